"""Data feed: whether loading supplies the samples that the devices consume, the cause, and what helps."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from typing import Any

import pytest

from support.problems import job, problem
from wanma.job.forecast.data_feed import DataFeed, SampleLoading, StoreRates
from wanma.job.forecast.forecast import Forecast, Workload
from wanma.job.plan.plan import Plan
from wanma.job.sections.images import ImageTransformSection
from wanma.planner.forecast.data_feed import HEADROOM, data_feed_text, store_download_reasons
from wanma.planner.forecast.data_loading import load_cost
from wanma.planner.forecast.plan_forecast import forecast_plan
from wanma.planner.forecast.problem import PlanningProblem
from wanma.planner.forecast.step_overhead import HANDOFF_SECONDS, step_overhead
from wanma.planner.job_planner import PlanResult
from wanma.planner.preparation.job_planning import plan_notes
from wanma.planner.preparation.loader_workers import (
    loader_workers,
    with_workers,
    workers_note,
    workers_text,
)

PLAN = Plan(dp_replicate=8, micro_batch=2, precision="bf16", device="cuda")
STORED = SampleLoading(
    samples=1_000_000,
    sample_bytes=100e3,
    file_bytes=200e6,
    decode_seconds=5e-3,
    is_remote=True,
    read_threads=16,
    loader_threads=3,
    cache_block_bytes=8 << 20,
)
DATA = {"images": ["s3://bucket/images"], "text": [], "cache_bytes": 1 << 40, "workers": 1}
ON_DISK = replace(STORED, is_remote=False, loader_threads=1)


def given(
    loading: SampleLoading = STORED, steps: int = 1000, store: float = 1e9, latency: float = 0.0, **data: Any
) -> PlanningProblem:
    """A problem of eight devices on one node of 64 cores, whose samples are stored images."""
    of = job(global_batch=16, steps=steps)
    made = problem(of.model_copy(update={"data": of.data.model_copy(update={**DATA, **data})}))
    node = replace(made.cluster.nodes[0], store_bytes_per_second=store, store_latency_seconds=latency)
    return replace(
        made,
        workload=replace(made.workload, loading=loading),
        cluster=replace(made.cluster, nodes=(node,)),
    )


def forecast(of: PlanningProblem) -> tuple[Forecast, DataFeed]:
    made = forecast_plan(of, PLAN)
    assert made.data_feed is not None
    return made, made.data_feed


def test_decoding_is_divided_by_the_workers_up_to_the_cores_of_a_rank() -> None:
    for workers, decoders in ((1, 1), (2, 2), (4, 4), (32, 8)):  # 64 cores, 8 ranks
        found = load_cost(given(ON_DISK, workers=workers, prefetch=64), PLAN).parts["decoding"]
        assert found == pytest.approx((250e-6 + 2 * 5e-3) / decoders)
    # Threads decode all steps that are loaded; a process decodes the one that it loads.
    for by_processes, decoders in ((False, 4), (True, 2)):
        loading = replace(ON_DISK, by_processes=by_processes)
        found = load_cost(given(loading, workers=8, prefetch=2), PLAN).parts["decoding"]
        assert found == pytest.approx((250e-6 + 2 * 5e-3) / decoders)
    # Of a store, three steps are loaded at once, each decoded by its thread.
    assert load_cost(given(), PLAN).parts["decoding"] == pytest.approx((250e-6 + 2 * 5e-3) / 3)


def test_a_node_that_reads_all_samples_reads_each_stored_byte_once() -> None:
    whole_epoch = given(replace(STORED, samples=16_000))
    cost = load_cost(whole_epoch, PLAN)
    assert cost.parts["store bandwidth"] == pytest.approx(16 * 100e3 / 1e9)
    assert cost.store_share == 1.0
    epochs = load_cost(given(replace(STORED, samples=4_000)), PLAN)
    assert epochs.parts["store bandwidth"] == pytest.approx(16 * 100e3 / 1e9)
    assert epochs.store_share == 0.25


def test_a_full_shuffle_that_reads_few_samples_downloads_a_block_for_each() -> None:
    few = load_cost(given(replace(STORED, samples=10**9), cache_bytes=1 << 50, steps=10), PLAN)
    assert few.parts["store bandwidth"] == pytest.approx(16 * (8 << 20) / 1e9, rel=1e-3)
    block = given(replace(STORED, samples=10**9), cache_bytes=1 << 50, steps=10, shuffle="block")
    assert load_cost(block, PLAN).parts["store bandwidth"] == pytest.approx(16 * 100e3 / 1e9)


def test_a_cache_of_half_the_data_misses_half_of_the_blocks() -> None:
    cost = load_cost(given(cache_bytes=50_000_000_000), PLAN)
    assert cost.parts["store bandwidth"] == pytest.approx(16 * 0.5 * (8 << 20) / 1e9)
    assert cost.store_share == 1.0


def test_without_a_cache_each_sample_is_a_request_of_its_rank() -> None:
    cost = load_cost(given(cache_bytes=0, latency=0.1), PLAN)
    assert cost.parts["store bandwidth"] == pytest.approx(16 * 100e3 / 1e9)
    # Two samples of a rank, of which three steps of two are requested at once.
    assert cost.parts["store requests"] == pytest.approx(2 * 0.1 / 6)
    split = replace(PLAN, dp_replicate=4, tp=2)  # two ranks read the same samples
    twice = load_cost(given(cache_bytes=0), split).parts["store bandwidth"]
    assert twice == pytest.approx(2 * 16 * 100e3 / 1e9)


@pytest.mark.parametrize(
    ("nodes", "cache", "store", "expected"),
    [
        (1, 1 << 40, 8 << 20, "3.0 GiB to download in this run, 6 min 24 s at 8.0 MiB/s"),
        (1, 1 << 40, None, "3.0 GiB to download in this run"),
        (1, 2 << 30, None, "8.0 GiB to download in this run"),
        (1, 0, None, None),
        (
            2,
            1 << 40,
            None,
            "3.8 GiB to download in this run, by each of 2 nodes with an empty cache (7.5 GiB in all)",
        ),
    ],
    ids=["rate", "no rate", "small cache", "no cache", "nodes"],
)
def test_the_plan_says_what_leaves_the_store_by_node(
    nodes: int, cache: int, store: float | None, expected: str | None
) -> None:
    """Four epochs of 4 GiB in blocks of one sample, of which each of two nodes meets half in an epoch."""
    loading = replace(
        STORED,
        samples=4096,
        sample_bytes=float(1 << 20),
        file_bytes=float(1 << 20),
        store_bytes=4 << 30,
        cached_bytes=1 << 30,
    )
    of = given(loading, steps=1024, cache_bytes=cache)
    node = replace(of.cluster.nodes[0], store_bytes_per_second=store, count=nodes)
    machines = problem(devices=8 * nodes)
    of = replace(of, cluster=replace(of.cluster, nodes=(node,)), hardware=machines.hardware)
    plan = replace(PLAN, dp_replicate=8 * nodes, micro_batch=1)
    held = "node cache: this machine's holds 1.0 GiB of 4.0 GiB of the data; "
    texts = store_download_reasons(of, plan)
    assert texts == (() if expected is None else (held + expected,))
    assert set(texts) <= set(forecast_plan(of, plan).reasons)


def test_a_wait_for_data_is_part_of_the_step_for_the_share_of_the_run_that_reads_the_store() -> None:
    quarter = replace(STORED, samples=4_000, decode_seconds=0.0)
    made, feed = forecast(given(quarter, store=1e6))
    computing = made.step.seconds - made.step.loading
    slow = load_cost(given(quarter, store=1e6), PLAN).store_seconds
    raw = computing - made.step.checkpoint
    assert made.step.loading == pytest.approx(HANDOFF_SECONDS + 0.25 * (slow - raw))
    assert feed.share == pytest.approx(computing / slow)
    assert feed.store_share == 0.25
    overhead = step_overhead(given(quarter, store=1e6), PLAN)
    assert overhead.loading_stall(raw) == pytest.approx(made.step.loading)


def test_a_shortage_names_the_fed_devices_the_cause_and_what_helps() -> None:
    of = given(replace(STORED, decode_seconds=0.5))
    made, feed = forecast(of)
    assert feed.limits[0].cause == "decoding"
    assert feed.fed_devices == pytest.approx(8 * feed.share)
    assert feed.share < 1
    text = data_feed_text(feed)
    assert text.startswith(f"the data feed {feed.fed_devices:.2g} of 8 devices: decoding supplies ")
    (workers,) = feed.remedies
    assert workers.change == "data.workers = 8"
    improved = load_cost(given(replace(STORED, decode_seconds=0.5), workers=8, prefetch=8), PLAN)
    assert workers.fed_devices == pytest.approx(
        feed.fed_devices * load_cost(of, PLAN).peak_seconds / improved.peak_seconds
    )
    assert text in made.reasons
    assert plan_notes(of.job, PlanResult(PLAN, made)) == [text]


def test_a_slow_store_is_helped_by_local_copies_and_by_reading_neighbours() -> None:
    _, feed = forecast(given(store=1e8))
    assert feed.limits[0].cause == "store bandwidth"
    changes = [remedy.change for remedy in feed.remedies]
    assert "data.shuffle = 'block'" in changes
    assert any(change.startswith("files copied to the nodes' disks (93.1 GiB)") for change in changes)
    assert not any("workers" in change for change in changes), "decoding is not what is slow"
    fed = [remedy.fed_devices for remedy in feed.remedies]
    assert fed == sorted(fed, reverse=True)


def test_small_files_of_a_distant_store_are_slow_by_latency_and_larger_ones_help() -> None:
    small = replace(STORED, file_bytes=100e3, decode_seconds=0.0)
    _, feed = forecast(given(small, latency=5.0, store=1e12))
    assert feed.limits[0].cause == "store requests"
    fed = {remedy.change: remedy.fed_devices for remedy in feed.remedies}
    assert fed["larger files (WebDataset, Parquet)"] > 1.5 * feed.fed_devices
    assert fed["data.workers = 8"] > 2 * feed.fed_devices, "more requests at once"


def test_where_no_setting_helps_the_sentence_says_so() -> None:
    _, feed = forecast(given(replace(ON_DISK, decode_seconds=0.5), workers=8, prefetch=8))
    assert feed.remedies == ()
    assert "store smaller images" in data_feed_text(feed)


def test_data_that_keep_up_are_no_note() -> None:
    of = given(replace(ON_DISK, decode_seconds=1e-6))
    made, feed = forecast(of)
    assert feed.share > 1
    assert (feed.fed_devices, feed.remedies) == (8.0, ())
    assert plan_notes(of.job, PlanResult(PLAN, made)) == []
    assert not any(reason.startswith("the data feed") for reason in made.reasons)


def without_rates(of: PlanningProblem) -> PlanningProblem:
    unknown = replace(of.cluster.nodes[0], store_bytes_per_second=None, store_latency_seconds=None)
    return replace(of, cluster=replace(of.cluster, nodes=(unknown,)))


def test_each_rate_is_said_to_be_given_measured_or_assumed() -> None:
    given_rates = forecast(given())[1].assumed
    assert given_rates == (
        "store bandwidth: 1 GB/s per node, given in the cluster file",
        "store latency: 0 ms per request, given in the cluster file",
        "decoding: 5 ms per sample and core, measured on this machine",
    )
    made, feed = forecast(without_rates(given()))
    assert feed.assumed[:2] == (
        "store bandwidth: 1.25 GB/s per node, assumed (cluster file: store_gb_per_second)",
        "store latency: 0.10 s per request, assumed (cluster file: store_latency_milliseconds)",
    )
    assert set(feed.assumed) <= set(made.reasons)
    assert len(forecast(given(ON_DISK))[1].assumed) == 1


def test_a_probe_of_the_store_replaces_assumptions_and_not_what_is_given() -> None:
    rates = StoreRates(0.02, 50e6, 400e6, "measured by a probe on 2026-11-27")
    measured = replace(STORED, store=rates, decode_origin="measured by run one on 2026-11-26")
    _, feed = forecast(without_rates(given(measured)))
    assert feed.assumed == (
        "store bandwidth: 0.4 GB/s per node, measured by a probe on 2026-11-27",
        "store latency: 20 ms per request, measured by a probe on 2026-11-27",
        "bandwidth of one request: 50 MB/s, measured by a probe on 2026-11-27",
        "decoding: 5 ms per sample and core, measured by run one on 2026-11-26",
    )
    cost = load_cost(without_rates(given(measured, cache_bytes=0)), PLAN)
    # Two samples of a rank by requests of 20 ms and 100 kB at 50 MB/s, six at once.
    assert cost.parts["store requests"] == pytest.approx(2 * (0.02 + 100e3 / 50e6) / 6)
    assert cost.parts["store bandwidth"] == pytest.approx(16 * 100e3 / 400e6)
    assert load_cost(given(measured), PLAN).parts["store bandwidth"] == pytest.approx(
        load_cost(given(), PLAN).parts["store bandwidth"]
    )


def test_a_failed_probe_is_said() -> None:
    failed = replace(STORED, store=StoreRates(fault="a probe of the store failed: OSError"))
    _, feed = forecast(without_rates(given(failed)))
    assert feed.assumed[0].endswith(
        "assumed (cluster file: store_gb_per_second; a probe of the store failed: OSError)"
    )


# ------------------------------------------------------------------ loader threads


def test_the_plan_chooses_the_least_threads_that_keep_up() -> None:
    chosen = []
    for decode_seconds in (1e-5, 4e-3, 6e-3, 20e-3, 1.0):
        of = given(replace(ON_DISK, decode_seconds=decode_seconds), workers="auto", prefetch=64)
        made, feed = forecast(of)
        computing = made.step.seconds - made.step.loading
        chosen.append(feed.workers)
        if feed.workers < 8:  # 64 cores, 8 ranks
            enough = load_cost(of, PLAN, workers=feed.workers).peak_seconds
            assert enough <= computing / HEADROOM
        if 1 < feed.workers < 8:
            fewer = load_cost(of, PLAN, workers=feed.workers - 1).peak_seconds
            assert fewer > computing / HEADROOM
    assert chosen == sorted(chosen)
    assert (chosen[0], chosen[-1]) == (1, 8)


def test_threads_that_would_not_help_are_not_taken() -> None:
    of = given(replace(STORED, decode_seconds=1e-5), store=1e5, workers="auto")
    assert forecast(of)[1].limits[0].cause == "store bandwidth"
    assert forecast(of)[1].workers == 1


def test_the_wait_of_a_step_counts_the_threads_that_may_be_chosen() -> None:
    slow = replace(ON_DISK, decode_seconds=0.5)
    auto, fixed = (forecast(given(slow, workers=workers, prefetch=8))[0] for workers in ("auto", 8))
    assert auto.step == fixed.step


def test_a_given_number_of_threads_stays() -> None:
    assert forecast(given(replace(ON_DISK, decode_seconds=1.0), workers=2))[1].workers == 2


def test_the_bytes_ahead_bound_the_steps_that_are_loaded_at_once() -> None:
    small = given(
        replace(STORED, decode_seconds=0.05), latency=0.5, store=1e12, cache_bytes=0, prefetch_bytes=1
    )
    assert load_cost(small, PLAN).parts["store requests"] == pytest.approx(2 * 0.5 / 2)
    _, feed = forecast(small)
    size = 3 * 2 * 16 * 512  # three steps of two samples of 512 tokens
    changes = {remedy.change for remedy in feed.remedies}
    assert f"data.prefetch_bytes = {size} (48.0 KiB of host memory for each rank)" in changes


def test_the_number_of_steps_ahead_is_a_way_out_too() -> None:
    few = given(replace(STORED, decode_seconds=1e-5), latency=2.0, store=1e12, cache_bytes=0, prefetch=1)
    assert "data.prefetch = 3" in {remedy.change for remedy in forecast(few)[1].remedies}


def test_ranks_get_the_number_and_the_job_keeps_auto() -> None:
    of = given(replace(ON_DISK, decode_seconds=1.0), workers="auto")
    made, _ = forecast(of)
    workers = loader_workers(of.job, PLAN, of.cluster, made, of.workload)
    assert workers == 8
    assert with_workers(of.job, workers).data.worker_count == 8
    assert of.job.data.worker_count == 1
    assert workers_text(of.job, workers) == "8 threads per rank (chosen: data.workers = 'auto')"
    own = given(ON_DISK, image_transform=ImageTransformSection(size=8, augment=["mine"]))
    assert workers_text(own.job, 2) == "2 processes per rank"
    assert workers_note(of.job, workers) == [
        "data.workers = 8: chosen for data.workers = 'auto'; it changes no sample"
    ]
    assert workers_note(of.job, 1) == workers_note(with_workers(of.job, 8), 8) == []


@pytest.mark.parametrize(
    ("device", "own", "processes", "expected"),
    [("cuda", False, False, 8), ("cpu", False, False, 4), ("cuda", True, False, 1), ("cuda", True, True, 4)],
)
def test_without_a_step_time_the_cores_decide(device: str, own: bool, processes: bool, expected: int) -> None:
    of = given(ON_DISK, workers="auto", worker_processes=processes)
    plan = replace(PLAN, device=device)
    found = loader_workers(of.job, plan, of.cluster, None, of.workload, has_own_data=own)
    assert found == expected


def test_an_own_data_set_has_no_forecast_of_its_feed() -> None:
    of = job()
    own = of.model_copy(update={"data": of.data.model_copy(update={"text": [], "factory": "mine:data"})})
    assert forecast_plan(problem(own), PLAN).data_feed is None


OWN = replace(ON_DISK, sample_bytes=0.0, decode_seconds=0.5, decode_origin="measured by run one", is_own=True)
OWN_DATA = {"images": [], "factory": "mine:data"}


def test_python_holds_threads_back_and_processes_do_not() -> None:
    for keys, readers in (
        ({"workers": 1}, 1),
        ({"workers": 4}, 1),
        ({"workers": "auto"}, 1),
        ({"workers": 4, "worker_processes": True}, 4),
        ({"workers": "auto", "worker_processes": True, "prefetch": 16}, 8),
    ):
        cost = load_cost(given(OWN, **{**OWN_DATA, **keys}), PLAN)
        assert cost.parts["reading"] == pytest.approx((250e-6 + 2 * 0.5) / readers)
    waits = load_cost(given(replace(OWN, core_share=0.1), **OWN_DATA | {"workers": 4}), PLAN)
    assert waits.parts["reading"] == pytest.approx((250e-6 + 2 * 0.5) / 4)


def test_a_slow_dataset_of_ones_own_is_helped_by_processes() -> None:
    _, feed = forecast(given(OWN, **OWN_DATA, workers="auto"))
    assert (feed.workers, feed.limits[0].cause) == (1, "reading")
    assert feed.assumed == ("reading: 0.50 s per sample, measured by run one",)
    best = feed.remedies[0]
    assert best.change == "data.worker_processes = true, data.workers = 8"
    assert best.fed_devices == pytest.approx(8 * feed.fed_devices, rel=1e-2)
    of = given(OWN, **OWN_DATA, workers="auto", worker_processes=True, prefetch=8)
    made, feed = forecast(of)
    assert feed.workers == loader_workers(of.job, PLAN, of.cluster, made, of.workload) == 8


def test_feed_and_loading_survive_json() -> None:
    made, feed = forecast(given())
    assert made.to_json()["data_feed"] == asdict(feed)
    workload = given(replace(STORED, store=StoreRates(0.02, None, 1e8, "measured"))).workload
    assert Workload.from_json(workload.to_json()) == workload


@pytest.mark.parametrize(
    ("nodes", "order", "expected"),
    [
        (1, "global", None),
        (4, "global", r"parts on 4 nodes: .* 75% of the samples .* 6\.9 MiB a step"),
        (4, "interleaved", r"parts on 4 nodes, .* at most 6\.9 MiB a step"),
    ],
)
def test_data_in_parts_say_what_is_handed_over(nodes: int, order: str, expected: str | None) -> None:
    of = given(ON_DISK, placement="parts", part_order=order)
    section = of.job.cluster.model_copy(update={"nodes": nodes})
    of = replace(
        of,
        job=of.job.model_copy(update={"cluster": section}),
        workload=replace(of.workload, input_elements_per_sample=3 * 224 * 224),
    )
    found = [reason for reason in forecast_plan(of, PLAN).reasons if reason.startswith("data in parts")]
    assert len(found) == (expected is not None)
    if expected is not None:
        assert re.search(expected, found[0]), found
