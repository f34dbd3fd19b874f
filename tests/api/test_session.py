"""wanma.session: the job's numbers inside one's own loop, alone and on several ranks."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import wanma
from support.compare import same_numbers, same_tensors
from support.own import Numbers, PartlyLabelled, Plain, Tagger, seeded
from support.own_loop import loop, loop_in_rank, per_sample
from support.own_loop import session_job as job
from support.ranks import Outcome, run_job, run_ranks
from wanma.job.plan.plan import Plan


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The same job as `wanma.train` runs it in a rank."""
    objects = {"model": seeded(Plain), "data": Numbers()}
    plan = Plan(micro_batch=7, precision="fp64")
    return run_job(tmp_path_factory.mktemp("trained"), job(), plan, objects=objects)


def test_a_session_alone_gives_the_numbers_of_a_whole_job(trained: Outcome, tmp_path: Path) -> None:
    seen = loop(job(), tmp_path / "run")
    assert seen == list(range(28))
    same_numbers(trained, Outcome(tmp_path / "run"), 1e-10)
    for name in ("job.toml", "plan.json", "environment.json", "report.html"):
        assert (tmp_path / "run" / name).exists(), name


LAYOUTS = {
    "2 replicas": {"dp_replicate": 2},
    "ZeRO 3, accumulating": {"dp_shard": 2, "micro_batch": 1},
    "ZeRO 1, accumulating": {"dp_shard": 2, "shard": "optimizer", "micro_batch": 2},
    "2 replicas whose shares move": {
        "dp_replicate": 2,
        "micro_batch": 2,
        "batch_shares": [2, 5],
        "batch_share_schedule": [[1, [6, 1]], [3, [1, 6]]],
    },
}
on_each_layout = pytest.mark.parametrize("parallel", LAYOUTS.values(), ids=LAYOUTS)


@on_each_layout
def test_a_session_on_two_ranks_gives_the_same_numbers(
    parallel: dict[str, Any], trained: Outcome, tmp_path: Path
) -> None:
    seen = run_ranks(loop_in_rank, 2, (job(parallel=parallel), tmp_path / "run"), is_reused=True)
    assert sorted(seen[0] + seen[1]) == list(range(28))
    same_numbers(trained, Outcome(tmp_path / "run"), 1e-10)


def test_a_session_carries_on_where_it_was_left(trained: Outcome, tmp_path: Path) -> None:
    text = job(checkpoint={"every_steps": 2})
    with wanma.session(text, run_directory=tmp_path) as session:
        model = session.prepare(seeded(Plain))
        for batch in session.batches(Numbers()):
            if batch.samples[0] == 14:  # two steps are done and saved; the user's program ends here
                break
            session.step(per_sample(model, batch))
    assert loop(text, tmp_path) == list(range(14, 28))
    run = Outcome(tmp_path)
    assert run.losses == pytest.approx(trained.losses, rel=1e-10)
    same_tensors(trained.tensors(), run.tensors(), 1e-10)


def test_targets_that_are_ignored_do_not_count_in_ones_own_losses(tmp_path: Path) -> None:
    data, model = PartlyLabelled(size=8), seeded(Tagger).double()
    expected = F.cross_entropy(model(data.inputs).flatten(0, 1), data.targets.flatten())
    text = job(train={"steps": 1, "global_batch": 8}, data={"validation_fraction": 0.0})
    with wanma.session(text, run_directory=tmp_path) as session:
        prepared = session.prepare(model)
        for batch in session.batches(data):
            logits = prepared(*batch.inputs)
            session.step(F.cross_entropy(logits.transpose(1, 2), batch.targets, reduction="none"))
    assert Outcome(tmp_path).losses == pytest.approx([expected.item()], rel=1e-12)


def test_losses_of_a_table_of_numbers_are_squared_errors(tmp_path: Path) -> None:
    (tmp_path / "flats.csv").write_text("area,price\n" + "".join(f"{n},{2 * n + 0.5}\n" for n in range(20)))
    columns = {"features": ["area"], "target": "price"}
    data = {"path": str(tmp_path / "flats.csv"), "columns": columns, "cache": str(tmp_path)}
    text = job(data=data, train={"precision": "fp32"})
    seen = []
    with wanma.session(text, run_directory=tmp_path / "run") as session:
        model = session.prepare(torch.nn.Linear(1, 1))
        for batch in session.batches():
            output = model(*batch.inputs)
            losses = session.losses(output, batch)
            session.step(losses)
            seen.append((losses, output[:, 0], batch.targets))
    assert len(seen) == 4
    assert all(torch.equal(losses, (output - targets).square()) for losses, output, targets in seen)


# ------------------------------------------------------------------ ends


def last_event(run: Path) -> dict[str, Any]:
    event: dict[str, Any] = json.loads((run / "events.jsonl").read_text().splitlines()[-1])
    return event


