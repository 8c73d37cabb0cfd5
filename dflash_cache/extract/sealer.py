"""Compress, write and seal shards in a background thread, one after another, while the target goes on."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from dflash_cache.format.manifest import QuarantinedDocument, ShardEntry
from dflash_cache.format.shard import ShardData
from dflash_cache.format.writer import CacheWriter, StagedShard

__all__ = ["ShardSealer"]


Quarantined = tuple[QuarantinedDocument, ...]


class ShardSealer:
    """The only user of a writer while it lives. A context manager.

    Whatever goes wrong in the background is raised by the next call that looks, and no later shard is begun.
    Leaving by Ctrl-C or SIGTERM writes the shards that wait too, since they are whole; leaving by any other exception
    finishes the shard in work and forgets those that wait.
    """

    def __init__(self, writer: CacheWriter) -> None:
        """Start the thread."""
        self._writer = writer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="seal")
        self._pending: deque[Future[ShardEntry | None]] = deque()
        self._failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asked_to_stop = kind is not None and issubclass(kind, KeyboardInterrupt)
        self._thread.shutdown(wait=True, cancel_futures=not asked_to_stop)

    def stage(self, number: int, first_document: int, data: ShardData) -> StagedShard:
        """Write a shard, and wait for it, so that it can be checked before it is sealed."""
        return self._thread.submit(self._writer.stage, number, first_document, data).result()

    def seal(self, staged: StagedShard, quarantined: Quarantined) -> None:
        """Seal a staged shard in the background."""
        self._pending.append(self._thread.submit(self._guard, lambda: self._seal(staged, quarantined)))

    def stage_and_seal(self, number: int, first_document: int, data: ShardData, quarantined: Quarantined) -> None:
        """Write and seal a shard in the background, after those handed over before."""

        def work() -> ShardEntry:
            return self._seal(self._writer.stage(number, first_document, data), quarantined)

        self._pending.append(self._thread.submit(self._guard, work))

    def quarantine(self, documents: Quarantined) -> None:
        """List documents that are in no shard, in the background, after the shards handed over before."""
        self._pending.append(self._thread.submit(self._guard, lambda: self._writer.quarantine(documents)))

    def sealed(self, *, at_most_pending: int | None = None) -> list[ShardEntry]:
        """Return the shards that were sealed since the last call.

        Args:
          at_most_pending: Wait until no more than so many are unfinished; None does not wait.

        Raises:
          DflashCacheError, OSError: What went wrong in the background.
        """
        entries = []
        while self._pending:
            must_wait = at_most_pending is not None and len(self._pending) > at_most_pending
            if not must_wait and not self._pending[0].done():
                break
            entry = self._pending.popleft().result()
            if entry is not None:
                entries.append(entry)
        return entries

    def _seal(self, staged: StagedShard, quarantined: Quarantined) -> ShardEntry:
        self._writer.seal(staged, quarantined)
        return staged.entry

    def _guard(self, work: Callable[[], ShardEntry | None]) -> ShardEntry | None:
        """Do nothing more after a failure: what follows must not be sealed before what failed."""
        if self._failed:
            raise RuntimeError("follows a shard that failed")  # never seen: the first failure is raised
        try:
            return work()
        except BaseException:
            self._failed = True
            raise
