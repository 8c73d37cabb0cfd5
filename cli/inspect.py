"""``dflash-cache inspect``: look into a cache, a shard, a document."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from dflash_cache.cli.console import (
    format_bytes,
    format_count,
    print_data,
    print_error,
    print_json,
    print_notice,
    print_properties,
    print_table,
    progress_bars,
    readable,
    stdout_console,
)
from dflash_cache.errors import ConfigError

if TYPE_CHECKING:
    from dflash_cache.format.cache import FeatureCache
    from dflash_cache.format.verify import VerifyReport
    from dflash_cache.report.agreement import Agreement
    from dflash_cache.report.facts import ArrayFacts, CacheFacts, LengthStats
    from dflash_cache.report.layers import LayerStats
    from dflash_cache.report.text import TextSpan

__all__ = ["inspect_app", "print_cache"]

inspect_app = typer.Typer(
    help="Look into a cache, a shard or a document; works on an unfinished cache too.", no_args_is_help=True
)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON to stdout, for scripts.")]
VerifyOption = Annotated[
    bool, typer.Option("--verify", help="Read every byte and check every checksum; exit code 1 if anything is wrong.")
]
PlotOption = Annotated[
    Path | None,
    typer.Option("--plot", help="Draw document lengths, per-layer RMS and the mask share into this image file."),
]


@inspect_app.command("cache")
def inspect_cache(
    path: Annotated[Path, typer.Argument(help="Folder of the cache.")],
    sample: Annotated[int, typer.Option(min=1, help="Documents to read for the per-layer figures.")] = 32,
    json: JsonOption = False,
    verify: VerifyOption = False,
    plot: PlotOption = None,
) -> None:
    """Show what made a cache, what is in it, and whether its numbers look right."""
    from dflash_cache.format.cache import FeatureCache
    from dflash_cache.report.facts import LAYER_CONVENTION, cache_facts

    cache = FeatureCache.open(path)
    report = _verify(cache, None) if verify else None
    facts = None if report and report.problems else cache_facts(cache, sample_documents=sample)
    if facts is not None and plot is not None:
        _plot(plot, str(path), facts.doc_lengths, facts.layers, facts.supervised_tokens)
    if json:
        print_json({"facts": facts, "layer_convention": LAYER_CONVENTION, "verify": report})
    elif facts is not None:
        _print_cache_facts(path, facts)
    _finish(report, json=json)


@inspect_app.command("shard")
def inspect_shard(
    shard: Annotated[str, typer.Argument(help="Folder of a shard, or its number with --cache.")],
    cache: Annotated[Path | None, typer.Option("--cache", help="Folder of the cache, when SHARD is a number.")] = None,
    json: JsonOption = False,
    verify: VerifyOption = False,
    plot: PlotOption = None,
) -> None:
    """Show the arrays, documents and per-layer figures of one shard; reads all of it."""
    from dflash_cache.report.facts import LAYER_CONVENTION, shard_facts

    opened, number = _find_shard(shard, cache)
    report = _verify(opened, (number,)) if verify else None
    facts = None if report and report.problems else shard_facts(opened, number)
    if facts is not None and plot is not None:
        _plot(plot, facts.name, facts.doc_lengths, facts.layers, facts.supervised_tokens)
    if json:
        print_json({"facts": facts, "layer_convention": LAYER_CONVENTION, "verify": report})
    elif facts is not None:
        print_data(Text(f"shard {facts.name} of {opened.folder}\n", style="bold"))
        _print_contents(facts.arrays, facts.lengths, facts.supervised_tokens)
        _print_layers(facts.layers, facts.agreement, "all documents")
    _finish(report, json=json)


@inspect_app.command("doc")
def inspect_document(
    path: Annotated[Path, typer.Argument(help="Folder of the cache.")],
    number: Annotated[int, typer.Argument(help="Which document, counted from 0 in cache order.")],
    json: JsonOption = False,
) -> None:
    """Show one document's text with the supervised part highlighted, and its per-layer figures."""
    from dflash_cache.format.cache import FeatureCache
    from dflash_cache.report.facts import document_facts

    cache = FeatureCache.open(path)
    count = len(cache.index.length)
    if not 0 <= number < count:
        raise ConfigError(f"{path} has no document {number}; its documents are 0 to {count - 1}")
    facts = document_facts(cache, number)
    if json:
        print_json(facts)
        return
    heading = f"document {facts.ordinal} (line {facts.doc_id} of the corpus, from 0) in {facts.shard}: "
    share = facts.supervised_tokens / facts.tokens
    print_data(Text(f"{heading}{facts.tokens:,} tokens, {share:.1%} supervised\n", style="bold"))
    print_data(_highlighted(facts.spans))
    print_data("")
    _print_layers(facts.layers, facts.agreement, "this document")


