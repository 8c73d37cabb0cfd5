"""Where torch computes, by the name that a user gives."""

import torch

from dflash_cache.errors import ConfigError

__all__ = ["choose_device"]


def choose_device(name: str) -> torch.device:
    """Resolve ``cpu``, ``cuda``, ``cuda:N``, or ``auto``: the first GPU, or the CPU where there is none.

    Raises:
      ConfigError: If the name is not one of these, or there is no such GPU.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is not known; use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = device.index or 0
        if index >= count:
            raise ConfigError(f"device {name!r} is not there: this machine has {count} usable GPUs; use --device cpu")
        device = torch.device("cuda", index)
    return device
