"""Run the same extraction in forked children, as often as asked: started once, since importing torch takes seconds.

Reads lines from stdin: "OUT SHARDS SECONDS" starts an extraction into OUT and kills it (SIGKILL) that long after OUT
holds so many shards; "OUT - -" lets it end. Answers "killed", "ended" or "failed", the seconds that it ran, and the
shards that it left.
"""

import os
import signal
import sys
import time
from pathlib import Path

import transformers
from support.extraction import small_config
from transformers.models.qwen3 import modeling_qwen3

from dflash_cache.extract.progress import ExtractEvent, Phase
from dflash_cache.extract.runner import extract

_HAS_ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT


def count_shards(out: str) -> int:
    """Shards in place, listed in the manifest or not yet."""
    return len(list(Path(out).glob("shard-*.zarr")))


def run_child(model: str, data: str, out: str, begun: int) -> None:
    """Extract, in the child; leave with 0 only if it succeeds."""

    def announce(event: ExtractEvent) -> None:
        if event == Phase("open_target"):
            os.write(begun, b"x")

    status = 1
    try:
        extract(small_config(Path(model), (Path(data),), Path(out)), announce)
        status = 0
    finally:
        os._exit(status)


def main(model: str, data: str) -> None:
    """Serve requests until stdin ends."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    print(f"ready {modeling_qwen3.__name__}", flush=True)  # imported here once, not by every child
    for line in sys.stdin:
        out, shards, delay = line.split()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            run_child(model, data, out, writing)
        os.read(reading, 1)
        start = time.monotonic()
        if delay != "-":
            while count_shards(out) < int(shards) and not os.waitid(os.P_PID, child, _HAS_ENDED):
                time.sleep(0.001)
            time.sleep(float(delay))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
        word = "killed" if os.WIFSIGNALED(status) else "ended" if os.WEXITSTATUS(status) == 0 else "failed"
        print(f"{word} {time.monotonic() - start:.3f} {count_shards(out)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
