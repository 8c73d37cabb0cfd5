"""Turn a GGUF file into a plain transformers folder: ``python -m dflash_cache.demo.unpack MODEL.gguf FOLDER``."""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

__all__ = ["unpack_gguf"]


def unpack_gguf(gguf: Path, folder: Path) -> None:
    """Write weights and tokenizer as bfloat16 safetensors, ``config.json``, ``tokenizer.json`` and chat template.

    Args:
      gguf: The model; its four-bit weights are multiplied out.
      folder: An existing folder.

    Raises:
      ValueError: If the weights come out packed or incomplete.
    """
    auto_model: Any = AutoModelForCausalLM
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    source = auto_model.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    config = source.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # else saving refuses a model that it takes for quantised
    model = auto_model.from_config(config)
    expected, unpacked = model.state_dict(), source.state_dict()
    odd = [name for name, tensor in expected.items() if name not in unpacked or unpacked[name].shape != tensor.shape]
    if odd:
        raise ValueError(
            f"{odd[0]} is missing or still packed. With the package 'kernels' installed, transformers keeps the "
            "weights packed: uninstall it for the demo's first run"
        )
    model.load_state_dict(unpacked)
    model.generation_config = source.generation_config
    model.eval().to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    unpack_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
