"""Write and read drafters in z-lab's checkpoint format, which vLLM and SGLang load (dflash.md section 1.4)."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_cache.drafter.config import DrafterConfig
from dflash_cache.drafter.model import Drafter
from dflash_cache.errors import CheckpointError, ConfigError, DiskSpaceError, NonFiniteError
from dflash_cache.export.card import ModelCard
from dflash_cache.export.folder import whole_folder
from dflash_cache.export.zlab_config import ARCHITECTURE, WeightsDtype, config_from_zlab, config_to_zlab

__all__ = ["CARD_NAME", "CONFIG_NAME", "WEIGHTS_NAME", "read_zlab_checkpoint", "write_zlab_checkpoint"]

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
CARD_NAME = "README.md"

_DTYPE_NAMES: dict[torch.dtype, WeightsDtype] = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


def write_zlab_checkpoint(
    folder: Path,
    drafter: Drafter,
    config: DrafterConfig,
    card: ModelCard,
    dtype: torch.dtype = torch.bfloat16,
    *,
    replace: bool = False,
) -> None:
    """Write a drafter as a folder that servers load unedited; it appears whole or not at all.

    ``config.json``, ``model.safetensors`` (11 tensors a layer and 3 more, without prefix; embedding and lm_head are the
    target's) and ``README.md``. The same drafter gives the same bytes.

    Args:
      folder: Where; parents are made.
      drafter: Weights of any number format, on any device.
      config: The drafter's.
      card: What the README says.
      dtype: Number format on disk: bfloat16, rounded to nearest even, or float32.
      replace: Whether an earlier drafter checkpoint in ``folder`` is replaced.

    Raises:
      ConfigError: If dtype is neither, or config is not the drafter's.
      NonFiniteError: If a weight is NaN or infinite, or becomes so in dtype.
      OutputExistsError: If folder holds anything else.
      DiskSpaceError: If the disk is too small.
    """
    if dtype not in _DTYPE_NAMES:
        raise ConfigError(f"drafters are exported in bfloat16 or float32, got {str(dtype).removeprefix('torch.')}")
    if config != drafter.config:
        raise ConfigError("the configuration to be exported is not the one that the drafter was built with")
    tensors = {name: weight.detach().to("cpu", dtype).contiguous() for name, weight in drafter.state_dict().items()}
    _refuse_non_finite(tensors, "the drafter to be exported")
    with whole_folder(folder, _is_checkpoint if replace else lambda _: False) as unfinished:
        _require_space(unfinished, sum(tensor.nbytes for tensor in tensors.values()))
        described = config_to_zlab(config, _DTYPE_NAMES[dtype])
        (unfinished / CONFIG_NAME).write_text(json.dumps(described, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        save_file(tensors, unfinished / WEIGHTS_NAME, metadata={"format": "pt"})
        (unfinished / CARD_NAME).write_text(card.render(config, folder.name), encoding="utf-8")


def read_zlab_checkpoint(folder: Path, dtype: torch.dtype | None = None) -> tuple[DrafterConfig, Drafter]:
    """Read a drafter in z-lab's format, written here or published elsewhere.

    Args:
      folder: With ``config.json`` and ``model.safetensors``.
      dtype: Of the parameters; None keeps the stored one.

    Returns:
      Its configuration and the drafter, on the CPU.

    Raises:
      CheckpointError: If a file, a field or a tensor is missing, unexpected or of the wrong shape; names it.
      NonFiniteError: If a weight is NaN or infinite.
    """
    config = config_from_zlab(_read_config(folder / CONFIG_NAME), str(folder / CONFIG_NAME))
    path = folder / WEIGHTS_NAME
    try:
        tensors = load_file(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; a drafter's weights lie in one file of this name") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file ({error}); fetch or export it again") from error
    drafter = Drafter(config)
    _refuse_other_tensors({name: weight.shape for name, weight in drafter.state_dict().items()}, tensors, path)
    _refuse_non_finite(tensors, str(path))
    if dtype is not None:
        tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    drafter.load_state_dict(tensors, strict=True, assign=True)
    return config, drafter


def _read_config(path: Path) -> dict[str, Any]:
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; name the folder of a drafter in z-lab's format") from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(described, dict):
        raise CheckpointError(f"{path} should hold a JSON object, got {type(described).__name__}")
    return described


def _refuse_other_tensors(expected: dict[str, torch.Size], found: dict[str, Tensor], path: Path) -> None:
    faults = []
    missing, unexpected = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing:
        faults.append(f"missing are {_listed(missing)}")
    if unexpected:
        faults.append(f"unexpected are {_listed(unexpected)}")
    for name in sorted(expected.keys() & found.keys()):
        if expected[name] != found[name].shape:
            faults.append(f"{name} has shape {list(found[name].shape)}, its config gives {list(expected[name])}")
        elif found[name].dtype not in _DTYPE_NAMES:
            stored = str(found[name].dtype).removeprefix("torch.")
            faults.append(f"{name} is {stored}, readable are {' and '.join(_DTYPE_NAMES.values())}")
    if faults:
        more = f" (and {len(faults) - 3} more)" if len(faults) > 3 else ""
        raise CheckpointError(
            f"{path} does not hold the {len(expected)} tensors of its config: {'; '.join(faults[:3])}{more}"
        )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _refuse_non_finite(tensors: dict[str, Tensor], where: str) -> None:
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise NonFiniteError(f"{where}: {name} holds NaN or infinite values; go back to an earlier checkpoint")


def _require_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DiskSpaceError(f"the drafter takes {needed:,} bytes, but only {free:,} are free at {folder.parent}")


def _is_checkpoint(folder: Path) -> bool:
    """Say whether a folder holds nothing but a drafter checkpoint."""
    if {path.name for path in folder.iterdir()} != {CONFIG_NAME, WEIGHTS_NAME, CARD_NAME}:
        return False
    try:
        return ARCHITECTURE in (_read_config(folder / CONFIG_NAME).get("architectures") or [])
    except CheckpointError:  # what cannot be read may be anything
        return False
