"""A resumed run is the run that was never stopped, bit for bit on the CPU (B57, trap 25)."""

import os
import signal

import pytest
import torch
from support.caches import make_cache
from support.training import assert_resumes_identically, read_metrics, tiny_config, train_until

from dflash_cache.config import DrafterSettings, LossConfig
from dflash_cache.errors import CheckpointError, IdentityMismatchError, OutputExistsError
from dflash_cache.train.events import EvaluationProgress, StepDone
from dflash_cache.train.loop import train

# Seven rows an epoch at 64 tokens a row.
LENGTHS = (40, 12, 25, 33, 50, 8, 100, 31, 22, 60, 17)


@pytest.fixture
def config(tmp_path):
    make_cache(tmp_path / "cache", lengths=LENGTHS)
    return tiny_config(tmp_path / "cache", tmp_path / "run", eval_fraction=0.2, eval_every=3)


def test_half_and_half_equals_the_whole(config):
    assert_resumes_identically(config.model_copy(update={"max_steps": 10}), [5])


def test_stopping_anywhere_changes_nothing(config):
    # Mid-epoch, at and across the border of epochs, and several times in one run.
    assert_resumes_identically(config, [1, 2, 6, 7, 9])


def test_accumulated_rows_mixed_loss_and_data_labels(config):
    loss = LossConfig(terms={"ce": 0.3, "kl_div": 0.7}, temperature=2.0, gamma=7.0, denominator="mask_weight")
    assert_resumes_identically(
        config.model_copy(update={"rows_per_step": 3, "loss": loss, "epochs": 3, "max_steps": 7}), [2, 5]
    )


def test_periodic_checkpoints_are_the_same_as_those_on_request(config):
    assert_resumes_identically(config.model_copy(update={"save_every": 2, "keep_checkpoints": 1}), [3, 4])


def test_stopped_in_an_evaluation_it_is_made_up_for(config):
    stopped = []

    def stop_in_evaluation(event):
        if isinstance(event, EvaluationProgress) and not stopped and event.rows_done < event.num_rows:
            stopped.append(event.step)
            raise KeyboardInterrupt

    config = config.model_copy(update={"eval_fraction": 0.4})
    whole = train(config.model_copy(update={"out": config.out.with_name("whole")}))
    assert train(config, stop_in_evaluation).interrupted and stopped == [3]
    assert train(config.model_copy(update={"resume": True})).best == whole.best
    assert read_metrics(config.out) == read_metrics(whole.out)


def test_killed_without_a_checkpoint_it_resumes_from_the_one_before(config):
    class Killed(BaseException):
        pass

    def kill(event):
        if isinstance(event, StepDone) and event.step == 5:
            raise Killed

    config = config.model_copy(update={"save_every": 2})
    whole = train(config.model_copy(update={"out": config.out.with_name("whole")}))
    with pytest.raises(Killed):
        train(config, kill)
    assert len(read_metrics(config.out)) > 5
    first = []
    train(config.model_copy(update={"resume": True}), lambda event: first.append(event))
    assert first[0].first_step == 4
    assert read_metrics(config.out) == read_metrics(whole.out)


def test_killed_before_its_first_checkpoint_it_begins_again(config):
    class Killed(BaseException):
        pass

    def kill(event):
        if isinstance(event, StepDone):
            raise Killed

    whole = train(config.model_copy(update={"out": config.out.with_name("whole")}))
    with pytest.raises(Killed):
        train(config, kill)
    assert train(config.model_copy(update={"resume": True})).held_out == whole.held_out
    assert read_metrics(config.out) == read_metrics(whole.out)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_step_saves_and_says_how_to_go_on(config, number):
    before = signal.getsignal(signal.SIGINT)

    def send(event):
        if isinstance(event, StepDone) and event.step == 2:
            os.kill(os.getpid(), number)

    report = train(config, send)
    assert report.interrupted and report.final is None
    assert report.step in (2, 3) and report.checkpoint.name == f"step-{report.step:06d}"
    assert f"--out {config.out} --resume" in report.how_to_continue
    assert not (config.out / "final").exists()
    assert signal.getsignal(signal.SIGINT) == before


def test_a_finished_run_is_exported_again_and_not_trained_again(config):
    first = train(config)
    weights = (first.final / "model.safetensors").read_bytes()
    events = []
    again = train(config.model_copy(update={"resume": True}), events.append)
    assert not any(isinstance(event, StepDone) for event in events)
    assert again.step == again.total_steps and (again.final / "model.safetensors").read_bytes() == weights


def test_what_the_numbers_do_not_depend_on_may_change(config):
    train_until(config, 3)
    freed = {"save_every": 2, "eval_every": 5, "keep_checkpoints": 5, "resume": True}
    assert not train(config.model_copy(update=freed)).interrupted


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        # B54, B57
        ({"seed": 1}, "seed: 0 -> 1"),
        ({"recipe": "paper"}, "recipe: 'speculators' -> 'paper'"),
        ({"loss": LossConfig(gamma=7.0)}, "loss.gamma: 4.0 -> 7.0"),
        ({"drafter": DrafterSettings(num_layers=1)}, "drafter.num_hidden_layers: 2 -> 1"),
        ({"row_tokens": 70}, "row_tokens: 64 -> 70"),
        ({"num_anchors": 5}, "num_anchors: 12 -> 5"),
        ({"eval_fraction": 0.3}, "eval_fraction: 0.2 -> 0.3"),
        ({"epochs": 3}, "total_steps: .*learning rate was planned"),
    ],
)
def test_what_they_do_depend_on_may_not(config, changes, shown):
    train_until(config, 2)
    before = {path: path.read_bytes() for path in config.out.rglob("*") if path.is_file()}
    with pytest.raises(IdentityMismatchError, match=f"(?s){shown}"):
        train(config.model_copy(update={**changes, "resume": True}))
    assert {path: path.read_bytes() for path in config.out.rglob("*") if path.is_file()} == before


def test_another_cache_is_refused(config, tmp_path):
    train_until(config, 2)
    make_cache(tmp_path / "other", lengths=LENGTHS, corpus={"digest": "f" * 32}, target={"weights_digest": "new"})
    with pytest.raises(IdentityMismatchError) as caught:
        train(config.model_copy(update={"shards": tmp_path / "other", "resume": True}))
    assert "cache.target.weights_digest: 'w' -> 'new'" in str(caught.value)
    assert "cache.corpus.digest" in str(caught.value)


def test_resume_and_overwrite_need_a_run_and_a_run_needs_them(config):
    with pytest.raises(CheckpointError, match="there is no run to resume"):
        train(config.model_copy(update={"resume": True}))
    first = train(config)
    with pytest.raises(OutputExistsError, match="--resume"):
        train(config)
    again = train(config.model_copy(update={"overwrite": True}))
    assert (first.held_out, first.step) == (again.held_out, again.step)
    assert len([r for r in read_metrics(config.out) if r["kind"] == "step"]) == again.step


def test_an_overwritten_run_is_safe_until_the_cache_is_known_to_be_good(config):
    train(config)
    (config.shards / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match="format"):
        train(config.model_copy(update={"overwrite": True}))
    assert (config.out / "final" / "model.safetensors").exists()


def test_default_generator_is_neither_used_nor_disturbed(config):
    torch.manual_seed(123)
    state = torch.get_rng_state()
    train(config)
    assert torch.equal(torch.get_rng_state(), state)
