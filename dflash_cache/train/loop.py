"""A run from its first step to the exported drafter: :func:`train` is stage two's entry."""

import itertools
import time
from pathlib import Path

from dflash_cache import __version__
from dflash_cache.config import TrainConfig
from dflash_cache.errors import ConfigError
from dflash_cache.stream.loader import RowPrefetcher
from dflash_cache.stream.plan import StepPlan
from dflash_cache.train.checkpoint import checkpoint_name, latest_checkpoint, load_checkpoint, save_checkpoint
from dflash_cache.train.contract import RunRecord, cache_digest, refuse_changes
from dflash_cache.train.evaluation import Evaluator
from dflash_cache.train.events import (
    CheckpointSaved,
    EvaluationDone,
    EvaluationProgress,
    Exported,
    OnEvent,
    RunStarted,
    StepDone,
    TrainEvent,
    TrainReport,
    Warned,
)
from dflash_cache.train.finish import export_final
from dflash_cache.train.interrupt import StopRequest
from dflash_cache.train.metrics_log import MetricsLog
from dflash_cache.train.run_folder import RunFolder
from dflash_cache.train.schedule import learning_rate
from dflash_cache.train.setup import RunSetup, prepare_run
from dflash_cache.train.state import Figures, TrainState
from dflash_cache.train.step import TrainStep

__all__ = ["implausible_accuracy", "train"]

# An untrained drafter that drafts nine of ten slots right has seen the answer, or the corpus is one repeated phrase.
_IMPLAUSIBLE_ACCURACY = 0.9
_EARLY_STEPS = 50


def train(config: TrainConfig, on_event: OnEvent = lambda event: None) -> TrainReport:
    """Train a drafter from a cache, or continue such a run.

    Ctrl-C ends the run after the step in progress, with a checkpoint; so does a KeyboardInterrupt raised by
    ``on_event``. A resumed run repeats the uninterrupted one exactly: bit for bit on the CPU.

    Args:
      config: Resolved settings.
      on_event: Told what happens, in the calling thread, between steps.

    Returns:
      How it ended.

    Raises:
      DflashCacheError: One of its children, each with what to do next; nothing already saved is harmed.
    """
    folder = RunFolder(config.out)
    folder.refuse_others(resume=config.resume, overwrite=config.overwrite)
    setup = prepare_run(config)
    folder.require_space(setup.bytes_to_write, overwrite=config.overwrite)
    with folder.claim(overwrite=config.overwrite):
        state = _resumed_state(setup, folder) if config.resume else _begun_state(setup, folder)
        with MetricsLog(folder, state.progress) as log, StopRequest() as stop:
            run = _Run(setup, folder, state, log, _Events(on_event, stop))
            finished = run.to_the_end()
            checkpoint = run.save()
            final = run.export() if finished else None
        return _report(setup, state, checkpoint, final)


def implausible_accuracy(step: int, epoch: int, accuracy: float | None) -> bool:
    """Whether a drafter is better at the start of its training than it can honestly be."""
    return epoch == 0 and step <= _EARLY_STEPS and accuracy is not None and accuracy > _IMPLAUSIBLE_ACCURACY


class _Events:
    """Hands events on. Events come between steps, so Ctrl-C in a callback can wait for the next safe point."""

    def __init__(self, on_event: OnEvent, stop: StopRequest) -> None:
        self._on_event = on_event
        self.stop = stop

    def __call__(self, event: TrainEvent) -> None:
        try:
            self._on_event(event)
        except KeyboardInterrupt:
            if self.stop.requested:
                raise
            self.stop.requested = True


