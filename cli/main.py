"""The ``dflash-cache`` program: its commands, and the one place where an error becomes a message and an exit code."""

import errno
import io
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from dflash_cache import __version__
from dflash_cache.cli.console import print_error
from dflash_cache.cli.demo import demo
from dflash_cache.cli.estimate import estimate
from dflash_cache.cli.extract import extract
from dflash_cache.cli.inspect import inspect_app
from dflash_cache.cli.train import train
from dflash_cache.errors import DflashCacheError

__all__ = ["app", "main"]

EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="dflash-cache",
    help="Train DFlash drafters offline: run the target once, prove and cache its hidden states, train from the cache.",
    epilog="Begin with `dflash-cache demo`; it runs every step on a small model in a few minutes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(extract)
app.command()(estimate)
app.command()(train)
app.add_typer(inspect_app, name="inspect")
app.command()(demo)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"dflash-cache {__version__}")  # noqa: T201 - stdout is data
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train DFlash drafters offline."""


def main() -> None:
    """Run the program: 0 done, 1 a clear error, 2 wrong usage, 130 interrupted; 3 and 143, see `extract`."""
    _prepare_streams()
    try:
        app()
    except DflashCacheError as error:
        print_error(str(error))
        sys.exit(EXIT_FAILURE)
    except OSError as error:
        # What the system refused (permissions, a broken disk) is for the user to mend, like our own errors.
        print_error(_explain(error))
        sys.exit(EXIT_FAILURE)
    except KeyboardInterrupt:
        print_error("interrupted")
        sys.exit(EXIT_INTERRUPTED)


def _prepare_streams() -> None:
    """Let closed streams swallow what is written, and escape characters that a stream's encoding lacks."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - until the program ends
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _explain(error: OSError) -> str:
    where = f": {error.filename}" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk is full{where}. What was finished is intact; make room and run the same command again "
            "(`train` with --resume, once it has begun)."
        )
    return f"{error.strerror or error}{where}"
