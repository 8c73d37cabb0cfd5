"""Tokenise each document once, and mark the tokens that the drafter learns from.

Plain text: all tokens but the first, with the tokenizer's own special tokens. A chat: the tokens whose characters all
lie in a supervised span, and no special tokens beyond those that the template wrote. A token that straddles the start
or the end of a span is not supervised: from the prompt alone the target could not have generated it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from dflash_cache.corpus.chat import ChatRefusedError, ChatRenderer, RenderedChat
from dflash_cache.corpus.fit import MIN_TOKENS, Dropped, Encoded, Kept, Split, fit_document
from dflash_cache.corpus.reader import DocumentReader, Selection
from dflash_cache.corpus.records import RawDocument
from dflash_cache.corpus.store import TokenizedCorpus, TokenizedDocument, TokenStoreWriter
from dflash_cache.corpus.summary import SummaryBuilder
from dflash_cache.errors import ConfigError, CorpusError, TargetError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dflash_cache.config import CorpusConfig, LongDocuments, TemplateValue

__all__ = [
    "CorpusProgress",
    "DocumentTokenizer",
    "Dropped",
    "Kept",
    "Split",
    "TokenizedDocument",
    "tokenize_corpus",
    "tokenize_document",
]

_BATCH_DOCUMENTS = 512
_BATCH_CHARACTERS = 4 * 2**20
_PROBE = "One probe, 1 + 1 = 2:\n\tdéjà vu"


@dataclass(frozen=True, slots=True)
class CorpusProgress:
    """How far tokenising is.

    Attributes:
      documents: Documents read so far.
      tokens: Tokens kept so far.
      bytes_read: Bytes of the files read so far, as they lie on disk.
      total_bytes: Bytes of all files.
    """

    documents: int
    tokens: int
    bytes_read: int
    total_bytes: int


class DocumentTokenizer:
    """Turns raw documents into tokens and loss masks, several at once for speed; the batching changes no result."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        max_length: int,
        template_kwargs: "Mapping[str, TemplateValue]",
        long: "LongDocuments" = "truncate",
    ) -> None:
        """Take the target's tokenizer; it is not changed.

        Args:
          tokenizer: A fast tokenizer.
          max_length: Most tokens of a document, at least 2.
          template_kwargs: Arguments of the chat template.
          long: What happens to a longer document.

        Raises:
          TargetError: If the tokenizer is not a fast one.
          ConfigError: If max_length is below 2.
        """
        if not tokenizer.is_fast:
            raise TargetError(
                f"the tokenizer {type(tokenizer).__name__} has no fast (Rust) backend, which gives the character "
                f"offsets that the loss mask needs; convert it to a tokenizer.json first"
            )
        if max_length < MIN_TOKENS:
            raise ConfigError(f"the maximum length must be at least {MIN_TOKENS} tokens, got {max_length}")
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._template_kwargs = template_kwargs
        self._long = long

    def tokenize(self, documents: Sequence[RawDocument]) -> list[Kept | Split | Dropped]:
        """Tokenise some documents, in their order.

        Raises:
          CorpusError: If there are chats and the tokenizer has no usable chat template.
          ConfigError: If there are chats and a template argument is not one of the template's.
        """
        results: dict[int, Kept | Split | Dropped] = {}
        texts: list[tuple[int, str]] = []
        chats: list[tuple[int, RenderedChat]] = []
        for place, document in enumerate(documents):
            if document.text is not None:
                texts.append((place, document.text))
                continue
            try:
                chats.append((place, self._render(document)))
            except ChatRefusedError as refusal:
                results[place] = Dropped(document.index, document.source, refusal.reason, refusal.detail)
        encoded = [*self._encode_texts(texts), *self._encode_chats(chats)]
        for place, tokens in encoded:
            results[place] = fit_document(documents[place], tokens, self._max_length, self._long)
        return [results[place] for place in range(len(documents))]

    def _render(self, document: RawDocument) -> RenderedChat:
        if document.messages is None:
            raise ValueError(f"{document.source}: neither text nor messages")
        try:
            return self._renderer.render(document.messages)
        except ChatRefusedError:
            raise
        except CorpusError as error:
            raise CorpusError(f"{document.source}: {error}") from error

    @cached_property
    def _renderer(self) -> ChatRenderer:
        return ChatRenderer(self._tokenizer, self._template_kwargs)

    @cached_property
    def _text_encoder(self) -> Tokenizer:
        return _private_backend(self._tokenizer, for_chat=False)

    @cached_property
    def _chat_encoder(self) -> Tokenizer:
        return _private_backend(self._tokenizer, for_chat=True)

    def _encode_texts(self, texts: list[tuple[int, str]]) -> Iterator[tuple[int, Encoded]]:
        if not texts:
            return
        bos = self._tokenizer.bos_token
        encodings = self._text_encoder.encode_batch_fast([text for _, text in texts], add_special_tokens=True)
        for (place, text), encoding in zip(texts, encodings, strict=True):
            ids = np.asarray(encoding.ids, dtype=np.int32)
            # A text that spells out the bos token would get a second one from the tokenizer.
            if bos and text.startswith(bos) and len(ids) > 1 and ids[0] == ids[1] == self._tokenizer.bos_token_id:
                ids = ids[1:]
            mask = np.ones(len(ids), dtype=np.bool_)
            mask[:1] = False
            yield place, Encoded(ids, mask, is_chat=False)

    def _encode_chats(self, chats: list[tuple[int, RenderedChat]]) -> Iterator[tuple[int, Encoded]]:
        if not chats:
            return
        encodings = self._chat_encoder.encode_batch([chat.text for _, chat in chats], add_special_tokens=False)
        for (place, chat), encoding in zip(chats, encodings, strict=True):
            offsets = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            mask = tokens_inside(offsets, chat.supervised)
            yield place, Encoded(np.asarray(encoding.ids, dtype=np.int32), mask, is_chat=True)


