"""Names of a run in Ray, and records of its nodes in the run's folder `engine`, which all nodes see.

A run has a prefix; its placement groups are PREFIXgGROUP, of which g0 has the first nodes; the actor of node
INDEX is PREFIXgGROUP-INDEX.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from wanma.job.run.run_directory import RunDirectory

MARKER_FILE = "ray-run"
"""File of the submission by which a node knows the run directory; its text is the prefix of the run."""


def group_of(actor: str) -> str:
    """Return the name of the placement group of an actor."""
    return actor.rpartition("-")[0]


def index_of(actor: str) -> int:
    """Return the index of an actor's node."""
    return int(actor.rpartition("-")[2])


def node_file(run_directory: str | Path, index: int, suffix: str) -> Path:
    """Return the path of the record ('json') or of the output ('log') of a node."""
    return RunDirectory(Path(run_directory)).engine_files / f"ray-node-{index}.{suffix}"


def read_node_records(run_directory: str | Path) -> dict[int, dict[str, Any]]:
    """Return the records of the nodes that have started, by index: `host`, `exit` code and `problem`."""
    paths = RunDirectory(Path(run_directory)).engine_files.glob("ray-node-*.json")
    return dict(sorted((index_of(path.stem), json.loads(path.read_text())) for path in paths))
