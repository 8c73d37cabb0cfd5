"""From what a user typed to where a target lies: a folder, or a repository on the hub."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from dflash_cache.errors import TargetError

__all__ = ["TargetName", "resolve_target_name"]

# Organisations whose model names begin with their own name; other bare names are not guessed.
_OWNERS = {"qwen": "Qwen"}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class TargetName:
    """Where a target lies.

    Attributes:
      given: What the user typed.
      location: What transformers is given: a folder's path or ``organisation/name``.
      folder: The folder; None for a repository on the hub.
      notice: What was filled in, in words; None when nothing was.
    """

    given: str
    location: str
    folder: Path | None
    notice: str | None = None

    @property
    def identity_name(self) -> str:
        """The name that a cache remembers: a folder's own name (it may move), or the repository."""
        return self.location if self.folder is None else self.folder.resolve().name


def resolve_target_name(given: str) -> TargetName:
    """Find what a model name means; an existing folder wins over the hub.

    Args:
      given: A folder, ``organisation/name``, or a bare name that begins with its organisation's (``Qwen3.6-27B``).

    Raises:
      TargetError: If it is neither.
    """
    path = Path(given).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise TargetError(f"{given} is a folder without a config.json; name the folder of a transformers model")
        return TargetName(given, str(path), path)
    if path.is_file():
        raise TargetError(f"{given} is a file; name the folder that holds it, with its config.json and tokenizer")
    if _looks_like_path(given):
        raise TargetError(f"{given}: no such folder; name the folder of a transformers model, or a hub name")
    if "/" in given:
        return TargetName(given, given, None)
    for prefix, owner in _OWNERS.items():
        if given.lower().startswith(prefix):
            location = f"{owner}/{given}"
            return TargetName(given, location, None, f"{given} was taken as {location}")
    raise TargetError(
        f"{given} is neither a folder here nor a whole hub name; give the hub name with its organisation, such as "
        f"organisation/{given}, or the path of a folder"
    )


def _looks_like_path(given: str) -> bool:
    absolute_or_dotted = given.startswith((".", "~", os.sep)) or given.endswith(os.sep)
    return absolute_or_dotted or not _HUB_NAME.fullmatch(given)
