"""`wanma data inspect`: format, fields, lengths and rows, decoded."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
from PIL import Image

from support.chats import conversations, tokens_of, write_chats, write_tokenizer
from support.data_command import DataCommand
from support.data_files import CASES, write_case
from wanma.data.text.tokenizer import load_tokenizer

RECORDS = [
    {"text": "horse " * number, "id": number, "url": None if number % 2 else "u"} for number in range(1, 41)
]
JOB = """\
[model]
preset = "gpt-1m"
[data]
text = ["corpus"]
sequence_length = 16
[train]
steps = 1
global_batch = 1
"""


def test_json_lines_show_fields_lengths_and_rows(data: DataCommand) -> None:
    data.write_lines("a.jsonl", RECORDS)
    ran = data("inspect", "a.jsonl", "--rows", "1")
    assert ran.code == 0
    assert ran.err == "", "progress is shown only where it takes time"
    assert "data: jsonl, 1 file, " in ran.out
    assert "40 rows" in ran.out
    assert re.search(r"^url +text +50.0 %$", ran.out, re.MULTILINE)
    assert "a.jsonl: row 0\n" in ran.out
    assert "a.jsonl: row 1\n" not in ran.out
    assert "  text  horse" in ran.out


def test_lengths_are_exact_for_all_rows(data: DataCommand) -> None:
    path = data.write_lines("a.jsonl", RECORDS)
    sizes = [len(line) for line in path.read_bytes().splitlines()]
    (source,) = data.json("inspect", "a.jsonl", "--tokenizer", "bytes", "--sequence-length", "100")
    assert source["byte_lengths"] == {
        "rows": 40,
        "is_exact": True,
        "minimum": min(sizes),
        "median": np.median(sizes),
        "p95": pytest.approx(np.quantile(sizes, 0.95)),
        "maximum": max(sizes),
        "total": sum(sizes),
    }
    tokens = [6 * number + 1 for number in range(1, 41)]  # with the end of the document
    assert source["token_lengths"]["total"] == sum(tokens)
    assert source["packing"]["longer_share"] == sum(count > 100 for count in tokens) / 40
    assert source["packing"]["sequences"] == (sum(tokens) - 1) // 100


def test_random_rows_are_drawn_by_the_seed(data: DataCommand) -> None:
    data.write_lines("a.jsonl", RECORDS)
    command = ("inspect", "a.jsonl", "--rows", "0", "--sample", "5")
    first, again, other = (data.json(*command, "--seed", seed)[0]["shown"] for seed in ("1", "1", "2"))
    assert len(first) == 5
    assert first == again != other


def test_a_job_is_inspected_by_its_tokenizer_and_sequence_length(data: DataCommand) -> None:
    (data.folder / "corpus").mkdir()
    (data.folder / "corpus" / "a.txt").write_text("ten thousand horses\n" * 3)
    (data.folder / "corpus" / "b.txt").write_text("one")
    (data.folder / "corpus" / "c.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (data.folder / "job.toml").write_text(JOB)
    ran = data("inspect", "job.toml", "data.sequence_length=32").check()
    assert "text: text, 2 files" in ran.out
    assert "left out: 1 file" in ran.out
    assert "sequences of 32 tokens: about 2" in ran.out
    assert "50.0 % of rows are longer" in ran.out


def test_the_sources_of_a_job_are_shown_by_format_and_field(data: DataCommand) -> None:
    data.write_lines("corpus/a.jsonl", [{"meta": {"body": "horse" * 4}}, {"meta": {"body": "camel"}}])
    (data.folder / "corpus" / "b.txt").write_text("ten")
    columns = 'columns = { text = "meta.body" }\n'
    (data.folder / "job.toml").write_text(JOB.replace("sequence", f"{columns}sequence", 1))
    lines, text = data.json("inspect", "job.toml")
    assert (lines["name"], lines["format"], lines["rows"]) == ("text/jsonl", "jsonl", 2)
    assert (lines["token_lengths"]["minimum"], lines["token_lengths"]["maximum"]) == (6, 21)
    assert lines["packing"]["longer_share"] == 0.5
    assert (text["name"], text["rows"]) == ("text/text", 1)


def test_tokens_are_decoded(data: DataCommand) -> None:
    np.savez(data.folder / "a.npz", tokens=np.frombuffer(b"horsecamel", np.uint8).reshape(2, 5).astype("u2"))
    (source,) = data.json("inspect", "a.npz", "--tokenizer", "bytes")
    assert [row["fields"]["tokens"] for row in source["shown"]] == [
        "horse\n[104 111 114 115 101]",
        "camel\n[99 97 109 101 108]",
    ]


def test_images_are_described_and_written_as_png(data: DataCommand) -> None:
    data.write_image("pictures/cat/1.jpg", (255, 0, 0), "JPEG")
    data.write_image("pictures/dog/2.png", (0, 0, 255))
    ran = data("inspect", "pictures", "--images", "shown").check()
    assert "<JPEG, 6 x 4, RGB, " in ran.out
    assert "2 images written:" in ran.out
    (red, blue) = sorted((data.folder / "shown").iterdir())
    assert red.name == "data-00000000-image.png"
    assert Image.open(blue).getpixel((0, 0)) == (0, 0, 255)


def test_the_images_of_a_job_are_its_training_and_its_test_set(data: DataCommand) -> None:
    generator = np.random.default_rng(0)
    arrays = {
        f"{kind}_{part}": generator.integers(0, 9, (count, 4, 4) if kind == "x" else count, np.uint8)
        for part, count in (("train", 6), ("test", 2))
        for kind in "xy"
    }
    np.savez(data.folder / "digits.npz", **arrays)
    (data.folder / "job.toml").write_text('[model]\npreset = "resnet-18"\n[data]\nimages = "digits.npz"\n')
    train, test = data.json("inspect", "job.toml")
    assert (train["name"], train["rows"], test["name"], test["rows"]) == ("train", 6, "validation", 2)
    assert train["shown"][0]["fields"]["x_train"].startswith("<pixels 4 x 4, ")


@pytest.mark.parametrize("name", CASES)
def test_every_format_is_shown(name: str, data: DataCommand) -> None:
    write_case(name, data.folder / "in", 20)
    asked = () if name != "text-lines" else ("--format", "text-lines")
    (source,) = data.json("inspect", "in", *asked)
    assert source["format"] == CASES[name].data_format.name
    assert source["rows"] >= 20
    assert source["damaged"] == []
    assert len(source["shown"]) == 3
    assert all(row["fields"] and not row["fault"] for row in source["shown"])


def test_an_option_of_the_format_changes_what_a_row_is(data: DataCommand) -> None:
    case = next(name for name in CASES if CASES[name].data_format.name == "megatron")
    write_case(case, data.folder / "in", 20)
    documents, sequences = (
        data.json("inspect", "in", "--option", f"unit={unit}")[0]["rows"] for unit in ("document", "sequence")
    )
    assert documents < sequences


def test_a_damaged_file_is_listed_and_the_others_are_shown(data: DataCommand) -> None:
    data.write_lines("in/a.jsonl", RECORDS)
    (data.folder / "in" / "b.jsonl").write_bytes(b'{"text": "\0"}\n')
    ran = data("inspect", "in")
    assert ran.code == 0
    assert "damaged: 1 file;" in ran.out
    assert "b.jsonl: a zero byte at 10" in ran.out


def test_a_description_beside_data_is_no_data(data: DataCommand) -> None:
    data.write_lines("in/data/a.jsonl", RECORDS)
    (data.folder / "in" / "README.md").write_text("# A data set\n")
    (source,) = data.json("inspect", "in")
    assert (source["format"], source["files"], source["rows"]) == ("jsonl", 1, 40)


def test_a_narrow_terminal_cuts_no_number(data: DataCommand) -> None:
    data.write_lines("a.jsonl", RECORDS)
    ran = data("inspect", "a.jsonl", "--rows", "1", columns=40)
    assert ran.code == 0
    assert "…" not in ran.out
    assert "100.0 %" in ran.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("missing",), "DATA: 'missing' does not exist"),
        (("empty",), "no file in the folder 'empty'"),
        (("zero",), "a.txt' is empty"),
        (("a.jsonl", "--format", "parque"), "Did you mean 'parquet'?"),
        (("a.jsonl", "--option", "x=1"), "the format 'jsonl' has no option 'x'"),
        (("a.jsonl", "--field", "txt"), "--field txt: no row has it."),
        (("a.jsonl", "--tokenizer", "missing.json"), "no such file"),
        (("job.toml", "a.jsonl"), "job.toml is a job, and 'a.jsonl'"),
        (("own.toml",), "the data of this job are a program"),
    ],
)
def test_a_mistake_is_one_message(arguments: tuple[str, ...], message: str, data: DataCommand) -> None:
    data.write_lines("a.jsonl", RECORDS)
    (data.folder / "empty").mkdir()
    (data.folder / "zero").mkdir()
    (data.folder / "zero" / "a.txt").touch()
    (data.folder / "job.toml").write_text(JOB)
    (data.folder / "own.toml").write_text('[model]\npreset = "gpt-1m"\n[data]\nfactory = "faulty:data"\n')
    ran = data("inspect", *arguments)
    assert ran.code != 0
    assert message in ran.told_once()


def test_data_of_which_no_row_can_be_read_have_exit_code_1(data: DataCommand) -> None:
    data.write_lines("a.jsonl", RECORDS)
    ran = data("inspect", "a.jsonl", "--format", "parquet")
    assert ran.code == 1
    assert "damaged: 1 file" in ran.out
    (source,) = data.json("inspect", "a.jsonl", "--format", "parquet", code=1)
    assert (source["rows"], len(source["damaged"])) == (0, 1)


def test_folders_of_splits_are_no_classes(data: DataCommand) -> None:
    for number, name in enumerate(["train/cat", "train/dog", "val/cat", "val/dog", "test/cat", "test/dog"]):
        data.write_image(f"pictures/{name}/{number}.png", (number, 0, 0))
    sources = data.json("inspect", "pictures")
    assert [(source["name"], source["rows"]) for source in sources] == [
        ("train", 2),
        ("validation", 2),
        ("test", 2),
    ]
    classes = [[row["fields"]["class"] for row in source["shown"]] for source in sources]
    assert classes == [["cat", "dog"]] * 3
    (source,) = data.json("inspect", "pictures/val")
    assert [row["fields"]["class"] for row in source["shown"]] == ["cat", "dog"]


def test_without_pillow_images_are_named_but_not_written(
    data: DataCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    data.write_image("pictures/cat/1.jpg", (255, 0, 0), "JPEG")
    monkeypatch.setitem(sys.modules, "PIL", None)
    ran = data("inspect", "pictures")
    assert ran.code == 0
    assert "<JPEG, " in ran.out
    ran = data("inspect", "pictures", "--images", "shown")
    assert ran.code == 2
    assert "the package `pillow`" in ran.told_once()


def test_without_pyarrow_parquet_names_its_extra(data: DataCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    write_case("parquet", data.folder / "in", 20)
    for name in ["pyarrow", *(name for name in sys.modules if name.startswith("pyarrow."))]:
        monkeypatch.setitem(sys.modules, name, None)
    ran = data("inspect", "in")
    assert ran.code == 2
    assert "pip install 'wanma[data]'" in ran.told_once()


@pytest.mark.parametrize("is_job", [True, False], ids=["job", "file"])
def test_tokens_of_conversations_are_counted_by_the_chat_template(is_job: bool, data: DataCommand) -> None:
    chats = conversations(5)
    write_chats(data.folder / "chats.jsonl", chats)
    folder = write_tokenizer(data.folder / "tokenizer")
    (data.folder / "job.toml").write_text(
        '[model]\npreset = "gpt-1m"\n[data]\npath = "chats.jsonl"\ntokenizer = "tokenizer"\n'
    )
    asked = ("job.toml",) if is_job else ("chats.jsonl", "--tokenizer", "tokenizer")
    (source,) = data.json("inspect", *asked, "--sequence-length", "64")
    tokenizer = load_tokenizer(folder)
    lengths = [len(tokens_of(tokenizer, chat)) for chat in chats]
    found = source["token_lengths"]
    assert (found["minimum"], found["maximum"], found["total"]) == (min(lengths), max(lengths), sum(lengths))
    assert source["packing"] is None, "a row holds whole conversations"
