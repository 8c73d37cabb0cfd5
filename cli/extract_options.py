"""Options that `extract` and `estimate` share, and how they become settings."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from dflash_cache.config import Codec, ExtractConfig, LongDocuments, TemplateValue, resolve
from dflash_cache.errors import ConfigError

__all__ = [
    "AttentionOption",
    "BatchTokensOption",
    "CodecOption",
    "ConfigOption",
    "DataOption",
    "DeviceOption",
    "DtypeOption",
    "FcLayersOption",
    "FusedOption",
    "LimitOption",
    "LongOption",
    "MaxLengthOption",
    "ModelOption",
    "OutOption",
    "RevisionOption",
    "SampleOption",
    "ShardTokensOption",
    "ShuffleSeedOption",
    "TemplateKwargOption",
    "TrustOption",
    "extract_settings",
]

ModelOption = Annotated[
    str | None,
    typer.Option("--model", help="The target: a folder, or a hub name such as Qwen/Qwen3.6-27B.", show_default=False),
]
DataOption = Annotated[
    list[Path] | None,
    typer.Option("--data", help="JSON Lines, plain or gzip; repeat for several files.", show_default=False),
]
OutOption = Annotated[Path | None, typer.Option("--out", help="Folder of the cache. [default: ./cache]")]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="TOML file with any setting of schemas/extract-config.schema.json.")
]
RevisionOption = Annotated[str | None, typer.Option("--revision", help="Commit, tag or branch of a hub model.")]
DtypeOption = Annotated[
    Literal["auto", "float32", "bfloat16"] | None,
    typer.Option("--dtype", help="Number format of the target. [default: auto: its own on a GPU, float32 on a CPU]"),
]
DeviceOption = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda or cuda:N. [default: auto]")]
AttentionOption = Annotated[
    Literal["sdpa", "eager"] | None, typer.Option("--attention", help="Attention of the target. [default: sdpa]")
]
FcLayersOption = Annotated[
    str | None,
    typer.Option(
        "--fc-layers",
        help="Decoder layers whose outputs feed the drafter, 0-based, by commas. "
        "[default: five spread over the target; 1,16,31,46,61 of 64]",
    ),
]
MaxLengthOption = Annotated[int | None, typer.Option("--max-length", help="Most tokens of a document. [default: 4096]")]
LongOption = Annotated[
    LongDocuments | None,
    typer.Option(
        "--long",
        help="What happens to longer documents: cut them, make several of them, or leave them out. [default: truncate]",
    ),
]
LimitOption = Annotated[int | None, typer.Option("--limit", help="Read only the first N documents.")]
SampleOption = Annotated[
    int | None, typer.Option("--sample", help="Of the documents, draw N at random; they stay in order.")
]
ShuffleSeedOption = Annotated[
    int | None, typer.Option("--shuffle-seed", help="Seed of --sample's draw. [default: 0]", show_default=False)
]
TemplateKwargOption = Annotated[
    list[str] | None,
    typer.Option("--template-kwarg", help="NAME=VALUE for the chat template, e.g. enable_thinking=false."),
]
BatchTokensOption = Annotated[
    int | None, typer.Option("--batch-tokens", help="Padded tokens in a forward pass. [default: 4096]")
]
ShardTokensOption = Annotated[
    int | None, typer.Option("--shard-tokens", help="Tokens of a full shard. [default: 512 MiB of states]")
]
CodecOption = Annotated[
    Codec | None,
    typer.Option("--codec", help="compact compresses without loss; fast only adds checksums. [default: compact]"),
]
FusedOption = Annotated[
    bool | None,
    typer.Option(
        "--fused/--no-fused",
        help="On a GPU, run the target with fused pieces (needs flash-linear-attention). [default: fused]",
        show_default=False,
    ),
]
TrustOption = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")]

_CORPUS = ("max_length", "long", "limit", "sample", "shuffle_seed")
_RUN = ("model", "out", "revision", "dtype", "device", "attention", "batch_tokens", "shard_tokens", "codec", "fused")
_SWITCHES = ("trust_remote_code", "overwrite")


def extract_settings(given: Mapping[str, Any], **more: Any) -> ExtractConfig:
    """Resolve what was typed, and the file that it names, into settings.

    Args:
      given: The command's parameters by name, those that are no settings too.
      more: Settings with flags of one command alone; None where not given.

    Raises:
      ConfigError: If a value is out of range or cannot be read.
    """
    data, layers, pairs = given.get("data"), given.get("fc_layers"), given.get("template_kwarg")
    flags: dict[str, Any] = {name: given.get(name) for name in _RUN}
    # A switch that is not given must not beat the file.
    flags |= {name: given.get(name) or None for name in _SWITCHES}
    flags |= more
    flags["fc_layers"] = _layer_list(layers) if layers is not None else None
    flags["corpus"] = {
        **{name: given.get(name) for name in _CORPUS},
        "files": tuple(data) if data else None,
        "template_kwargs": _template_kwargs(pairs) if pairs else None,
    }
    return resolve(ExtractConfig, flags, given.get("config"))


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
