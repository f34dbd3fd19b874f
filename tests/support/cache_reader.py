"""Processes that read files through a node cache, forked from one that has imported what they need.

A process reads ranges of all files in an order of its own until each byte was read. Then it writes the hash
of each file and its traffic as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import s3fs  # noqa: F401  (its import takes longer than all reads)

from wanma.data.cache.node_cache import NodeCache
from wanma.data.stores.client import store_traffic
from wanma.data.stores.listing import list_files
from wanma.elastic.workers.linux_processes import process_state


@dataclass
class Reader:
    """Process that reads.

    Attributes:
        number: number of the process.
        output: file that it writes at its end, atomically.
    """

    number: int
    output: Path

    def is_alive(self) -> bool:
        return process_state(self.number) not in ("gone", "dead")

    def kill(self) -> None:
        """Kill it, and wait until it has gone."""
        if self.is_alive():
            os.kill(self.number, signal.SIGKILL)
        self.wait()

    def wait(self, seconds: float = 240) -> None:
        deadline = time.monotonic() + seconds
        while self.is_alive():
            assert time.monotonic() < deadline, f"process {self.number} reads for ever"
            time.sleep(0.005)

    def result(self) -> dict[str, Any]:
        """Return what it has written, after its end."""
        self.wait()
        assert self.output.exists(), f"process {self.number} failed: see the output of the test"
        return dict(json.loads(self.output.read_text()))


class Readers:
    """Starter of such processes, which share the environment that this one has now."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._started = folder, list[Reader]()
        folder.mkdir()
        tests = Path(__file__).parents[1]
        environment = {**os.environ, "PYTHONPATH": f"{tests}{os.pathsep}{tests.parent / 'src'}"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.cache_reader"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def start(self, cache: Path, limit: int, block: int, seed: int, urls: Sequence[str]) -> Reader:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        output = self._folder / str(len(self._started))
        order = [str(output), str(cache), limit, block, seed, list(urls)]
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        self._started.append(Reader(int(self._process.stdout.readline()), output))
        return self._started[-1]

    def close(self) -> None:
        for reader in self._started:
            reader.kill()
        self._process.communicate(timeout=60)


@contextmanager
def cache_readers(folder: Path) -> Iterator[Readers]:
    """Start processes whose results are files in `folder`, which is created."""
    readers = Readers(folder)
    try:
        yield readers
    finally:
        readers.close()


def _read(cache_folder: str, limit: int, block: int, seed: int, urls: list[str]) -> dict[str, Any]:
    files = list_files(urls, "data.text")
    cache = NodeCache(Path(cache_folder), limit, block)
    sources = [cache.open(file) for file in files]
    step = block // 3 + 1
    ranges = [
        (number, start) for number, source in enumerate(sources) for start in range(0, source.size, step)
    ]
    random.Random(seed).shuffle(ranges)
    contents = [bytearray(source.size) for source in sources]
    for first in range(0, len(ranges), 4):
        for number in range(len(sources)):
            starts = [start for owner, start in ranges[first : first + 4] if owner == number]
            parts = sources[number].read_ranges([(start, start + step) for start in starts])
            for start, part in zip(starts, parts, strict=True):
                contents[number][start : start + len(part)] = part
    hashes = [hashlib.sha256(content).hexdigest() for content in contents]
    return {
        "hashes": hashes,
        "downloads": cache.traffic["cache_blocks", "miss"],
        "requests": store_traffic()["store_requests", "s3"],
    }


def _serve() -> None:
    """Fork a process for each line of standard input, and print its number."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended ones are gone at once
    while line := sys.stdin.readline():
        output, *arguments = json.loads(line)
        if (number := os.fork()) == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            partial = Path(f"{output}.part")
            partial.write_text(json.dumps(_read(*arguments)))
            partial.rename(output)
            os._exit(0)
        print(number, flush=True)


if __name__ == "__main__":
    _serve()
