"""A wrong job is refused by a dry run with one message that names the mistake."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from support.wrong_jobs import ALL, BASE, OWN_CODE, Wrong
from wanma.cli.main import main
from wanma.job.errors import EXIT_USAGE, JobError
from wanma.job.file.loading import to_job
from wanma.job.file.schema import KeySchema, schema_keys
from wanma.training.loop import preflight


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user's folder, in which commands are given."""
    path = tmp_path_factory.mktemp("wrong")
    for name, text in BASE.items():
        (path / f"{name}.toml").write_text(text)
    (path / "own_code.py").write_text(OWN_CODE)
    (path / "words.txt").write_text("some words for a model to read\n" * 400)
    (path / "rows.jsonl").write_text('{"words": "a row"}\n' * 400)
    (path / "empty.txt").write_text("")
    (path / "numbers.csv").write_text("a,b,price\n" + "1,2,0.5\n" * 400)
    (path / "folder").mkdir()
    (path / "adapters").mkdir()
    (path / "adapters" / "adapter_config.json").write_text("{}")
    images = np.random.default_rng(0).integers(0, 255, (600, 8, 8), np.uint8)
    np.savez(path / "images.npz", x_train=images, y_train=np.arange(600) % 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setenv("XDG_CACHE_HOME", str(path / "cache"))
        patch.syspath_prepend(str(path))
        yield path
    sys.modules.pop("own_code", None)


@pytest.mark.parametrize("base", BASE)
def test_the_jobs_that_are_made_wrong_are_right(
    folder: Path, base: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", f"{base}.toml", "--dry-run"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("wrong", ALL, ids=lambda wrong: f"{wrong.base} {' '.join(wrong.overrides)[:60]}")
def test_a_wrong_job_is_refused(folder: Path, wrong: Wrong, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["train", f"{wrong.base}.toml", "--dry-run", *wrong.overrides])
    told = capsys.readouterr().err
    assert code == EXIT_USAGE, told
    assert told.startswith("error: ")
    assert told.count("error: ") == 1
    assert "Traceback" not in told
    assert "bug in wanma" not in told
    assert "log of the rank" not in told, "no rank was started"
    assert wrong.says in told
    assert not (folder / "runs").exists(), "a dry run writes nothing"


def _values(key: KeySchema) -> list[object]:
    """Values that no key of this type takes."""
    if key.choices and "list" not in key.allowed and "whole" not in key.allowed:
        return ["no such choice", 3.5, [1]]
    if key.is_text:
        return [3, True, ["a"], "a\0b"]
    if "number" in key.allowed and "[" not in key.allowed and "list" not in key.allowed:
        return ["x", True, [1], float("inf"), float("nan"), 1e300, 10**40, -(10**40)]
    return [] if key.allowed == "a table" else [3.5, "no such word", float("nan")]


@pytest.mark.parametrize("path", [path for path in schema_keys() if path.count(".") == 1])
def test_every_key_refuses_what_it_cannot_be(path: str) -> None:
    section, name = path.split(".")
    given = {"preset": "gpt-1m"} if section == "model" else {}
    for value in _values(schema_keys()[path]):
        if isinstance(value, str) and schema_keys()[path].allowed.startswith("a list of text"):
            continue  # one text is a list of one
        with pytest.raises(JobError) as refusal:
            to_job({"model": {"preset": "gpt-1m"}} | {section: {**given, name: value}})
        assert path in str(refusal.value), (value, str(refusal.value))


@pytest.mark.parametrize(
    ("override", "code", "says"),
    [
        ("train.parameter_groups=[{match='zzz*'}]", EXIT_USAGE, "matches no parameter"),
        ("checkpoint.start_from=/nowhere", EXIT_USAGE, "there is no such folder"),
        ("model.factory=own_code:Looks", 0, "the model has 15 parameters"),
    ],
)
def test_a_model_too_large_to_run_here_is_checked_without_storage(
    folder: Path,
    override: str,
    code: int,
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "MAX_ELEMENTS_RUN_FIRST", 0)
    monkeypatch.setattr(preflight, "MAX_ELEMENTS_RUN", 0)
    assert main(["train", "own.toml", "--dry-run", override]) == code
    told = capsys.readouterr()
    assert says in told.err + " ".join(told.out.split())


def test_a_dry_run_warns_of_validations_without_data_as_the_run_does(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["train.validate_every_steps=1", "data.validation_fraction=0", "train.steps=1"]
    assert main(["train", "own.toml", "--dry-run", *asked]) == 0
    said = "train.validate_every_steps = 1 without effect: the data has no validation part; set data."
    assert said in " ".join(capsys.readouterr().out.split())
    assert main(["train", "own.toml", "--run-dir", "run", "observe.console=plain", *asked]) == 0
    told = capsys.readouterr()
    assert said in " ".join((told.out + told.err).split())
