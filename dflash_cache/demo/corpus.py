"""The demo's text: functions and classes of the Python standard library, as every installation has them."""

import ast
import itertools
import json
import sysconfig
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dflash_cache.errors import ConfigError

__all__ = ["DemoCorpusSummary", "DemoPrompt", "demo_prompts", "write_demo_corpus"]

# Pure Python files that all supported versions have. The order is part of the corpus.
_CORPUS_FILES = (
    "asyncio/queues.py",
    "bisect.py",
    "calendar.py",
    "colorsys.py",
    "concurrent/futures/thread.py",
    "configparser.py",
    "contextlib.py",
    "copy.py",
    "csv.py",
    "dataclasses.py",
    "difflib.py",
    "fileinput.py",
    "fractions.py",
    "ftplib.py",
    "functools.py",
    "glob.py",
    "gzip.py",
    "heapq.py",
    "html/parser.py",
    "http/cookies.py",
    "ipaddress.py",
    "json/decoder.py",
    "json/encoder.py",
    "linecache.py",
    "logging/handlers.py",
    "mimetypes.py",
    "netrc.py",
    "plistlib.py",
    "poplib.py",
    "pprint.py",
    "queue.py",
    "random.py",
    "sched.py",
    "selectors.py",
    "shelve.py",
    "shlex.py",
    "shutil.py",
    "smtplib.py",
    "socketserver.py",
    "statistics.py",
    "string.py",
    "tempfile.py",
    "timeit.py",
    "tokenize.py",
    "traceback.py",
    "uuid.py",
    "wave.py",
    "weakref.py",
)
# None of these is in the corpus: what is decoded was never trained on.
_PROMPT_FILES = ("base64.py", "cmd.py", "fnmatch.py", "getpass.py", "numbers.py", "posixpath.py", "textwrap.py")

_MIN_CHARS, _MAX_CHARS = 400, 2400  # about 130 to 800 tokens of code
_PROMPT_CHARS = 160
_CHARS_PER_TOKEN = 3.2  # of code, in small byte-pair vocabularies
_TEXTS_BETWEEN_CHATS = 2


@dataclass(frozen=True)
class DemoCorpusSummary:
    """What was written.

    Attributes:
      documents: Lines of the file.
      chats: Those with ``messages``; the others have ``text``.
      tokens: As counted or estimated, without chat templates.
    """

    documents: int
    chats: int
    tokens: int


@dataclass(frozen=True)
class DemoPrompt:
    """Something for the target to go on with.

    Attributes:
      kind: ``text`` is continued as it is; ``chat`` is a user's message.
      content: The text or the message.
    """

    kind: Literal["text", "chat"]
    content: str

    def token_ids(self, tokenizer: Any) -> tuple[int, ...]:
        """Tokenise it; a chat through the tokenizer's template, up to where the answer begins.

        Args:
          tokenizer: A transformers tokenizer.
        """
        if self.kind == "text":
            return tuple(tokenizer(self.content)["input_ids"])
        messages = [{"role": "user", "content": self.content}]
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return tuple(tokenizer(rendered, add_special_tokens=False)["input_ids"])


@dataclass(frozen=True)
class _Definition:
    """A function or class: its module, name, and dedented source, which may be cut at a line's end."""

    module: str
    name: str
    source: str
    is_cut: bool

    @classmethod
    def of(cls, module: str, name: str, source: str) -> "_Definition":
        kept = _whole_lines(source, _MAX_CHARS)
        return cls(module, name, kept, is_cut=len(kept) < len(source))


def _estimate_tokens(text: str) -> int:
    return round(len(text) / _CHARS_PER_TOKEN)


