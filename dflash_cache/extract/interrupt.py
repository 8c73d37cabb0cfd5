"""Ctrl-C and a scheduler's SIGTERM: stop, seal what is whole, and say which it was."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from dflash_cache.signals import handling_signals

__all__ = ["Interrupted", "raising_interrupts"]


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


@contextmanager
def raising_interrupts() -> Iterator[None]:
    """Raise :class:`Interrupted` at the first SIGINT or SIGTERM; a second one ends the process at once.

    What is sealed survives any end; the first signal only gives the shards that are whole the time to be written.
    """
    received = False

    def handle(number: signal.Signals) -> None:
        nonlocal received
        if received:
            os._exit(128 + number)
        received = True
        raise Interrupted(number)

    with handling_signals(handle):
        yield
