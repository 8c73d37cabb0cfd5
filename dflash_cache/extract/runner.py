"""Stage one from settings to a finished cache."""

import errno
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from dflash_cache.config import ExtractConfig
from dflash_cache.corpus.store import TokenizedCorpus
from dflash_cache.corpus.summary import CorpusSummary
from dflash_cache.corpus.tokenize import CorpusProgress, tokenize_corpus
from dflash_cache.errors import CacheDamagedError, CacheFormatError
from dflash_cache.extract.disk import check_disk_space, estimate_size
from dflash_cache.extract.head import FoundHead, find_head
from dflash_cache.extract.inputs import check_window, corpus_spec, feature_spec, open_weights, pad_id, run_settings
from dflash_cache.extract.mask_token import MaskTokenProposal, propose_mask_token
from dflash_cache.extract.pipeline import ExtractionJob, ExtractionResult, run_extraction
from dflash_cache.extract.plan import plan_extraction
from dflash_cache.extract.progress import CorpusRead, ExtractEvent, Notice, OnEvent, Phase
from dflash_cache.extract.run_log import RunRecorder
from dflash_cache.extract.selfcheck import SelfCheckReport
from dflash_cache.extract.target import TargetFiles, open_target
from dflash_cache.format.manifest import (
    MANIFEST_NAME,
    AttachedName,
    CacheIdentity,
    CacheManifest,
    CorpusSpec,
    ExtractSettings,
    file_digest,
    read_manifest,
)
from dflash_cache.format.shard import ShardReader, explain_disk_full
from dflash_cache.format.writer import (
    CacheWriter,
    FolderLock,
    check_identity,
    delete_cache,
    lock_folder,
    prepare_folder,
)
from dflash_cache.spec import FeatureSpec, FinalNormSpec

__all__ = ["ExtractReport", "extract"]

logger = logging.getLogger(__name__)

_TOKENIZER_NAME: AttachedName = "tokenizer.json"
_HEAD_NAME: AttachedName = "target_head.safetensors"


@dataclass(frozen=True)
class ExtractReport:
    """What a run of stage one made.

    Attributes:
      folder: The cache.
      manifest: Its manifest, complete.
      corpus: What was kept and dropped.
      stored_bytes: Of all shards' data files.
      raw_bytes: Of their hidden states, uncompressed.
      documents_before, tokens_before: Sealed by earlier runs.
      batches: Forward passes of this run; 0 when there was nothing to do.
      tokens_computed: Tokens that went through the target in this run.
      seconds: Of the whole run.
      compute_seconds: From the first batch to the last sealed shard.
      self_check: What it found; None when there was nothing to do.
      notices: What the user should know.
    """

    folder: Path
    manifest: CacheManifest
    corpus: CorpusSummary
    stored_bytes: int
    raw_bytes: int
    documents_before: int
    tokens_before: int
    batches: int
    tokens_computed: int
    seconds: float
    compute_seconds: float
    self_check: SelfCheckReport | None
    notices: tuple[str, ...]

    @property
    def nothing_to_do(self) -> bool:
        """Whether the cache was complete already."""
        return self.batches == 0


def _ignore(event: ExtractEvent) -> None:
    """Report to nobody."""


def extract(config: ExtractConfig, on_event: OnEvent = _ignore, summary: Path | None = None) -> ExtractReport:
    """Make a cache, or continue an unfinished one.

    An interruption (Ctrl-C, kill, full disk) leaves every sealed shard as it is; the same call continues. However the
    run ends, unless by a kill, a record of it is appended to the cache's log.

    Args:
      config: The settings.
      on_event: Told of progress, in this thread.
      summary: File for the same record; None writes none.

    Raises:
      DflashCacheError: The child that names what is wrong; see each module.
      KeyboardInterrupt: After Ctrl-C, once the shards that are whole are sealed.
    """
    recorder = RunRecorder(config, on_event, summary)
    try:
        report = _Run(config, recorder.on_event).run()
    except BaseException as error:
        recorder.fail(error)
        raise
    recorder.finish(report.manifest, report.corpus, nothing_to_do=report.nothing_to_do)
    return report