def print_cache(path: Path, *, sample: int) -> None:
    """Print what is in a cache.

    Args:
      path: Its folder.
      sample: Documents to read for the per-layer figures.
    """
    from dflash_cache.format.cache import FeatureCache
    from dflash_cache.report.facts import cache_facts

    _print_cache_facts(path, cache_facts(FeatureCache.open(path), sample_documents=sample))


def _print_cache_facts(path: Path, facts: "CacheFacts") -> None:
    from dflash_cache.report.facts import LAYER_CONVENTION

    manifest = facts.manifest
    target, corpus = manifest.identity.target, manifest.identity.corpus
    state = "complete" if manifest.complete else "NOT complete: run its extract command again to continue"
    rows = [
        ("state", f"{state}; {manifest.num_documents:,} of {corpus.num_documents:,} documents"),
        ("target", f"{target.name}{f' @ {target.revision}' if target.revision else ''} ({target.architecture})"),
        (
            "computed in",
            f"{target.compute_dtype}{f', quantized {target.quantization}' if target.quantization else ''}",
        ),
        ("fc layers", ", ".join(str(i) for i in manifest.identity.features.fc_layer_indices)),
        ("last layer", manifest.identity.features.last_layer.index),
        ("layer convention", LAYER_CONVENTION),
        ("final norm", f"{target.final_norm.kind}, eps {target.final_norm.eps:g}"),
        ("mask token", f"{target.mask_token_id} ({target.mask_token_reason})"),
        ("chat template", f"{corpus.template_digest or 'none'} {corpus.template_kwargs or ''}".strip()),
        (
            "longest allowed",
            f"{corpus.max_length:,} tokens; {corpus.truncated:,} documents cut, {corpus.split:,} split into parts",
        ),
        ("left out", ", ".join(f"{count:,} {reason}" for reason, count in corpus.dropped.items()) or "nothing"),
        ("quarantined", f"{len(manifest.quarantined):,} with NaN, infinite or zero states"),
        ("shards", f"{len(manifest.shards):,}"),
    ]
    print_properties(f"cache {path}", rows)
    _print_contents(facts.arrays, facts.lengths, facts.supervised_tokens)
    _print_layers(facts.layers, facts.agreement, f"{facts.sampled_documents} sampled documents")


def _highlighted(spans: "Sequence[TextSpan]") -> Text:
    """Supervised text in colour; where there is none, in brackets, so that a log shows it too."""
    colour = stdout_console().is_terminal
    text = Text()
    for span in spans:
        shown = readable(span.text)
        if not span.supervised:
            text.append(shown, style="dim" if colour else "")
        elif colour:
            text.append(shown, style="bold green")
        else:
            text.append(f"\N{LEFT DOUBLE ANGLE BRACKET}{shown}\N{RIGHT DOUBLE ANGLE BRACKET}")
    return text


