"""Reading JSON Lines: what is taken, and what each bad input is told."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_cache.corpus import reader as reader_module
from dflash_cache.corpus.reader import DocumentReader, Message, read_documents
from dflash_cache.errors import CorpusError

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}


def test_texts_and_chats_are_read_with_their_place(write_corpus: Callable[..., Path]) -> None:
    path = write_corpus([{"text": "one", "id": 7}, b"", b"   ", CHAT])
    first, second = read_documents([path])
    assert (first.index, first.source.line, first.text, first.messages) == (0, 1, "one", None)
    assert (second.index, second.source.line, second.text) == (1, 4, None)
    assert second.messages == (Message("user", "hi"), Message("assistant", "hello"))


def test_indices_run_on_over_files_and_lines_start_again(write_corpus: Callable[..., Path]) -> None:
    first = write_corpus([{"text": "a"}, b"", {"text": "b"}], "first.jsonl")
    second = write_corpus([b"", {"text": "c"}], "second.jsonl")
    places = [(doc.index, doc.source.path, doc.source.line) for doc in read_documents([first, second])]
    assert places == [(0, first, 1), (1, first, 3), (2, second, 2)]


def test_gzip_is_known_by_its_bytes_not_its_name(write_corpus: Callable[..., Path]) -> None:
    disguised = write_corpus([{"text": "packed"}], "corpus.jsonl", compress=True)
    plain = write_corpus([{"text": "plain"}], "corpus.gz")
    assert [doc.text for doc in read_documents([disguised, plain])] == ["packed", "plain"]


def test_gzip_of_several_members_is_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "members.gz"
    path.write_bytes(b"".join(gzip.compress(json.dumps({"text": name}).encode() + b"\n") for name in "abc"))
    assert [doc.text for doc in read_documents([path])] == ["a", "b", "c"]


def test_windows_line_ends_byte_order_mark_and_missing_last_newline(tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "b"}')
    assert [(doc.text, doc.source.line) for doc in read_documents([path])] == [("a", 1), ("b", 3)]


def test_unicode_line_separators_inside_a_string_do_not_end_a_line(tmp_path: Path) -> None:
    path = tmp_path / "separators.jsonl"
    path.write_text(json.dumps({"text": "a\u2028b\u0085c"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [doc.text for doc in read_documents([path])] == ["a\u2028b\u0085c"]


@pytest.mark.parametrize("compress", [False, True])
def test_bytes_read_reach_the_size_on_disk(write_corpus: Callable[..., Path], compress: bool) -> None:
    path = write_corpus([{"text": "x" * 50}] * 20, compress=compress)
    documents = DocumentReader([path, path])
    assert documents.total_bytes == 2 * path.stat().st_size
    seen = [documents.bytes_read for _ in documents]
    assert seen == sorted(seen)
    assert documents.bytes_read == documents.total_bytes


def test_reading_twice_starts_again(write_corpus: Callable[..., Path]) -> None:
    documents = DocumentReader([write_corpus([{"text": "a"}, {"text": "b"}])])
    assert [doc.index for doc in documents] == [doc.index for doc in documents] == [0, 1]


def test_reading_is_lazy(write_corpus: Callable[..., Path]) -> None:
    documents = read_documents([write_corpus([{"text": "good"}, b"{broken"])])
    assert next(documents).text == "good"
    with pytest.raises(CorpusError, match=r":2: not valid JSON"):
        next(documents)


def _chat_of(message: Any) -> dict[str, Any]:
    return {"messages": [message]}


BAD_LINES = {
    "broken": (b'{"text": "a"', ["not valid JSON", "one complete JSON object"]),
    "array": (b'["a"]', ["a list", "a JSON object"]),
    "null": (b"null", ["null", "a JSON object"]),
    "number too long": (b'{"text": ' + b"9" * 5000 + b"}", ["not valid JSON"]),
    "nested too deep": (b"[" * 100_000, ["not valid JSON"]),
    "not utf-8": (b'{"text": "caf\xe9"}', ["0xe9", "not UTF-8"]),
    "lone surrogate": (rb'{"text": "a\ud83d"}', ["lone surrogate", "ud83d"]),
    "neither": ({"prompt": "a", "completion": "b"}, ["neither", "'prompt', 'completion'", "'messages'"]),
    "both": ({"text": "a", **CHAT}, ["both"]),
    "both null": ({"text": None, "messages": None}, ["neither"]),
    "text is a number": ({"text": 3}, ["'text' is a number", "a string"]),
    "text is a list": ({"text": ["a"]}, ["'text' is a list"]),
    "messages is a string": ({"messages": "hi"}, ["'messages' is a string", "a list"]),
    "messages is empty": ({"messages": []}, ["empty list", "at least one"]),
    "message is a string": (_chat_of("hi"), ["messages[0] is a string"]),
    "no role": (_chat_of({"content": "a"}), ["no 'role'", "'content'"]),
    "sharegpt": (_chat_of({"from": "human", "value": "a"}), ["no 'role', 'content'", "'from', 'value'"]),
    "unknown role": (_chat_of({"role": "human", "content": "a"}), ["'human'", "system, developer, user, assistant"]),
    "role is a number": (_chat_of({"role": 1, "content": "a"}), ["role a number"]),
    "content is null": (_chat_of({"role": "user", "content": None}), ["messages[0] 'content' is null", "a string"]),
    "content in parts": (_chat_of({"role": "user", "content": [{"text": "a"}]}), ["'content' is a list"]),
    "surrogate in content": (rb'{"messages": [{"role": "user", "content": "\udc00"}]}', ["lone surrogate"]),
    "reasoning": (_chat_of({"role": "assistant", "content": "a", "reasoning_content": "b"}), ["'reasoning_content'"]),
    "tools": ({**CHAT, "tools": [{"name": "f"}]}, ["'tools'"]),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_one_error_with_its_place(case: str, write_corpus: Callable[..., Path]) -> None:
    line, expected = BAD_LINES[case]
    path = write_corpus([{"text": "fine"}, b"", line])
    with pytest.raises(CorpusError) as caught:
        list(read_documents([path]))
    message = str(caught.value)
    assert message.startswith(f"{path}:3: ")
    for part in expected:
        assert part in message
    assert len(message) < 500


def test_fields_that_hold_nothing_are_ignored(write_corpus: Callable[..., Path]) -> None:
    message = {"role": "user", "content": "a", "tool_calls": None, "name": "", "reasoning_content": None}
    (document,) = read_documents([write_corpus([{"messages": [message], "text": None, "tools": []}])])
    assert document.messages == (Message("user", "a"),)


def test_a_json_array_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "array.json"
    path.write_text(json.dumps([{"text": "a"}, {"text": "b"}], indent=1))
    with pytest.raises(CorpusError, match=r"one JSON array must be rewritten"):
        list(read_documents([path]))


@pytest.mark.parametrize("cut", [-3, -12, 15])
def test_truncated_gzip_is_an_error(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "cut.jsonl.gz"
    lines = "".join(json.dumps({"text": f"{i} {i * i} {i**3}"}) + "\n" for i in range(500))
    path.write_bytes(gzip.compress(lines.encode())[:cut])
    with pytest.raises(CorpusError, match=r"cut\.jsonl\.gz: the gzip data is cut short or damaged after line \d+"):
        list(read_documents([path]))


def test_damaged_gzip_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "damaged.gz"
    data = bytearray(gzip.compress(b'{"text": "some words to pack"}\n'))
    data[-6] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(CorpusError, match="damaged"):
        list(read_documents([path]))


@pytest.mark.parametrize(
    ("head", "kind"),
    [(b"\x28\xb5\x2f\xfdrest", "zstd"), (b"PAR1rest", "Parquet"), ('{"text"'.encode("utf-16"), "UTF-16")],
)
def test_other_kinds_of_file_are_named(tmp_path: Path, head: bytes, kind: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(head)
    with pytest.raises(CorpusError, match=f"looks like {kind}; expected JSON Lines"):
        list(read_documents([path]))


def test_missing_files_folders_and_devices_are_refused_before_reading(
    tmp_path: Path, write_corpus: Callable[..., Path]
) -> None:
    good = write_corpus([{"text": "a"}])
    for bad, expected in [
        (tmp_path / "missing.jsonl", "no such file"),
        (tmp_path, "is a folder"),
        (Path("/dev/null"), "not a regular file"),
    ]:
        with pytest.raises(CorpusError, match=expected):
            read_documents([good, bad])
    with pytest.raises(CorpusError, match="at least one"):
        read_documents([])


def test_a_line_without_end_is_refused(write_corpus: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "MAX_LINE_BYTES", 64)
    path = write_corpus([{"text": "short"}, {"text": "x" * 100}])
    with pytest.raises(CorpusError, match=r":2: the line is longer than 64 bytes"):
        list(read_documents([path]))
