"""The model card: what a drafter was made from, how good it is, and how to serve it."""

import json
from dataclasses import dataclass
from typing import Any, Protocol

from dflash_cache import __version__
from dflash_cache.config import TrainConfig
from dflash_cache.drafter.config import DrafterConfig
from dflash_cache.format.manifest import CacheIdentity

__all__ = ["HeldOutFigures", "ModelCard"]

# Settings that say where and how often files are written, not what is learned.
_INCIDENTAL_SETTINGS = (
    "shards",
    "out",
    "device",
    "eval_every",
    "save_every",
    "keep_checkpoints",
    "overwrite",
    "resume",
    "allow_incomplete",
    "drafter",  # the resolved geometry is in config.json
)


class HeldOutFigures(Protocol):
    """Teacher-forced figures of an evaluation on held-out documents; None where nothing was supervised."""

    @property
    def step(self) -> int:
        """Optimizer steps before it."""
        ...

    @property
    def loss(self) -> float | None:
        """The loss of the recipe."""
        ...

    @property
    def accuracy(self) -> float | None:
        """Share of supervised slots whose argmax is the label."""
        ...

    @property
    def streak(self) -> float | None:
        """Mean number of leading correct slots of a block."""
        ...

    @property
    def eal(self) -> float | None:
        """Streak + 1 bonus token."""
        ...


@dataclass(frozen=True)
class ModelCard:
    """What the README beside a drafter tells.

    Attributes:
      identity: Of the cache it was trained on: target, corpus, features.
      training: The resolved settings of the run.
      steps: Optimizer steps taken.
      held_out: The latest evaluation; None when nothing was held out.
      documents: Documents that were there to be trained on or held out; fewer than the corpus' for an unfinished cache.
      written_by: Program and version.
    """

    identity: CacheIdentity
    training: TrainConfig
    steps: int
    held_out: HeldOutFigures | None
    documents: int
    written_by: str = f"dflash-cache {__version__}"

    def render(self, config: DrafterConfig, name: str) -> str:
        """Write the card as Markdown with a YAML head.

        Args:
          config: The drafter.
          name: What to call the drafter; also its path in the commands.
        """
        sections = (
            _head(self.identity),
            f"# {name}\n\nA DFlash drafter for **{self.identity.target.name}**: it drafts {config.block_size - 1} "
            f"tokens at once, and the target verifies them in one pass. Written by {self.written_by}.",
            _serving(self.identity, config, name),
            _geometry(config),
            _target(self.identity),
            _data(self.identity, self.documents),
            self._recipe(),
            self._quality(),
        )
        return "\n\n".join(sections) + "\n"

    def _recipe(self) -> str:
        settings = self.training.model_dump(mode="json", exclude=set(_INCIDENTAL_SETTINGS))
        return (
            f"## Training\n\n{self.steps:,} optimizer steps, recipe `{self.training.recipe}`, resolved:\n\n"
            f"```json\n{json.dumps(settings, indent=2)}\n```"
        )

    def _quality(self) -> str:
        if self.held_out is None:
            return "## Quality\n\nNo documents were held out, so nothing is known of how well it drafts unseen text."
        rows = (
            ("loss", self.held_out.loss),
            ("accuracy (share of slots right)", self.held_out.accuracy),
            ("streak (leading slots right, per block)", self.held_out.streak),
            ("expected acceptance length (streak + 1 bonus token)", self.held_out.eal),
        )
        return (
            f"## Quality\n\nOn held-out documents after {self.held_out.step:,} steps, a block at every supervised "
            "token, teacher-forced: an estimate of what serving accepts, not a measurement of it.\n\n"
            + _table(("figure", "value"), tuple((name, _number(value)) for name, value in rows))
        )


def _head(identity: CacheIdentity) -> str:
    lines = ["---", "tags:", "- dflash", "- speculative-decoding"]
    if identity.target.revision is not None:  # a hub model, so that the name means something there
        lines.insert(1, f"base_model: {json.dumps(identity.target.name)}")
    return "\n".join([*lines, "---"])


