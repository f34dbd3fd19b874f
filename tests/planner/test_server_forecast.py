"""Forecast of parameter servers: their memory, the traffic of a step, and the part that bounds it."""

from __future__ import annotations

from typing import Any

import pytest

from wanma.hardware.cluster_file.shorthand import parse_shorthand
from wanma.job.cluster import Cluster, NodeGroup
from wanma.job.errors import JobError
from wanma.job.forecast.forecast import STEP_TIME_KINDS, EmbeddingTable, Forecast, LayerWorkload, Workload
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.workload.model_workload import compute_decoder_workload
from wanma.planner.cost.embedding_exchange import distinct_ids
from wanma.planner.forecast.plan_forecast import forecast_plan, forecast_plan_memory
from wanma.planner.forecast.problem import build_problem
from wanma.planner.forecast.server_forecast import SERVER_LINK, UPDATES, pause_seconds
from wanma.planner.job_planner import complete_plan

DENSE, WIDTH = 500_000, 16
ROWS = {"user": 10_000_000, "item": 100_000}
BATCH, WORKERS = 4096, 2
PLAN = Plan(dp_replicate=WORKERS, micro_batch=BATCH // WORKERS)


def box(memory_bytes: int) -> Cluster:
    return Cluster((NodeGroup("box", 8, memory_bytes, ()),))


def job(model: dict[str, Any] | None = None, **servers: Any) -> Job:
    return Job.model_validate(
        {
            "model": model or {"family": "recommender", "kind": "dlrm"},
            "train": {"global_batch": BATCH, "embedding_optimizer": None if model else "adam"},
            "parallel": {"dp_replicate": WORKERS, "allow": ["staleness"]},
            "servers": {"count": 2, **servers},
        }
    )


def recommender(rows: dict[str, int]) -> Workload:
    tables = tuple(
        EmbeddingTable("tables", name, count, WIDTH, 1, 2.0 * WIDTH) for name, count in rows.items()
    )
    return Workload((LayerWorkload("dense", 1, DENSE, 1e6, 1e3),), 1, tables=tables)


def memory(asked: Job, rows: dict[str, int] = ROWS) -> Forecast:
    return forecast_plan_memory(build_problem(asked, box(64 << 30), recommender(rows), ranks=2), PLAN)


BY_MODE = pytest.mark.parametrize(
    ("mode", "samples"), [("synchronous", BATCH // WORKERS), ("asynchronous", BATCH), ("bounded", BATCH)]
)


@BY_MODE
def test_a_worker_s_micro_batch_is_its_part_of_a_step(mode: str, samples: int) -> None:
    found = complete_plan(job(mode=mode), PLAN, box(64 << 30), recommender(ROWS))
    assert found.plan.micro_batch == samples


@BY_MODE
def test_a_step_moves_dense_parameters_and_used_rows(mode: str, samples: int) -> None:
    used = sum(distinct_ids(rows, samples) for rows in ROWS.values())
    pulled = DENSE + WIDTH * used
    servers = memory(job(mode=mode)).servers
    assert servers is not None
    assert servers.exchanged_bytes == pytest.approx(8 * pulled + 16 * used)
    rounded = memory(job(mode=mode, compression="bf16")).servers
    assert rounded is not None
    assert rounded.exchanged_bytes == pytest.approx(6 * pulled + 16 * used)


def test_servers_share_parameters_and_state_and_worker_0_holds_all_of_them() -> None:
    whole = 4 * 3 * (DENSE + WIDTH * sum(ROWS.values()))
    small = dict.fromkeys(ROWS, 1000)
    few = 4 * 3 * (DENSE + WIDTH * sum(small.values()))
    one, other = memory(job()), memory(job(), small)
    assert one.servers is not None
    assert other.servers is not None
    held = one.servers.memory_bytes - other.servers.memory_bytes
    numbers = 4 * (sum(ROWS.values()) - sum(small.values()))  # of each row's newest update
    assert held == pytest.approx((whole - few + numbers) / 2, rel=0.001)
    # A save copies what it holds.
    assert one.memory_bytes - other.memory_bytes == pytest.approx(2 * (whole - few), rel=0.01)
    twice = memory(job(replicas=2)).servers
    assert twice is not None
    # Also gradients, and of each row the number of its newest update.
    again = whole + 4 * DENSE + 4 * sum(ROWS.values())
    assert twice.memory_bytes - one.servers.memory_bytes == pytest.approx(again / 2, rel=1e-6)


def test_servers_and_workers_that_do_not_fit_together_are_refused() -> None:
    needed = memory(job())
    assert needed.servers is not None
    alone = needed.memory_bytes / 0.85  # worker 0 fits
    together = (needed.memory_bytes * 2 + needed.servers.memory_bytes * 2) / 0.85
    with pytest.raises(JobError, match=r"servers\.count"):
        complete_plan(job(), PLAN, box(int(alone) + 1), recommender(ROWS))
    assert complete_plan(job(), PLAN, box(int(together)), recommender(ROWS)).plan.world_size == WORKERS


def test_tables_in_a_file_of_worker_0_may_be_larger_than_its_memory() -> None:
    table = EmbeddingTable("tables", "user", 781_250_000, 64, 1, 1.0)  # 50 billion parameters
    workload = Workload((LayerWorkload("dense", 1, DENSE, 1e6, 1e3),), 1, tables=(table,))
    servers = 4 * table.rows * (64 + 1 + 1)
    with pytest.raises(JobError, match=r"servers\.count") as error:
        complete_plan(job(), PLAN, box(int(1.3 * servers)), workload)
    assert "parallel.embedding_memory_bytes" in error.value.hint
    on_disk = PLAN.with_changes(embedding_memory_bytes=4 << 30)
    found = complete_plan(job(), on_disk, box(int(1.3 * servers)), workload).forecast
    assert found is not None
    assert found.memory_bytes < 6 << 30
    assert found.disk_bytes == 4 * table.rows * 65
    with pytest.raises(JobError, match=r"parallel\.embedding_memory_bytes = 1000 ") as error:
        complete_plan(job(), PLAN.with_changes(embedding_memory_bytes=1000), box(1 << 40), workload)
    assert "ranks" not in error.value.hint


def test_a_pause_moves_the_rows_that_steps_have_used_since_the_one_before() -> None:
    def seconds(every: int) -> float:
        train = job().train.model_copy(update={"validate_every_steps": 0})
        saves = job().checkpoint.model_copy(update={"every_steps": every})
        asked = job().model_copy(update={"train": train, "checkpoint": saves})
        return every * pause_seconds(build_problem(asked, box(64 << 30), recommender(ROWS), ranks=2), PLAN)

    whole = 4 * 3 * (DENSE + WIDTH * sum(ROWS.values()))
    used = sum(distinct_ids(rows, 10 * BATCH) for rows in ROWS.values())
    assert seconds(10) / seconds(10**7) == pytest.approx(4 * 3 * (DENSE + WIDTH * used) / whole, rel=0.01)


def test_more_servers_shorten_a_step_that_they_bound_and_asynchronous_workers_do_not_wait() -> None:
    dimensions = DecoderConfig(4, 512, 8, 8, 2048, 8192)
    plan = Plan(dp_replicate=4, micro_batch=1024, device="cuda", precision="bf16")

    def forecast(**servers: Any) -> Forecast:
        asked = job({"family": "decoder"}, **servers)
        problem = build_problem(
            asked, parse_shorthand("8 H100"), compute_decoder_workload(dimensions, 64), dimensions
        )
        found = forecast_plan(problem, plan)
        assert found.step is not None
        parts = sum(getattr(found.step, kind) for kind in STEP_TIME_KINDS)
        assert parts == pytest.approx(found.step.seconds)
        return found

    seconds = {count: forecast(count=count).step.seconds for count in (1, 4)}  # type: ignore[union-attr]
    assert seconds[4] < seconds[1]
    one = forecast(count=1)
    assert one.servers is not None
    assert one.servers.bound in (SERVER_LINK, UPDATES)
    assert any(one.servers.bound in reason for reason in one.reasons)
    free = forecast(count=4, mode="asynchronous")
    assert free.step is not None
    assert free.step.seconds < seconds[4]
