"""Train DFlash drafters offline: run the target once, prove and cache its hidden states, train from the cache."""

from importlib.metadata import version as _version

from dflash_cache.errors import DflashCacheError

__all__ = ["DflashCacheError", "__version__"]

__version__: str = _version("dflash-cache")
