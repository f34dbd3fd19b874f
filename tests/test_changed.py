"""Selection of tests by what a change touches."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import git
from support.changed import changed_files, distances, needs_everything


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository in which two tests import two modules, one of them by way of another."""
    files = {
        "src/wanma/__init__.py": "",
        "src/wanma/low.py": "",
        "src/wanma/high.py": "from wanma import low\n",
        "src/wanma/lazy.py": "def f():\n    from wanma.low import x\n",
        "src/wanma/typed.py": "import typing\nif typing.TYPE_CHECKING:\n    import wanma.low\n",
        "src/wanma/cli/__init__.py": "",
        "src/wanma/cli/main.py": "import wanma.high\n",
        "tests/test_low.py": "from wanma.low import x\n",
        "tests/test_high.py": "import wanma.high\n",
        "tests/test_lazy.py": "import wanma.lazy\n",
        "tests/test_typed.py": "import wanma.typed\n",
        "tests/test_named.py": 'run("wanma.high:f")\n',
        "tests/test_command.py": 'run(["wanma", "train"])\n',
        "tests/test_page.py": 'PAGE = "guide.md"\n',
        "tests/room/conftest.py": "import wanma.low\n",
        "tests/room/test_in_room.py": "",
        "docs/guide.md": "text\n",
    }
    return git.repository(tmp_path, files)


def test_tests_are_found_by_their_distance_from_a_change(repository: Path) -> None:
    found = distances({"src/wanma/low.py"}, repository)
    tests = {Path(path).name: hops for path, hops in found.items() if path.startswith("tests/")}
    assert tests == {
        "test_low.py": 1,
        "conftest.py": 1,
        "test_in_room.py": 2,
        "test_high.py": 2,
        "test_lazy.py": 2,
        "test_named.py": 2,
        "test_command.py": 3,
    }


def test_a_page_is_found_by_its_name(repository: Path) -> None:
    assert set(distances({"docs/guide.md"}, repository)) == {"docs/guide.md", "tests/test_page.py"}


def test_what_is_not_committed_and_what_git_does_not_know_is_a_change(repository: Path) -> None:
    (repository / "src/wanma/low.py").write_text("x = 1\n")
    (repository / "tests/test_new.py").write_text("")
    assert changed_files("HEAD", repository) == {"src/wanma/low.py", "tests/test_new.py"}
    git.git(repository, "commit", "-qam", "second")
    assert changed_files("HEAD", repository) == {"tests/test_new.py"}
    assert changed_files("HEAD~1", repository) == {"src/wanma/low.py", "tests/test_new.py"}


def test_a_change_of_versions_touches_everything() -> None:
    assert needs_everything({"docs/a.md", "constraints.txt"})
    assert not needs_everything({"docs/a.md"})
