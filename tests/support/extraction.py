"""Run stage one in tests, and compare what it made."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dflash_cache.config import CorpusConfig, ExtractConfig
from dflash_cache.extract.progress import ExtractEvent
from dflash_cache.format.cache import FeatureCache
from dflash_cache.format.writer import LOG_NAME

SMALL: dict[str, Any] = {
    "device": "cpu",
    "fc_layers": (0, 1, 3),
    "batch_tokens": 400,
    "shard_tokens": 300,
    "window_tokens": 700,
}


def small_config(model: Path, files: tuple[Path, ...], out: Path, **changes: Any) -> ExtractConfig:
    """Settings that give several shards and windows for a thousand tokens."""
    corpus = {"files": files, **changes.pop("corpus", {})}
    return ExtractConfig(model=str(model), corpus=CorpusConfig(**corpus), out=out, **{**SMALL, **changes})


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file beneath a folder but the lock and the log of runs, by relative path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (".lock", LOG_NAME)
    }


def planes_of(cache: Path) -> dict[int, npt.NDArray[np.float32]]:
    """Every document's stored planes [n, P, H] in float32, by its index in the corpus."""
    reader = FeatureCache.open(cache)
    found = {}
    for document in range(len(reader.index.length)):
        piece = reader.read(document)
        bits = np.concatenate([piece.fc_features, piece.last_hidden_states[:, None]], axis=1)
        found[int(reader.index.doc_id[document])] = (
            torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy()
        )
    return found


class StopAt:
    """A callback that raises when the n-th event of a kind comes."""

    def __init__(self, kind: type[ExtractEvent], number: int, error: Callable[[], BaseException]) -> None:
        self._kind = kind
        self._left = number
        self._error = error

    def __call__(self, event: ExtractEvent) -> None:
        if isinstance(event, self._kind):
            self._left -= 1
            if self._left == 0:
                raise self._error()
