"""Make targets of the environments that the tests near a change need.

python -m support.gate.environments REVISION
"""

from __future__ import annotations

import sys

from support.changed import changed_files, distances, needs_everything
from support.gate.order import TESTS, files_behind

TARGETS = ("peers", "frameworks", "hadoop", "ray", "docs", "wheel")
"""Targets, each with an environment `.venv-TARGET`."""


def targets_for(revision: str, imports: int = 3) -> list[str]:
    """Return the targets for the tests that `--changed-since=revision --changed-within=imports` selects."""
    changed = changed_files(revision)
    if needs_everything(changed):
        return list(TARGETS)
    near = {TESTS.parent / name for name, hops in distances(changed).items() if hops <= imports}
    tests = [file for file in near if file.is_relative_to(TESTS) and file.name.startswith("test_")]
    texts = [behind.read_text() for file in tests for behind in files_behind(file)]
    return [target for target in TARGETS if any(f".venv-{target}" in text for text in texts)]


if __name__ == "__main__":
    print(*targets_for(sys.argv[1]))
