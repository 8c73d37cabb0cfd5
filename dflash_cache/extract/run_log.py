"""What each run did, one JSON object a run: appended to the cache's log, and written where the user asks."""

import logging
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from dflash_cache import __version__
from dflash_cache.config import ExtractConfig
from dflash_cache.corpus.summary import CorpusSummary
from dflash_cache.errors import CacheDamagedError, CacheFormatError
from dflash_cache.extract.interrupt import Interrupted
from dflash_cache.extract.progress import BatchComputed, ExtractEvent, Notice, OnEvent, Phase, SelfCheckPassed
from dflash_cache.format.manifest import CacheManifest, read_manifest
from dflash_cache.format.writer import LOG_NAME
from dflash_cache.spec import FrozenModel

__all__ = ["RunRecord", "RunRecorder"]

logger = logging.getLogger(__name__)

ExitReason = Literal["complete", "nothing_to_do", "interrupted", "terminated", "failed"]


class SealedRecord(FrozenModel):
    """What is in the cache when the run ends."""

    complete: bool
    documents: int
    tokens: int
    shards: int
    stored_bytes: int
    raw_bytes: int
    quarantined: int


class RunRecord(FrozenModel):
    """One run of stage one.

    Attributes:
      program: Program and version.
      started: UTC, ISO 8601.
      seconds: Of the whole run.
      exit: How it ended.
      error: Its message; None when the run did what it was asked for.
      settings: As given, with defaults.
      corpus: What was kept and dropped; None when the run did not finish.
      sealed: What is in the cache; None when there is none.
      tokens_computed: Tokens through the target in this run, those of the self-check not counted.
      tokens_per_second: Of this run; None before its first batch.
      self_check_agreement: Share of compared positions with the target's own argmax; None when none was needed.
      notices: What the user was told.
    """

    program: str
    started: str
    seconds: float
    exit: ExitReason
    error: str | None
    settings: ExtractConfig
    corpus: CorpusSummary | None
    sealed: SealedRecord | None
    tokens_computed: int
    tokens_per_second: float | None
    self_check_agreement: float | None
    notices: tuple[str, ...]


class RunRecorder:
    """Listens to a run and records how it ended."""

    def __init__(self, config: ExtractConfig, on_event: OnEvent, summary: Path | None) -> None:
        """Begin.

        Args:
          config: The run's settings.
          on_event: Is told of every event in turn.
          summary: File for the record, replaced; None writes none.
        """
        self._config = config
        self._forward = on_event
        self._summary = summary
        self._started = datetime.now(UTC)
        self._began = time.monotonic()
        self._has_lock = False
        self._batch: BatchComputed | None = None
        self._agreement: float | None = None
        self._notices: list[str] = []

    def on_event(self, event: ExtractEvent) -> None:
        """Take note of an event and pass it on."""
        match event:
            case Phase("tokenize"):  # the first one under the lock
                self._has_lock = True
            case Notice(text):
                self._notices.append(text)
            case BatchComputed():
                self._batch = event
            case SelfCheckPassed():
                self._agreement = event.agreement
        self._forward(event)

    def finish(self, manifest: CacheManifest, corpus: CorpusSummary, *, nothing_to_do: bool) -> None:
        """Record a run that did what it was asked for."""
        self._write(self._record("nothing_to_do" if nothing_to_do else "complete", None, manifest, corpus))

    def fail(self, error: BaseException) -> None:
        """Record a run that ended otherwise."""
        reason: ExitReason = "failed"
        if isinstance(error, KeyboardInterrupt):
            reason = "terminated" if isinstance(error, Interrupted) and error.exit_code == 143 else "interrupted"
        message = f"{type(error).__name__}: {error}"
        self._write(self._record(reason, message, self._manifest_on_disk(), None))

    def _manifest_on_disk(self) -> CacheManifest | None:
        try:
            return read_manifest(self._config.out) if self._has_lock else None
        except (CacheFormatError, CacheDamagedError):  # the error that ended the run, or there is none yet
            return None

    def _record(
        self, reason: ExitReason, error: str | None, manifest: CacheManifest | None, corpus: CorpusSummary | None
    ) -> RunRecord:
        batch = self._batch
        return RunRecord(
            program=f"dflash-cache {__version__}",
            started=self._started.isoformat(timespec="seconds"),
            seconds=round(time.monotonic() - self._began, 3),
            exit=reason,
            error=error,
            settings=self._config,
            corpus=corpus,
            sealed=None if manifest is None else _sealed(manifest),
            tokens_computed=batch.tokens_computed if batch else 0,
            tokens_per_second=round(batch.tokens_per_second, 1) if batch else None,
            self_check_agreement=self._agreement,
            notices=tuple(self._notices),
        )

    def _write(self, record: RunRecord) -> None:
        if self._has_lock:
            _append(self._config.out / LOG_NAME, record)
        if self._summary is not None:
            text = record.model_dump_json(indent=1) + "\n"
            try:
                self._summary.write_text(text, encoding="utf-8")
            except OSError as error:
                self._forward(Notice(f"the summary could not be written to {self._summary}: {error.strerror}"))


def _append(path: Path, record: RunRecord) -> None:
    """Add a line. A log that cannot be written must not hide how the run ended."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(record.model_dump_json() + "\n")
    except OSError as error:
        logger.warning("%s could not be written: %s", path, error)


def _sealed(manifest: CacheManifest) -> SealedRecord:
    return SealedRecord(
        complete=manifest.complete,
        documents=manifest.num_documents,
        tokens=manifest.num_tokens,
        shards=len(manifest.shards),
        stored_bytes=sum(shard.stored_bytes for shard in manifest.shards),
        raw_bytes=manifest.num_tokens * manifest.identity.features.bytes_per_token,
        quarantined=len(manifest.quarantined),
    )
