"""Ctrl-C between two steps, not in the middle of one."""

import signal
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from dflash_cache.signals import handling_signals

__all__ = ["StopRequest"]


class StopRequest:
    """Turns the first Ctrl-C (or SIGTERM) into a wish that the loop grants at its next safe point.

    A second one raises KeyboardInterrupt at once: whoever presses twice does not want to wait, and the latest
    checkpoint is intact.

    Attributes:
      requested: Whether to stop.
    """

    def __init__(self) -> None:
        self.requested = False
        self._handlers = ExitStack()

    def __enter__(self) -> Self:
        self._handlers.enter_context(handling_signals(self._handle))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handlers.close()

    def _handle(self, number: signal.Signals) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
