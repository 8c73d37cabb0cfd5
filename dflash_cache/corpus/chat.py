"""Render a chat with the target's own template, and find the characters that the assistant generates.

Two ways to the spans:

- A template with ``{% generation %}`` tags says itself what the assistant generates.
- Any other is rendered up to each assistant turn: the span of message i runs from ``render(messages[:i])`` with the
  generation prompt to ``render(messages[:i + 1])``. Each must be a prefix of the full chat; a template that renders
  earlier turns differently as the chat grows (dropping old reasoning, say) is refused, since no span of the full text
  would then be what the target generates.

In both, the token that ends the turn belongs to the span and the whitespace that the template writes after it does not.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import xxhash
from jinja2 import TemplateError, TemplateSyntaxError

from dflash_cache.corpus.records import Message
from dflash_cache.corpus.summary import DropReason
from dflash_cache.errors import ConfigError, CorpusError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dflash_cache.config import TemplateValue

__all__ = ["ChatRefusedError", "ChatRenderer", "RenderedChat", "render_chat", "template_digest"]

_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

# What a template's own code may raise. Templates are input: an error in one is the chat's or the template's fault.
_TEMPLATE_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class ChatRefusedError(CorpusError):
    """This chat cannot be rendered so that the assistant's part is known; others of the corpus may.

    Attributes:
      reason: Under which the document is counted.
      detail: What was found, in words.
    """

    def __init__(self, reason: DropReason, detail: str) -> None:
        super().__init__(f"{reason.explanation}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A chat as the target reads it.

    Attributes:
      text: The template's output.
      supervised: Character ranges [start, stop) of ``text`` that the assistant generates; ascending, disjoint, none
        empty.
    """

    text: str
    supervised: tuple[tuple[int, int], ...]


