"""``dflash-cache extract``: stage one."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

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
from dflash_cache.config import Codec, ExtractConfig, TemplateValue, resolve
from dflash_cache.errors import ConfigError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from dflash_cache.extract.progress import BatchComputed, CorpusRead, ExtractEvent, ShardSealed
    from dflash_cache.extract.runner import ExtractReport

__all__ = ["extract", "run_extraction"]

EXIT_INTERRUPTED = 130


def extract(
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="The target: a folder, or a hub name such as Qwen/Qwen3.6-27B.", show_default=False
        ),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option("--data", help="JSON Lines, plain or gzip; repeat for several files.", show_default=False),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder of the cache. [default: ./cache]")] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="TOML file with any setting of schemas/extract-config.schema.json."),
    ] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Commit, tag or branch of a hub model.")] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"] | None,
        typer.Option(
            "--dtype", help="Number format of the target. [default: auto: its own on a GPU, float32 on a CPU]"
        ),
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda or cuda:N. [default: auto]")] = None,
    attention: Annotated[
        Literal["sdpa", "eager"] | None, typer.Option("--attention", help="Attention of the target. [default: sdpa]")
    ] = None,
    fc_layers: Annotated[
        str | None,
        typer.Option(
            "--fc-layers",
            help="Decoder layers whose outputs feed the drafter, 0-based, by commas. "
            "[default: five spread over the target; 1,16,31,46,61 of 64]",
        ),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option("--max-length", help="Tokens kept of a document. [default: 4096]")
    ] = None,
    template_kwarg: Annotated[
        list[str] | None,
        typer.Option("--template-kwarg", help="NAME=VALUE for the chat template, e.g. enable_thinking=false."),
    ] = None,
    batch_tokens: Annotated[
        int | None, typer.Option("--batch-tokens", help="Padded tokens in a forward pass. [default: 8192]")
    ] = None,
    shard_tokens: Annotated[
        int | None, typer.Option("--shard-tokens", help="Tokens of a full shard. [default: 512 MiB of states]")
    ] = None,
    codec: Annotated[
        Codec | None,
        typer.Option("--codec", help="compact compresses without loss; fast only adds checksums. [default: compact]"),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete the cache in --out first.")] = False,
) -> None:
    """Run the target once over a corpus and cache the hidden states that a drafter learns from.

    Each line of the data is `{"text": "..."}` (every token supervised except the first) or
    `{"messages": [{"role": "user", "content": "..."}, ...]}` (rendered with the tokenizer's chat template, supervised
    where the assistant speaks). Interrupted? The same command continues at the first missing document.

    Example: `dflash-cache extract --model Qwen3.6-27B --data chats.jsonl --out ./cache`
    """
    flags = {
        "model": model,
        "corpus": {
            "files": tuple(data) if data else None,
            "max_length": max_length,
            "template_kwargs": _template_kwargs(template_kwarg) if template_kwarg else None,
        },
        "out": out,
        "revision": revision,
        "dtype": dtype,
        "device": device,
        "attention": attention,
        "fc_layers": _layer_list(fc_layers) if fc_layers is not None else None,
        "batch_tokens": batch_tokens,
        "shard_tokens": shard_tokens,
        "codec": codec,
        # A flag that is not given must not beat the file.
        "trust_remote_code": trust_remote_code or None,
        "overwrite": overwrite or None,
    }
    resolved = resolve(ExtractConfig, flags, config)
    try:
        report = run_extraction(resolved)
    except KeyboardInterrupt:
        print_error(
            f"interrupted; every sealed shard is kept: run the same command again to continue in {resolved.out}"
        )
        raise typer.Exit(EXIT_INTERRUPTED) from None
    print_summary(report)


def run_extraction(config: ExtractConfig) -> "ExtractReport":
    """Extract with progress bars; where there is no terminal, with a line for each shard."""
    from dflash_cache.extract.runner import extract as extract_cache

    with progress_bars("{task.fields[figures]}") as bars:
        return extract_cache(config, _Display(bars).show)


def print_summary(report: "ExtractReport") -> None:
    """Print what became of the corpus and of the cache, and what to type next."""
    corpus, manifest = report.corpus, report.manifest
    rows: list[tuple[str, object]] = [
        ("documents", f"{corpus.documents_kept:,} kept of {corpus.documents_read:,} read"),
        ("truncated", f"{corpus.documents_truncated:,} at {manifest.identity.corpus.max_length:,} tokens"),
        ("left out", corpus.describe_drops().strip() or "none"),
        ("tokens", f"{corpus.tokens:,}, {corpus.supervised_tokens / corpus.tokens:.1%} supervised"),
        ("shards", f"{len(manifest.shards):,}"),
        (
            "stored",
            f"{format_bytes(report.stored_bytes)} of {format_bytes(report.raw_bytes)} raw (ratio "
            f"{report.raw_bytes / report.stored_bytes:.3f}; {report.stored_bytes / corpus.tokens:,.0f} bytes/token)",
        ),
    ]
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


def _layer_list(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"--fc-layers is {text!r}, expected 0-based layer numbers separated by commas, such as 1,16,31,46,61"
        ) from error


def _template_kwargs(pairs: list[str]) -> dict[str, TemplateValue]:
    values: dict[str, TemplateValue] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"--template-kwarg is {pair!r}, expected NAME=VALUE, such as enable_thinking=false")
        if name in values:
            raise ConfigError(f"--template-kwarg names {name} more than once")
        values[name] = _template_value(text)
    return values


def _template_value(text: str) -> TemplateValue:
    """Read true, false and numbers as what they are, and anything else as text."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    return value if isinstance(value, bool | int | float | str) else text


class _Display:
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