class _Run:
    """The loop and what it works with; all that changes is in ``state``."""

    def __init__(self, setup: RunSetup, folder: RunFolder, state: TrainState, log: MetricsLog, events: _Events) -> None:
        self.setup = setup
        self.folder = folder
        self.state = state
        self.log = log
        self.events = events
        self.step = TrainStep(setup.objective, setup.config, setup.device)
        self.evaluator = Evaluator(
            setup.objective, setup.reader, setup.held_out, setup.device, setup.config.num_anchors
        )
        self.warned_of_accuracy = False

    @property
    def total_steps(self) -> int:
        return self.setup.contract.total_steps

    def to_the_end(self) -> bool:
        """Take the steps that are left; False if stopped before."""
        self.events(_started(self.setup, self.state, self.folder))
        for message in self.setup.warnings:
            self.events(Warned(message))
        self._evaluate_if_due()
        left = self.total_steps - self.state.progress.step
        plans, ahead = itertools.tee(itertools.islice(self.setup.plan.steps(self.state.progress.position), left))
        rows = (row for plan in ahead for row in plan.rows)
        with RowPrefetcher(self.setup.reader, rows) as prefetcher:
            for plan in plans:
                if self.events.stop.requested:
                    return False
                self._take_step(plan, prefetcher)
                self._evaluate_if_due()
                if self.state.progress.step % self.setup.config.save_every == 0:
                    self.save()
        self._refuse_untrained()
        return not self._evaluation_is_due()

    def save(self) -> Path:
        """Save a checkpoint, unless this step's is there."""
        self.log.sync()
        step, config = self.state.progress.step, self.setup.config
        is_new = not (self.folder.checkpoints / checkpoint_name(step)).exists()
        saved = save_checkpoint(self.folder.checkpoints, self.state, self.setup.contract, keep=config.keep_checkpoints)
        if is_new:
            self.events(CheckpointSaved(step, saved))
        return saved

    def export(self) -> Path:
        """Write the drafter as servers load it."""
        export_final(self.folder.final, self.setup, self.state)
        self.events(Exported(self.folder.final))
        return self.folder.final

    def _take_step(self, plan: StepPlan, prefetcher: RowPrefetcher) -> None:
        began, waited = time.perf_counter(), prefetcher.waited_seconds
        progress = self.state.progress
        lr = learning_rate(progress.step, self.total_steps, self.setup.config.optimizer)
        result = self.step(self.state, itertools.islice(prefetcher, len(plan.rows)), lr)
        metrics = result.sums.finalize(self.setup.objective.loss)
        done = StepDone(
            step=progress.step + 1,
            epoch=plan.start.epoch,
            metrics=metrics,
            lr=lr,
            grad_norm=result.grad_norm,
            coverage=result.num_used / result.num_eligible if result.num_eligible else None,
            fill=result.num_tokens / (len(plan.rows) * self.setup.config.row_tokens),
            num_tokens=result.num_tokens,
            seconds=time.perf_counter() - began,
            data_wait_seconds=prefetcher.waited_seconds - waited,
        )
        self.state.progress = progress.model_copy(
            update={
                "step": done.step,
                "epoch": plan.next.epoch,
                "row": plan.next.row,
                "tokens": progress.tokens + result.num_tokens,
                "slots": progress.slots + metrics.num_slots,
                "training": Figures.of(done.step, metrics),
            }
        )
        self.log.step(done)
        self.events(done)
        if plan.next.epoch > plan.start.epoch:
            self._refuse_untrained()
        self._warn_of_accuracy(done)

    def _evaluation_is_due(self) -> bool:
        progress, config = self.state.progress, self.setup.config
        if not len(self.setup.held_out) or progress.evaluated_step >= progress.step:
            return False
        return progress.step % (config.eval_every or config.save_every) == 0 or progress.step == self.total_steps

    def _evaluate_if_due(self) -> None:
        """Evaluate; when stopped in the middle, the resumed run evaluates before it goes on."""
        if not self._evaluation_is_due():
            return
        began = time.perf_counter()
        step, num_rows = self.state.progress.step, len(self.setup.held_out)

        def on_row(rows_done: int) -> bool:
            self.events(EvaluationProgress(step, rows_done, num_rows))
            return not self.events.stop.requested or rows_done == num_rows

        metrics = self.evaluator(self.state.drafter, on_row)
        if metrics is None:
            return
        figures = Figures.of(step, metrics)
        self.state.progress = self.state.progress.with_evaluation(figures)
        is_best = self.state.progress.best is figures
        done = EvaluationDone(step, metrics, is_best, time.perf_counter() - began)
        self.log.evaluation(done)
        self.events(done)

    def _warn_of_accuracy(self, done: StepDone) -> None:
        if self.warned_of_accuracy or not implausible_accuracy(done.step, done.epoch, done.metrics.accuracy):
            return
        self.warned_of_accuracy = True
        self.events(
            Warned(
                f"training accuracy is already {done.metrics.accuracy:.1%} at step {done.step}. That is implausible "
                "for real text: check for repeated documents, and that features and tokens belong together "
                "(`dflash-cache inspect doc`)."
            )
        )

    def _refuse_untrained(self) -> None:
        if self.state.progress.slots == 0 and self.state.progress.step:
            raise ConfigError(
                f"no block could be trained in {self.state.progress.step} steps: no training document of "
                f"{self.setup.config.shards} has two supervised tokens within {self.setup.contract.drafter.block_size} "
                "tokens of each other. Check the loss masks with `dflash-cache inspect cache`."
            )


def _begun_state(setup: RunSetup, folder: RunFolder) -> TrainState:
    state = setup.new_state()
    record = RunRecord(
        written_by=f"dflash-cache {__version__}",
        cache_digest=cache_digest(setup.contract.cache),
        config=setup.config,
        contract=setup.contract,
    )
    folder.write_record(record)
    return state


def _resumed_state(setup: RunSetup, folder: RunFolder) -> TrainState:
    """Go on from the newest checkpoint; from the beginning if the run was killed before its first."""
    refuse_changes(folder.read_record().contract, setup.contract, folder.path)
    state = setup.new_state()
    checkpoint = latest_checkpoint(folder.checkpoints)
    if checkpoint is not None:
        load_checkpoint(checkpoint, state, setup.contract)
    return state


def _started(setup: RunSetup, state: TrainState, folder: RunFolder) -> RunStarted:
    first_epoch = setup.plan.epoch(0)
    return RunStarted(
        out=folder.path,
        device=str(setup.device),
        total_steps=setup.contract.total_steps,
        first_step=state.progress.step,
        num_epochs=setup.config.epochs,
        num_train_documents=len(setup.split.train),
        num_held_out_documents=len(setup.split.held_out),
        num_train_tokens=first_epoch.num_tokens,
        num_parameters=sum(parameter.numel() for parameter in state.drafter.parameters()),
        rows_per_epoch=len(first_epoch),
        fill=first_epoch.fill,
    )


def _report(setup: RunSetup, state: TrainState, checkpoint: Path, final: Path | None) -> TrainReport:
    progress, config = state.progress, setup.config
    return TrainReport(
        out=config.out,
        step=progress.step,
        total_steps=setup.contract.total_steps,
        interrupted=final is None,
        checkpoint=checkpoint,
        final=final,
        training=progress.training,
        held_out=progress.held_out,
        best=progress.best,
        how_to_continue=None if final is not None else f"dflash-cache train --out {config.out} --resume",
    )