class ChatRenderer:
    """A tokenizer's chat template with its arguments, checked once."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", template_kwargs: "Mapping[str, TemplateValue]") -> None:
        """Take the tokenizer's template.

        Raises:
          CorpusError: If the tokenizer has no chat template.
          ConfigError: If an argument is not one of the template's.
        """
        template = _template_text(tokenizer)
        if template is None:
            raise CorpusError(
                f"the tokenizer {tokenizer.name_or_path or type(tokenizer).__name__!r} has no chat template, so "
                f"'messages' cannot be rendered; use a chat model's tokenizer, or a corpus of 'text'"
            )
        _check_template_kwargs(template_kwargs, template, tokenizer)
        self._tokenizer = tokenizer
        self._template = template
        self._kwargs: dict[str, Any] = dict(template_kwargs)
        self._has_generation_tags = _GENERATION_TAG.search(template) is not None
        self._special_tokens = _special_tokens(tokenizer)

    def render(self, messages: Sequence[Message]) -> RenderedChat:
        """Render a chat and find what the assistant generates in it.

        Args:
          messages: At least one.

        Returns:
          The text and the supervised spans; no span when no message is the assistant's.

        Raises:
          ChatRefusedError: If the template raises an error for this chat, or its earlier turns are not stable.
          CorpusError: If the template is broken for every chat.
        """
        text = self._render_text(messages, add_generation_prompt=False)
        spans = self._tagged_spans(messages, text) if self._has_generation_tags else self._prefix_spans(messages, text)
        return RenderedChat(text=text, supervised=tuple((start, stop) for start, stop in spans if start < stop))

    def _tagged_spans(self, messages: Sequence[Message], text: str) -> list[tuple[int, int]]:
        rendered, spans = self._render_tracked(messages)
        ordered = all(0 <= start <= stop for start, stop in spans) and all(
            left[1] <= right[0] for left, right in pairwise(spans)
        )
        if rendered != text or not ordered or (spans and spans[-1][1] > len(text)):
            raise ChatRefusedError(
                DropReason.TEMPLATE_REFUSED,
                f"its generation tags do not mark the rendered text (spans {spans} of {len(text)} characters)",
            )
        # One block a message tells whose trailing whitespace is the answer's own; other layouts do not.
        contents = [message.content for message in messages if message.role == "assistant"]
        if len(contents) != len(spans):
            contents = [""] * len(spans)
        return [
            (start, self._span_stop(text, start, self._include_eos(text, start, stop), content))
            for (start, stop), content in zip(spans, contents, strict=True)
        ]

    def _prefix_spans(self, messages: Sequence[Message], text: str) -> list[tuple[int, int]]:
        spans = []
        for i, message in enumerate(messages):
            if message.role != "assistant":
                continue
            if i == 0:
                raise ChatRefusedError(DropReason.ASSISTANT_SPEAKS_FIRST, "messages[0] is the assistant's")
            prompt = self._render_text(messages[:i], add_generation_prompt=True)
            is_last = i + 1 == len(messages)
            turn = text if is_last else self._render_text(messages[: i + 1], add_generation_prompt=False)
            _check_prefix(prompt, turn, f"the prompt of messages[{i}]")
            _check_prefix(turn, text, f"the chat up to messages[{i}]")
            spans.append((len(prompt), self._span_stop(text, len(prompt), len(turn), message.content)))
        return spans

    def _include_eos(self, text: str, start: int, stop: int) -> int:
        """Move a tagged span's end over an eos token that the template writes just after its tags."""
        eos = self._tokenizer.eos_token
        if not isinstance(eos, str) or text[start:stop].rstrip().endswith(self._special_tokens):
            return stop
        return stop + len(eos) if text.startswith(eos, stop) else stop

    def _span_stop(self, text: str, start: int, stop: int, content: str) -> int:
        """Cut the whitespace that the template adds after a turn, but none of the answer's own."""
        body = text[start:stop]
        stripped = body.rstrip()
        kept = start + len(stripped)
        if stripped.endswith(self._special_tokens):
            return kept
        answer = content.rstrip()
        if not stripped.endswith(answer):
            return kept
        return kept + _shared_prefix(body[len(stripped) :], content[len(answer) :])

    def _render_text(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        try:
            # tokenize=False returns text in every version; with tokenize=True newer ones return a dict.
            rendered = self._tokenizer.apply_chat_template(
                _as_dicts(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **self._kwargs
            )
        except TemplateSyntaxError as error:
            raise CorpusError(f"the tokenizer's chat template is broken at line {error.lineno}: {error}") from error
        except _TEMPLATE_ERRORS as error:
            raise ChatRefusedError(DropReason.TEMPLATE_REFUSED, f"{type(error).__name__}: {error}") from error
        return cast(str, rendered)

    def _render_tracked(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """Render with the generation tags followed, to character spans.

        apply_chat_template would give a token mask, and versions differ in which tokens that straddle a span it sets.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        arguments: dict[str, Any] = {**self._tokenizer.special_tokens_map, **self._kwargs}
        try:
            rendered, spans = cast(
                tuple[list[str], list[list[tuple[int, int]]]],
                render_jinja_template(
                    conversations=[_as_dicts(messages)],
                    chat_template=self._template,
                    return_assistant_tokens_mask=True,
                    **arguments,
                ),
            )
        except _TEMPLATE_ERRORS as error:
            raise ChatRefusedError(DropReason.TEMPLATE_REFUSED, f"{type(error).__name__}: {error}") from error
        return rendered[0], spans[0]


def render_chat(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    template_kwargs: "Mapping[str, TemplateValue]",
) -> RenderedChat:
    """Render one chat; see :class:`ChatRenderer`, which checks the template only once for many.

    Raises:
      CorpusError: If there is no template, or it does not go with this chat.
      ConfigError: If an argument is not one of the template's.
    """
    return ChatRenderer(tokenizer, template_kwargs).render(messages)


def template_digest(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """Digest the chat template that chats would be rendered with.

    Returns:
      xxh3_128 of its UTF-8 text in hexadecimal; None when the tokenizer has no template.

    Raises:
      CorpusError: If the tokenizer has several templates and none is the default.
    """
    template = _template_text(tokenizer)
    return None if template is None else xxhash.xxh3_128_hexdigest(template.encode("utf-8"))


def _template_text(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    if not tokenizer.chat_template:
        return None
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        raise CorpusError(f"the tokenizer's chat template cannot be chosen: {error}") from error


def _check_template_kwargs(
    template_kwargs: "Mapping[str, TemplateValue]", template: str, tokenizer: "PreTrainedTokenizerBase"
) -> None:
    reserved = set(inspect.signature(tokenizer.apply_chat_template).parameters) | {"conversations", "messages"}
    for name in template_kwargs:
        if name in reserved:
            raise ConfigError(f"the template argument {name!r} is set by the program; remove it")
        # A name that the template's text never mentions changes nothing: a typing error that would go unnoticed.
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise ConfigError(
                f"the chat template has no argument {name!r}, so it would change nothing; correct the name or remove it"
            )


def _special_tokens(tokenizer: "PreTrainedTokenizerBase") -> tuple[str, ...]:
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return tuple({*added, *(str(token) for token in tokenizer.all_special_tokens)} - {""})


def _as_dicts(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def _shared_prefix(left: str, right: str) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def _check_prefix(prefix: str, whole: str, name: str) -> None:
    if whole.startswith(prefix):
        return
    same = _shared_prefix(prefix, whole)
    raise ChatRefusedError(
        DropReason.UNSTABLE_TEMPLATE,
        f"{name} is no prefix of what follows; from character {same} on it is {prefix[same : same + 40]!r} at first "
        f"and {whole[same : same + 40]!r} later",
    )
