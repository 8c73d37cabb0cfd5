"""Run the command line as a user does, in this process."""

import contextlib
import io
import sys
from dataclasses import dataclass

from dflash_cache.cli import main


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    stdout: str
    stderr: str


def run(*arguments: object) -> Outcome:
    """Run ``dflash-cache ARGUMENTS`` and return its exit code and output."""
    stdout, stderr = io.StringIO(), io.StringIO()
    before = sys.argv
    sys.argv = ["dflash-cache", *map(str, arguments)]
    code = 0
    try:
        # The console looks up sys.stderr when it prints, so that redirecting it here works.
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            main()
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    finally:
        sys.argv = before
    return Outcome(code, stdout.getvalue(), stderr.getvalue())


def fails_cleanly(outcome: Outcome, *words: str) -> None:
    """Assert one clear message on stderr, exit code 1, and no traceback."""
    assert outcome.code == 1, outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert outcome.stderr.count("error: ") == 1, outcome.stderr
    for word in words:
        assert word in outcome.stderr, outcome.stderr