def _find_shard(shard: str, cache: Path | None) -> "tuple[FeatureCache, int]":
    from dflash_cache.format.cache import FeatureCache

    if cache is None and shard.isdecimal():
        raise ConfigError(f"shard number {shard} of which cache? Add --cache FOLDER, or give the shard's own folder")
    folder = Path(shard).resolve()
    opened = FeatureCache.open(cache if cache is not None else folder.parent)
    names = [entry.name for entry in opened.manifest.shards]
    # By name: a number of any length is compared as text, and zeros before it are fine.
    if shard.isdecimal() and (name := f"shard-{shard.lstrip('0').zfill(5)}.zarr") in names:
        return opened, names.index(name)
    if cache is None and folder.name in names:
        return opened, names.index(folder.name)
    raise ConfigError(f"{opened.folder} has no shard {shard}; its sealed shards are 0 to {len(names) - 1}")


def _verify(cache: "FeatureCache", shards: tuple[int, ...] | None) -> "VerifyReport":
    from dflash_cache.format.verify import verify_cache

    entries = cache.manifest.shards
    total = sum(entries[i].stored_bytes for i in (shards if shards is not None else range(len(entries))))
    with progress_bars("{task.fields[done]}") as bars:
        task = bars.add_task("verifying", total=total, done="")
        done = 0

        def advance(number: int, stored: int) -> None:
            nonlocal done
            done += stored
            bars.update(task, completed=done, done=f"shard {number}, {format_bytes(done)}")

        return verify_cache(cache, shards=shards, on_shard=advance)


def _finish(report: "VerifyReport | None", *, json: bool) -> None:
    if report is None:
        return
    for problem in report.problems:
        print_error(problem.message)
    if report.problems:
        print_notice(f"{len(report.problems)} problems in {report.shards} shards")
        raise typer.Exit(1)
    if not json:
        print_notice(f"verified: {report.shards} shards, {format_bytes(report.stored_bytes)}, every checksum matches")


def _plot(
    path: Path, title: str, doc_lengths: Sequence[int], layers: "Sequence[LayerStats]", supervised_tokens: int
) -> None:
    from dflash_cache.report.plot import plot_contents

    plot_contents(path, title=title, doc_lengths=doc_lengths, layers=layers, supervised_tokens=supervised_tokens)
    print_notice(f"drew {path}")


def _print_contents(arrays: "Sequence[ArrayFacts]", lengths: "LengthStats", supervised: int) -> None:
    rows: list[tuple[object, ...]] = [
        (
            a.name,
            " x ".join(str(n) for n in a.shape),
            a.dtype,
            ", ".join(a.codecs),
            format_bytes(a.raw_bytes),
            format_bytes(a.stored_bytes),
            f"{a.ratio:.3f}",
        )
        for a in arrays
    ]
    raw, stored = sum(a.raw_bytes for a in arrays), sum(a.stored_bytes for a in arrays)
    rows.append(("total", "", "", "", format_bytes(raw), format_bytes(stored), f"{raw / stored:.3f}"))
    print_table("arrays", ("array", "shape", "dtype", "codecs", "raw", "stored", "ratio"), rows)
    length_row = (
        format_count(lengths.documents),
        format_count(lengths.tokens),
        lengths.minimum,
        f"{lengths.median:.0f}",
        f"{lengths.mean:.1f}",
        f"{lengths.percentile_95:.0f}",
        lengths.maximum,
        f"{supervised / lengths.tokens:.1%}",
        f"{stored / lengths.tokens:,.0f}",
    )
    columns = ("documents", "tokens", "min", "median", "mean", "95%", "max", "supervised", "bytes/token")
    print_table("documents (lengths in tokens)", columns, [length_row])


def _print_layers(layers: "Sequence[LayerStats]", agreement: "Agreement", measured_on: str) -> None:
    rows = [
        (f"{s.layer} ({s.role})", f"{s.rms:.4g}", f"{s.max_abs:.4g}", s.zero_rows, s.nonfinite_rows) for s in layers
    ]
    title = f"hidden states ({measured_on})"
    print_table(title, ("layer output", "RMS", "max |x|", "zero rows", "non-finite rows"), rows)
    if agreement.share is not None:
        print_data(
            f"the last layer predicts the next token on {agreement.share:.1%} of {agreement.tokens:,} supervised tokens"
        )
