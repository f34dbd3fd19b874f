"""Scripts of other frameworks under `wanma launch`, in environments of their own (make frameworks)."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy
import pytest

from support.command import Desk, Ran
from support.networks import Cable

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = REPOSITORY / "tests" / "scripts"
SECRET = "0123456789abcdef"


def python_of(framework: str) -> Path:
    """Return the interpreter of an environment that has the framework."""
    return REPOSITORY / ".venv-frameworks" / framework / "bin" / "python"


def needs(framework: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        not python_of(framework).exists(),
        reason=f"needs an environment of {framework}: make frameworks, or make horovod",
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


def check_scripts_on_an_engine(desk: Desk, *options: str, **environment: str) -> None:
    """Run scripts of torch, JAX and TensorFlow, one rank on each of two nodes; compare them with one process.

    Args:
        desk: the folder of the user's project.
        options: options of `wanma launch` for the engine.
        environment: environment variables of the command.
    """
    (desk.folder / ".wanmaignore").write_text("home-cache/\n")
    for name, words in {"ddp": (), "jax_training": (), "tensorflow_training": ("workers",)}.items():
        shutil.copy(SCRIPTS / f"{name}.py", desk.folder)
        framework = name.partition("_")[0]
        place = ("--nodes", "2", "--ranks", "1")
        if framework != "ddp":
            place += ("--framework", framework, "--python", str(python_of(framework)))
        desk.start("launch", *options, *place, f"{name}.py", *words, **environment).end().check()
        run = desk.folder / "runs" / name
        if framework == "ddp":
            logs = [(run / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 1)]
            ends = [log.partition(f"rank {rank} (0 here) of 2: loss ")[2] for rank, log in enumerate(logs)]
            assert ends[0] == ends[1] != "", logs
        else:
            losses = read_metrics(run, 2)
            assert losses[0] == losses[1] == pytest.approx(numpy_losses(), rel=1e-5), name


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