@dataclass(frozen=True)
class _Inputs:
    """All that is known before the weights are loaded."""

    files: TargetFiles
    features: FeatureSpec
    corpus: TokenizedCorpus
    corpus_spec: CorpusSpec
    settings: ExtractSettings
    mask_token: MaskTokenProposal

    def identity(self, final_norm: FinalNormSpec, *, tied: bool) -> CacheIdentity:
        return CacheIdentity(
            target=self.files.spec(self.mask_token, final_norm, tied=tied),
            features=self.features,
            corpus=self.corpus_spec,
            settings=self.settings,
        )


class _Run:
    """One call of :func:`extract`."""

    def __init__(self, config: ExtractConfig, on_event: OnEvent) -> None:
        self._config = config
        self._on_event = on_event
        self._notices: list[str] = []
        self._began = time.monotonic()

    def run(self) -> ExtractReport:
        config = self._config
        exists = prepare_folder(config.out, overwrite=False)
        self._on_event(Phase("open_target"))
        files = open_target(config, self._notice)
        features = feature_spec(config, files)
        with lock_folder(config.out) as lock:
            stored = read_manifest(config.out) if exists and not config.overwrite else None
            inputs = self._read_corpus(files, features, lock)
            if stored is not None:
                _check_continues(config.out, stored, inputs)
                if stored.complete:
                    self._notice(f"{config.out} is complete already; nothing to do")
                    return self._report(stored, inputs, stored, None)
            self._check_space(inputs, stored, exists)
            self._on_event(Phase("load_weights"))
            found, job = self._open_job(inputs, lock, replace=exists and config.overwrite)
            with job.writer as writer:
                before = writer.manifest
                _attach(writer, inputs.files, found)
                self._on_event(Phase("extract"))
                result = self._extract(job)
                self._on_event(Phase("finish"))
                writer.finish()
                return self._report(before, inputs, writer.manifest, result)

    def _read_corpus(self, files: TargetFiles, features: FeatureSpec, lock: FolderLock) -> _Inputs:
        config = self._config
        self._on_event(Phase("tokenize"))
        corpus = tokenize_corpus(config.corpus, files.tokenizer, lock.scratch_folder("tokens"), self._on_corpus)
        check_window(config, files, corpus)
        mask_token = propose_mask_token(
            files.tokenizer,
            model_type=files.model_type,
            tokenizer_vocab_size=files.tokenizer_vocab_size,
            eos_token_ids=files.eos_token_ids,
            counts=corpus.token_counts(files.vocab_size),
        )
        if mask_token.uses:
            self._notice(f"the mask token {mask_token.token_id} occurs {mask_token.uses} times in the corpus itself")
        return _Inputs(
            files=files,
            features=features,
            corpus=corpus,
            corpus_spec=corpus_spec(config, files, corpus, mask_token),
            settings=run_settings(config, files, features),
            mask_token=mask_token,
        )

    def _check_space(self, inputs: _Inputs, stored: CacheManifest | None, exists: bool) -> None:
        files, corpus = inputs.files, inputs.corpus
        missing = int(corpus.lengths[stored.end_document if stored else 0 :].sum())
        head_is_there = stored is not None and _HEAD_NAME in stored.attached
        estimate = estimate_size(
            missing,
            inputs.features,
            inputs.settings.codec,
            vocab_size=0 if head_is_there else files.vocab_size,
            bytes_per_weight=files.compute_dtype.itemsize,
        )
        freed = _cache_bytes(self._config.out) if exists and self._config.overwrite else 0
        check_disk_space(self._config.out, estimate, freed_bytes=freed)

    def _open_job(self, inputs: _Inputs, lock: FolderLock, *, replace: bool) -> tuple[FoundHead, ExtractionJob]:
        config = self._config
        target = open_weights(config, inputs.files, self._notice)
        found = find_head(target)
        spec = found.head.spec
        if replace:
            delete_cache(config.out)
        # A cache that was begun with other weights under the same names is noticed here at the latest.
        writer = CacheWriter(config.out, inputs.identity(spec.final_norm, tied=spec.tied), lock=lock)
        settings = inputs.settings
        job = ExtractionJob(
            target=target,
            found=found,
            features=inputs.features,
            corpus=inputs.corpus,
            plan=plan_extraction(inputs.corpus.lengths, settings.shard_tokens, settings.window_tokens),
            batch_tokens=settings.batch_tokens,
            pad_id=pad_id(inputs.files),
            self_check_documents=config.self_check_documents,
            on_bad=config.on_bad,
            writer=writer,
        )
        return found, job

    def _extract(self, job: ExtractionJob) -> ExtractionResult:
        try:
            return run_extraction(job, self._on_event)
        except KeyboardInterrupt:
            logger.warning(
                "interrupted: %d of %d documents are sealed in %s; run the same command again to continue",
                job.writer.manifest.num_documents,
                job.corpus.num_documents,
                job.writer.folder,
            )
            raise

    def _on_corpus(self, progress: CorpusProgress) -> None:
        self._on_event(CorpusRead(progress.documents, progress.tokens, progress.bytes_read, progress.total_bytes))

    def _notice(self, text: str) -> None:
        self._notices.append(text)
        self._on_event(Notice(text))

    def _report(
        self, before: CacheManifest, inputs: _Inputs, manifest: CacheManifest, result: ExtractionResult | None
    ) -> ExtractReport:
        return ExtractReport(
            folder=self._config.out,
            manifest=manifest,
            corpus=inputs.corpus.summary,
            stored_bytes=sum(shard.stored_bytes for shard in manifest.shards),
            raw_bytes=manifest.num_tokens * inputs.features.bytes_per_token,
            documents_before=before.num_documents,
            tokens_before=before.num_tokens,
            batches=result.batches if result else 0,
            tokens_computed=result.tokens if result else 0,
            seconds=time.monotonic() - self._began,
            compute_seconds=result.seconds if result else 0.0,
            self_check=result.self_check if result else None,
            notices=tuple(self._notices),
        )


