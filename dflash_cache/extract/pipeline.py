"""The main loop: windows to batches to rows to shards.

While the target runs a batch, the rows of the one before are brought to the host and put into their shards, and a
background thread compresses and writes the shards of the window before. Everything that decides a byte on disk is
decided by the plan; threads only decide when it is written.
"""

import time
from dataclasses import dataclass

import numpy as np

from dflash_cache.corpus.store import TokenizedCorpus
from dflash_cache.errors import NonFiniteError, SelfCheckError
from dflash_cache.extract.assembly import WindowAssembler
from dflash_cache.extract.features import FeatureExtractor, plane_layers, plane_name
from dflash_cache.extract.head import FoundHead
from dflash_cache.extract.loading import LoadedTarget
from dflash_cache.extract.plan import ExtractionPlan, IntArray, ShardPlan, WindowPlan, pending_batches
from dflash_cache.extract.progress import BatchComputed, OnEvent, SelfCheckPassed, ShardSealed
from dflash_cache.extract.sealer import ShardSealer
from dflash_cache.extract.selfcheck import SelfCheckReport, run_self_check
from dflash_cache.extract.transfer import HostRows, PendingRows, RowTransfer
from dflash_cache.format.manifest import ShardEntry
from dflash_cache.format.shard import ShardData, ShardReader
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
      NonFiniteError: If the target gives NaN or infinity; names document and layer.
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
        self._num_sealed_before = manifest.num_documents
        self._done_documents = self._sealed_documents = manifest.num_documents
        self._done_tokens = manifest.num_tokens
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
            for window in windows:
                # Memory: this window is filled while at most the shards of the one before wait to be written.
                self._report_sealed(sealer.sealed(at_most_pending=lag))
                self._run_window(window, extractor, transfer, sealer)
                lag = len(window.shards)
            self._report_sealed(sealer.sealed(at_most_pending=0))
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
        self._check_rows(arrived, batch, lengths)
        start = 0
        for document, length in zip(batch.tolist(), lengths.tolist(), strict=True):
            if assembler.wants(document):
                assembler.place(document, arrived.rows[start : start + length])
                self._done_documents += 1
                self._done_tokens += length
            start += length
        self._batches += 1
        self._computed_tokens += start
        for plan, data in assembler.take_ready():
            self._hand_over(plan, data, sealer)
        self._report_sealed(sealer.sealed())
        self._report_progress()

    def _check_rows(self, arrived: HostRows, batch: IntArray, lengths: IntArray) -> None:
        """Refuse NaN, infinity and rows of zeros, naming the document and the layer."""
        for good, error, what in (
            (arrived.finite, NonFiniteError, "NaN or infinity"),
            (arrived.nonzero, SelfCheckError, "only zeros"),
        ):
            if good.all():
                continue
            row, plane = (int(places[0]) for places in np.nonzero(~good))
            ends = np.cumsum(lengths)
            place = int(np.searchsorted(ends, row, side="right"))
            token = row - int(ends[place] - lengths[place])
            doc_id = int(self._job.corpus.doc_ids[batch[place]])
            raise error(
                f"document {doc_id} of the corpus, token {token}: the {plane_name(self._job.features, plane)} hold "
                f"{what} as bfloat16. Nothing of it was sealed; run the target in --dtype float32 to see whether its "
                "number format is to blame, or leave this document out"
            )

    def _hand_over(self, plan: ShardPlan, data: ShardData, sealer: ShardSealer) -> None:
        """Pass a whole shard to the background, after the self-check if it is this run's first."""
        if self._self_check is not None:
            sealer.stage_and_seal(plan, data)
            return
        job = self._job
        began = time.monotonic()
        staged = sealer.stage(plan, data)
        reader = job.writer.open_staged(staged)
        try:
            self._check_tokens(plan, reader)
            report = run_self_check(job.target, job.found, job.features, reader, job.self_check_documents)
        finally:
            reader.close()
        self._self_check = report
        self._self_check_seconds = time.monotonic() - began
        self._on_event(SelfCheckPassed(len(report.doc_ids), report.worst.error, report.agreement))
        sealer.seal(staged)

    def _check_tokens(self, plan: ShardPlan, reader: ShardReader) -> None:
        expected = np.concatenate(
            [self._job.corpus.document(i).input_ids for i in range(plan.first_document, plan.end_document)]
        )
        if not np.array_equal(reader.arrays["input_ids"].read(0, plan.num_tokens), expected):
            raise SelfCheckError(f"the token ids stored in shard {plan.number} are not those of the corpus")

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
                bytes_written=self._bytes_written,
                tokens_per_second=rate,
                megabytes_per_second=rate * job.features.bytes_per_token / 1e6,
                seconds_left=missing / rate if rate > 0 else None,
            )
        )
