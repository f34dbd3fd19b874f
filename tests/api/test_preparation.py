"""Preparation of a run: a child process reads the model, and the command tells its errors and its end."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, sys
from wanma.api.run import preparation
from wanma.job.errors import JobError, WanmaError
from wanma.job.file.loading import to_job
from wanma.planner.preparation.job_workload import read_model

def read(job):
    if job.train.steps == 1:
        raise JobError("no model", "name one")
    if job.train.steps == 2:
        os._exit(3)
    return read_model(job)

def read_by_child(steps):
    job = to_job({"model": {"preset": "gpt-1m", "lora_rank": 2}, "train": {"steps": steps}})
    with preparation._model_reader(job, {}) as reader:
        assert reader is not preparation.read_model
        return reader(job, {}).workload.parameters

preparation.read_model = read
assert read_by_child(3) > 500_000
for steps, code, text in ((1, 2, "no model"), (2, 1, "has ended")):
    try:
        read_by_child(steps)
    except WanmaError as error:
        assert (error.exit_code, text in error.message) == (code, True), error
    else:
        raise AssertionError(steps)
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    assert "torch" not in sys.modules
"""


def test_a_model_is_read_by_a_child_whose_errors_are_the_parents() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
