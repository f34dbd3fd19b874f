from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from support.command import Desk, Training

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    return Desk(tmp_path_factory.mktemp("desk"), modules=HERE)


_whole: dict[tuple[str, ...], Training] = {}
_printed: dict[str, str] = {}
"""Standard output of the command that trained a run, by the name of the run."""


def uninterrupted(desk: Desk, plan: tuple[str, ...] = ()) -> Training:
    """The finished run of text.toml under `plan`, trained once per session."""
    key = (str(desk.folder), *plan)
    if key not in _whole:
        name = f"whole-{len(_whole)}"
        ran = desk.run("train", "text.toml", "--run-dir", name, *plan).check()
        _whole[key] = desk.training(name)
        _printed[name] = ran.out
    return _whole[key]


@pytest.fixture
def whole(desk: Desk) -> Training:
    """An uninterrupted run with two replicas; tests copy it before they change it."""
    return uninterrupted(desk)


@pytest.fixture
def printed(whole: Training) -> str:
    """Standard output of the command that trained `whole`."""
    return _printed[whole.path.name]


@pytest.fixture
def whole_of_plan(desk: Desk) -> Callable[[tuple[str, ...]], Training]:
    """The uninterrupted run with overrides that choose the layout."""
    return partial(uninterrupted, desk)
