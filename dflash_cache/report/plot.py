"""Pictures of a cache or a shard: document lengths, per-layer magnitude, share of supervised tokens."""

from collections.abc import Sequence
from pathlib import Path

from dflash_cache.errors import ConfigError, MissingDependencyError
from dflash_cache.report.layers import LayerStats

__all__ = ["plot_contents"]

_BINS = 40
_SUPERVISED, _CONTEXT, _LAST = "#1b7f79", "#c9d3d6", "#d1603d"


def plot_contents(
    path: Path, *, title: str, doc_lengths: Sequence[int], layers: Sequence[LayerStats], supervised_tokens: int
) -> None:
    """Draw what a cache or shard contains into an image file.

    Args:
      path: Where to write; the suffix decides the format.
      title: What is drawn.
      doc_lengths: In tokens.
      layers: As stored.
      supervised_tokens: Of all tokens.

    Raises:
      MissingDependencyError: If matplotlib is not installed.
      ConfigError: If the file cannot be written or its suffix is no image format.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("a plot needs matplotlib: pip install 'dflash-cache[plot]'") from error
    if not path.suffix:  # matplotlib would add one, and write another file than the one that was named
        raise ConfigError(f"the picture {path} has no suffix; name an image file, such as {path.name or 'cache'}.png")
    figure = Figure(figsize=(12, 4.2), dpi=120, layout="constrained")
    figure.suptitle(title, fontsize=11)
    lengths_axes, layers_axes, mask_axes = figure.subplots(1, 3, width_ratios=[2, 2, 1])
    _draw_lengths(lengths_axes, doc_lengths)
    _draw_layers(layers_axes, layers)
    _draw_mask(mask_axes, supervised_tokens, sum(doc_lengths))
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the picture {path} cannot be written: {error}") from error


def _draw_lengths(axes, doc_lengths: Sequence[int]) -> None:  # type: ignore[no-untyped-def] # matplotlib has no types
    axes.hist(doc_lengths, bins=min(_BINS, max(1, len(set(doc_lengths)))), color=_SUPERVISED, edgecolor="white")
    axes.set(title=f"{len(doc_lengths):,} documents", xlabel="tokens in a document", ylabel="documents")
    axes.yaxis.get_major_locator().set_params(integer=True)


def _draw_layers(axes, layers: Sequence[LayerStats]) -> None:  # type: ignore[no-untyped-def]
    places = range(len(layers))
    colors = [_LAST if stats.role == "last" else _SUPERVISED for stats in layers]
    rms, largest = [stats.rms for stats in layers], [stats.max_abs for stats in layers]
    axes.vlines(places, rms, largest, color=_CONTEXT, linewidth=2, zorder=1)
    axes.scatter(places, rms, color=colors, s=60, label="RMS", zorder=2)
    axes.scatter(places, largest, color=colors, marker="_", s=180, label="largest magnitude", zorder=2)
    axes.set_xticks(places, [f"{stats.layer}\n{stats.role}" for stats in layers])
    axes.set_yscale("log")
    axes.set(title="hidden states", xlabel="decoder layer (output)", ylabel="magnitude")
    axes.margins(y=0.2)
    axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)


def _draw_mask(axes, supervised: int, total: int) -> None:  # type: ignore[no-untyped-def]
    share = supervised / total
    axes.bar(["supervised", "context\nonly"], [share, 1 - share], color=[_SUPERVISED, _CONTEXT])
    axes.set(title=f"{share:.1%} supervised", ylim=(0, 1), ylabel="share of tokens")
