"""Open and check everything that a run needs before its first step. Nothing in the run's folder is touched here."""

from dataclasses import dataclass
from pathlib import Path

import torch

from dflash_cache.config import TrainConfig
from dflash_cache.device import choose_device
from dflash_cache.drafter.config import DrafterConfig, derive_drafter_config
from dflash_cache.drafter.model import Drafter
from dflash_cache.drafter.objective import Objective
from dflash_cache.errors import ConfigError
from dflash_cache.format.cache import FeatureCache
from dflash_cache.stream.loader import RowReader
from dflash_cache.stream.order import DocumentSplit, split_documents
from dflash_cache.stream.packing import RowPlans, pack_documents
from dflash_cache.stream.plan import TrainingPlan
from dflash_cache.target_head import TARGET_HEAD_NAME, TargetHead
from dflash_cache.train.cache_checks import check_features, check_head, implausible_head
from dflash_cache.train.contract import RunContract
from dflash_cache.train.generators import Generators
from dflash_cache.train.optimizer import build_optimizer
from dflash_cache.train.state import Progress, TrainState

__all__ = ["RunSetup", "prepare_run"]

# float32 weight, float32 first and second moment.
_CHECKPOINT_BYTES_PER_PARAMETER = 12
_FINAL_BYTES_PER_PARAMETER = 2  # bfloat16


@dataclass(frozen=True)
class RunSetup:
    """A run that is ready to begin or to go on.

    Attributes:
      config: As given.
      contract: What it came to.
      device: Where to train.
      cache: The open cache.
      reader: Of its rows.
      split: Training and held-out documents.
      plan: The course of training.
      held_out: Rows of the held-out documents; none when nothing is held out.
      objective: How the drafter is judged.
      warnings: What the user should read.
    """

    config: TrainConfig
    contract: RunContract
    device: torch.device
    cache: FeatureCache
    reader: RowReader
    split: DocumentSplit
    plan: TrainingPlan
    held_out: RowPlans
    objective: Objective
    warnings: tuple[str, ...]

    def new_state(self) -> TrainState:
        """Build the run as it is before its first step; its first weights depend on the seed alone."""
        generators = Generators.from_seed(self.config.seed, self.device)
        drafter = Drafter(self.contract.drafter)
        drafter.initialize(generators.weights)
        drafter = drafter.to(self.device)
        return TrainState(drafter, build_optimizer(drafter, self.config.optimizer), generators, Progress())

    @property
    def bytes_to_write(self) -> int:
        """Disk that the run needs at the least: a checkpoint beside the one before it, and the final drafter."""
        with torch.device("meta"):
            drafter = Drafter(self.contract.drafter)
        num_parameters = sum(parameter.numel() for parameter in drafter.parameters())
        checkpoints = 1 if self.config.resume else 2
        return num_parameters * (checkpoints * _CHECKPOINT_BYTES_PER_PARAMETER + _FINAL_BYTES_PER_PARAMETER)


def prepare_run(config: TrainConfig) -> RunSetup:
    """Open the cache, check it, and plan the whole run.

    Raises:
      CacheFormatError: If the folder is not a finished cache that can be trained from.
      CacheDamagedError: If it is damaged.
      ConfigError: If a setting does not go with the cache or the machine.
      NonFiniteError: If stored states are NaN, infinite or zero.
    """
    device = choose_device(config.device)
    cache = FeatureCache.open(config.shards)
    manifest = cache.manifest
    check_features(config.shards, manifest, allow_incomplete=config.allow_incomplete)
    identity = manifest.identity
    drafter = derive_drafter_config(identity.target, identity.features, config.drafter)
    _refuse_used_mask_token(config.shards, cache, drafter)
    head = _load_head(cache, drafter, device)
    reader = RowReader(cache, pin_memory=device.type == "cuda")
    lengths = cache.index.length
    split = split_documents(cache.index.doc_id, eval_fraction=config.eval_fraction, seed=config.seed)
    plan = TrainingPlan(
        split.train, lengths, seed=config.seed, row_tokens=config.row_tokens, rows_per_step=config.rows_per_step
    )
    sample = reader.read(plan.epoch(0).row(0)).to(device)
    warning = implausible_head(sample, head)
    return RunSetup(
        config=config,
        contract=_contract(config, cache, drafter, plan, device),
        device=device,
        cache=cache,
        reader=reader,
        split=split,
        plan=plan,
        held_out=pack_documents(split.held_out, lengths, row_tokens=config.row_tokens),
        objective=Objective(drafter, config.loss, head),
        warnings=() if warning is None else (warning,),
    )


def _contract(
    config: TrainConfig, cache: FeatureCache, drafter: DrafterConfig, plan: TrainingPlan, device: torch.device
) -> RunContract:
    return RunContract(
        cache=cache.manifest.identity,
        cache_documents=cache.manifest.num_documents,
        drafter=drafter,
        total_steps=plan.num_steps(epochs=config.epochs, max_steps=config.max_steps),
        device_type="cuda" if device.type == "cuda" else "cpu",
        recipe=config.recipe,
        seed=config.seed,
        row_tokens=config.row_tokens,
        rows_per_step=config.rows_per_step,
        num_anchors=config.num_anchors,
        noise_half_width=config.noise_half_width,
        loss=config.loss,
        optimizer=config.optimizer,
        eval_fraction=config.eval_fraction,
    )


def _load_head(cache: FeatureCache, drafter: DrafterConfig, device: torch.device) -> TargetHead:
    """Load the target's head: float32 on the CPU, as stored on a GPU."""
    path = cache.attached(TARGET_HEAD_NAME)
    head = TargetHead.load(path, device=device, dtype=torch.float32 if device.type == "cpu" else None)
    check_head(path, head, cache.manifest, drafter)
    return head


def _refuse_used_mask_token(folder: Path, cache: FeatureCache, drafter: DrafterConfig) -> None:
    """Refuse early what stage one already counted; any other mask token is looked for row by row."""
    identity = cache.manifest.identity
    uses = identity.corpus.mask_token_uses
    if drafter.mask_token_id == identity.target.mask_token_id and uses:
        raise ConfigError(
            f"the mask token {drafter.mask_token_id} of {identity.target.name} occurs {uses} times in the corpus of "
            f"{folder}; set drafter.mask_token_id to an id that no document contains"
        )
