"""``dflash-cache extract``: stage one."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_cache.cli.console import (
    format_bytes,
    format_count,
    print_error,
    print_notice,
    print_properties,
    print_warning,
    progress_bars,
)
from dflash_cache.cli.extract_options import (
    AttentionOption,
    BatchTokensOption,
    CodecOption,
    ConfigOption,
    DataOption,
    DeviceOption,
    DtypeOption,
    FcLayersOption,
    FusedOption,
    LimitOption,
    LongOption,
    MaxLengthOption,
    ModelOption,
    OutOption,
    RevisionOption,
    SampleOption,
    ShardTokensOption,
    ShuffleSeedOption,
    TemplateKwargOption,
    TrustOption,
    extract_settings,
)
from dflash_cache.config import ExtractConfig, OnBad
from dflash_cache.errors import ConfigError
from dflash_cache.extract.interrupt import Interrupted, raising_interrupts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.progress import Progress, TaskID

    from dflash_cache.corpus.summary import CorpusSummary
    from dflash_cache.extract.progress import BatchComputed, CorpusRead, ExtractEvent, ShardSealed
    from dflash_cache.extract.runner import ExtractReport
    from dflash_cache.format.manifest import QuarantinedDocument

__all__ = ["ExtractDisplay", "describe_long", "extract", "run_extraction"]

EXIT_LEFT_OUT = 3


def extract(
    ctx: typer.Context,
    model: ModelOption = None,
    data: DataOption = None,
    out: OutOption = None,
    config: ConfigOption = None,
    revision: RevisionOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    attention: AttentionOption = None,
    fc_layers: FcLayersOption = None,
    max_length: MaxLengthOption = None,
    long: LongOption = None,
    limit: LimitOption = None,
    sample: SampleOption = None,
    shuffle_seed: ShuffleSeedOption = None,
    template_kwarg: TemplateKwargOption = None,
    batch_tokens: BatchTokensOption = None,
    shard_tokens: ShardTokensOption = None,
    codec: CodecOption = None,
    fused: FusedOption = None,
    trust_remote_code: TrustOption = False,
    on_bad: Annotated[
        OnBad | None,
        typer.Option(
            "--on-bad",
            help="A document with NaN, infinite or zero states stops the run, or is left out and listed in the "
            "manifest (exit code 3). [default: stop]",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be made, as `estimate` does; writes nothing.")
    ] = False,
    summary: Annotated[
        Path | None,
        typer.Option("--summary", help="Write what the run did to this file, as JSON, however it ends."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete the cache in --out first.")] = False,
) -> None:
    """Run the target once over a corpus and cache the hidden states that a drafter learns from.

    Each line of the data is `{"text": "..."}` (every token supervised except the first) or
    `{"messages": [{"role": "user", "content": "..."}, ...]}` (rendered with the tokenizer's chat template, supervised
    where the assistant speaks). Interrupted? The same command continues at the first missing document.

    Exit codes: 0 done; 1 an error; 2 wrong usage; 3 done, but documents were left out (`--on-bad skip`); 130 and 143
    after Ctrl-C and SIGTERM, which seal what is whole first (a second one ends at once).

    Example: `dflash-cache extract --model Qwen3.6-27B --data chats.jsonl --out ./cache`
    """
    if summary is not None and dry_run:
        raise ConfigError("--dry-run runs nothing that --summary could tell of; `estimate --json` prints its figures")
    if summary is not None and (summary.is_dir() or not summary.absolute().parent.is_dir()):
        raise ConfigError(f"--summary {summary} must be a file in a folder that exists")
    resolved = extract_settings(ctx.params, on_bad=on_bad)
    if dry_run:
        from dflash_cache.cli.estimate import show_estimate

        show_estimate(resolved, rate=None, measure=False, as_json=False)
        return
    try:
        with raising_interrupts():
            report = run_extraction(resolved, summary)
    except Interrupted as stop:
        print_error(
            f"interrupted by {stop}; every sealed shard is kept: run the same command again to continue in "
            f"{resolved.out}"
        )
        raise typer.Exit(stop.exit_code) from None
    print_summary(report)
    if report.manifest.quarantined:
        raise typer.Exit(EXIT_LEFT_OUT)


def run_extraction(config: ExtractConfig, summary: Path | None = None) -> "ExtractReport":
    """Extract with progress bars; where there is no terminal, with a line for each shard.

    Args:
      config: The settings.
      summary: File for the run's record.
    """
    from dflash_cache.extract.runner import extract as extract_cache

    with progress_bars("{task.fields[figures]}") as bars:
        return extract_cache(config, ExtractDisplay(bars).show, summary)


def print_summary(report: "ExtractReport") -> None:
    """Print what became of the corpus and of the cache, and what to type next."""
    corpus, manifest = report.corpus, report.manifest
    stored = report.stored_bytes
    rows: list[tuple[str, object]] = [
        ("documents", f"{corpus.documents_kept:,} kept of {corpus.documents_read:,} read"),
        ("too long", describe_long(corpus, manifest.identity.corpus.max_length)),
        ("left out", corpus.describe_drops().strip() or "none"),
        ("tokens", f"{corpus.tokens:,}, {corpus.supervised_tokens / corpus.tokens:.1%} supervised"),
        ("shards", f"{len(manifest.shards):,}"),
        (
            "stored",
            f"{format_bytes(stored)} of {format_bytes(report.raw_bytes)} raw (ratio "
            f"{report.raw_bytes / stored:.3f}; {stored / manifest.num_tokens:,.0f} bytes/token)",
        ),
    ]
    if manifest.quarantined:
        rows.append(("quarantined", _describe_quarantine(manifest.quarantined)))
    if report.self_check is not None:
        check = report.self_check
        agreed = f"{check.agreement:.2%} of {check.decisive:,} next tokens are the target's own"
        differ = f"largest difference of a layer {check.worst.error:.1e}, allowed {check.tolerance:.0e}"
        rows.append(("self-check", f"{len(check.doc_ids)} documents recomputed one by one; {agreed}; {differ}"))
    if report.tokens_computed:
        rate = report.tokens_computed / report.compute_seconds
        rows.append(("speed", f"{rate:,.0f} tokens/s over {report.compute_seconds:,.1f} s"))
    print_properties(f"cache {report.folder}", rows)
    print_notice(f"look:  dflash-cache inspect cache {report.folder}")
    print_notice(f"train: dflash-cache train --shards {report.folder}")


def describe_long(corpus: "CorpusSummary", max_length: int) -> str:
    """Say what became of documents longer than allowed; those that were dropped are among those left out."""
    if not corpus.documents_split:
        return f"{corpus.documents_truncated:,} truncated to {max_length:,} tokens"
    parts = corpus.parts - corpus.documents_kept + corpus.documents_split
    text = f"{corpus.documents_split:,} split into {parts:,} parts of at most {max_length:,} tokens"
    if corpus.parts_left_out:
        text += f"; {corpus.parts_left_out:,} parts left out with nothing to learn ({corpus.tokens_left_out:,} tokens)"
    return text


def _describe_quarantine(entries: "Sequence[QuarantinedDocument]") -> str:
    first = entries[0]
    return (
        f"{len(entries):,} left out, their states are NaN, infinite or zero (first: document "
        f"{first.doc_id}, token {first.token}, layer {first.layer}: {first.reason}); all are listed in the manifest"
    )


class ExtractDisplay:
    """Turns events into bars and lines."""

    def __init__(self, bars: "Progress") -> None:
        self._bars = bars
        self._task: TaskID | None = None

    def show(self, event: "ExtractEvent") -> None:
        """Draw one event."""
        from dflash_cache.extract import progress

        match event:
            case progress.Phase(name):
                self._begin(name)
            case progress.Notice(text):
                print_notice(f"note: {text}")
            case progress.DocumentQuarantined(_, text):
                print_warning(text)
            case progress.CorpusRead():
                self._read(event)
            case progress.BatchComputed():
                self._computed(event)
            case progress.SelfCheckPassed(documents, error, agreement):
                print_notice(
                    f"self-check passed: {documents} documents recomputed one by one, {agreement:.2%} of next tokens "
                    f"are the target's own, largest difference of a layer {error:.1e}"
                )
            case progress.ShardSealed():
                self._sealed(event)

    def _begin(self, phase: str) -> None:
        if self._task is not None:
            self._bars.remove_task(self._task)
        words = {
            "open_target": "opening the target",
            "tokenize": "tokenising",
            "load_weights": "loading the target's weights",
            "extract": "extracting",
            "finish": "finishing",
        }[phase]
        self._task = self._bars.add_task(words, total=None, figures="")
        if self._bars.disable:
            print_notice(f"{words} ...")

    def _read(self, corpus: "CorpusRead") -> None:
        if self._task is not None:
            figures = f"{corpus.documents:,} documents, {corpus.tokens:,} tokens"
            self._bars.update(self._task, total=corpus.total_bytes, completed=corpus.bytes_read, figures=figures)

    def _computed(self, batch: "BatchComputed") -> None:
        figures = (
            f"{batch.documents:,}/{batch.total_documents:,} documents  {batch.tokens_per_second:,.0f} tok/s  "
            f"{batch.megabytes_per_second:,.1f} MB/s  {format_bytes(batch.bytes_written)}"
        )
        if self._task is not None:
            self._bars.update(self._task, total=batch.total_tokens, completed=batch.tokens, figures=figures)

    def _sealed(self, shard: "ShardSealed") -> None:
        if self._bars.disable:
            print_notice(
                f"sealed {shard.name}: {format_count(shard.documents)} documents, {format_count(shard.tokens)} tokens, "
                f"{format_bytes(shard.stored_bytes)}; {format_count(shard.sealed_documents)} documents in all"
            )
