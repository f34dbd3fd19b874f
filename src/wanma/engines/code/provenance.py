"""Provenance of a run's code: commit, branch, changes since the commit, in the run directory.

`code/commit.json` names the commit of the working tree, `code/diff.patch` holds its changes of tracked files,
for `git apply`. A repository that git cannot read is a reason in the JSON and no error: the run goes on.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wanma.engines.code.git import NoRepositoryError, repository_root, run_git
from wanma.engines.code.secret_names import git_exclusions, secret_names
from wanma.engines.code.snapshot import CodeSnapshot
from wanma.job.errors import WanmaError
from wanma.job.run.run_directory import RunDirectory, write_json

MOST_DIFF_BYTES = 5_000_000
MOST_NAMES = 1000
"""Largest number of untracked names in the JSON."""


@dataclass
class _Status:
    """Output of `git status`, parsed."""

    commit: str | None = None
    branch: str | None = None
    changed: list[str] = field(default_factory=list)
    untracked: list[str] = field(default_factory=list)


def record_provenance(
    folder: Path, run: RunDirectory, snapshot: CodeSnapshot | None = None
) -> dict[str, Any]:
    """Write `code/commit.json` and `code/diff.patch` of the working tree that contains `folder`.

    The diff leaves out files whose names look like credentials; the JSON has their names.

    Returns:
        The content of `code/commit.json`; its keys are in docs/reference/run-directory.md.

    Raises:
        WanmaError: the run directory cannot be written.
    """
    patch = b""
    try:
        record, patch = _describe(repository_root(folder))
    except NoRepositoryError as error:
        record = {"commit": None, "reason": str(error)}
    except WanmaError as error:
        record = {"commit": None, "reason": error.message}
    record["snapshot"] = None if snapshot is None else snapshot.digest
    try:
        run.code.mkdir(parents=True, exist_ok=True)
        diff = run.code / "diff.patch"
        diff.unlink(missing_ok=True)
        if patch:
            partial = diff.with_name(f".diff.patch.{os.getpid()}")
            partial.write_bytes(patch)
            partial.replace(diff)
        write_json(run.code / "commit.json", record)
    except OSError as error:
        raise WanmaError(
            f"cannot write to {run.code}: {error.strerror}",
            "free space there, or choose another --run-dir",
        ) from error
    return record


def _describe(root: Path) -> tuple[dict[str, Any], bytes]:
    """Return the content of the JSON and of the patch."""
    status = _parse_status(
        run_git(
            root, "status", "--porcelain=v2", "--branch", "--untracked-files=all", "--no-renames", "-z"
        ).text
    )
    if status.commit is None:
        base = run_git(root, "hash-object", "-t", "tree", "--stdin").text.decode().strip()  # the empty tree
    else:
        base = "HEAD"
    options = ("--no-ext-diff", "--no-textconv", "--no-color", "--no-renames", "--binary", "--src-prefix=a/")
    diff = run_git(
        root,
        *("diff", *options, "--dst-prefix=b/", base, "--", ":/", *git_exclusions()),
        limit_bytes=MOST_DIFF_BYTES,
    )
    patch = diff.text
    if diff.is_cut:
        end = patch.rfind(b"\n") + 1
        patch = patch[:end] + b"# wanma: the diff is cut after %d bytes\n" % end
    record = {
        "commit": status.commit,
        "branch": status.branch,
        "is_dirty": bool(status.changed or status.untracked),
        "changed": status.changed[:MOST_NAMES],
        "untracked": status.untracked[:MOST_NAMES],
        "untracked_files": len(status.untracked),
        "left_out_of_diff": secret_names(status.changed),
        "diff_is_cut": diff.is_cut,
    }
    return record, patch


def _parse_status(text: bytes) -> _Status:
    """Parse `git status --porcelain=v2 --branch -z` without renames."""
    status = _Status()
    for line in os.fsdecode(text).split("\0"):
        kind, _, rest = line.partition(" ")
        match kind:
            case "#":
                key, _, value = rest.partition(" ")
                if key == "branch.oid" and value != "(initial)":
                    status.commit = value
                elif key == "branch.head" and value != "(detached)":
                    status.branch = value
            case "?":
                status.untracked.append(_printable(rest))
            case "1":
                status.changed.append(_printable(rest.split(" ", 7)[7]))
            case "u":
                status.changed.append(_printable(rest.split(" ", 9)[9]))
    return status


def _printable(name: str) -> str:
    """Return a name as valid Unicode; bytes that are no UTF-8 become escapes in hexadecimal."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