def test_leaving_the_loop_early_is_an_orderly_stop_with_a_checkpoint(tmp_path: Path) -> None:
    with wanma.session(job(), run_directory=tmp_path) as session:
        model = session.prepare(seeded(Plain))
        for batch in session.batches(Numbers()):
            session.step(per_sample(model, batch))
            break
    event = last_event(tmp_path)
    assert (event["kind"], event["outcome"], event["step"]) == ("finish", "interrupted", 1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert loop(job(), tmp_path) == list(range(7, 28))


def test_ctrl_c_in_a_loop_without_a_supervisor_is_no_failure(tmp_path: Path) -> None:
    def interrupted_loop() -> None:
        with wanma.session(job(), run_directory=tmp_path) as session:
            model = session.prepare(seeded(Plain))
            for batch in session.batches(Numbers()):
                session.step(per_sample(model, batch))
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted_loop()
    assert last_event(tmp_path) | {"time": 0} == {"kind": "finish", "time": 0, "outcome": "aborted"}


def test_a_finished_run_has_no_more_batches_and_stays_finished(tmp_path: Path) -> None:
    loop(job(), tmp_path)
    assert loop(job(), tmp_path) == []
    event = last_event(tmp_path)
    assert (event["kind"], event["outcome"], event["step"]) == ("finish", "finished", 4)


# ------------------------------------------------------------------ misuse


@pytest.mark.parametrize(
    ("misuse", "fact"),
    [
        (lambda own: [own.session.step(own.losses()) for _ in range(2)], "called twice for one batch"),
        (lambda own: next(own.batches), "was not called for a batch"),
        (lambda own: own.session.prepare(seeded(Plain)), "one model"),
        (lambda own: own.session.batches(own.data), r"session\.batches was called twice"),
        (lambda own: own.session.step(own.losses().mean()), "reduction='none'"),
        (lambda own: own.session.step(None), "NoneType, not a tensor"),
        (lambda own: own.session.step([1.0]), "list, not a tensor"),
        (lambda own: own.session.step(torch.ones(7)), "have no gradient"),
    ],
)
def test_a_wrong_step_of_a_loop_is_refused(misuse: Callable[[Any], Any], fact: str, tmp_path: Path) -> None:
    with wanma.session(job(), run_directory=tmp_path) as session:
        model, data = session.prepare(seeded(Plain)), Numbers()
        batches = session.batches(data)
        losses = partial(per_sample, model, next(batches))
        with pytest.raises(wanma.WanmaError, match=fact):
            misuse(SimpleNamespace(session=session, data=data, batches=batches, losses=losses))


def test_batches_before_prepare_are_refused(tmp_path: Path) -> None:
    with (
        wanma.session(job(), run_directory=tmp_path) as session,
        pytest.raises(wanma.WanmaError, match=r"session\.prepare\(model\)"),
    ):
        next(iter(session.batches(Numbers())))


def test_a_pipeline_is_refused_before_a_model_is_built(tmp_path: Path) -> None:
    text = job(parallel={"pp": 2}, train={"global_batch": 8})
    with pytest.raises(AssertionError, match=r"JobError: parallel\.pp = 2"):
        run_ranks(loop_in_rank, 2, (text, tmp_path / "run"), is_reused=True)


def test_another_number_of_ranks_than_the_job_says_is_refused(tmp_path: Path) -> None:
    with pytest.raises(wanma.WanmaError, match="the plan has 2 ranks, but 1 "):
        loop(job(parallel={"dp_replicate": 2}), tmp_path)


def test_an_error_in_the_loop_is_the_users_and_leaves_no_group_behind(tmp_path: Path) -> None:
    def own() -> None:
        with wanma.session(job(), run_directory=tmp_path) as session:
            session.prepare(seeded(Plain))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        own()
    assert not torch.distributed.is_initialized()


def test_the_jobs_threads_are_used(tmp_path: Path) -> None:
    with wanma.session(job(cluster={"threads_per_rank": 1}), run_directory=tmp_path):
        assert torch.get_num_threads() == 1
    assert json.loads((tmp_path / "plan.json").read_text())["plan"]["threads_per_rank"] == 1


def test_what_is_no_module_is_refused(tmp_path: Path) -> None:
    with (
        wanma.session(job(), run_directory=tmp_path) as session,
        pytest.raises(wanma.WanmaError, match="the model is the class Plain"),
    ):
        session.prepare(Plain)


def test_a_process_group_of_ones_own_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with (
            pytest.raises(wanma.WanmaError, match="remove the call of init_process_group"),
            wanma.session(job(), run_directory=tmp_path / "run"),
        ):
            pass
    finally:
        torch.distributed.destroy_process_group()
    assert not (tmp_path / "run").exists()


def test_the_data_threads_end_with_the_session_whatever_the_program_keeps(tmp_path: Path) -> None:
    with wanma.session(job(), run_directory=tmp_path) as session:
        model = session.prepare(seeded(Plain))
        batches = session.batches(Numbers())
        session.step(per_sample(model, next(batches)))
    assert [thread.name for thread in threading.enumerate() if "wanma-loader" in thread.name] == []
    assert list(batches) == []
