"""Laws of every format: detection by content, random access as sequential reading, refusal of damage."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.data_files import CASES, LocalFile, RemoteFile, list_files, plain, write_case
from support.grids import rotated
from wanma.data.formats.detection import best_format, detect_format, format_named, known_formats, probe_file
from wanma.data.formats.format import BadDataError, Certainty, Probe
from wanma.data.index.build import open_or_build_index
from wanma.data.index.sample_index import SampleIndex
from wanma.job.errors import WanmaError

SAMPLES = 20
_NUMBERS = count()


@pytest.fixture(scope="module", autouse=True)
def _closed_files() -> Iterator[None]:
    """Close the mapped files of the module at its end."""
    yield
    opened.cache_clear()


@cache
def written(name: str) -> tuple[Path, list[dict[str, object]]]:
    """Folder of a case's files and their samples, written once."""
    place = Path(mkdtemp()) / name
    return place, write_case(name, place, SAMPLES)


def open_case(name: str, cache_folder: Path, kind: type[LocalFile] = LocalFile) -> SampleIndex:
    return open_or_build_index(list_files(written(name)[0], kind), CASES[name].data_format, cache_folder)


@cache
def opened(name: str, kind: type[LocalFile]) -> SampleIndex:
    return open_case(name, Path(mkdtemp()), kind)


def read_all(index: SampleIndex) -> list[object]:
    return [plain(record) for record in index.read(np.arange(index.rows))]


@pytest.mark.parametrize("kind", [LocalFile, RemoteFile])
@pytest.mark.parametrize("name", CASES)
def test_samples_are_read_as_they_were_written(name: str, kind: type[LocalFile]) -> None:
    index = opened(name, kind)
    expected = [plain(record) for record in written(name)[1]]
    assert index.rows == len(expected) >= SAMPLES
    assert read_all(index) == expected


@pytest.mark.parametrize(("name", "kind"), rotated(CASES, [LocalFile, RemoteFile], ["local", "remote"]))
@given(data=st.data())
def test_random_access_gives_what_sequential_reading_gives(
    name: str, kind: type[LocalFile], data: st.DataObject
) -> None:
    index = opened(name, kind)
    expected = written(name)[1]
    numbers = data.draw(st.lists(st.integers(0, index.rows - 1), max_size=30))
    found = index.read(np.array(numbers, np.int64))
    assert [plain(record) for record in found] == [plain(expected[number]) for number in numbers]


@pytest.mark.parametrize("name", CASES)
def test_the_format_is_found_by_content(name: str) -> None:
    found = detect_format(list_files(written(name)[0]))
    if name == "text-lines":
        assert found.name == "text"  # only its name asks for lines
    else:
        assert found.name == CASES[name].data_format.name


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.needs_suffix])
def test_the_suffix_does_not_decide_where_content_does(name: str) -> None:
    """Each format that a content shows is found under a name without a suffix, and under another's suffix."""
    case = CASES[name]
    files = list_files(written(name)[0])
    if case.data_format.markers:
        files = [file for file in files if file.path.name in ("state.json", "a.idx")]
    probe = probe_file(files[0])
    for other in ("x", "x.txt", "x.csv", "x.parquet", "x.tar"):
        alone = probe.name if case.data_format.name == "huggingface" else other
        found = best_format(Probe(alone, probe.head, probe.tail, probe.size), known_formats().values())
        assert found is not None
        assert found.name == case.data_format.name, other


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.needs_suffix])
def test_the_suffix_decides_between_texts(name: str) -> None:
    probe = probe_file(list_files(written(name)[0])[0])
    formats = known_formats().values()
    assert {one.name for one in formats if one.detect(probe)} <= {"text", "csv"}
    assert best_format(Probe("x.md", probe.head, b"", 1), formats) == format_named("text")
    if name in ("csv", "tsv"):
        assert best_format(Probe("x.csv", probe.head, b"", 1), formats) == format_named("csv")


TEXTS = {"text", "text-lines", "csv"}
"""Formats as which any text can be read."""


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("other", sorted(known_formats()))
def test_a_file_of_another_format_is_refused(name: str, other: str, tmp_path: Path) -> None:
    own = CASES[name].data_format.name
    is_text = own in {*TEXTS, "jsonl", "json-list"}
    if other == own or (other in TEXTS and is_text):
        return
    if {own, other} == {"arrow", "huggingface"}:
        return  # the same tables, with and without their description
    with pytest.raises(WanmaError) as raised:
        read_all(open_or_build_index(list_files(written(name)[0]), format_named(other), tmp_path))
    assert str(written(name)[0]) in raised.value.message


def check_error(error: WanmaError, folder: Path) -> None:
    assert str(folder) in error.message
    assert "\n" not in error.message
    if isinstance(error, BadDataError):
        assert Path(error.file).is_relative_to(folder)


