"""The demo's text: real code, the same every time, never the code that is decoded afterwards."""

import ast
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_cache.corpus.reader import read_documents
from dflash_cache.demo.corpus import DemoPrompt, demo_prompts, write_demo_corpus
from dflash_cache.errors import ConfigError


def documents(path: Path) -> list[dict]:  # type: ignore[type-arg]
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_same_file_every_time_and_about_the_size_asked_for(tmp_path: Path) -> None:
    summary = write_demo_corpus(tmp_path / "a.jsonl", 20_000)
    write_demo_corpus(tmp_path / "b.jsonl", 20_000)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert 20_000 <= summary.tokens < 21_000
    found = documents(tmp_path / "a.jsonl")
    assert len(found) == summary.documents
    assert sum("messages" in document for document in found) == summary.chats
    assert 0.15 < summary.chats / summary.documents < 0.4


def test_a_longer_corpus_begins_with_the_shorter(tmp_path: Path) -> None:
    write_demo_corpus(tmp_path / "short.jsonl", 5_000)
    write_demo_corpus(tmp_path / "long.jsonl", 8_000)
    assert (tmp_path / "long.jsonl").read_bytes().startswith((tmp_path / "short.jsonl").read_bytes())


def test_counts_with_the_given_tokenizer(tmp_path: Path) -> None:
    summary = write_demo_corpus(tmp_path / "a.jsonl", 3_000, lambda text: len(text.split()))
    texts = [d.get("text") or _answer_code(d) for d in documents(tmp_path / "a.jsonl")]
    assert summary.tokens == sum(len(text.split()) for text in texts)


def _answer_code(document: dict) -> str:  # type: ignore[type-arg]
    answer: str = document["messages"][1]["content"]
    return answer.removeprefix("```python\n").removesuffix("```")


def test_documents_are_varied_and_of_moderate_length(tmp_path: Path) -> None:
    write_demo_corpus(tmp_path / "a.jsonl", 25_000)
    texts = [d.get("text") or _answer_code(d) for d in documents(tmp_path / "a.jsonl")]
    assert len(set(texts)) == len(texts)
    assert all(400 <= len(text) <= 2400 or text.count("\n") > 5 for text in texts)
    assert max(map(len, texts)) <= 2400
    assert all(text.endswith("\n") for text in texts)


def test_answers_are_whole_definitions(tmp_path: Path) -> None:
    write_demo_corpus(tmp_path / "a.jsonl", 25_000)
    chats = [document for document in documents(tmp_path / "a.jsonl") if "messages" in document]
    assert len(chats) > 10
    for document in chats:
        question = document["messages"][0]["content"]
        (node,) = ast.parse(_answer_code(document)).body
        assert node.name in question  # type: ignore[attr-defined]


def test_is_read_by_the_corpus_reader(tmp_path: Path) -> None:
    summary = write_demo_corpus(tmp_path / "a.jsonl", 3_000)
    assert len(list(read_documents([tmp_path / "a.jsonl"]))) == summary.documents


def test_more_than_there_is_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ask for fewer"):
        write_demo_corpus(tmp_path / "a.jsonl", 10**8)
    assert not (tmp_path / "a.jsonl").exists()
    with pytest.raises(ConfigError, match="10000 prompts"):
        demo_prompts(10_000)


def test_prompts_are_not_in_the_corpus(tmp_path: Path) -> None:
    write_demo_corpus(tmp_path / "a.jsonl", 60_000)
    corpus = "\n".join(
        d.get("text") or "\n".join(m["content"] for m in d["messages"]) for d in documents(tmp_path / "a.jsonl")
    )
    prompts = demo_prompts(12)
    assert prompts == demo_prompts(12)
    assert {prompt.kind for prompt in prompts} == {"text", "chat"}
    assert len({prompt.content for prompt in prompts}) == 12
    for prompt in prompts:
        assert prompt.content not in corpus
        assert 10 < len(prompt.content) <= 400


def test_prompts_as_tokens() -> None:
    vocabulary = {"<s>": 0, "user": 1, "hi": 2, "answer": 3, "?": 4}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    tokenizer.chat_template = (
        "{% for m in messages %}<s> {{ m['role'] }} {{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}answer{% endif %}"
    )
    assert DemoPrompt("text", "hi hi").token_ids(tokenizer) == (2, 2)
    assert DemoPrompt("chat", "hi").token_ids(tokenizer) == (0, 1, 2, 3)
