from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.command import Desk, Training
from support.fault_table import PROPERTY, Row
from support.nodes import SHARDED, Machines
from support.recovered import COMMON, STEPS, WHOLE_STEPS

HERE = Path(__file__).parent


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    """A test's own: no name of a run or of marks can meet another test's."""
    (tmp_path / "desk").mkdir()
    return Desk(tmp_path / "desk", modules=HERE)


@pytest.fixture(scope="session")
def shared_desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    """Undisturbed runs with which those of the tests are compared."""
    return Desk(tmp_path_factory.mktemp("desk"), modules=HERE)


@pytest.fixture(scope="session")
def whole_of(shared_desk: Desk) -> Callable[[tuple[str, ...]], Training]:
    """The run with these overrides that nothing happens to, long enough for every run compared with it."""
    made: dict[tuple[str, ...], Training] = {}

    def whole_of(overrides: tuple[str, ...]) -> Training:
        if overrides not in made:
            name = f"whole-{len(made)}"
            every = [f"checkpoint.{key}={STEPS}" for key in ("every_steps", "keep_every_steps")]
            words = (f"train.steps={WHOLE_STEPS}", *every, "checkpoint.in_memory_every_steps=off", *overrides)
            shared_desk.run("train", *COMMON, *words, "--run-dir", name).check()
            made[overrides] = shared_desk.training(name)
        return made[overrides]

    return whole_of


@pytest.fixture(scope="session")
def whole(whole_of: Callable[[tuple[str, ...]], Training]) -> Training:
    """On two replicas."""
    return whole_of(())


@pytest.fixture
def note(record_property: Callable[[str, Any], None]) -> Callable[[Row], None]:
    """Put a row into the table of faults: what the test has asserted, and what it took."""

    def note(row: Row) -> None:
        record_property(PROPERTY, dataclasses.asdict(row))

    return note


@pytest.fixture(scope="session")
def untroubled(shared_desk: Desk) -> Training:
    """The run on two machines that nothing happens to."""
    both = Machines(shared_desk, "untroubled", *SHARDED)
    both.start(0)
    both.start(1)
    assert [one.code for one in both.end()] == [0, 0]
    return shared_desk.training("untroubled")
