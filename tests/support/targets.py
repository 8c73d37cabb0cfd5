"""Tiny targets with random weights, saved to disk with a tokenizer of their own: what the faults' checks run on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3Config,
)
from transformers.models.gemma3.modeling_gemma3 import Gemma3ForCausalLM
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration

TOKENIZER_VOCAB = 480
VOCAB = 512
CHATML = (
    "{%- if greeting is defined %}<|im_start|>system\n{{ greeting }}<|im_end|>\n{%- endif %}"
    "{%- for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)
_SEED_TEXT = [
    "the target reads each document once, and the drafter learns from what the target thought of it",
    "every token of the answer is one that the assistant wrote itself, 0 1 2 3 4 5 6 7 8 9",
    "a shard is sealed when its bytes are on the disk; a manifest says which shards exist",
]


def build_tokenizer(folder: Path, vocab_size: int = TOKENIZER_VOCAB) -> PreTrainedTokenizerFast:
    """Train a byte-level tokenizer with a ChatML template and save it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|reserved_0|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SEED_TEXT * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHATML
    fast.save_pretrained(folder)
    return fast


def save_target(model: Any, folder: Path, seed: int = 0, *, update_gain: float = 1.0) -> Path:
    """Give a model random weights worth testing with, and save it with a tokenizer.

    transformers starts norms at 1 and everything else at 0.02, which hides a missing norm and makes logits flat.

    Args:
      model: The model.
      folder: Where it goes.
      seed: Of the weights.
      update_gain: Factor on what each layer adds to the residual stream; small in deep models, as training makes it.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "conv" not in name:
                spread = 1.0 if "embed" in name else 1.5 / parameter.shape[-1] ** 0.5
                if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
                    spread *= update_gain
                parameter.normal_(0.0, spread, generator=generator)
            elif "norm" in name or "ln_" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model.eval()
    model.save_pretrained(folder)
    build_tokenizer(folder)
    return folder


def dense_config(*, tied: bool = False) -> Qwen3Config:
    """T-dense, T-tied: a small Qwen3."""
    return Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        eos_token_id=2,
        pad_token_id=0,
    )


def build_dense(folder: Path, *, tied: bool = False, update_gain: float = 1.0) -> Path:
    """T-dense, or T-tied: one safetensors file, no lm_head in it."""
    return save_target(Qwen3ForCausalLM(dense_config(tied=tied)), folder, update_gain=update_gain)


def build_tied(folder: Path) -> Path:
    """T-tied."""
    return build_dense(folder, tied=True)


def hybrid_config() -> Qwen3_5Config:
    """T-hyb: Qwen3.5's wrapper around a hybrid text model; hidden size not divisible by the heads."""
    text = {
        "vocab_size": VOCAB,
        "hidden_size": 40,
        "intermediate_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "max_position_embeddings": 1024,
        "eos_token_id": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
        },
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "depth": 1,
        "out_hidden_size": 40,
        "num_position_embeddings": 16,
    }
    return Qwen3_5Config(text_config=text, vision_config=vision)


def build_hybrid(folder: Path) -> Path:
    """T-hyb, saved as the multimodal wrapper, with its key prefix."""
    return save_target(Qwen3_5ForConditionalGeneration(hybrid_config()), folder)


def build_llama(folder: Path, num_layers: int = 6) -> Path:
    """A small Llama."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        rms_norm_eps=1e-5,
        eos_token_id=2,
    )
    return save_target(LlamaForCausalLM(config), folder)


def build_gemma3(folder: Path) -> Path:
    """A small Gemma 3 text model: gain 1 + w, embedding scaled by sqrt(H), tied."""
    config = Gemma3TextConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=32,
        max_position_embeddings=1024,
        eos_token_id=2,
        pad_token_id=0,
    )
    return save_target(Gemma3ForCausalLM(config), folder)


def build_gpt2(folder: Path) -> Path:
    """A small GPT-2: layer norm with a bias, learned positions, tied."""
    config = GPT2Config(
        vocab_size=VOCAB, n_embd=48, n_layer=6, n_head=4, n_positions=1024, eos_token_id=2, bos_token_id=2
    )
    return save_target(GPT2LMHeadModel(config), folder)


BUILDERS: dict[str, Callable[[Path], Path]] = {
    "dense": build_dense,
    "tied": build_tied,
    "hybrid": build_hybrid,
    "llama": build_llama,
    "gemma3": build_gemma3,
    "gpt2": build_gpt2,
}
