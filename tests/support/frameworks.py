"""Scripts of TensorFlow and JAX under `wanma launch`, in their own environments (make frameworks)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy
import pytest

from support.command import Desk, Ran
from support.networks import Cable

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = REPOSITORY / "tests" / "scripts"
SECRET = "0123456789abcdef"


def python_of(framework: str) -> Path:
    """Return the interpreter of an environment that has the framework, and neither wanma nor torch."""
    return REPOSITORY / ".venv-frameworks" / framework / "bin" / "python"


def needs(framework: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        not python_of(framework).exists(), reason=f"needs an environment of {framework}: make frameworks"
    )


def command(framework: str, script: str, *words: str, options: tuple[str, ...]) -> list[str]:
    """Return the words after `wanma` that start a script of tests/scripts."""
    environment = ["--framework", framework, "--python", str(python_of(framework))]
    return ["launch", *environment, *options, str(SCRIPTS / script), *words]


def run_on_two_nodes(desk: Desk, network: Cable, words: list[str], **environment: str) -> list[Ran]:
    """Run a command with `--nodes 2` in both namespaces of a network; the run directory is `both`."""
    place = ("--nodes", "2", "--rendezvous", f"{network.addresses[0]}:29500", "--run-dir", "both")
    nodes = [
        desk.start(
            words[0],
            *place,
            "--set",
            f"cluster.node_rank={rank}",
            *words[1:],
            before=("ip", "netns", "exec", name),
            WANMA_SECRET=SECRET,
            **environment,
        )
        for rank, name in enumerate(network.names)
    ]
    return [node.end() for node in nodes]


def read_metrics(run: Path, ranks: int) -> list[list[float]]:
    """Return the losses that each rank has appended to its file of metrics, in the order of its steps."""
    files = [run / "metrics.jsonl", *(run / "logs" / f"rank-{rank}.jsonl" for rank in range(1, ranks))]
    records = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    assert all([one["step"] for one in of_rank] == list(range(1, len(of_rank) + 1)) for of_rank in records)
    return [[one["loss"] for one in of_rank] for of_rank in records]


def read_printed(text: str, mark: str) -> list[float]:
    """Return the losses of the only line that begins with `mark`."""
    (line,) = re.findall(rf"^{re.escape(mark)}, losses (.*)$", text, re.MULTILINE)
    return [float(word) for word in line.split()]


def numpy_losses(steps: int = 8, global_batch: int = 16) -> list[float]:
    """Return the losses of the scripts' training, computed in one process with numpy in float64."""
    features = numpy.random.default_rng(0).normal(size=(64, 4)).astype(numpy.float32).astype(float)
    targets = features.sum(axis=1, keepdims=True)
    weight = numpy.zeros((4, 1))
    losses = []
    for step in range(steps):
        rows = slice(step * global_batch % 64, step * global_batch % 64 + global_batch)
        errors = features[rows] @ weight - targets[rows]
        losses.append(float((errors**2).mean()))
        weight -= 0.1 * 2 * features[rows].T @ errors / global_batch
    return losses
