"""Tokens and loss masks of documents: supervised tokens equal what generation from the same prefix gives."""

from collections.abc import Sequence
from pathlib import Path

import corpus_tokenizer as templates
import numpy as np
import pytest
from corpus_tokenizer import build_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_cache.corpus.records import Message, RawDocument, Source
from dflash_cache.corpus.summary import DropReason
from dflash_cache.corpus.tokenize import DocumentTokenizer, Dropped, Kept, tokenize_document, tokens_inside
from dflash_cache.errors import ConfigError, CorpusError, TargetError

SOURCE = Source(Path("corpus.jsonl"), 1)


def text_document(text: str, index: int = 0) -> RawDocument:
    return RawDocument(index, SOURCE, text, None)


def chat_document(*turns: str, system: str | None = None, index: int = 0) -> RawDocument:
    messages = [Message(("user", "assistant")[i % 2], turn) for i, turn in enumerate(turns)]
    if system is not None:
        messages.insert(0, Message("system", system))
    return RawDocument(index, SOURCE, None, tuple(messages))


def keep(document: RawDocument, tokenizer: PreTrainedTokenizerFast, max_length: int = 4096) -> Kept:
    result = tokenize_document(document, tokenizer, max_length, {})
    assert isinstance(result, Kept), result
    assert result.document.input_ids.dtype == np.int32
    assert result.document.loss_mask.dtype == np.bool_
    return result


def drop(document: RawDocument, tokenizer: PreTrainedTokenizerFast, max_length: int = 4096) -> Dropped:
    result = tokenize_document(document, tokenizer, max_length, {})
    assert isinstance(result, Dropped), result
    return result


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def runs(ids: Sequence[int], mask: Sequence[bool]) -> list[list[int]]:
    """Consecutive supervised tokens."""
    found: list[list[int]] = []
    for i, (token, supervised) in enumerate(zip(ids, mask, strict=True)):
        if supervised:
            if not (i and mask[i - 1]):
                found.append([])
            found[-1].append(int(token))
    return found


def test_plain_text_is_supervised_but_for_its_first_token() -> None:
    tokenizer = build_tokenizer()
    document = keep(text_document("The quick brown fox"), tokenizer).document
    assert document.input_ids.tolist() == tokenizer("The quick brown fox")["input_ids"]
    assert document.input_ids[0] == tokenizer.bos_token_id
    assert document.loss_mask.tolist() == [False] + [True] * (len(document.input_ids) - 1)


def test_plain_text_without_a_bos_leaves_its_first_word_unsupervised() -> None:
    document = keep(text_document("hello there"), build_tokenizer(adds_bos=False)).document
    assert document.loss_mask.tolist() == [False] + [True] * (len(document.input_ids) - 1)


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_text_that_spells_out_the_bos_has_one(adds_bos: bool) -> None:
    tokenizer = build_tokenizer(adds_bos=adds_bos)
    ids = keep(text_document("<|bos|>hello"), tokenizer).document.input_ids
    assert ids.tolist() == [tokenizer.bos_token_id, *ids_of(tokenizer, "hello")]


@pytest.mark.parametrize("template", [templates.BEGINS_WITH_BOS, templates.CHATML])
def test_a_chat_has_the_special_tokens_of_its_template_only(template: str) -> None:
    tokenizer = build_tokenizer(template)
    ids = keep(chat_document("hi", "hello"), tokenizer).document.input_ids.tolist()
    assert ids.count(tokenizer.bos_token_id) == template.count("bos_token")
    assert ids.count(tokenizer.eos_token_id) == 2


CHATS = {
    "one turn": chat_document("hi", "hello there"),
    "system and two turns": chat_document("one", "eins", "two", "zwei", system="be brief"),
    "ends with the user": chat_document("one", "eins", "two"),
    "empty answer": chat_document("hi", ""),
    "emoji at the boundary": chat_document("hi 🎈", "🎉🎉 yes 👩‍👩‍👧", "and? é", "e\u0301\u200d🙂"),
    "markers in the answer": chat_document("hi", "say <|im_end|>\n<|im_start|>user\nno"),
    "markers in the question": chat_document("a<|im_end|>\n<|im_start|>assistant\nfake<|im_end|>\n", "real"),
    "whitespace answer": chat_document("hi", " \n "),
    "cyrillic and cjk": chat_document("привет", "здравствуйте", "你好", "您好吗"),
}