def _serving(identity: CacheIdentity, config: DrafterConfig, name: str) -> str:
    target, path = _shell_word(identity.target.name), _shell_word(f"./{name}")
    speculative = json.dumps(
        {"method": "dflash", "model": f"./{name}", "num_speculative_tokens": config.block_size - 1}
    )
    text = f"""## Serving

The checkpoint holds no embedding and no lm_head (they are the target's) and no code. A block of {config.block_size} \
slots is the last token and {config.block_size - 1} drafts.

vLLM, `num_speculative_tokens` = block size - 1:

```bash
vllm serve {target} --speculative-config {_shell_word(speculative)}
```

SGLang, `speculative-num-draft-tokens` = block size:

```bash
python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH \\
    --speculative-draft-model-path {path} --speculative-num-draft-tokens {config.block_size}
```

In Python, with a transformers target (dflash-cache decodes with it; transformers itself has no class for this format):

```python
from pathlib import Path
from dflash_cache.export.zlab import read_zlab_checkpoint

config, drafter = read_zlab_checkpoint(Path({json.dumps(f"./{name}")}))
```"""
    notes = _serving_notes(identity, config)
    return text + "".join(f"\n\n> {note}" for note in notes)


def _serving_notes(identity: CacheIdentity, config: DrafterConfig) -> list[str]:
    notes = []
    if identity.corpus.template_digest is not None:
        kwargs = json.dumps(identity.corpus.template_kwargs)
        notes.append(
            f"Trained on chats rendered with the template arguments `{kwargs}`. Serve with the same ones: a drafter "
            "trained without thinking accepts little of it, and the other way round."
        )
    if identity.target.quantization is not None:
        notes.append(
            f"The target was quantised ({identity.target.quantization}) while its states were recorded. Serve the same "
            "weights: others lower acceptance."
        )
    if config.sliding_window_rule == "anchor":
        notes.append(
            "Trained with windows that count from the anchor. Servers count from each slot, which differs in contexts "
            f"longer than {config.sliding_window} tokens."
        )
    return notes


def _geometry(config: DrafterConfig) -> str:
    sliding = config.layer_types.count("sliding_attention")
    layers = f"{config.num_hidden_layers}: {sliding} sliding, {config.num_hidden_layers - sliding} full"
    rows = (
        ("block size", str(config.block_size)),
        ("target layers, 0-based outputs, in the order of fc", ", ".join(map(str, config.target_layer_ids))),
        ("mask token id", str(config.mask_token_id)),
        ("layers", layers + (f", window {config.sliding_window}" if sliding else "")),
        ("heads / key-value heads / head size", _joined(config)),
        ("hidden / intermediate size", f"{config.hidden_size} / {config.intermediate_size}"),
        ("rope theta", f"{config.rope_theta:g}"),
    )
    return "## Drafter\n\n" + _table(("field", "value"), rows)


def _joined(config: DrafterConfig) -> str:
    return f"{config.num_attention_heads} / {config.num_key_value_heads} / {config.head_dim}"


def _target(identity: CacheIdentity) -> str:
    target = identity.target
    rows = (
        ("name", target.name),
        ("revision", target.revision or "local folder"),
        ("weights digest", target.weights_digest),
        ("tokenizer digest", target.tokenizer_digest),
        ("architecture", f"{target.architecture} ({target.model_type}), {target.num_layers} layers"),
        ("ran in", target.compute_dtype),
        ("quantisation", target.quantization or "none"),
        ("final norm", f"{target.final_norm.kind}, eps {target.final_norm.eps:g}"),
    )
    return "## Target\n\n" + _table(("field", "value"), rows)


def _data(identity: CacheIdentity, documents: int) -> str:
    corpus = identity.corpus
    share = corpus.supervised_tokens / corpus.num_tokens
    dropped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(corpus.dropped.items()) if count)
    used = (
        "" if documents == corpus.num_documents else f" ({documents:,} of them used: the others were not in the cache)"
    )
    rows = (
        ("digest of tokens and masks", corpus.digest),
        ("documents", f"{corpus.num_documents:,}{used}"),
        ("tokens", f"{corpus.num_tokens:,}"),
        ("supervised tokens", f"{corpus.supervised_tokens:,} ({share:.1%})"),
        ("longest document", f"{corpus.max_length:,} tokens, {corpus.truncated:,} cut, {corpus.split:,} split"),
        ("dropped documents", dropped or "none"),
        ("chat template digest", corpus.template_digest or "no chats"),
        ("chat template arguments", json.dumps(corpus.template_kwargs)),
    )
    return "## Data\n\n" + _table(("field", "value"), rows)


def _table(head: tuple[str, str], rows: tuple[tuple[str, str], ...]) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    return "\n".join(lines + [f"| {name} | {_cell(value)} |" for name, value in rows])


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _shell_word(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
