"""The model card: complete, true to the run, and free of paths."""

import json
import re
import shlex
from pathlib import Path

import pytest
from export_cases import Evaluation, cache_identity, drafter_config, model_card, random_drafter

from dflash_cache.config import TrainConfig
from dflash_cache.export.zlab import write_zlab_checkpoint


def test_serving_commands_draft_one_token_less_than_a_block() -> None:
    # B76, trap 28.
    card = model_card().render(drafter_config(), "final")
    vllm, sglang = (block for block in re.findall(r"```bash\n(.*?)```", card, re.DOTALL))
    words = shlex.split(vllm)
    speculative = json.loads(words[words.index("--speculative-config") + 1])
    assert speculative == {"method": "dflash", "model": "./final", "num_speculative_tokens": 15}
    words = shlex.split(sglang.replace("\\\n", " "))
    assert words[words.index("--speculative-num-draft-tokens") + 1] == "16"
    assert words[words.index("--model-path") + 1] == "tiny-random"


def test_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = drafter_config()
    write_zlab_checkpoint(tmp_path / "it's final", random_drafter(config), config, model_card())
    card = (tmp_path / "it's final" / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    exec(example, scope)
    assert scope["config"] == config
    assert shlex.split(re.findall(r"```bash\n(.*?)```", card, re.DOTALL)[1].replace("\\\n", " "))[6:8] == [
        "DFLASH",
        "--speculative-draft-model-path",
    ]


def test_recipe_is_the_resolved_one_without_paths() -> None:
    card = model_card().render(drafter_config(), "final")
    (recipe,) = re.findall(r"```json\n(.*?)```", card, re.DOTALL)
    settings = json.loads(recipe)
    assert settings["seed"] == 7 and settings["noise_half_width"] == 0.05
    assert settings["loss"]["gamma"] == 4.0 and settings["loss"]["terms"] == {"ce": 1.0}
    assert "/somewhere/private" not in card
    left_out = TrainConfig.model_fields.keys() - settings.keys()
    assert left_out == {
        "shards",
        "out",
        "device",
        "drafter",
        "eval_every",
        "save_every",
        "keep_checkpoints",
        "overwrite",
        "resume",
        "allow_incomplete",
    }


def test_fingerprint_of_target_and_data() -> None:
    # B82, B83, B42: what it was made from, how much, and in which mode.
    identity = cache_identity()
    target = identity.target.model_copy(update={"quantization": "fp8", "revision": "a" * 40, "name": "org/model"})
    corpus = identity.corpus.model_copy(
        update={
            "template_digest": "e" * 32,
            "template_kwargs": {"enable_thinking": False},
            "dropped": {"too short": 2, "no answer": 0},
        }
    )
    changed = identity.model_copy(update={"target": target, "corpus": corpus})
    card = model_card(identity=changed, documents=5).render(drafter_config(), "final")
    for part in (
        'base_model: "org/model"',
        "a" * 40,
        "w" * 32,
        "t" * 32,
        "e" * 32,
        corpus.digest,
        "quantised (fp8)",
        '{"enable_thinking": false}',
        "| tokens | 235 |",
        "6 (5 of them used",
        "2 too short",
        "float32",
    ):
        assert part in card, part
    assert "no answer" not in card


def test_layer_ids_are_in_the_published_convention() -> None:
    # B02: the ids of the config, in words.
    assert "0-based outputs, in the order of fc | 1, 2, 4, 5, 6 |" in model_card().render(drafter_config(), "final")


def test_figures_or_none() -> None:
    card = model_card().render(drafter_config(), "final")
    assert "| expected acceptance length (streak + 1 bonus token) | 3.7500 |" in card
    assert "475 steps" in card and "480 optimizer steps" in card
    assert "| loss | - |" in model_card(held_out=Evaluation(loss=None)).render(drafter_config(), "final")
    assert "nothing is known" in model_card(held_out=None).render(drafter_config(), "final")


@pytest.mark.parametrize(("rule", "noted"), [("query", False), ("anchor", True)])
def test_windows_that_servers_run_otherwise_are_noted(rule: str, noted: bool) -> None:
    card = model_card().render(drafter_config(sliding_window_rule=rule), "final")
    assert ("count from the anchor" in card) is noted
