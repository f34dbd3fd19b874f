from __future__ import annotations

from pathlib import Path

import pytest

from support.command import Desk, Training

HERE = Path(__file__).parent
PLANS = {
    "replicate 2": (),
    "ZeRO-3 2": ("parallel.dp_replicate=1", "parallel.dp_shard=2", "parallel.shard=parameters"),
}


@pytest.fixture(scope="session")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    return Desk(tmp_path_factory.mktemp("desk"), modules=HERE)


@pytest.fixture(scope="session", params=PLANS)
def plan(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Overrides that choose the layout."""
    return PLANS[request.param]


_whole: dict[tuple[str, ...], Training] = {}


def uninterrupted(desk: Desk, plan: tuple[str, ...] = ()) -> Training:
    """The finished run of text.toml under `plan`, trained once per session."""
    key = (str(desk.folder), *plan)
    if key not in _whole:
        name = f"whole-{len(_whole)}"
        ran = desk.run("train", "text.toml", "--run-dir", name, *plan)
        assert ran.code == 0, ran.text
        _whole[key] = desk.training(name)
    return _whole[key]


@pytest.fixture
def whole(desk: Desk) -> Training:
    """An uninterrupted run with two replicas; tests copy it before they change it."""
    return uninterrupted(desk)


@pytest.fixture
def whole_of_plan(desk: Desk, plan: tuple[str, ...]) -> Training:
    return uninterrupted(desk, plan)