def write_demo_corpus(
    path: Path, num_tokens: int, count_tokens: Callable[[str], int] = _estimate_tokens
) -> DemoCorpusSummary:
    """Write JSON Lines of about so many tokens: plain texts, and after every other one a chat about writing the code.

    The same Python version gives the same file.

    Args:
      path: The file; replaced if it exists.
      num_tokens: Documents are added until there are at least so many tokens.
      count_tokens: Of a text; the default goes by its length.

    Raises:
      ConfigError: If the standard library has less, or its sources are not installed.
    """
    definitions = _spread(_CORPUS_FILES)
    lines: list[str] = []
    tokens = chats = texts_since_chat = 0
    while tokens < num_tokens:
        definition = next(definitions, None)
        if definition is None:
            raise ConfigError(
                f"the standard library at {_library()} gives {tokens:,} tokens of text, {num_tokens:,} were asked for; "
                "ask for fewer, or install Python with its sources"
            )
        # An answer is never cut short: the drafter would learn that code ends anywhere.
        is_chat = texts_since_chat >= _TEXTS_BETWEEN_CHATS and not definition.is_cut
        lines.append(json.dumps(_as_chat(definition) if is_chat else {"text": definition.source}, ensure_ascii=False))
        tokens += count_tokens(definition.source)
        chats += is_chat
        texts_since_chat = 0 if is_chat else texts_since_chat + 1
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return DemoCorpusSummary(documents=len(lines), chats=chats, tokens=tokens)


def demo_prompts(count: int) -> tuple[DemoPrompt, ...]:
    """Return prompts of the corpus' two kinds, from modules that are not in it; always the same.

    Args:
      count: How many; texts and chats in turn.

    Raises:
      ConfigError: If there are not so many.
    """
    definitions = list(itertools.islice(_spread(_PROMPT_FILES), count))
    if len(definitions) < count:
        raise ConfigError(f"{count} prompts were asked for, the standard library gives {len(definitions)}")
    return tuple(
        DemoPrompt("chat", _request(definition)) if index % 2 else DemoPrompt("text", _beginning(definition.source))
        for index, definition in enumerate(definitions)
    )


def _request(definition: _Definition) -> str:
    return f"Write `{definition.name}` of Python's standard module `{definition.module}`."


def _as_chat(definition: _Definition) -> dict[str, list[dict[str, str]]]:
    answer = f"```python\n{definition.source}```"
    return {
        "messages": [
            {"role": "user", "content": _request(definition)},
            {"role": "assistant", "content": answer},
        ]
    }


def _beginning(source: str) -> str:
    """Cut a definition after its first lines, without the last line's end: the target goes on inside the code."""
    return _whole_lines(source, _PROMPT_CHARS).rstrip("\n") or source[:_PROMPT_CHARS]


def _library() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _spread(files: Sequence[str]) -> Iterator[_Definition]:
    """Take the first definition of every file, then the second of every file, and so on: any length is varied."""
    per_file = [_definitions(name) for name in files if (_library() / name).is_file()]
    for round_ in itertools.zip_longest(*per_file):
        yield from (definition for definition in round_ if definition is not None)


def _definitions(file_name: str) -> Iterator[_Definition]:
    """Read the functions and classes of a file, and the methods that a cut class no longer shows."""
    text = (_library() / file_name).read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    module = file_name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    for node in ast.parse(text).body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        source = _source(lines, node)
        if len(source) >= _MIN_CHARS:
            yield _Definition.of(module, node.name, source)
        if isinstance(node, ast.ClassDef) and len(source) > _MAX_CHARS:
            shown = node.lineno + _whole_lines(source, _MAX_CHARS).count("\n")
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.lineno > shown:
                    body = _source(lines, method)
                    if len(body) >= _MIN_CHARS:
                        yield _Definition.of(module, f"{node.name}.{method.name}", body)


def _source(lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return textwrap.dedent("".join(lines[first - 1 : node.end_lineno])).rstrip() + "\n"


def _whole_lines(source: str, max_chars: int) -> str:
    """Keep the leading lines that fit."""
    if len(source) <= max_chars:
        return source
    return source[: source.rfind("\n", 0, max_chars) + 1]
