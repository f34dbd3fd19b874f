"""Request for another number of parameter servers: a file in the run directory, which the run takes away."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from wanma.job.run.run_directory import RunDirectory, write_json


def request_servers(run: RunDirectory, count: int) -> None:
    """Write a request for `count` servers, in place of one that is not taken.

    Raises:
        OSError: the run directory cannot be written to.
    """
    write_json(_file(run), {"count": count})


def take_server_request(run: RunDirectory) -> int | None:
    """Take the request away, and return its number of servers; None: there is none, or it is damaged."""
    try:
        count = json.loads(_file(run).read_text())["count"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError):
        count = None
    withdraw_server_request(run)
    return count if isinstance(count, int) and count > 0 else None


def has_server_request(run: RunDirectory) -> bool:
    """Return whether a request waits to be taken."""
    return _file(run).exists()


def withdraw_server_request(run: RunDirectory) -> None:
    with contextlib.suppress(OSError):
        _file(run).unlink()


def _file(run: RunDirectory) -> Path:
    return run.path / "servers.json"
