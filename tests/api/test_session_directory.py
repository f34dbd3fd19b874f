"""Run directory of a session: access, traces of a refusal, record of an end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import wanma
from support.own import Numbers, Plain, Tagger, seeded
from support.own_loop import loop, per_sample, session_job
from support.ranks import Outcome
from wanma.api import session as session_module
from wanma.checkpoint.load.reader import find_newest_valid
from wanma.checkpoint.store.checkpoint_folder import read_manifest
from wanma.data.opening import open_dataset
from wanma.job.file.loading import load_job


def written(run: Path) -> dict[str, bytes]:
    """Files that a start writes."""
    return {name: (run / name).read_bytes() for name in ("job.toml", "plan.json", "environment.json")}


# ------------------------------------------------------------------ data


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.txt").write_text(f"the quick brown fox number {number} jumps\n" * 20)
    return folder


def text_job(corpus: Path, **train: Any) -> dict[str, Any]:
    data = {"text": [str(corpus)], "sequence_length": 16, "cache": str(corpus.parent / "cache")}
    return session_job(data={**data, "validation_fraction": 0.2}, train={"steps": 2, **train})


def text_loop(job: dict[str, Any], run: Path) -> None:
    with wanma.session(job, run_directory=run) as session:
        model = session.prepare(seeded(lambda: Tagger(vocabulary=320)))

        def losses(batch: wanma.Batch) -> Tensor:
            return F.cross_entropy(model(*batch.inputs).transpose(1, 2), batch.targets, reduction="none")

        for batch in session.batches(validate=losses):
            session.step(losses(batch))


def test_a_checkpoint_carries_the_fingerprint_of_the_data(corpus: Path, tmp_path: Path) -> None:
    text_loop(text_job(corpus), tmp_path / "run")
    path = find_newest_valid(tmp_path / "run" / "checkpoints")
    assert path is not None
    saved = load_job(tmp_path / "run" / "job.toml")
    fingerprint = open_dataset(saved.data, saved.train).fingerprint
    assert read_manifest(path).state["data_fingerprint"] == fingerprint != ""


def test_a_checkpoint_of_other_data_is_refused_and_all_stays_as_it_was(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    text_loop(text_job(corpus), run)
    before, metrics = written(run), (run / "metrics.jsonl").read_bytes()
    (corpus / "0.txt").write_text("something else\n" * 20)
    with pytest.raises(wanma.WanmaError, match="was saved while training on other data") as refused:
        text_loop(text_job(corpus, steps=4), run)
    assert "restore the data of that run" in str(refused.value)
    assert written(run) == before
    assert (run / "metrics.jsonl").read_bytes() == metrics
    assert Outcome(run).events[-1]["kind"] == "start_failed"


def test_the_perplexity_of_text_is_recorded(corpus: Path, tmp_path: Path) -> None:
    text_loop(text_job(corpus), tmp_path / "run")
    (validation,) = Outcome(tmp_path / "run").validations
    assert validation["perplexity"] == pytest.approx(torch.tensor(validation["loss"]).exp().item(), rel=1e-6)


# ------------------------------------------------------------------ job.toml and plan.json


def test_a_checkpoint_of_another_model_is_refused_and_all_stays_as_it_was(tmp_path: Path) -> None:
    loop(session_job(), tmp_path)
    before = written(tmp_path)

    def another() -> None:
        with wanma.session(session_job(train={"steps": 9}), run_directory=tmp_path) as session:
            session.prepare(seeded(Tagger))
            session.batches(Numbers())

    with pytest.raises(wanma.WanmaError, match=r"first\.weight"):
        another()
    assert written(tmp_path) == before


def test_another_batch_size_is_refused_and_all_stays_as_it_was(tmp_path: Path) -> None:
    loop(session_job(), tmp_path)
    before = written(tmp_path)
    with pytest.raises(wanma.WanmaError, match=r"train\.global_batch = 8 .* after 32"):
        loop(session_job(train={"steps": 9, "global_batch": 8}), tmp_path)
    assert written(tmp_path) == before


def test_a_run_that_carries_on_is_written_down_as_it_is_now(tmp_path: Path) -> None:
    loop(session_job(), tmp_path)
    loop(session_job(train={"steps": 6}), tmp_path)
    assert load_job(tmp_path / "job.toml").train.steps == 6
    assert [step["step"] for step in Outcome(tmp_path).steps] == [1, 2, 3, 4, 5, 6]


def test_a_call_that_trains_nothing_leaves_the_records_of_the_run(tmp_path: Path) -> None:
    loop(session_job(), tmp_path)
    before = written(tmp_path)
    loop(session_job(train={"validate_every_steps": 2}), tmp_path, validates=True)
    assert written(tmp_path) == before
    with pytest.raises(wanma.WanmaError, match=r"train\.learning_rate was 0\.01, and is 0\.5"):
        loop(session_job(train={"learning_rate": 0.5}), tmp_path)
    assert written(tmp_path) == before


def test_a_job_file_may_leave_the_model_to_the_program(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('[train]\nsteps = 2\nglobal_batch = 4\n[observe]\nconsole = "quiet"\n')
    loop(tmp_path / "own.toml", tmp_path / "run")
    assert load_job(tmp_path / "run" / "job.toml").model.factory == "__main__:own_loop"


def test_of_the_model_section_one_may_give_the_statistics_group_alone(tmp_path: Path) -> None:
    loop(session_job(model={"batch_norm_group": 4}), tmp_path)
    assert load_job(tmp_path / "job.toml").model.batch_norm_group == 4


@pytest.mark.parametrize(
    ("job", "told"),
    [
        (7, "a job cannot be made from int"),
        ("none.toml", "there is no job file none.toml"),
        ({"model": 3}, "model"),
        ({"model": {"arguments": {"rate": 1}, "preset": "gpt-0m"}}, "gpt-0m"),
        ({"model": {"arguments": 3}}, r"model\.arguments"),
        ({"model": {"arguments": {"f": object()}}}, r"model\.arguments\.f is of type object"),
        ({"model": {"factory": "a:b", "preset": "gpt-1m"}}, "exactly one of"),
        ({"trian": {}}, "Did you mean 'train'"),
        ({"parallel": {"dp_replicate": 2}, "train": {"global_batch": 1}}, r"train\.global_batch = 1 gives"),
    ],
)
def test_a_wrong_job_is_one_error_and_nothing_is_started(
    job: Any, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(wanma.JobError, match=told), wanma.session(job):
        pass
    assert not (tmp_path / "runs").exists()


# ------------------------------------------------------------------ one at a time


def test_a_second_session_in_the_same_place_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    code = (
        "import sys, wanma\n"
        "try:\n"
        "    with wanma.session(dict(observe=dict(console='quiet')), run_directory=sys.argv[1]):\n"
        "        print('opened')\n"
        "except wanma.WanmaError as error: print(error)\n"
    )
    with wanma.session(session_job(), run_directory=tmp_path) as session:
        model = session.prepare(seeded(Plain))
        batches = session.batches(Numbers())
        session.step(per_sample(model, next(batches)))
        before = written(tmp_path)
        command = [sys.executable, "-c", code, str(tmp_path)]
        second = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        assert second.stdout.startswith(f"another process is training in {tmp_path}\n"), second.stderr
        assert written(tmp_path) == before
        for batch in batches:
            session.step(per_sample(model, batch))
    assert len(Outcome(tmp_path).steps) == 4
    loop(session_job(train={"steps": 5}), tmp_path)  # the place is free again
    assert len(Outcome(tmp_path).steps) == 5


# ------------------------------------------------------------------ records


def test_a_session_that_fails_is_recorded_as_failed_and_carries_on(tmp_path: Path) -> None:
    text = session_job(checkpoint={"every_steps": 2})

    def fails() -> None:
        with wanma.session(text, run_directory=tmp_path) as session:
            model = session.prepare(seeded(Plain))
            for batch in session.batches(Numbers()):
                session.step(per_sample(model, batch) / (1 if batch.samples[0] < 21 else 1 // 0))

    with pytest.raises(ZeroDivisionError):
        fails()
    end = Outcome(tmp_path).events[-1]
    assert (end["kind"], end["outcome"]) == ("finish", "failed")
    assert end["text"] == "ZeroDivisionError: integer division or modulo by zero"
    assert loop(text, tmp_path) == list(range(14, 28))


def test_an_example_gives_model_flops_utilization(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "peak_flops_per_second", lambda *_: 1e9)
    with wanma.session(session_job(), run_directory=tmp_path) as session:
        model = session.prepare(seeded(Plain), example=torch.empty(2, 8, device="meta"))
        for batch in session.batches(Numbers()):
            session.step(per_sample(model, batch))
    flops = 3 * 2 * (8 * 16 + 16 * 4)
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["flops_per_sample"] == flops
    assert plan["parameters"] == 8 * 16 + 16 + 16 * 4 + 4
    for step in Outcome(tmp_path).steps:
        assert step["mfu"] == pytest.approx(flops * 7 / step["step_seconds"] / 1e9)


def test_without_an_example_the_utilization_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "peak_flops_per_second", lambda *_: 1e9)
    loop(session_job(), tmp_path)
    assert {step["mfu"] for step in Outcome(tmp_path).steps} == {None}


@pytest.mark.parametrize(
    ("example", "told"),
    [
        (torch.empty(2, 5), "cannot trace Plain on fake tensors"),
        ((), "example must hold tensors"),
        (torch.tensor(1.0), "example must hold tensors"),
        ([3], "example must hold tensors"),
    ],
    ids=["other shape", "nothing", "no samples", "no tensor"],
)
def test_an_example_that_the_model_does_not_take_is_refused(example: Any, told: str, tmp_path: Path) -> None:
    with (
        wanma.session(session_job(), run_directory=tmp_path) as session,
        pytest.raises(wanma.WanmaError, match=told),
    ):
        session.prepare(seeded(Plain), example=example)
