"""What a resumed run must share with the run that it continues, and what a run records of itself."""

import json
from pathlib import Path
from typing import Literal

import xxhash

from dflash_cache.config import LossConfig, OptimizerConfig, RecipeName, TrainConfig
from dflash_cache.drafter.config import DrafterConfig
from dflash_cache.errors import IdentityMismatchError
from dflash_cache.format.manifest import CacheIdentity, differences
from dflash_cache.spec import FrozenModel

__all__ = ["RunContract", "RunRecord", "cache_digest", "refuse_changes"]


class RunContract(FrozenModel):
    """Everything that the numbers of a run depend on. Two runs of equal contract train the same drafter.

    Not in it, and free to change on resume: ``save_every``, ``eval_every``, ``keep_checkpoints``, the folder names, and
    which device of its kind is used. ``epochs`` and ``max_steps`` count through the steps that they come to, since the
    learning rate is planned over all of them.

    Attributes:
      cache: What made the cache.
      cache_documents: Documents in sealed shards; fewer than the corpus' while extraction is unfinished.
      drafter: The whole geometry: mask token, fc layers, block size and window included.
      total_steps: Optimizer steps from first to last.
      device_type: Kind of device; noise is drawn there.
      recipe, seed, row_tokens, rows_per_step, num_anchors, noise_half_width, loss, optimizer, eval_fraction: As in
        ``TrainConfig``.
    """

    cache: CacheIdentity
    cache_documents: int
    drafter: DrafterConfig
    total_steps: int
    device_type: Literal["cpu", "cuda"]
    recipe: RecipeName
    seed: int
    row_tokens: int
    rows_per_step: int
    num_anchors: int
    noise_half_width: float
    loss: LossConfig
    optimizer: OptimizerConfig
    eval_fraction: float


class RunRecord(FrozenModel):
    """The contents of ``run.json``.

    Attributes:
      format, format_version: What kind of file this is.
      written_by: Program and version.
      cache_digest: One digest of the cache's identity, to compare runs by eye.
      config: The resolved settings, as given.
      contract: What they came to.
    """

    format: Literal["dflash-cache-run"] = "dflash-cache-run"
    format_version: Literal[1] = 1
    written_by: str
    cache_digest: str
    config: TrainConfig
    contract: RunContract


def cache_digest(identity: CacheIdentity) -> str:
    """Return the xxh3-128 digest of a cache's identity, as 32 hex digits."""
    canonical = json.dumps(identity.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return xxhash.xxh3_128_hexdigest(canonical.encode("utf-8"))


def refuse_changes(old: RunContract, new: RunContract, where: Path) -> None:
    """Refuse to continue a run with settings that would make it another.

    Args:
      old: Of the run or checkpoint.
      new: Of this command.
      where: The run's folder.

    Raises:
      IdentityMismatchError: Listing every field that differs, old and new.
    """
    changed = differences(old, new)
    if not changed:
        return
    listed = "\n".join(f"  {difference}" for difference in changed)
    hint = ""
    if any(difference.field == "total_steps" for difference in changed):
        hint = (
            "total_steps follows from epochs, max_steps, rows_per_step and row_tokens; the learning rate was planned "
            "over all steps, so a run cannot be made longer or shorter. "
        )
    raise IdentityMismatchError(
        f"{where} was begun with other settings (field: in the run -> asked for):\n{listed}\n"
        f"{hint}Resume with the settings of the run, choose another --out, or start over with --overwrite."
    )