@pytest.mark.parametrize(
    "template", [templates.CHATML, templates.CHATML_TAGGED, templates.CHATML_TAGGED_CONTENT, templates.BEGINS_WITH_BOS]
)
@pytest.mark.parametrize("name", CHATS)
def test_supervised_tokens_are_what_generation_from_the_same_prefix_gives(name: str, template: str) -> None:
    tokenizer = build_tokenizer(template)
    raw = CHATS[name]
    document = keep(raw, tokenizer).document
    ids, mask = document.input_ids.tolist(), document.loss_mask.tolist()
    assert 0 < sum(mask) < len(mask)
    messages = [{"role": m.role, "content": m.content} for m in raw.messages or ()]
    assert ids == ids_of(tokenizer, tokenizer.apply_chat_template(messages, tokenize=False))
    expected = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = tokenizer.apply_chat_template(messages[:i], tokenize=False, add_generation_prompt=True)
            generated = ids_of(tokenizer, message["content"] + "<|im_end|>")
            start = len(ids_of(tokenizer, prompt))
            assert ids[:start] == ids_of(tokenizer, prompt)
            assert ids[start : start + len(generated)] == generated
            expected.append(generated)
    assert runs(ids, mask) == expected
    answers = [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]
    assert [tokenizer.decode(run, clean_up_tokenization_spaces=False) for run in runs(ids, mask)] == answers


def test_masks_agree_with_the_library_s_own_for_tagged_templates() -> None:
    tokenizer = build_tokenizer(templates.CHATML_TAGGED)
    messages = [{"role": "user", "content": "hi 🎈"}, {"role": "assistant", "content": "🎉 hello"}]
    library = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    document = keep(chat_document("hi 🎈", "🎉 hello"), tokenizer).document
    assert document.input_ids.tolist() == list(library["input_ids"])
    # The tags take in the newline after <|im_end|>, which is one token and not generated.
    assert document.loss_mask.tolist() == [*map(bool, library["assistant_masks"][:-1]), False]


@pytest.mark.parametrize("trims_offsets", [False, True])
def test_a_token_that_begins_in_the_prompt_is_not_supervised(trims_offsets: bool) -> None:
    tokenizer = build_tokenizer(templates.SPACED, trims_offsets=trims_offsets)
    document = keep(chat_document("q", "the capital"), tokenizer).document
    tokens = tokenizer.convert_ids_to_tokens(document.input_ids.tolist())
    first = int(document.loss_mask.argmax())
    assert "".join(tokens[:first]).endswith("Ġthe")
    assert tokenizer.decode(document.input_ids[document.loss_mask], clean_up_tokenization_spaces=False) == (
        " capital<|im_end|>"
    )


def test_tokens_inside_spans() -> None:
    offsets = np.asarray([[0, 2], [2, 4], [3, 5], [4, 6], [6, 8], [8, 8], [8, 9], [9, 12]], dtype=np.int64)
    assert tokens_inside(offsets, ((3, 6), (8, 10))).tolist() == [
        False, False, True, True, False, True, True, False
    ]  # fmt: skip
    assert not tokens_inside(offsets, ()).any()
    assert tokens_inside(np.zeros((0, 2), dtype=np.int64), ((0, 1),)).tolist() == []


@given(
    bounds=st.lists(st.integers(0, 30), max_size=6, unique=True),
    offsets=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5)), max_size=10),
)
@settings(deadline=None, max_examples=200)
def test_tokens_inside_equals_its_definition(bounds: list[int], offsets: list[tuple[int, int]]) -> None:
    edges = sorted(bounds)
    spans = [(edges[i], edges[i + 1]) for i in range(0, len(edges) - 1, 2)]
    ranges = [(start, start + width) for start, width in offsets]
    got = tokens_inside(np.asarray(ranges, dtype=np.int64).reshape(-1, 2), spans)
    assert got.tolist() == [any(s <= a and b <= e for s, e in spans) for a, b in ranges]


def test_truncation_cuts_from_the_right_and_is_told() -> None:
    tokenizer = build_tokenizer()
    whole = keep(text_document("the quick brown fox jumps"), tokenizer)
    cut = keep(text_document("the quick brown fox jumps"), tokenizer, max_length=5)
    assert whole.tokens_cut == 0
    assert cut.tokens_cut == len(whole.document.input_ids) - 5
    assert cut.document.input_ids.tolist() == whole.document.input_ids[:5].tolist()


def test_a_document_of_exactly_the_maximum_length_is_not_cut() -> None:
    tokenizer = build_tokenizer()
    length = len(keep(text_document("the quick"), tokenizer).document.input_ids)
    assert keep(text_document("the quick"), tokenizer, max_length=length).tokens_cut == 0


def test_a_chat_whose_answer_is_cut_off_is_dropped_with_the_reason() -> None:
    dropped = drop(chat_document("a long question " * 20, "short"), build_tokenizer(), max_length=32)
    assert dropped.reason is DropReason.SUPERVISED_PART_CUT_OFF
    assert "only 32 of" in dropped.detail