def cut_positions(size: int, generator: random.Random) -> list[int]:
    places = {0, 1, 3, 11, size // 2, size - 1, size - 5, size - 17}
    return sorted(
        place for place in places | {generator.randrange(size) for _ in range(8)} if 0 <= place < size
    )


@pytest.mark.parametrize("name", [name for name in CASES if name != "images"])
def test_a_truncated_file_is_refused(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    expected = [plain(record) for record in written(name)[1]]
    generator = random.Random(1)
    whole = [file for file in list_files(written(name)[0]) if file.path.name != "dataset_info.json"]
    for file in whole[:4]:
        content = file.path.read_bytes()
        for size in cut_positions(len(content), generator):
            place = tmp_path / str(next(_NUMBERS))
            write_case(name, place, SAMPLES)
            (place / file.path.relative_to(written(name)[0])).write_bytes(content[:size])
            try:
                found = read_all(open_or_build_index(list_files(place), case.data_format, tmp_path / "cache"))
            except BadDataError as error:
                check_error(error, place)
                continue
            if case.truncation == "refused":
                assert found == expected, (file.path.name, size)
            elif len(whole) == 1:
                same = len(found) - (case.truncation == "text")
                assert found[: max(same, 0)] == expected[: max(same, 0)], (file.path.name, size)


def damage(content: bytearray, generator: random.Random) -> None:
    """Flip a bit, set, remove or insert bytes."""
    place = generator.randrange(len(content))
    match generator.randrange(4):
        case 0:
            content[place] ^= 1 << generator.randrange(8)
        case 1:
            content[place] = generator.choice([0, 127, 128, 255])
        case 2:
            del content[place : place + generator.randint(1, 8)]
        case 3:
            content[place:place] = generator.randbytes(generator.randint(1, 8))


def check_damaged_files(name: str, folder: Path, count: int, seed: int) -> None:
    """Read damaged files: each gives samples, or an error that names it, and nothing else."""
    generator = random.Random(seed)
    for number in range(count):
        place = folder / str(number)
        write_case(name, place, 5)
        path = generator.choice([file.path for file in list_files(place) if file.size])
        content = bytearray(path.read_bytes())
        damage(content, generator)
        path.write_bytes(content)
        try:
            read_all(open_or_build_index(list_files(place), CASES[name].data_format, folder / "cache"))
        except WanmaError as error:
            check_error(error, place)


@pytest.mark.parametrize("name", CASES)
def test_damaged_bytes_raise_no_other_error(name: str, tmp_path: Path) -> None:
    check_damaged_files(name, tmp_path, 15, seed=2)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_many_damaged_bytes_raise_no_other_error(name: str, tmp_path: Path) -> None:
    check_damaged_files(name, tmp_path, 300, seed=3)


@pytest.mark.parametrize("name", CASES)
def test_empty_files_have_no_samples_or_are_refused(name: str, tmp_path: Path) -> None:
    place = tmp_path / "files"
    write_case(name, place, 2)
    for file in list_files(place):
        file.path.write_bytes(b"")
    files = list_files(place)
    try:
        index = open_or_build_index(files, CASES[name].data_format, tmp_path)
        read_all(index)
    except WanmaError as error:
        check_error(error, place)
    else:
        assert index.rows == 0
    with pytest.raises(WanmaError, match="empty"):
        detect_format(files)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    write_case("jsonl", tmp_path / "files")
    files = list_files(tmp_path / "files")
    files[0].path.unlink()
    with pytest.raises(BadDataError, match="the file is missing") as raised:
        open_or_build_index(files, CASES["jsonl"].data_format, tmp_path)
    assert raised.value.file == files[0].url


def test_a_file_that_changes_under_a_run_is_noticed(tmp_path: Path) -> None:
    write_case("jsonl", tmp_path / "files")
    files = list_files(tmp_path / "files")
    index = open_or_build_index(files, CASES["jsonl"].data_format, tmp_path)
    files[0].path.write_text('{"id": 1}\n')
    with pytest.raises(BadDataError, match="the file has changed"):
        index.read(np.array([0]))


def test_a_batch_of_a_remote_file_is_one_call_of_ranges(tmp_path: Path) -> None:
    index = open_case("tfrecord", tmp_path, RemoteFile)
    (file,) = index.groups[0].files
    assert isinstance(file, RemoteFile)
    file.calls.clear()
    index.read(np.arange(SAMPLES))
    assert [len(ranges) for ranges in file.calls] == [SAMPLES]


def test_over_mapped_memory_samples_are_views(tmp_path: Path) -> None:
    for name, field in (("tar-ustar", "jpg"), ("cifar", "image"), ("megatron", "tokens"), ("npy", "array")):
        value = opened(name, LocalFile).read(np.array([3]))[0][field]
        assert isinstance(value, memoryview) or not value.flags.owndata, name
        assert memoryview(value).readonly is not False


def test_an_unknown_content_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"\xfe\xed\xfa\xce" + bytes(range(256)))
    with pytest.raises(BadDataError, match="no known format"):
        detect_format([LocalFile.of(path)])
    with pytest.raises(WanmaError, match=r"'parqet'\. Did you mean 'parquet'"):
        format_named("parqet")


def test_certainty_is_ordered() -> None:
    assert Certainty.NO < Certainty.POSSIBLE < Certainty.LIKELY < Certainty.SURE
