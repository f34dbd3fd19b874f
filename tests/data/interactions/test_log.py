"""Reading of interactions: formats, fields, bags, bad rows refused by file and row, or left out."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pydantic import ValidationError

from wanma.cli.main import main
from wanma.data.data_kinds import with_data_kinds
from wanma.data.formats.format import BadDataError, Record, Rows
from wanma.data.index.records import read_each
from wanma.data.index.sample_index import SampleIndex
from wanma.data.interactions import log_columns
from wanma.data.interactions.dataset import InteractionDataset
from wanma.data.interactions.id_hashing import hash_ids
from wanma.data.interactions.log import Bags, InteractionLog, read_log
from wanma.data.interactions.log_files import (
    first_record,
    interaction_faults,
    open_log,
    resolve_columns,
)
from wanma.data.interactions.synthetic import make_synthetic_log
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.file.loading import load_job, to_job
from wanma.job.sections.data import DataSection

HEADER = "user,item,rating,time\n"


def section_of(path: Path, columns: dict[str, Any] | None = None, **keys: Any) -> DataSection:
    own = {name: keys.pop(name) for name in ("bad_data", "bad_data_limit", "format") if name in keys}
    cache = path.parent / "cache"
    data = {"path": str(path), "kind": "interactions", "columns": columns or {}, "interactions": keys}
    return DataSection.model_validate({**data, "cache": str(cache), **own})


def read(path: Path, text: str, columns: dict[str, Any] | None = None, **keys: Any) -> InteractionLog:
    path.write_text(text)
    return read_log(section_of(path, columns, **keys))


@pytest.mark.parametrize(
    ("name", "separator", "header"),
    [("u.data", "\t", ""), ("u.tsv", "  ", ""), ("u.csv", ",", HEADER)],
    ids=["tabs", "blanks", "comma and header"],
)
def test_text_files_give_the_same_log(tmp_path: Path, name: str, separator: str, header: str) -> None:
    rows = [("3", "7", "4.5", "10"), ("0", "2", "1", "9"), ("3", "0", "5", "11")]
    log = read(tmp_path / name, header + "".join(separator.join(row) + "\n" for row in rows))
    assert log.users.tolist() == [3, 0, 3]
    assert log.items.tolist() == [7, 2, 0]
    assert log.targets.tolist() == [4.5, 1, 5]
    assert log.times.tolist() == [10, 9, 11]


def test_a_file_of_blanks_whose_later_lines_have_tabs_is_read(tmp_path: Path) -> None:
    log = read(tmp_path / "u.tsv", "0   50  5 88\n0   17 5 88\n196\t242\t3\t87\n")
    assert (log.users.tolist(), log.items.tolist()) == ([0, 0, 196], [50, 17, 242])


CRITEO = load_job(Path(__file__).parents[3] / "examples" / "criteo.toml").data
CRITEO_ROWS = [
    ["0", "1", "", "-2", "5", *["0"] * 9, "68fd1e64", "80e26c9b", "", *["a73ee510"] * 23],
    ["1", "3", "7", "", "44", *["12"] * 9, "", "f0cf0024", "05db9164", *["25c83c98"] * 22, ""],
    ["0", "", "0", "1", "9", *["2"] * 9, "68fd1e64", "80e26c9b", "05db9164", *["a73ee510"] * 23],
]


@pytest.mark.parametrize("name", ["train.txt", "day_0", "train.tsv", "day_0.gz"])
def test_a_file_in_criteo_s_format_is_a_log_of_clicks(name: str, tmp_path: Path) -> None:
    text = "".join("\t".join(row) + "\n" for row in CRITEO_ROWS).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    places = {"path": [str(tmp_path / name)], "cache": str(tmp_path / "cache"), "kind": "interactions"}
    section = CRITEO.model_copy(update=places)
    log = read_log(section)
    assert log.targets.tolist() == [0, 1, 0]
    assert log.times.tolist() == [0, 1, 2]
    numbers = [[1, 0, 0, 5, *[0] * 9], [3, 7, 0, 44, *[12] * 9], [0, 0, 1, 9, *[2] * 9]]
    assert log.dense == pytest.approx(np.log1p(np.array(numbers)), rel=1e-6)
    assert list(log.features) == [str(number) for number in range(16, 40)]
    columns = {"14": log.users, "15": log.items}
    columns |= {feature: bags.ids for feature, bags in log.features.items()}
    for number, ids in enumerate(columns.values(), start=14):
        assert ids.tolist() == hash_ids([row[number] for row in CRITEO_ROWS], 100_000).tolist()
    assert all(np.diff(bags.starts).tolist() == [1, 1, 1] for bags in log.features.values())
    index = open_log(section)
    resolved = resolve_columns(section.columns, section.interactions, first_record(index))
    records = read_each(index, np.arange(3))
    assert [list(interaction_faults(one, resolved, section)) for one in records] == [[], [], []]


def test_an_id_is_hashed_to_the_same_row_everywhere() -> None:
    values = ["68fd1e64", "", None, float("nan"), 7, "7", 7.0, np.int32(7), 0.5]
    assert hash_ids(values, 1000).tolist() == [209, 756, 756, 756, 255, 255, 255, 255, 235]


def test_bags_of_texts_are_hashed_by_their_parts(tmp_path: Path) -> None:
    text = "user,item,rating,genres\nann,1,5,action|noir\nbob,1,4,\n"
    hashed = {"u*": 1000, "genres": 50}
    log = read(tmp_path / "log.csv", text, {"sparse": ["genres"]}, hash_rows=hashed)
    assert log.users.tolist() == hash_ids(["ann", "bob"], 1000).tolist()
    assert log.items.tolist() == [1, 1]
    assert log.features["genres"].ids.tolist() == hash_ids(["action", "noir", ""], 50).tolist()
    assert log.features["genres"].starts.tolist() == [0, 2, 3]


@pytest.mark.parametrize(
    "keys",
    [{"hash_rows": {"words": 10}}, {"log_dense": True}, {"missing_dense": 1.0}],
    ids=lambda keys: min(keys),
)
def test_a_key_without_its_field_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=min(keys)):
        section_of(Path("log.csv"), **keys)


def test_fields_of_a_file_without_header_have_numbers(tmp_path: Path) -> None:
    columns = {"user": "1", "item": "0", "time": "2", "sparse": ["3"]}
    log = read(tmp_path / "log.csv", "7,3,10,1|2\n2,0,9,\n", columns, target="click")
    assert (log.users.tolist(), log.items.tolist(), log.times.tolist()) == ([3, 0], [7, 2], [10, 9])
    assert log.targets.tolist() == [1, 1]  # the third field is the time, and no rating
    assert log.features["3"].ids.tolist() == [1, 2]


@pytest.mark.parametrize("hash_rows", [{}, {"tags": 50}], ids=["ids", "hashed"])
def test_rows_of_one_id_are_read_as_among_rows_of_several(tmp_path: Path, hash_rows: dict[str, int]) -> None:
    ids = ["3", "", "017", "9" * 12, "0"]
    lines = "".join(f"{number},1,2,{one}\n" for number, one in enumerate(ids))
    header = "user,item,rating,tags\n"
    alone, among = (
        read(tmp_path / name, header + text, {"sparse": ["tags"]}, hash_rows=hash_rows).features["tags"]
        for name, text in (("alone.csv", lines), ("among.csv", f"{lines}5,1,2,4|5\n"))
    )
    assert alone.starts.tolist() == among.starts[:-1].tolist()
    assert alone.ids.tolist() == among.ids[:-2].tolist()


@pytest.mark.parametrize(
    ("column", "value"), [("user", "-4"), ("item", "1.5"), ("item", "x"), ("rating", "nan"), ("tags", "2|-7")]
)
def test_a_bad_value_is_named_with_its_file_row_and_column(tmp_path: Path, column: str, value: str) -> None:
    row = {"user": "1", "item": "2", "rating": "3", "tags": "4"}
    lines = [",".join(row), ",".join(row.values()), ",".join({**row, column: value}.values())]
    with pytest.raises(WanmaError) as raised:
        read(tmp_path / "log.csv", "\n".join(lines) + "\n", {"sparse": ["tags"]})
    assert raised.value.exit_code == EXIT_USAGE
    place = f"data.path: {tmp_path / 'log.csv'}: row 1: "
    assert all(part in raised.value.message for part in (place, f"column {column}", value.split("|")[-1]))


ROWS = [f"{n % 5},{n % 7},{n % 3},{n}" for n in range(40)]
BAD = {3: "x,1,2,3", 11: "1,2", 30: "1,2,nan,4"}


def write_damaged(folder: Path) -> Path:
    """Write rows of which three are bad, in two files."""
    rows = [BAD.get(number, row) for number, row in enumerate(ROWS)]
    folder.mkdir()
    for name, part in (("a.csv", rows[:25]), ("b.csv", rows[25:])):
        (folder / name).write_text(HEADER + "\n".join(part) + "\n")
    return folder


def test_bad_rows_are_left_out_listed_and_limited(tmp_path: Path) -> None:
    folder = write_damaged(tmp_path / "log")
    section = section_of(folder, bad_data="skip", split="time")
    log = read_log(section)
    whole = read(
        tmp_path / "whole.csv",
        HEADER + "".join(f"{row}\n" for number, row in enumerate(ROWS) if number not in BAD),
    )
    for name in ("users", "items", "targets", "times"):
        assert np.array_equal(getattr(log, name), getattr(whole, name))
    places = [(str(folder / "a.csv"), 3), (str(folder / "a.csv"), 11), (str(folder / "b.csv"), 5)]
    assert [(file, row) for file, row, _ in log.bad_rows] == places
    assert (log.place(3), log.place(25)) == (f"{folder / 'a.csv'}: row 4", f"{folder / 'b.csv'}: row 2")
    data = InteractionDataset(section, 1, 100)
    assert data.describe()["bad_rows"]["count"] == 3
    assert f"{folder / 'a.csv'}: row 3: " in data.bad_data_note
    with pytest.raises(WanmaError, match=r"data\.bad_data_limit"):
        read_log(section.model_copy(update={"bad_data_limit": 2}))
    with pytest.raises(WanmaError, match=f"{folder / 'a.csv'}: row 3: ") as raised:
        read_log(section.model_copy(update={"bad_data": None}))
    assert raised.value.exit_code == EXIT_USAGE


def test_a_file_that_cannot_be_read_is_left_out_as_a_whole(tmp_path: Path) -> None:
    folder = write_damaged(tmp_path / "log")
    (folder / "a.csv").write_bytes(b"user,item\n\xff\0")
    section = section_of(folder, bad_data="skip", split="time")
    log = read_log(section)
    assert len(log) == 14
    assert [one.file for one in log.damaged] == [str(folder / "a.csv")]
    with pytest.raises(WanmaError, match=r"a\.csv"):
        read_log(section.model_copy(update={"bad_data": "refuse"}))


def test_verification_lists_the_same_rows_as_reading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_damaged(tmp_path / "log")
    (tmp_path / "job.toml").write_text(
        f'[model]\nfamily = "recommender"\n[data]\npath = "{folder}"\ncache = "{tmp_path / "cache"}"\n'
    )
    assert main(["data", "verify", str(tmp_path / "job.toml"), "--json", "--processes", "1"]) == 1
    damages = json.loads(capsys.readouterr().out)["damages"]
    listed = read_log(section_of(folder, bad_data="skip")).bad_rows
    assert [(one["file"], one["row"], one["cause"]) for one in damages] == [tuple(row) for row in listed]


def test_a_log_is_converted_once_until_its_rows_or_settings_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted: list[int] = []

    def count(index: SampleIndex, rows: Rows) -> list[Record | BadDataError]:
        converted.append(len(rows))
        return read_each(index, rows)

    monkeypatch.setattr(log_columns, "read_each", count)
    section, click = (section_of(tmp_path / "log.csv", target=target) for target in ("rating", "click"))
    (tmp_path / "log.csv").write_text(HEADER + "\n".join(ROWS))
    first = read_log(section)
    again = read_log(section.model_copy(update={"validation_fraction": 0.5}))
    assert converted == [40]
    for name in ("users", "items", "targets", "times", "dense"):
        assert np.array_equal(getattr(again, name), getattr(first, name))
    assert read_log(click).targets.tolist() == [1.0] * 40
    (tmp_path / "log.csv").write_text(HEADER + "\n".join(ROWS[:-1]))
    assert len(read_log(section)) == 39
    assert converted == [40, 40, 39]


def test_one_changed_value_of_a_large_table_is_read(tmp_path: Path) -> None:
    path, ratings = tmp_path / "log.arrow", np.ones(40_000)
    for changed in (False, True):
        if changed:
            ratings[3000] = 5  # at no place from which the fingerprint of the file takes a block
        table = pa.table({"user": np.arange(40_000), "item": np.arange(40_000), "rating": ratings})
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table)
        assert read_log(section_of(path)).targets[3000] == ratings[3000]


@pytest.mark.parametrize(
    "bad", [{}, {0: "x", 5: "9|x", 6: "x", 7: "x", 8: "x", 10: "x"}], ids=["good", "bad"]
)
def test_chunks_of_a_log_are_one_log(
    bad: dict[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tags = ["1|2", "", "3", "4|5|6", "", "", "7", "", "8", "9", ""]
    rows = [f"{n},{n % 7},{n % 3},{n},{bad.get(n, tag)}" for n, tag in enumerate(tags)]
    listed: list[int] = []
    monkeypatch.setattr(log_columns, "list_bad_rows", lambda _, faults: listed.append(len(faults)))
    monkeypatch.setattr(log_columns, "_CHUNK_ROWS", 3)
    columns = {"sparse": ["tags"]}
    log = read(
        tmp_path / "log.csv", "user,item,rating,time,tags\n" + "\n".join(rows), columns, bad_data="skip"
    )
    good = [number for number in range(len(tags)) if number not in bad]
    assert log.users.tolist() == good
    assert [log.place(row).rpartition(" ")[2] for row in range(len(log))] == [str(number) for number in good]
    ids, starts = log.features["tags"].take(np.arange(len(good)))
    assert ids.tolist() == [int(one) for number in good for one in tags[number].split("|") if one]
    assert np.diff([*starts, len(ids)]).tolist() == [len(tags[n].split("|")) if tags[n] else 0 for n in good]
    assert [row for _, row, _ in log.bad_rows] == sorted(bad)
    assert listed == []  # not with each chunk: only once, of all


def test_columns_of_earlier_logs_make_room(tmp_path: Path) -> None:
    folder, names, logs = tmp_path / "cache" / "interactions", list[set[str]](), list[InteractionLog]()
    for number, name in enumerate("abc"):
        (tmp_path / f"{name}.csv").write_text(HEADER + "\n".join(ROWS[number:]))
        logs.append(read_log(section_of(tmp_path / f"{name}.csv").model_copy(update={"cache_bytes": 0})))
        names.append({file.name for file in folder.iterdir()})
    assert [len(one) for one in names] == [1, 2, 3]  # the ranks of a node may still open them
    sizes = [file.stat().st_size for file in folder.iterdir()]
    for age, new in enumerate([names[1] - names[0], names[0], names[2] - names[1]]):
        os.utime(folder / new.pop(), (age, age))
    (tmp_path / "d.csv").write_text(HEADER + "\n".join(ROWS[3:]))
    limit = {"cache_bytes": max(sizes) * 3}
    read_log(section_of(tmp_path / "d.csv").model_copy(update=limit))
    names.append({file.name for file in folder.iterdir()})
    assert len(names[3]) == 3
    assert names[3] >= names[2] - (names[1] - names[0])  # the one that was opened first of all is gone
    assert logs[1].items.tolist() == [n % 7 for n in range(1, 40)]


_CONVERT = """
import resource, sys
from wanma.data.interactions.log import read_log
from wanma.job.sections.data import DataSection
section = DataSection.model_validate_json(sys.argv[1])
read_log(section.model_copy(update={"path": [sys.argv[2]]}))  # imports and threads
(in_use,) = [int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")]
limit = in_use * 1024 + int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
log = read_log(section)
print(len(log), len(log.bad_rows), int(log.users.sum()), int(log.features["tags"].ids.sum()))
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process")
def test_a_log_of_two_million_rows_is_converted_in_less_memory_than_its_columns_take(tmp_path: Path) -> None:
    rows, names = 2_000_000, [f"tag{number}" for number in range(6)]
    header = ",".join(["user", "item", "time", "tags", *names]) + "\n"
    expected_users = expected_ids = bad = 0
    with (tmp_path / "log.csv").open("w") as file:
        file.write(header)
        for start in range(0, rows, 1000):
            lines = []
            for row in range(start, start + 1000):
                user = row % 4096
                is_bad = row % 997 == 0
                bad += is_bad
                expected_users += 0 if is_bad else user
                expected_ids += 0 if is_bad else row % 31 + 7
                lines.append(f"{'x' if is_bad else user},{row % 8191},{row},{row % 31}|7,1,2,3,4,5,6\n")
            file.writelines(lines)
    (tmp_path / "small.csv").write_text(header + "1,2,3,4|7,1,2,3,4,5,6\n" * 10)
    columns = {"sparse": ["tags", *names]}
    section = section_of(tmp_path / "log.csv", columns, target="click", bad_data="skip", bad_data_limit=rows)
    row_bytes = 8 + 8 + 4 + 8 + 2 * 8 + 8 + 6 * 16
    arguments = [section.model_dump_json(), str(tmp_path / "small.csv"), str(rows * row_bytes * 2 // 3)]
    result = subprocess.run(
        [sys.executable, "-c", _CONVERT, *arguments], capture_output=True, text=True, check=False, timeout=600
    )
    assert result.returncode == 0, result.stderr
    assert [int(word) for word in result.stdout.split()] == [rows - bad, bad, expected_users, expected_ids]


def test_a_missing_field_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WanmaError, match=r"data\.columns.*time"):
        read(tmp_path / "log.csv", "user,item,rating\n0,1,5\n", split="leave_last")
    with pytest.raises(WanmaError, match=r"data\.columns.*who"):
        read(tmp_path / "log.csv", "user,item,rating\n0,1,5\n", {"user": "who"})


@pytest.mark.parametrize(
    ("model", "data", "kind"),
    [
        ({"family": "recommender"}, {}, "interactions"),
        ({"preset": "dlrm-small"}, {}, "interactions"),  # by its fields user and item
        ({"preset": "dlrm-small"}, {"columns": {"user": "item", "item": "user"}}, "interactions"),
        ({"preset": "gpt-1m"}, {"kind": "text"}, "text"),
    ],
)
def test_interactions_are_known_by_the_model_by_columns_or_by_their_fields(
    model: dict[str, Any], data: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    (tmp_path / "log.csv").write_text(HEADER + "\n".join(ROWS))
    job = to_job({"model": model, "data": {"path": str(tmp_path / "log.csv"), **data}})
    assert with_data_kinds(job).data.content == kind


@pytest.mark.parametrize(
    ("starts", "ids", "offsets"),
    [([0, 1, 2, 3], [9, 5, 9], [0, 1, 2]), ([0, 2, 2, 3], [9, 5, 7, 9], [0, 1, 3])],
)
def test_rows_are_taken_with_their_ids(starts: list[int], ids: list[int], offsets: list[int]) -> None:
    taken = Bags(np.array([5, 7, 9]), np.array(starts)).take(np.array([2, 0, 2]))
    assert [array.tolist() for array in taken] == [ids, offsets]


def test_a_synthetic_log_has_the_rows_that_it_names_each_pair_once() -> None:
    log = make_synthetic_log(50, 80, 1000)
    pairs = log["user"] * 80 + log["item"]
    assert len(pairs) == len(set(pairs.tolist())) == 1000
    assert set(log["user"].tolist()) == set(range(50))
    assert set(log["rating"].tolist()) == {1, 2, 3, 4, 5}
    counts = np.sort(np.bincount(log["item"], minlength=80))
    assert counts[-8:].sum() > 3 * counts[:8].sum()


@pytest.mark.parametrize("entry", ["synthetic:5x5x30", "synthetic:5x5", "synthetic:9x9x5"])
def test_an_impossible_synthetic_log_is_refused(entry: str) -> None:
    section = DataSection(path=[entry])
    assert section.content == "interactions"
    with pytest.raises(WanmaError, match="synthetic"):
        read_log(section)
