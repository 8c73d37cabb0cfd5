"""Ctrl-C and a scheduler's SIGTERM: stop, seal what is whole, and say which it was."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["Interrupted", "SignalGuard"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A signal asked the run to stop."""

    def __init__(self, number: signal.Signals) -> None:
        """Remember which."""
        super().__init__(number.name)
        self.number = number

    @property
    def exit_code(self) -> int:
        """What shells and schedulers report for it: 130 for SIGINT, 143 for SIGTERM."""
        return 128 + self.number


class SignalGuard:
    """Raises :class:`Interrupted` at the first SIGINT or SIGTERM; a second one ends the process at once.

    What is sealed survives any end; the first signal only gives the shards that are whole the time to be written.
    Signals reach the main thread only; elsewhere this changes nothing.
    """

    def __init__(self) -> None:
        self._received = False
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
        if self._received:
            os._exit(128 + number)
        self._received = True
        raise Interrupted(signal.Signals(number))
