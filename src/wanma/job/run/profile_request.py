"""Request for a profile of a run that goes on: a file in its directory, which its supervisors look for."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from wanma.job.run.run_directory import RunDirectory, write_json

MAX_NUMBER = 255
"""Largest number of a request: a byte of the supervisor's page has it; 1 follows."""
MAX_STEPS = 100
"""Most steps of a profile: it is held in memory."""


@dataclass(frozen=True)
class ProfileRequest:
    """Request for a profile."""

    number: int
    """1 .. `MAX_NUMBER`; another than that of the request before."""
    steps: int
    """Steps to profile, 1 .. `MAX_STEPS`."""
    ranks: Sequence[int]


def request_profile(run: RunDirectory, steps: int, ranks: Sequence[int]) -> ProfileRequest:
    """Write a request; return it.

    Raises:
        OSError: the run directory cannot be written to.
    """
    before = read_profile_request(run)
    # Where the earlier request was deleted, the supervisor still knows its number: 1 may be that.
    number = (before.number if before is not None else int(time.time())) % MAX_NUMBER + 1
    request = ProfileRequest(number, steps, tuple(ranks))
    _file(run).parent.mkdir(exist_ok=True)
    for path in _file(run).parent.glob(f"{number}-rank-*"):
        path.unlink()
    write_json(_file(run), asdict(request))
    return request


def read_profile_request(run: RunDirectory, number: int | None = None) -> ProfileRequest | None:
    """Return the newest request; None: there is none, or not of this number, or it is damaged."""
    try:
        request = ProfileRequest(**json.loads(_file(run).read_text()))
        is_wanted = 1 <= request.number <= MAX_NUMBER and number in (None, request.number)
    except (OSError, ValueError, TypeError):
        return None
    return request if is_wanted else None


def trace_file(run: RunDirectory, number: int, rank: int) -> Path:
    """Return the file of a rank's trace."""
    return run.path / "profiles" / f"{number}-rank-{rank}.json.gz"


def _file(run: RunDirectory) -> Path:
    return run.path / "profiles" / "request.json"
