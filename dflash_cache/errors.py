"""Every error that a user can cause or act on.

One root, so that the command line catches one type and prints one message. Each child also inherits the built-in
whose meaning it refines, so that library users can catch what they know.
"""

__all__ = [
    "CacheDamagedError",
    "CacheFormatError",
    "CheckpointError",
    "ConfigError",
    "CorpusError",
    "DflashCacheError",
    "DiskSpaceError",
    "IdentityMismatchError",
    "MissingDependencyError",
    "NonFiniteError",
    "OutputExistsError",
    "SelfCheckError",
    "TargetError",
]


class DflashCacheError(Exception):
    """Base of all errors of this package.

    A message says what went wrong, where (file, line, field), what was found, what was expected, and what to do next.
    """


class ConfigError(DflashCacheError, ValueError):
    """A setting is unknown, out of range, or does not go with another."""


class CorpusError(DflashCacheError, ValueError):
    """The input text cannot be used as it is."""


class TargetError(DflashCacheError, ValueError):
    """The target model cannot be found, loaded, or understood."""


class CacheFormatError(DflashCacheError, ValueError):
    """A file is not a cache of a format that this version reads."""


class CacheDamagedError(DflashCacheError, OSError):
    """Stored bytes are missing, cut short, or not those that were sealed."""


class IdentityMismatchError(DflashCacheError, ValueError):
    """What is on disk was made with other settings than those asked for."""


class OutputExistsError(DflashCacheError, FileExistsError):
    """The output folder holds something that this run must not touch."""


class DiskSpaceError(DflashCacheError, OSError):
    """The disk is, or will be, too small."""


class SelfCheckError(DflashCacheError, RuntimeError):
    """What was about to be sealed does not agree with the target."""


class CheckpointError(DflashCacheError, ValueError):
    """A checkpoint or an exported drafter cannot be read, or does not belong to this run."""


class NonFiniteError(DflashCacheError, ArithmeticError):
    """A feature, a loss or a gradient is NaN or infinite."""


class MissingDependencyError(DflashCacheError, ImportError):
    """An optional package is needed for what was asked."""
