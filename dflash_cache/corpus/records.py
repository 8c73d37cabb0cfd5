"""What one line of a corpus may hold: a JSON object with ``text`` or with ``messages``.

A new kind of record (prompt and completion, ShareGPT, token ids) is a new entry of ``_SCHEMAS``.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_cache.errors import CorpusError

__all__ = ["ROLES", "Message", "RawDocument", "Source", "parse_record"]

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that a message may have; whether a chat template takes them is the template's business."""

_MAX_SHOWN = 12
_MESSAGE_FIELDS = ("role", "content")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a document stands: the file, and the line in it (1-based, of the decompressed text)."""

    path: Path
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class RawDocument:
    """One document as read; exactly one of ``text`` and ``messages`` is set.

    Attributes:
      index: Number among all non-blank lines of all files, from 0: the document's identity in the cache.
      source: File and line.
      text: Plain text.
      messages: A chat of at least one message.
    """

    index: int
    source: Source
    text: str | None
    messages: tuple[Message, ...] | None


def parse_record(line: bytes, index: int, source: Source) -> RawDocument:
    """Read one non-blank line.

    Raises:
      CorpusError: If the line is not UTF-8, not a JSON object, or not of a known schema; names file and line.
    """
    record = _parse_object(line, source)
    present = [name for name in _SCHEMAS if record.get(name) is not None]
    if len(present) != 1:
        found = "both" if present else "neither"
        raise CorpusError(
            f"{source}: the object has {found} of 'text' and 'messages' (fields found: {_names(record)}); "
            f"expected one: 'text' (a string) or 'messages' (a list of objects with 'role' and 'content')"
        )
    return _SCHEMAS[present[0]](record, index, source)


def _parse_object(line: bytes, source: Source) -> dict[str, Any]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{source}: byte 0x{line[error.start]:02x} at offset {error.start} of the line is not UTF-8; "
            f"convert the file to UTF-8 first, for example with iconv"
        ) from error
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        hint = ""
        if source.line == 1 and text.lstrip().startswith("["):
            hint = "; a file that is one JSON array must be rewritten with one object a line"
        raise CorpusError(
            f"{source}: not valid JSON ({error}); got {_shorten(text)}, expected one complete JSON object a line{hint}"
        ) from error
    if not isinstance(record, dict):
        raise CorpusError(
            f"{source}: got {_kind(record)}, expected a JSON object with 'text' or 'messages', "
            f'such as {{"text": "..."}}'
        )
    return record


def _parse_text(record: dict[str, Any], index: int, source: Source) -> RawDocument:
    text = _checked_string(record["text"], "'text'", source)
    return RawDocument(index=index, source=source, text=text, messages=None)


def _parse_messages(record: dict[str, Any], index: int, source: Source) -> RawDocument:
    messages = record["messages"]
    if not isinstance(messages, list):
        raise CorpusError(f"{source}: 'messages' is {_kind(messages)}, expected a list of objects")
    if not messages:
        raise CorpusError(f"{source}: 'messages' is an empty list, expected at least one message")
    if record.get("tools"):
        raise CorpusError(
            f"{source}: 'tools' beside 'messages' is not supported, and leaving it out would change the prompt; "
            f"remove the document or its tools"
        )
    parsed = tuple(_parse_message(message, number, source) for number, message in enumerate(messages))
    return RawDocument(index=index, source=source, text=None, messages=parsed)


def _parse_message(message: Any, number: int, source: Source) -> Message:
    where = f"messages[{number}]"
    if not isinstance(message, dict):
        raise CorpusError(f"{source}: {where} is {_kind(message)}, expected an object with 'role' and 'content'")
    missing = [name for name in _MESSAGE_FIELDS if name not in message]
    if missing:
        raise CorpusError(
            f"{source}: {where} has no {_names(missing)} (fields found: {_names(message)}); "
            f"expected 'role' and 'content'"
        )
    # Fields such as tool_calls or reasoning_content change what a template renders: never drop them in silence.
    extra = [name for name, value in message.items() if name not in _MESSAGE_FIELDS and value not in (None, "", [], {})]
    if extra:
        raise CorpusError(
            f"{source}: {where} has fields that are not supported: {_names(extra)}; expected only 'role' and "
            f"'content', so remove the others, or the document"
        )
    role = message["role"]
    if role not in ROLES:
        shown = repr(role) if isinstance(role, str) else _kind(role)
        raise CorpusError(f"{source}: {where} has the role {shown}, expected one of {', '.join(ROLES)}")
    return Message(role=role, content=_checked_string(message["content"], f"{where} 'content'", source))


_SCHEMAS: dict[str, Callable[[dict[str, Any], int, Source], RawDocument]] = {
    "text": _parse_text,
    "messages": _parse_messages,
}


def _checked_string(value: Any, name: str, source: Source) -> str:
    if not isinstance(value, str):
        raise CorpusError(f"{source}: {name} is {_kind(value)}, expected a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CorpusError(
            f"{source}: {name} holds the lone surrogate \\u{ord(value[error.start]):04x} at character {error.start}, "
            f"which is no text; write the character as a pair, or remove it"
        ) from error
    return value


def _kind(value: Any) -> str:
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return "null" if value is None else kinds[type(value)]


def _names(fields: Any) -> str:
    names = [repr(_shorten(name, 40, quote=False)) for name in fields]
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return (", ".join(names[:_MAX_SHOWN]) or "none") + more


def _shorten(text: str, length: int = 60, *, quote: bool = True) -> str:
    text = text.strip()
    short = text if len(text) <= length else text[:length] + "..."
    return repr(short) if quote else short
