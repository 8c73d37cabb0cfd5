"""``dflash-cache train``: stage two."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_cache.cli.console import (
    format_count,
    format_figure,
    print_data,
    print_notice,
    print_table,
    print_warning,
    progress_bars,
)
from dflash_cache.config import RecipeName, TrainConfig, resolve

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from dflash_cache.train.events import (
        EvaluationDone,
        EvaluationProgress,
        RunStarted,
        StepDone,
        TrainEvent,
        TrainReport,
    )

__all__ = ["run_training", "train"]

EXIT_INTERRUPTED = 130


def train(
    shards: Annotated[
        Path | None, typer.Option("--shards", help="Folder of the cache that `extract` made.", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the run. [default: ./drafter]")] = None,
    recipe: Annotated[
        RecipeName | None,
        typer.Option("--recipe", help="Preset of loss, noise and optimizer. [default: speculators]"),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="TOML file with any setting of schemas/train-config.schema.json."),
    ] = None,
    epochs: Annotated[int | None, typer.Option("--epochs", help="Passes over the documents. [default: 6]")] = None,
    max_steps: Annotated[int | None, typer.Option("--max-steps", help="Stop after this many optimizer steps.")] = None,
    row_tokens: Annotated[
        int | None, typer.Option("--row-tokens", help="Tokens packed into one row. [default: 4096]")
    ] = None,
    rows_per_step: Annotated[
        int | None,
        typer.Option("--rows-per-step", help="Rows whose gradients one step accumulates. [default: 1]"),
    ] = None,
    num_anchors: Annotated[
        int | None,
        typer.Option("--num-anchors", help="Blocks trained in a row, shared by its documents. [default: 512]"),
    ] = None,
    block_size: Annotated[int | None, typer.Option("--block-size", help="Slots of a block. [default: 16]")] = None,
    num_layers: Annotated[int | None, typer.Option("--num-layers", help="Drafter layers. [default: 5]")] = None,
    mask_token_id: Annotated[
        int | None, typer.Option("--mask-token-id", help="Id of unknown slots. [default: as the cache proposes]")
    ] = None,
    lr: Annotated[float | None, typer.Option("--lr", help="Peak learning rate. [default: by recipe]")] = None,
    eval_fraction: Annotated[
        float | None, typer.Option("--eval-fraction", help="Share of documents held out. [default: 0.02]")
    ] = None,
    eval_every: Annotated[
        int | None, typer.Option("--eval-every", help="Steps between evaluations. [default: at each checkpoint]")
    ] = None,
    save_every: Annotated[
        int | None, typer.Option("--save-every", help="Steps between checkpoints. [default: 500]")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Of weights, order, anchors and noise. [default: 0]")
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda or cuda:N. [default: auto]")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out, exactly, with the settings it was begun with.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete the run in --out first.")] = False,
    allow_incomplete: Annotated[
        bool, typer.Option("--allow-incomplete", help="Train on a cache whose extraction has not finished.")
    ] = False,
) -> None:
    """Train a drafter from a cache; the target is never loaded.

    Writes checkpoints, metrics.jsonl and TensorBoard logs into the run's folder, and in the end the drafter in
    z-lab's format (vLLM, SGLang) with a model card into its folder `final`. Ctrl-C saves and says how to go on.

    Example: `dflash-cache train --shards ./cache --out ./drafter --epochs 6`
    """
    flags: dict[str, Any] = {
        "shards": shards,
        "out": out,
        "recipe": recipe,
        "epochs": epochs,
        "max_steps": max_steps,
        "row_tokens": row_tokens,
        "rows_per_step": rows_per_step,
        "num_anchors": num_anchors,
        "drafter": {"block_size": block_size, "num_layers": num_layers, "mask_token_id": mask_token_id},
        "optimizer": {"lr": lr},
        "eval_fraction": eval_fraction,
        "eval_every": eval_every,
        "save_every": save_every,
        "seed": seed,
        "device": device,
        # A flag that is not given must not beat the file.
        "resume": resume or None,
        "overwrite": overwrite or None,
        "allow_incomplete": allow_incomplete or None,
    }
    report = run_training(resolve(TrainConfig, flags, config, _stored_settings(flags, config)))
    if report.interrupted:
        print_notice(f"interrupted at step {report.step} of {report.total_steps}; saved {report.checkpoint}")
        print_notice(f"continue with: {report.how_to_continue}")
        raise typer.Exit(EXIT_INTERRUPTED)
    print_summary(report)


def _stored_settings(flags: dict[str, Any], config: Path | None) -> TrainConfig | None:
    """Read the settings of the run that is being continued, so that nobody has to type them again."""
    from dflash_cache.train.run_folder import RunFolder

    # Whether, and which run, may stand in the file too; the cache's folder may stand in the run alone.
    asked = resolve(TrainConfig, {**flags, "shards": Path()}, config)
    if not asked.resume:
        return None
    folder = RunFolder(asked.out)
    folder.refuse_others(resume=True, overwrite=False)
    return folder.read_record().config


def run_training(config: TrainConfig) -> "TrainReport":
    """Train with progress bars; where there is no terminal, with a line now and then."""
    from dflash_cache.train.loop import train as train_drafter

    with progress_bars("{task.fields[figures]}") as bars:
        display = _Display(bars)
        return train_drafter(config, display.show)


def print_summary(report: "TrainReport") -> None:
    """Print the end of a run: figures to stdout, what to do next to stderr."""
    rows = []
    for name, figures in (("training", report.training), ("held out", report.held_out), ("best held out", report.best)):
        if figures is not None:
            shown = (figures.loss, ".4f"), (figures.accuracy, ".2%"), (figures.streak, ".3f"), (figures.eal, ".3f")
            rows.append((name, figures.step, *(format_figure(value, spec) for value, spec in shown)))
    columns = ("", "step", "loss", "accuracy", "streak", "expected acceptance length")
    print_table(f"trained {report.step:,} steps", columns, rows)
    print_data(f"drafter: {report.final}")
    print_notice(f"metrics: {report.out / 'metrics.jsonl'}; tensorboard --logdir {report.out / 'tensorboard'}")


class _Display:
    """Turns events into bars and lines."""

    def __init__(self, bars: "Progress") -> None:
        self._bars = bars
        self._steps: TaskID | None = None
        self._evaluation: TaskID | None = None
        self._plain_every = 1

    def show(self, event: "TrainEvent") -> None:
        """Draw one event."""
        from dflash_cache.train import events

        match event:
            case events.RunStarted():
                self._started(event)
            case events.StepDone():
                self._stepped(event)
            case events.EvaluationProgress():
                self._evaluating(event)
            case events.EvaluationDone():
                self._evaluated(event)
            case events.Warned(message):
                print_warning(message)
            case events.CheckpointSaved(step, folder):
                print_notice(f"step {step}: saved {folder}")
            case events.Exported(folder):
                print_notice(f"exported {folder}")

    def _started(self, run: "RunStarted") -> None:
        print_notice(
            f"{format_count(run.num_parameters)} parameters on {run.device}; {run.num_train_documents:,} documents to "
            f"train on ({run.num_train_tokens:,} tokens), {run.num_held_out_documents:,} held out; "
            f"{run.rows_per_epoch:,} rows an epoch, {run.fill:.1%} full; {run.total_steps:,} steps"
            + (f", continuing after {run.first_step:,}" if run.first_step else "")
        )
        self._plain_every = max(1, run.total_steps // 20)
        self._steps = self._bars.add_task("training", total=run.total_steps, completed=run.first_step, figures="")

    def _stepped(self, step: "StepDone") -> None:
        m = step.metrics
        figures = (
            f"loss {format_figure(m.loss, '.3f')}  acc {format_figure(m.accuracy, '.1%')}  "
            f"accept {format_figure(m.eal, '.2f')}  "
            f"{step.tokens_per_second:,.0f} tok/s  wait {step.data_wait_share:.0%}"
        )
        if self._steps is not None:
            self._bars.update(self._steps, completed=step.step, figures=figures)
        if self._bars.disable and step.step % self._plain_every == 0:
            print_notice(f"step {step.step}: {figures}")

    def _evaluating(self, progress: "EvaluationProgress") -> None:
        if self._evaluation is None:
            self._evaluation = self._bars.add_task("evaluating", total=progress.num_rows, figures="")
        self._bars.update(self._evaluation, completed=progress.rows_done)

    def _evaluated(self, done: "EvaluationDone") -> None:
        if self._evaluation is not None:
            self._bars.remove_task(self._evaluation)
            self._evaluation = None
        m = done.metrics
        print_notice(
            f"step {done.step}: held out: loss {format_figure(m.loss, '.4f')}, "
            f"accuracy {format_figure(m.accuracy, '.2%')}, streak {format_figure(m.streak, '.3f')}, "
            f"expected acceptance length {format_figure(m.eal, '.3f')}{' (best so far)' if done.is_best else ''}"
        )