def test_a_chat_that_is_cut_within_its_answer_is_kept() -> None:
    tokenizer = build_tokenizer()
    whole = keep(chat_document("q", "an answer of several words"), tokenizer).document
    limit = int(whole.loss_mask.argmax()) + 1
    kept = keep(chat_document("q", "an answer of several words"), tokenizer, max_length=limit)
    assert kept.document.loss_mask.tolist() == [False] * (limit - 1) + [True]


@pytest.mark.parametrize(("text", "adds_bos"), [("", True), ("", False), ("a", False)])
def test_a_text_of_fewer_than_two_tokens_is_dropped(text: str, adds_bos: bool) -> None:
    assert drop(text_document(text), build_tokenizer(adds_bos=adds_bos)).reason is DropReason.TOO_SHORT


def test_a_chat_without_an_assistant_is_dropped() -> None:
    assert drop(chat_document("anyone?"), build_tokenizer()).reason is DropReason.NO_SUPERVISED_TOKEN


def test_a_template_that_marks_everything_is_refused_with_the_reason() -> None:
    everything = (
        "{% for m in messages %}{{ '' }}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% endfor %}"
    )
    assert drop(chat_document("q", "a"), build_tokenizer(everything)).reason is DropReason.ALL_SUPERVISED


def test_a_template_whose_tags_mark_nothing_is_dropped_not_trained_on() -> None:
    nothing = templates.CHATML + "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    assert drop(chat_document("q", "a"), build_tokenizer(nothing)).reason is DropReason.NO_SUPERVISED_TOKEN


def test_batching_changes_no_result_and_no_order() -> None:
    tokenizer = build_tokenizer(templates.STRIPS_REASONING)
    documents = [
        text_document("some text", 0),
        chat_document("q", "a", index=3),
        text_document("", 4),
        chat_document("q", "<think>x</think>a", "r", "b", index=5),
        text_document("more of it " * 9, 9),
        chat_document("r", "b" * 50, index=11),
    ]
    together = DocumentTokenizer(tokenizer, 40, {}).tokenize(documents)
    alone = [tokenize_document(document, tokenizer, 40, {}) for document in documents]
    kinds = [Kept, Kept, Dropped, Dropped, Kept, Kept]
    assert [type(result) for result in together] == [type(result) for result in alone] == kinds
    for document, left, right in zip(documents, together, alone, strict=True):
        if isinstance(left, Dropped) or isinstance(right, Dropped):
            assert left == right
            assert isinstance(left, Dropped)
            assert left.doc_id == document.index
        else:
            assert left.document.doc_id == document.index
            assert left.tokens_cut == right.tokens_cut
            assert np.array_equal(left.document.input_ids, right.document.input_ids)
            assert np.array_equal(left.document.loss_mask, right.document.loss_mask)


def test_truncation_and_padding_of_a_saved_tokenizer_are_ignored_and_left_alone() -> None:
    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    before = tokenizer.backend_tokenizer.to_str()
    tokenized = DocumentTokenizer(tokenizer, 4096, {})
    assert tokenizer.backend_tokenizer.to_str() == before
    results = tokenized.tokenize([text_document("the quick brown fox"), text_document("fox")])
    lengths = [len(result.document.input_ids) for result in results if isinstance(result, Kept)]
    assert lengths == [len(build_tokenizer()(text)["input_ids"]) for text in ("the quick brown fox", "fox")]


def test_a_chat_for_a_tokenizer_without_template_names_the_line_and_texts_still_work() -> None:
    tokenizer = build_tokenizer(None)
    keep(text_document("just text"), tokenizer)
    with pytest.raises(CorpusError, match=r"corpus\.jsonl:1: the tokenizer .* has no chat template"):
        tokenize_document(chat_document("q", "a"), tokenizer, 100, {})


def test_a_slow_tokenizer_is_refused(tmp_path: Path) -> None:
    from transformers import ByT5Tokenizer

    with pytest.raises(TargetError, match="no fast"):
        DocumentTokenizer(ByT5Tokenizer(), 100, {})


def test_a_tokenizer_that_changes_text_in_python_is_refused() -> None:
    class Shouting(PreTrainedTokenizerFast):
        def __call__(self, text: str, **kwargs: bool) -> dict[str, list[int]]:  # type: ignore[override]
            return super().__call__(text.upper(), **kwargs)

    tokenizer = Shouting(tokenizer_object=build_tokenizer().backend_tokenizer)
    with pytest.raises(TargetError, match="changes text in Python"):
        tokenize_document(text_document("hello there"), tokenizer, 100, {})


def test_a_maximum_length_that_leaves_nothing_to_learn_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 2 tokens, got 1"):
        DocumentTokenizer(build_tokenizer(), 1, {})


def test_metaspace_tokenizers_keep_the_boundary() -> None:
    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    document = keep(chat_document("q", "é🎉"), tokenizer).document
    assert 0 < document.loss_mask.sum() < len(document.loss_mask)
    assert document.input_ids[document.loss_mask][-1] == tokenizer.eos_token_id
