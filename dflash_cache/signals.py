"""Ctrl-C and a scheduler's SIGTERM, taken over for as long as a run lasts."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["handling_signals"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def handling_signals(handle: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call a function at SIGINT and SIGTERM in place of what happens otherwise, until the block ends.

    Signals reach the main thread only; in any other this changes nothing.

    Args:
      handle: Runs in the main thread, between two of its bytecodes; may raise.
    """
    previous = {}
    if threading.current_thread() is threading.main_thread():
        previous = {number: signal.signal(number, lambda n, _: handle(signal.Signals(n))) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            # None stands for a handler that was not set from Python, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
