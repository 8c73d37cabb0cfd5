"""A tiny real tokenizer and chat templates of the kinds that models ship."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Tags over the end-of-turn token and the newline after it, as training templates have them.
CHATML_TAGGED = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% generation %}{{ message['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Tags over the answer only.
CHATML_TAGGED_CONTENT = CHATML_TAGGED.replace(
    "{% generation %}{{ message['content'] + '<|im_end|>\n' }}{% endgeneration %}",
    "{% generation %}{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>\n' }}",
)

# Drops the reasoning of all turns but the last, as Qwen's templates do.
STRIPS_REASONING = (
    "{% for message in messages %}"
    "{% set content = message['content'] %}"
    "{% if message['role'] == 'assistant' and not loop.last and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# The generation prompt opens, or opens and closes, the reasoning.
THINKING = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<|im_start|>assistant\n' + ('<think>\n' if enable_thinking else '<think>\n\n</think>\n\n') }}"
    "{{ message['content'] + '<|im_end|>\n' }}"
    "{% else %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' + ('<think>\n' if enable_thinking else '<think>\n\n</think>\n\n') }}"
    "{% endif %}"
)

# No end-of-turn token at all.
HEADINGS = (
    "{% for message in messages %}"
    "{{ '### ' + message['role'] + ':\n' + message['content'] + '\n\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"
)

# A space ends the prompt, and the answer's first token wants to swallow it.
SPACED = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

REFUSES_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
)

BEGINS_WITH_BOS = "{{ bos_token }}" + CHATML

_SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "A drafter proposes tokens and the target verifies them.",
    "hello there, general; what is the capital of France? Paris is the capital of France.",
    "system user assistant tool: you are a helpful assistant",
    "<think>\nreasoning about the question\n</think>\n\nthe answer is 42",
]


def build_tokenizer(
    chat_template: str | None = CHATML, *, adds_bos: bool = True, trims_offsets: bool = False
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of some 340 tokens and wrap it as transformers loads one."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=["<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_SENTENCES * 3, trainer)
    steps: list[Any] = [processors.ByteLevel(trim_offsets=trims_offsets)]
    if adds_bos:
        steps.append(processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 1)]))
    backend.post_processor = processors.Sequence(steps)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|bos|>", eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    tokenizer.chat_template = chat_template
    return tokenizer
