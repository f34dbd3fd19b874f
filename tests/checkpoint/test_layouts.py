"""Saved on any layout, loaded on any other, bit for bit: four real processes, see layouts_program.py."""

from __future__ import annotations

import itertools
import runpy
from pathlib import Path

import pytest

from support.ranks import run_ranks
from wanma.job.run.worker import WorkerContext

PROGRAM = Path(__file__).with_name("layouts_program.py")
LAYOUTS = [
    "one process",
    "replicated on 2",
    "replicated on 4",
    "DTensor replicated on 4",
    "rows on 2",
    "columns on 4",
    "rows x columns",
    "FSDP2 on 2",
    "FSDP2 on 4",
    "hybrid 2 x 2",
    "FSDP2 x tensor parallel",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def reports(folder: Path) -> list[dict[str, str]]:
    """Findings of each rank."""
    return run_ranks(try_layouts, 4, (str(PROGRAM), folder), seconds=240, is_reused=True)


def try_layouts(worker: WorkerContext, program: str, folder: Path) -> dict[str, str]:
    main = runpy.run_path(program)["main"]
    return dict(main(worker.rank, folder))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_save_on_every_layout_is_whole(reports: list[dict[str, str]], layout: str) -> None:
    assert reports[0][f"whole {layout}"] == ""
    assert {report.get(f"save {layout}", "") for report in reports} == {""}


@pytest.mark.parametrize(("source", "target"), list(itertools.product(LAYOUTS, LAYOUTS)))
def test_saved_on_one_layout_it_loads_on_another(
    reports: list[dict[str, str]], source: str, target: str
) -> None:
    key = f"{source} -> {target}"
    assert reports[0][key] == ""
    assert {report.get(key, "") for report in reports} == {""}


def test_no_element_is_written_twice(reports: list[dict[str, str]], folder: Path) -> None:
    saves = sorted((folder / "saves").iterdir())
    assert len(saves) == len(LAYOUTS)
    single = payload_bytes(saves[0])
    assert [payload_bytes(save) for save in saves] == [single] * len(saves)


def test_replicas_share_the_writing(reports: list[dict[str, str]], folder: Path) -> None:
    save = sorted((folder / "saves").iterdir())[LAYOUTS.index("replicated on 4")]
    sizes = [path.stat().st_size - header_bytes(path) for path in save.glob("rank-*.safetensors")]
    assert len(sizes) == 4
    assert max(sizes) < 1.5 * min(sizes)


def header_bytes(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def payload_bytes(save: Path) -> int:
    return sum(path.stat().st_size - header_bytes(path) for path in save.glob("rank-*.safetensors"))
