"""Ctrl-C between two steps, not in the middle of one."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["StopRequest"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Turns the first Ctrl-C (or SIGTERM) into a wish that the loop grants at its next safe point.

    A second one raises KeyboardInterrupt at once: whoever presses twice does not want to wait, and the latest
    checkpoint is intact. Signals reach the main thread only; elsewhere this changes nothing.

    Attributes:
      requested: Whether to stop.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            # None stands for a handler that was not set from Python, which Python cannot put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
