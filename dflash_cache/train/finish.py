"""What a finished run hands over: the drafter as servers load it, with a card that says how it was made."""

from pathlib import Path

from dflash_cache.export.card import ModelCard
from dflash_cache.export.zlab import write_zlab_checkpoint
from dflash_cache.train.setup import RunSetup
from dflash_cache.train.state import TrainState

__all__ = ["export_final"]


def export_final(folder: Path, setup: RunSetup, state: TrainState) -> None:
    """Write the drafter in z-lab's format, atomically; an export of the same run that is there is replaced.

    Raises:
      DiskSpaceError: If the disk is full; the latest checkpoint is intact.
      OutputExistsError: If the folder holds something else.
    """
    card = ModelCard(
        identity=setup.contract.cache,
        training=setup.config,
        steps=state.progress.step,
        held_out=state.progress.held_out,
        documents=setup.contract.cache_documents,
    )
    write_zlab_checkpoint(folder, state.drafter, setup.contract.drafter, card, replace=True)
