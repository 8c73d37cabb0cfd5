"""Run the same extraction in forked children, as often as asked: started once, since importing torch takes seconds.

Reads lines from stdin: "OUT SECONDS" starts an extraction into OUT and kills it (SIGKILL) that long after it began;
"OUT -" lets it end. Answers "killed", "ended" or "failed", and the seconds that it ran.
"""

import os
import signal
import sys
import time
from pathlib import Path

import transformers
from support.extraction import small_config

from dflash_cache.extract.progress import ExtractEvent, Phase
from dflash_cache.extract.runner import extract


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
    print("ready", flush=True)
    for line in sys.stdin:
        out, delay = line.split()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            run_child(model, data, out, writing)
        os.read(reading, 1)
        start = time.monotonic()
        if delay != "-":
            time.sleep(float(delay))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
        word = "killed" if os.WIFSIGNALED(status) else "ended" if os.WEXITSTATUS(status) == 0 else "failed"
        print(f"{word} {time.monotonic() - start:.3f}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
