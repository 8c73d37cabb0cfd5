"""The main loop: windows to batches to rows to shards.

While the target runs a batch, the rows of the one before are brought to the host and put into their shards, and a
background thread compresses and writes the shards of the window before. Everything that decides a byte on disk is
decided by the plan; threads only decide when it is written.
"""

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflash_cache.config import OnBad
from dflash_cache.corpus.store import TokenizedCorpus
from dflash_cache.errors import NonFiniteError, SelfCheckError
from dflash_cache.extract.assembly import ReadyShard, WindowAssembler
from dflash_cache.extract.features import FeatureExtractor, plane_layers, plane_name
from dflash_cache.extract.head import FoundHead
from dflash_cache.extract.loading import LoadedTarget
from dflash_cache.extract.plan import ExtractionPlan, IntArray, WindowPlan, pending_batches
from dflash_cache.extract.progress import (
    BatchComputed,
    DocumentQuarantined,
    Notice,
    OnEvent,
    SelfCheckPassed,
    ShardSealed,
)
from dflash_cache.extract.sealer import ShardSealer
from dflash_cache.extract.selfcheck import SelfCheckReport, run_self_check
from dflash_cache.extract.transfer import PendingRows, RowTransfer
from dflash_cache.format.manifest import QuarantinedDocument, ShardEntry
from dflash_cache.format.shard import ShardReader
from dflash_cache.format.writer import CacheWriter
from dflash_cache.spec import FeatureSpec

__all__ = ["ExtractionJob", "ExtractionResult", "run_extraction"]


@dataclass(frozen=True)
class ExtractionJob:
    """What is to be extracted, by what, to where.

    Attributes:
      target, found: The target and its head.
      features: What is captured.
      corpus: The tokenised corpus.
      plan: How it is cut up.
      batch_tokens: Most padded tokens of a batch.
      pad_id: What stands on padding.
      self_check_documents: How many documents are recomputed before the first shard is sealed.
      writer: The cache.
      on_bad: Whether a document whose states cannot be stored stops the run or is quarantined.
    """

    target: LoadedTarget
    found: FoundHead
    features: FeatureSpec
    corpus: TokenizedCorpus
    plan: ExtractionPlan
    batch_tokens: int
    pad_id: int
    self_check_documents: int
    writer: CacheWriter
    on_bad: OnBad = "stop"


@dataclass(frozen=True)
class ExtractionResult:
    """What a run did.

    Attributes:
      batches: Forward passes, those of the self-check not counted.
      tokens: Real tokens computed.
      seconds: From the first batch to the last sealed shard.
      self_check: What it found; None when there was nothing to do.
      self_check_seconds: How long it took, of ``seconds``; the same for a corpus of any size.
    """

    batches: int
    tokens: int
    seconds: float
    self_check: SelfCheckReport | None
    self_check_seconds: float


def run_extraction(job: ExtractionJob, on_event: OnEvent) -> ExtractionResult:
    """Compute and seal every shard that is missing.

    Raises:
      NonFiniteError: If the target gives NaN or infinity; names document and layer. Also if no document is good.
      SelfCheckError: If what was stored does not agree with the target.
      DiskSpaceError: If the disk is full; what is sealed is intact.
      ConfigError: If a batch does not fit into the GPU's memory.
    """
    return _Extraction(job, on_event).run()


