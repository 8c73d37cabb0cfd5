"""The command line: a thin shell over the library."""

from dflash_cache.cli.main import main

__all__ = ["main"]