def _check_continues(folder: Path, stored: CacheManifest, inputs: _Inputs) -> None:
    """Compare an existing cache with what is asked for, before weights are loaded, and look at each shard's files.

    Final norm and tying are read off the weights, whose digest is compared: they are taken from the cache here.
    """
    target = stored.identity.target
    check_identity(folder, stored.identity, inputs.identity(target.final_norm, tied=target.tied_embeddings))
    for number in range(len(stored.shards)):
        ShardReader(folder, stored, number).close()


def _attach(writer: CacheWriter, files: TargetFiles, found: FoundHead) -> None:
    """Put the target's head and tokenizer into the cache, unless they are there, whole."""
    staging = writer.staging_folder()
    for name in (_HEAD_NAME, _TOKENIZER_NAME):
        listed = writer.manifest.attached.get(name)
        path = writer.folder / name
        if listed is not None and path.is_file() and file_digest(path) == listed:
            continue
        made = staging / name
        with explain_disk_full(made):
            _write_attachment(made, name, files, found)
        if listed is not None and file_digest(made) != listed:
            raise CacheDamagedError(
                f"{path}: damaged, and what this target gives is not what was sealed; restore it from a copy, or start "
                "over with --overwrite"
            )
        writer.attach(name, made)


def _write_attachment(path: Path, name: AttachedName, files: TargetFiles, found: FoundHead) -> None:
    if name == _TOKENIZER_NAME:
        path.write_text(files.tokenizer.backend_tokenizer.to_str(pretty=True), encoding="utf-8")
        return
    try:
        found.head.save(path)
    except SafetensorError as error:  # hides the system's error number in its text
        if any(f"{word} {errno.ENOSPC}" in str(error) for word in ("code:", "os error")):  # by its version
            raise OSError(errno.ENOSPC, str(error)) from error
        raise


def _cache_bytes(folder: Path) -> int:
    """Bytes that deleting a cache frees; 0 for what cannot be read as one."""
    try:
        manifest = read_manifest(folder)
    except (CacheFormatError, CacheDamagedError) as error:
        logger.warning("what lies in %s is deleted unread: %s", folder / MANIFEST_NAME, error)
        return 0
    return sum(shard.stored_bytes for shard in manifest.shards) + sum(file.bytes for file in manifest.attached.values())
