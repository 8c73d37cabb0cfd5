"""Reading and writing a shard directly against zarr-python's own pipeline and a plain file, in one run.

usage: python benchmarks/format_io.py CACHE [--repeats 5]

Takes the first shard of a real cache (`dflash-cache demo` makes one), writes it in both profiles into a temporary
folder beside the cache, and reads it back. Everything is warm (page cache). GB/s are of decoded hidden states; judge
the ratios, which come from interleaved runs.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import zarr

from dflash_cache.format.cache import FeatureCache
from dflash_cache.format.layout import ARRAY_NAMES, shard_layout
from dflash_cache.format.manifest import ShardEntry
from dflash_cache.format.shard import ShardData, ShardReader, write_shard

STATES = ("fc_features", "last_hidden_states")


def load(cache: FeatureCache) -> ShardData:
    reader = cache.shard(0)
    return ShardData(**{name: reader.arrays[name].read(0, reader.layout[name].shape[0]) for name in ARRAY_NAMES})


def interleaved(tasks: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each task, run in turns so that another load meets all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(repeats):
        for name, task in tasks.items():
            start = time.perf_counter()
            task()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def report(title: str, seconds: dict[str, float], gigabytes: float, baseline: str) -> None:
    print(f"\n{title}")
    for name, value in seconds.items():
        print(f"  {name:34s} {gigabytes / value:6.2f} GB/s   x{seconds[baseline] / value:5.2f} of {baseline}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    cache = FeatureCache.open(arguments.cache)
    data = load(cache)
    features = cache.manifest.identity.features
    gigabytes = (data.fc_features.nbytes + data.last_hidden_states.nbytes) / 1e9
    print(
        f"{len(data.input_ids):,} tokens, {gigabytes:.3f} GB of hidden states of {cache.manifest.identity.target.name}"
    )
    with tempfile.TemporaryDirectory(dir=arguments.cache.parent) as folder, ThreadPoolExecutor(2) as threads:
        for codec in ("compact", "fast"):
            measure(Path(folder) / codec, codec, data, features, threads, arguments.repeats, gigabytes)


def measure(root, codec, data, features, threads, repeats, gigabytes) -> None:
    root.mkdir()
    count = iter(range(10**6))
    layout = shard_layout(len(data.input_ids), len(data.doc_lengths), features, codec)

    def write_direct() -> Path:
        folder = root / f"direct{next(count)}"
        write_shard(folder, data, features, codec, threads)
        return folder

    shard = write_direct()

    def write_zarr() -> None:
        group = zarr.open_group(root / f"zarr{next(count)}", mode="w")
        source = zarr.open_group(shard, mode="r")
        for name in STATES:
            array = zarr.create_array(
                group.store_path / name,
                shape=source[name].shape,
                dtype=source[name].dtype,
                chunks=source[name].chunks,
                shards=source[name].shards,
                compressors=source[name].compressors,
                filters=source[name].filters,
                fill_value=source[name].fill_value,
            )
            array[:] = getattr(data, name).view(source[name].dtype)

    def write_plain() -> None:
        with (root / f"plain{next(count)}").open("wb") as file:
            for name in STATES:
                file.write(getattr(data, name).data)

    tasks = {"plain file": write_plain, "direct (2 threads, fsync)": write_direct, "zarr-python": write_zarr}
    report(f"{codec}: write", interleaved(tasks, repeats), gigabytes, "zarr-python")

    with ThreadPoolExecutor(1) as encoder:
        entries = write_shard(root / "sealed", data, features, codec, encoder)
    tokens = len(data.input_ids)
    entry = ShardEntry(
        name="shard-00000.zarr",
        first_document=0,
        num_documents=len(data.doc_lengths),
        num_tokens=tokens,
        supervised_tokens=int(data.loss_mask.sum()),
        arrays=entries,
    )
    reader = ShardReader.staged(root / "sealed", entry, features, codec)
    buffers = {name: np.empty(layout[name].shape, np.uint16) for name in STATES}
    plain = root / "plain_states"
    plain.write_bytes(b"".join(getattr(data, name).tobytes() for name in STATES))
    raw_buffer = bytearray(plain.stat().st_size)

    def read_plain() -> None:
        with plain.open("rb", buffering=0) as file:
            file.readinto(raw_buffer)

    def read_direct() -> None:
        for name in STATES:
            reader.arrays[name].read(0, tokens, buffers[name])

    def read_zarr() -> None:
        group = zarr.open_group(root / "sealed", mode="r")
        for name in STATES:
            group[name][:]

    tasks = {"plain file, reused buffer": read_plain, "direct (1 thread)": read_direct, "zarr-python": read_zarr}
    report(f"{codec}: read", interleaved(tasks, repeats), gigabytes, "zarr-python")
    raw = sum(layout[name].raw_bytes for name in STATES)
    stored = sum(entries[name].bytes for name in STATES)
    print(f"  hidden states stored in {stored / raw:.3f} of raw (ratio {raw / stored:.3f})")


if __name__ == "__main__":
    main()
