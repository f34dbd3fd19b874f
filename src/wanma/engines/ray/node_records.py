"""Records of the nodes of a run on Ray, in the run's folder `engine`, which all nodes see."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from wanma.job.run.run_directory import RunDirectory

MARKER_FILE = "ray-run"
"""File of the submission by which a node knows the run directory; its text is the prefix of the run."""


def node_file(run_directory: str | Path, index: int, suffix: str) -> Path:
    """Return the path of the record ('json') or of the output ('log') of a node."""
    return RunDirectory(Path(run_directory)).engine_files / f"ray-node-{index}.{suffix}"


def read_node_records(run: RunDirectory) -> dict[int, dict[str, Any]]:
    """Return the records of the nodes that have started, by index: `host`, `exit` code and `problem`."""
    paths = run.engine_files.glob("ray-node-*.json")
    return dict(sorted((int(path.stem.rpartition("-")[2]), json.loads(path.read_text())) for path in paths))
