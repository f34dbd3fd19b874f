"""Formats of other packages, by entry points of the group wanma.formats."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from support.data_files import LocalFile
from wanma.data.formats import detection
from wanma.data.formats.byte_ranges import RangeFormat, RangeScan
from wanma.data.formats.detection import detect_format, format_named, known_formats
from wanma.data.formats.format import Certainty, Content, FileGroup, Probe, Record
from wanma.data.index.build import open_or_build_index
from wanma.data.opening import open_dataset
from wanma.data.stores.byte_source import ByteSource
from wanma.job.errors import WanmaError
from wanma.job.sections.data import DataSection
from wanma.job.sections.train import TrainSection


@dataclass(frozen=True)
class Pairs(RangeFormat):
    """Format of records of two bytes behind a magic number."""

    name: ClassVar[str] = "pairs"

    def detect(self, probe: Probe) -> Certainty:
        return Certainty.SURE if probe.head.startswith(b"PAIRS") else Certainty.NO

    def scan_ranges(self, source: ByteSource, group: FileGroup) -> RangeScan:
        starts = np.arange(5, source.size, 2)
        return RangeScan(starts, starts + 2)

    def parse(self, content: Content, facts: Mapping[str, Any]) -> Record:
        return {"first": content[0], "second": content[1]}


class Taken(Pairs):
    name: ClassVar[str] = "jsonl"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Let a package have an entry point whose value is the test's parameter."""
    entry = EntryPoint("own", request.param, detection.ENTRY_POINT_GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda self: globals()[self.attr])
    monkeypatch.setattr(detection, "entry_points", lambda group: [entry] if group == entry.group else [])
    detection._known_formats.cache_clear()
    yield
    detection._known_formats.cache_clear()


@pytest.mark.parametrize("installed", ["own:Pairs"], indirect=True)
def test_a_format_of_another_package_is_found_and_read(installed: None, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"PAIRSabcd")
    files = [LocalFile.of(path)]
    assert detect_format(files) == format_named("pairs") == Pairs()
    index = open_or_build_index(files, Pairs(), tmp_path)
    assert index.read(np.array([1, 0])) == [{"first": 99, "second": 100}, {"first": 97, "second": 98}]


@pytest.mark.parametrize(
    ("installed", "cause"),
    [
        ("own:Missing", "cannot be loaded: 'Missing'"),
        ("own:Path", "is no subclass of wanma.data.formats"),
        ("own:Taken", "takes the name 'jsonl'"),
    ],
    indirect=["installed"],
)
def test_an_entry_point_that_is_no_format_is_named(installed: None, cause: str) -> None:
    with pytest.raises(WanmaError, match=f"the entry point own = own:.*{cause}"):
        known_formats()


MODULE = """\
import os
from dataclasses import dataclass

import numpy as np

from wanma.data.formats.byte_ranges import RangeFormat, RangeScan
from wanma.data.formats.format import Certainty


@dataclass(frozen=True)
class Marked(RangeFormat):
    name = "marked"

    def detect(self, probe):
        return Certainty.SURE if probe.head.startswith(b"MARKED") else Certainty.NO

    def scan_ranges(self, source, group):
        starts = np.arange(6, source.size)
        return RangeScan(starts, starts + 1)

    def parse(self, content, facts):
        return {"process": os.getpid(), "value": content[0]}
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a package with a format, which other processes find, too."""
    folder = tmp_path / "site" / "marked-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: marked\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        f"[{detection.ENTRY_POINT_GROUP}]\nmarked = marked_files:Marked\n"
    )
    (folder.parent / "marked_files.py").write_text(MODULE)
    monkeypatch.syspath_prepend(folder.parent)
    detection._known_formats.cache_clear()
    yield
    detection._known_formats.cache_clear()


@pytest.mark.usefixtures("package")
def test_a_table_in_a_format_of_another_package_is_read_by_loader_processes(tmp_path: Path) -> None:
    (tmp_path / "rows").write_bytes(b"MARKED" + bytes(range(20)))
    columns = {"features": ["process"], "target": "value", "target_type": "class"}
    section = DataSection.model_validate(
        {"path": str(tmp_path / "rows"), "columns": columns, "cache": str(tmp_path), "validation_fraction": 0}
    )
    by_processes, by_threads = (
        open_dataset(section.model_copy(update={"worker_processes": chosen}), TrainSection()).batch(range(30))
        for chosen in (None, False)
    )
    assert by_processes.targets.tolist() == by_threads.targets.tolist()
    assert set(by_threads.inputs[0].flatten().tolist()) == {os.getpid()}
    assert os.getpid() not in by_processes.inputs[0]
