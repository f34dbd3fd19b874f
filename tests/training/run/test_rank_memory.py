"""Peak memory of a rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from wanma.training.run.rank_memory import peak_rank_memory_bytes

PROGRAM = """
import mmap, os
from wanma.training.run.rank_memory import peak_rank_memory_bytes, reset_peak_memory
block = bytearray(b"x") * (64 << 20)
del block
print(peak_rank_memory_bytes("cpu"))
reset_peak_memory("cpu")
print(peak_rank_memory_bytes("cpu"))
file = os.memfd_create("copies")
os.ftruncate(file, 64 << 20)
memory = mmap.mmap(file, 64 << 20)
for start in range(0, 64 << 20, 1 << 20):
    memory[start : start + (1 << 20)] = b"x" * (1 << 20)
print(peak_rank_memory_bytes("cpu"))
"""


def test_the_kernel_s_numbers_are_read_in_bytes(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmHWM:\t  2048 kB\nRssShmem:\t  1024 kB\n")
    assert peak_rank_memory_bytes("cpu", status) == 1 << 20


def test_the_peak_has_what_was_let_go_until_it_is_reset_and_no_files_in_memory() -> None:
    answer = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    before, after, with_file = map(int, answer.stdout.split())
    assert before - after > 48 << 20
    assert abs(with_file - after) < 16 << 20
