"""Small corpora as JSON Lines."""

import json
import random
from pathlib import Path

_WORDS = [
    *(
        "target",
        "drafter",
        "token",
        "shard",
        "manifest",
        "answer",
        "assistant",
        "document",
        "learns",
        "reads",
        "writes",
    ),
    *(
        "every",
        "once",
        "bytes",
        "disk",
        "seal",
        "layer",
        "norm",
        "head",
        "0",
        "1",
        "2",
        "3",
        ",",
        ".",
        "the",
        "a",
        "of",
    ),
]


def write_texts(path: Path, count: int, *, shortest: int = 3, longest: int = 90, seed: int = 0) -> Path:
    """Write documents of plain text, from short to long, in random order."""
    generator = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            words = generator.choices(_WORDS, k=generator.randint(shortest, longest))
            file.write(json.dumps({"text": " ".join(words)}) + "\n")
    return path


def write_chats(path: Path, count: int, *, seed: int = 0) -> Path:
    """Write chats of one to three turns."""
    generator = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            messages = []
            for _ in range(generator.randint(1, 3)):
                question = " ".join(generator.choices(_WORDS, k=generator.randint(1, 12)))
                answer = " ".join(generator.choices(_WORDS, k=generator.randint(1, 40)))
                messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path