class _Extraction:
    """One run; holds the counters."""

    def __init__(self, job: ExtractionJob, on_event: OnEvent) -> None:
        self._job = job
        self._on_event = on_event
        manifest = job.writer.manifest
        self._num_sealed_before = manifest.end_document
        self._next_number = len(manifest.shards)
        self._sealed_documents = manifest.num_documents
        self._done_documents = manifest.end_document
        self._done_tokens = int(job.corpus.lengths[: manifest.end_document].sum())
        self._bytes_written = sum(shard.stored_bytes for shard in manifest.shards)
        self._batches = self._computed_tokens = 0
        self._began = time.monotonic()
        self._self_check: SelfCheckReport | None = None
        self._self_check_seconds = 0.0

    def run(self) -> ExtractionResult:
        job = self._job
        windows = [window for window in job.plan.windows if window.end_document > self._num_sealed_before]
        max_rows = max(job.batch_tokens, int(job.corpus.lengths.max()))
        row_shape = (len(plane_layers(job.features)), job.features.hidden_size)
        transfer = RowTransfer(job.target.device, max_rows, row_shape)
        lag = 0
        with FeatureExtractor(job.target, job.features, job.pad_id) as extractor, ShardSealer(job.writer) as sealer:
            try:
                for window in windows:
                    # Memory: this window is filled while at most the shards of the one before wait to be written.
                    self._report_sealed(sealer.sealed(at_most_pending=lag))
                    self._run_window(window, extractor, transfer, sealer)
                    lag = len(window.shards)
                self._report_sealed(sealer.sealed(at_most_pending=0))
            except KeyboardInterrupt:
                self._on_event(Notice("stopping: the shards that are whole are sealed; a second signal ends at once"))
                raise
        if not job.writer.manifest.shards:
            raise NonFiniteError(
                f"none of the {job.corpus.num_documents} documents is left: {job.target.name} gives NaN, infinity or "
                "zeros for each of them; run it in --dtype float32, or fetch its weights again"
            )
        return ExtractionResult(
            batches=self._batches,
            tokens=self._computed_tokens,
            seconds=time.monotonic() - self._began,
            self_check=self._self_check,
            self_check_seconds=self._self_check_seconds,
        )

    def _run_window(
        self, window: WindowPlan, extractor: FeatureExtractor, transfer: RowTransfer, sealer: ShardSealer
    ) -> None:
        corpus = self._job.corpus
        assembler = WindowAssembler(window, corpus, self._job.features, self._num_sealed_before)
        previous: tuple[IntArray, PendingRows] | None = None
        for batch in pending_batches(window, corpus.lengths, self._job.batch_tokens, self._num_sealed_before):
            rows = extractor.run([corpus.document(int(document)).input_ids for document in batch])
            pending = transfer.submit(rows)
            if previous is not None:
                self._finish_batch(*previous, assembler, sealer)
            previous = (batch, pending)
        if previous is not None:
            self._finish_batch(*previous, assembler, sealer)

    def _finish_batch(
        self, batch: IntArray, pending: PendingRows, assembler: WindowAssembler, sealer: ShardSealer
    ) -> None:
        """Bring a batch's rows into their shards, and hand over the shards that are whole now."""
        arrived = pending.wait()
        lengths = self._job.corpus.lengths[batch]
        good = arrived.finite & arrived.nonzero
        start = 0
        for document, length in zip(batch.tolist(), lengths.tolist(), strict=True):
            rows = slice(start, start + length)
            start += length
            if not assembler.wants(document):
                continue
            if good[rows].all():
                assembler.place(document, arrived.rows[rows])
            else:
                assembler.quarantine(self._judge(document, arrived.finite[rows], good[rows]))
            self._done_documents += 1
            self._done_tokens += length
        self._batches += 1
        self._computed_tokens += start
        for shard in assembler.take_ready():
            self._hand_over(shard, sealer)
        self._report_sealed(sealer.sealed())
        self._report_progress()

    def _judge(self, document: int, finite: npt.NDArray[np.bool_], good: npt.NDArray[np.bool_]) -> QuarantinedDocument:
        """Name what is wrong with a document; refuse it unless the run goes on without.

        Args:
          document: Its ordinal.
          finite: [n, P] whether each row of it is finite.
          good: [n, P] whether each row is finite and not all zero.

        Raises:
          NonFiniteError, SelfCheckError: Naming document, token and layer.
        """
        job = self._job
        token, plane = (int(places[0]) for places in np.nonzero(~good))
        is_zero = bool(finite[token, plane])
        entry = QuarantinedDocument(
            document=document,
            doc_id=int(job.corpus.doc_ids[document]),
            token=token,
            layer=plane_layers(job.features)[plane],
            reason="all_zero" if is_zero else "not_finite",
        )
        what = (
            f"document {entry.doc_id} of the corpus, token {token}: the {plane_name(job.features, plane)} hold "
            f"{'only zeros' if is_zero else 'NaN or infinity'} as bfloat16"
        )
        if job.on_bad == "stop":
            raise (SelfCheckError if is_zero else NonFiniteError)(
                f"{what}. Nothing of it was sealed; run the target in --dtype float32 to see whether its number format "
                "is to blame, or go on without such documents with --on-bad skip"
            )
        self._on_event(DocumentQuarantined(entry.doc_id, f"{what}; it is left out"))
        return entry

    def _hand_over(self, shard: ReadyShard, sealer: ShardSealer) -> None:
        """Pass a whole shard to the background, after the self-check if it is this run's first."""
        if shard.data is None:
            sealer.quarantine(shard.quarantined)
            return
        number = self._next_number
        self._next_number += 1
        if self._self_check is not None:
            sealer.stage_and_seal(number, shard.first_document, shard.data, shard.quarantined)
            return
        job = self._job
        began = time.monotonic()
        staged = sealer.stage(number, shard.first_document, shard.data)
        reader = job.writer.open_staged(staged)
        try:
            self._check_tokens(shard, reader)
            report = run_self_check(job.target, job.found, job.features, reader, job.self_check_documents)
        finally:
            reader.close()
        self._self_check = report
        self._self_check_seconds = time.monotonic() - began
        self._on_event(SelfCheckPassed(len(report.doc_ids), report.worst.error, report.agreement))
        sealer.seal(staged, shard.quarantined)

    def _check_tokens(self, shard: ReadyShard, reader: ShardReader) -> None:
        left_out = {entry.document for entry in shard.quarantined}
        planned = range(shard.plan.first_document, shard.plan.end_document)
        expected = np.concatenate([self._job.corpus.document(i).input_ids for i in planned if i not in left_out])
        if not np.array_equal(reader.arrays["input_ids"].read(0, reader.entry.num_tokens), expected):
            raise SelfCheckError(f"the token ids stored in {reader.entry.name} are not those of the corpus")

    def _report_sealed(self, entries: list[ShardEntry]) -> None:
        for entry in entries:
            self._bytes_written += entry.stored_bytes
            self._sealed_documents += entry.num_documents
            self._on_event(
                ShardSealed(
                    name=entry.name,
                    documents=entry.num_documents,
                    tokens=entry.num_tokens,
                    stored_bytes=entry.stored_bytes,
                    sealed_documents=self._sealed_documents,
                    bytes_written=self._bytes_written,
                )
            )

    def _report_progress(self) -> None:
        job = self._job
        elapsed = max(time.monotonic() - self._began, 1e-6)
        rate = self._computed_tokens / elapsed
        missing = job.corpus.num_tokens - self._done_tokens
        self._on_event(
            BatchComputed(
                documents=self._done_documents,
                tokens=self._done_tokens,
                total_documents=job.corpus.num_documents,
                total_tokens=job.corpus.num_tokens,
                tokens_computed=self._computed_tokens,
                bytes_written=self._bytes_written,
                tokens_per_second=rate,
                megabytes_per_second=rate * job.features.bytes_per_token / 1e6,
                seconds_left=missing / rate if rate > 0 else None,
            )
        )
