"""Compress, write and seal shards in a background thread, one after another, while the target goes on."""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from dflash_cache.extract.plan import ShardPlan
from dflash_cache.format.manifest import ShardEntry
from dflash_cache.format.shard import ShardData
from dflash_cache.format.writer import CacheWriter, StagedShard

__all__ = ["ShardSealer"]


class ShardSealer:
    """The only user of a writer while it lives. A context manager.

    Whatever goes wrong in the background is raised by the next call that looks, and no later shard is begun.
    Leaving by an exception (Ctrl-C too) finishes the shard in work and forgets those that wait.
    """

    def __init__(self, writer: CacheWriter) -> None:
        """Start the thread."""
        self._writer = writer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="seal")
        self._pending: deque[Future[ShardEntry]] = deque()
        self._failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def stage(self, plan: ShardPlan, data: ShardData) -> StagedShard:
        """Write a shard, and wait for it, so that it can be checked before it is sealed."""
        return self._thread.submit(self._writer.stage, plan.number, plan.first_document, data).result()

    def seal(self, staged: StagedShard) -> None:
        """Seal a staged shard in the background."""
        self._pending.append(self._thread.submit(self._seal, staged))

    def stage_and_seal(self, plan: ShardPlan, data: ShardData) -> None:
        """Write and seal a shard in the background, after those handed over before."""
        self._pending.append(self._thread.submit(self._stage_and_seal, plan, data))

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
            entries.append(self._pending.popleft().result())
        return entries

    def _stage_and_seal(self, plan: ShardPlan, data: ShardData) -> ShardEntry:
        if self._failed:
            raise RuntimeError(
                f"shard {plan.number} follows one that failed"
            )  # never seen: the first failure is raised
        try:
            staged = self._writer.stage(plan.number, plan.first_document, data)
        except BaseException:
            self._failed = True
            raise
        return self._seal(staged)

    def _seal(self, staged: StagedShard) -> ShardEntry:
        try:
            self._writer.seal(staged)
        except BaseException:
            self._failed = True
            raise
        return staged.entry
