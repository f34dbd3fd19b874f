"""Output of a program on a disk that is full: it is read to its end, and the reason is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from wanma.bench.programs.running_program import Output
from wanma.job.errors import WanmaError

FULL = Path("/dev/full")
"""Device on which every write fails for want of space."""


@pytest.mark.parametrize("lines", [1, 20_000], ids=["in the buffer", "more than a pipe holds"])
def test_a_full_disk_neither_stops_the_program_nor_goes_unnoticed(lines: int) -> None:
    command = [sys.executable, "-S", "-c", f"for step in range({lines}): print('step', step)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        output = Output(process.stdout, FULL)
        assert process.wait(timeout=60) == 0
        with pytest.raises(WanmaError, match="/dev/full: No space left"):
            output.close()
    assert len(output.lines) == lines
