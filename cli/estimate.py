"""``dflash-cache estimate``: what an extraction will make and cost."""

from typing import TYPE_CHECKING, Annotated

import typer

from dflash_cache.cli.console import format_bytes, print_json, print_notice, print_properties, progress_bars
from dflash_cache.cli.extract import ExtractDisplay, describe_long
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
from dflash_cache.config import ExtractConfig

if TYPE_CHECKING:
    from dflash_cache.extract.estimate import Estimate

__all__ = ["estimate"]


def estimate(
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
    rate: Annotated[
        float | None, typer.Option("--rate", help="Tokens per second of the target, for the hours.", show_default=False)
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Load the target and run one batch: its speed, and what it is stored in.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON to stdout, for scripts.")] = False,
) -> None:
    """Count what `extract` would make with the same options: tokens, padding, shards, bytes, hours. Writes nothing.

    The corpus is tokenised and planned as it will be; the target's weights are loaded for `--measure` alone.

    Example: `dflash-cache estimate --model Qwen3.6-27B --data chats.jsonl --rate 9000`
    """
    settings = extract_settings(ctx.params)
    show_estimate(settings, rate=rate, measure=measure, as_json=json)


def show_estimate(config: ExtractConfig, *, rate: float | None, measure: bool, as_json: bool) -> None:
    """Estimate with progress bars and print the result."""
    from dflash_cache.extract.estimate import estimate_extraction

    with progress_bars("{task.fields[figures]}") as bars:
        found = estimate_extraction(config, ExtractDisplay(bars).show, rate=rate, measure=measure)
    if as_json:
        derived = ("padding_share", "needed_bytes", "fits", "hours")
        print_json({**vars(found), **{name: getattr(found, name) for name in derived}})
        return
    _print_estimate(config, found)
    if found.hours is None:
        print_notice("hours: give the target's speed with --rate TOKENS_PER_SECOND, or --measure it")


def _print_estimate(config: ExtractConfig, found: "Estimate") -> None:
    corpus = found.corpus
    basis = {
        "exact": "exactly",
        "measured": "by one batch through the codec",
        "assumed": "assumed with caution; real activations take about 72%",
    }[found.stored_basis]
    room = f"{format_bytes(found.free_bytes)} free"
    if found.existing_bytes:
        room += f", {format_bytes(found.existing_bytes)} of this cache there already"
    hours = "-"
    if found.hours is not None and found.tokens_per_second is not None:
        hours = f"{found.hours:,.2f} at {found.tokens_per_second:,.0f} tokens/s ({found.rate_basis})"
    rows: list[tuple[str, object]] = [
        ("documents", f"{corpus.documents_kept:,} kept of {corpus.documents_read:,} read"),
        ("too long", describe_long(corpus, config.corpus.max_length)),
        ("left out", corpus.describe_drops().strip() or "none"),
        ("tokens", f"{found.tokens:,}, {found.supervised_tokens / found.tokens:.1%} supervised"),
        ("batches", f"{found.batches:,}; {found.padding_share:.2%} of their positions are padding"),
        ("shards", f"{found.shards:,}"),
        ("raw", format_bytes(found.raw_bytes)),
        ("stored", f"{format_bytes(found.stored_bytes)} ({found.stored_bytes / found.raw_bytes:.1%} of raw, {basis})"),
        ("head, tokenizer", format_bytes(found.head_bytes)),
        ("room", f"{room}: {'enough' if found.fits else 'NOT ENOUGH'} for {format_bytes(found.needed_bytes)}"),
        ("hours", hours),
    ]
    print_properties(f"extracting {found.target} into {config.out} (nothing is written yet)", rows)