def tokenize_document(
    document: RawDocument,
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
    template_kwargs: "Mapping[str, TemplateValue]",
    long: "LongDocuments" = "truncate",
) -> Kept | Split | Dropped:
    """Tokenise one document; see :class:`DocumentTokenizer`, which is faster for many.

    Raises:
      CorpusError, ConfigError, TargetError: As there.
    """
    return DocumentTokenizer(tokenizer, max_length, template_kwargs, long).tokenize([document])[0]


def tokenize_corpus(
    config: "CorpusConfig",
    tokenizer: "PreTrainedTokenizerBase",
    out_dir: Path,
    on_progress: Callable[[CorpusProgress], None] | None = None,
) -> TokenizedCorpus:
    """Tokenise the files of a corpus into a store on disk.

    Documents stream through; memory does not depend on the corpus' size, but for 16 bytes a kept document.

    Args:
      config: Files, which of their documents, maximum length, template arguments.
      tokenizer: The target's tokenizer, a fast one.
      out_dir: Folder of the store; an earlier store in it is replaced.
      on_progress: Called after every few hundred documents.

    Returns:
      The store, opened.

    Raises:
      CorpusError: If a file or a line cannot be read, the corpus is empty, or no document is left.
      ConfigError: If a template argument is not one of the template's.
      TargetError: If the tokenizer is not a fast one.
      DiskSpaceError: If the disk is full.
    """
    selection = Selection(limit=config.limit, sample=config.sample, seed=config.shuffle_seed or 0)
    reader = DocumentReader(config.files, selection)
    document_tokenizer = DocumentTokenizer(tokenizer, config.max_length, config.template_kwargs, config.long)
    counts = SummaryBuilder()
    with TokenStoreWriter(out_dir) as writer:
        for batch in _batches(reader):
            for raw, result in zip(batch, document_tokenizer.tokenize(batch), strict=True):
                _count(result, raw, counts, writer)
            if on_progress is not None:
                on_progress(CorpusProgress(counts.documents_read, counts.tokens, reader.bytes_read, reader.total_bytes))
        summary = counts.build()
        names = ", ".join(str(path) for path in config.files)
        if not summary.documents_read:
            raise CorpusError(f"{names}: no documents, only blank lines or nothing; expected one JSON object a line")
        if not summary.documents_kept:
            raise CorpusError(
                f"{names}: none of the {summary.documents_read} documents can be used:\n{summary.describe_drops()}"
            )
        return writer.seal(summary)


def tokens_inside(offsets: npt.NDArray[np.int64], spans: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    """Find the tokens whose characters all lie in one span.

    Args:
      offsets: Character range [start, stop) of each token, int64 [n, 2].
      spans: Character ranges [start, stop), ascending and disjoint.

    Returns:
      Bool [n]; a token that straddles a span's start or end is False.
    """
    if not spans:
        return np.zeros(len(offsets), dtype=np.bool_)
    bounds = np.asarray(spans, dtype=np.int64)
    span = np.searchsorted(bounds[:, 0], offsets[:, 0], side="right") - 1
    inside: npt.NDArray[np.bool_] = (span >= 0) & (offsets[:, 1] <= bounds[span, 1]) & (offsets[:, 0] < bounds[span, 1])
    return inside


def _count(result: Kept | Split | Dropped, raw: RawDocument, counts: SummaryBuilder, writer: TokenStoreWriter) -> None:
    if isinstance(result, Dropped):
        counts.drop(result.reason, raw.source, result.detail)
        return
    if isinstance(result, Split):
        counts.keep_parts(
            [(len(part.input_ids), int(part.loss_mask.sum())) for part in result.parts],
            chat=raw.messages is not None,
            left_out=(result.parts_left_out, result.tokens_left_out),
        )
        for part in result.parts:
            writer.append(part)
        return
    document = result.document
    counts.keep(
        len(document.input_ids),
        int(document.loss_mask.sum()),
        chat=raw.messages is not None,
        truncated=result.tokens_cut > 0,
    )
    writer.append(document)


def _batches(documents: Iterable[RawDocument]) -> Iterator[list[RawDocument]]:
    batch: list[RawDocument] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text or "") + sum(len(message.content) for message in document.messages or ())
        if len(batch) >= _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _private_backend(tokenizer: "PreTrainedTokenizerBase", *, for_chat: bool) -> Tokenizer:
    """Copy the Rust tokenizer without truncation and padding, which a saved tokenizer may carry.

    For chats the post-processor goes too: without special tokens to add, all it could do is to trim whitespace off the
    offsets, and then a token that begins with the prompt's last space would seem to lie in the answer.

    Raises:
      TargetError: If the tokenizer's own call gives other ids than its backend.
    """
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    if for_chat:
        backend.post_processor = None
    special = not for_chat
    own = list(tokenizer(_PROBE, add_special_tokens=special)["input_ids"])
    got = backend.encode(_PROBE, add_special_tokens=special).ids
    if own != got:
        raise TargetError(
            f"the tokenizer {type(tokenizer).__name__} gives {own} for {_PROBE!r} when called, but its backend gives "
            f"{got}; it changes text in Python, which is not supported"
        )
    return backend
