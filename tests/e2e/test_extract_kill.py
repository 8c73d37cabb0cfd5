"""SIGKILL at random moments, continue, and compare every byte with an uninterrupted run (B55)."""

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Self

import pytest
from support.corpora import write_texts
from support.extraction import files_of
from support.targets import build_dense

_DRIVER = Path(__file__).with_name("extract_in_forks.py")


class Driver:
    """A subprocess that runs extractions in forks of its own."""

    def __init__(self, model: Path, data: Path) -> None:
        path = os.pathsep.join([str(_DRIVER.parent.parent), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, str(_DRIVER), str(model), str(data)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __enter__(self) -> Self:
        assert self._answer().startswith("ready")
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate(timeout=60)  # closes stdin, which ends it

    def run(self, out: Path, kill_at: tuple[int, float] | None = None) -> tuple[str, float, int]:
        """Extract into a folder.

        Args:
          out: The folder.
          kill_at: Kill it so many seconds after so many shards are in place; None lets it end.

        Returns:
          How it ended, the seconds that it ran, and the shards in place.
        """
        assert self._process.stdin is not None
        moment = "- -" if kill_at is None else f"{kill_at[0]} {kill_at[1]:.4f}"
        self._process.stdin.write(f"{out} {moment}\n")
        self._process.stdin.flush()
        word, seconds, shards = self._answer().split()
        assert word in ("killed", "ended")
        return word, float(seconds), int(shards)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def _kill_and_compare(tmp_path: Path, kills: int, documents: int, seed: int) -> None:
    model = build_dense(tmp_path / "model")
    data = write_texts(tmp_path / "data.jsonl", documents, longest=60)
    generator = random.Random(seed)
    with Driver(model, data) as driver:
        _, seconds, total = driver.run(tmp_path / "whole")
        left = []
        for kill in range(kills):
            # The first early; the others once more shards are in place, while the next are computed or written.
            shards = total * kill // kills
            delay = generator.uniform(0.0, seconds / total) if kill else generator.uniform(0.05, 0.25) * seconds
            word, _, sealed = driver.run(tmp_path / "cache", (shards, delay))
            left.append((word, sealed))
        assert any(word == "killed" and 0 < sealed < total for word, sealed in left), (left, total)
        assert driver.run(tmp_path / "cache")[0] == "ended"
    assert files_of(tmp_path / "cache") == files_of(tmp_path / "whole")


def test_killed_four_times_and_continued(tmp_path: Path) -> None:
    _kill_and_compare(tmp_path, kills=4, documents=80, seed=1)


@pytest.mark.slow
def test_killed_ten_times_and_continued(tmp_path: Path) -> None:
    _kill_and_compare(tmp_path, kills=10, documents=250, seed=2)
