"""A run in the terminal."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from wanma.job.run.run_directory import RunDirectory
from wanma.report.key_figures import data_loading_text, store_traffic_text
from wanma.report.report_page import render_report_page
from wanma.report.run_report import read_report
from wanma.report.terminal import Placement, run_summary, runs_table

NewRun = Callable[..., RunDirectory]


def test_the_summary_tells_the_end_the_numbers_and_the_forecast(new_run: NewRun) -> None:
    lines = run_summary(read_report(new_run(300))).splitlines()
    assert lines[0] == "gpt: Finished: 300 of 300 steps."
    assert "  2 ranks (dp_replicate 2), bf16, cpu, 10.2M parameters" in lines
    assert "  best validation   2.202  (perplexity 9.043, step 300)" in lines
    assert any(line.startswith("  peak memory") and "680 MiB  (forecast 544 MiB)" in line for line in lines)
    assert any(line.startswith("  time: forward and backward 87 %") for line in lines)


def test_a_run_without_metrics_is_said_to_have_none(new_run: NewRun) -> None:
    run = new_run(0, total=10, finish=None)
    text = run_summary(read_report(run))
    assert "This run has no metrics" in text
    assert str(run.rank_log(0)) in text
    run.rank_log(0).unlink()
    assert str(run.rank_log(0)) not in run_summary(read_report(run)), "no rank was started"


def test_warnings_and_gaps_are_part_of_the_summary(new_run: NewRun) -> None:
    run = new_run(3, loss=lambda _: math.nan)
    with run.events.open("a") as file:
        file.write('{"kind": "message", "time": 1.0, "level": "warning", "text": "disk full"}\n')
    run.environment.unlink()
    text = run_summary(read_report(run))
    assert "  warning: disk full" in text
    assert "environment.json: missing" in text


def test_every_recovery_is_told(new_run: NewRun) -> None:
    run = new_run(30, total=60)
    with run.events.open("a") as file:
        file.write(
            '{"kind": "recovery", "time": 1.0, "failure": "rank 1 failed: ValueError", "source": "memory", '
            '"step": 29, "repeated_steps": 0, "seconds": 0.5, "attempt": 1}\n'
        )
    report = read_report(run)
    assert len(report.recoveries) == 1
    assert (
        "\n\n  recovered from: rank 1 failed: ValueError\n"
        "    resumed from the in-memory checkpoint of step 29, no step is repeated; "
        "0.50 s from the failure to the next finished step"
    ) in run_summary(report)
    assert "rank 1 failed: ValueError" in render_report_page(report)


def test_runs_are_listed_one_a_line(new_run: NewRun) -> None:
    runs = [new_run(300, name="long"), new_run(5, name="[b]odd", total=10, finish="interrupted")]
    stream = io.StringIO()
    Console(file=stream, width=100).print(runs_table(runs))
    heads, long, odd = stream.getvalue().splitlines()
    assert heads.split() == ["run", "state", "steps", "loss", "tokens/s", "MFU", "memory", "last", "activity"]
    assert long.split()[:4] == ["long", "finished", "300/300", "2.069"]
    assert odd.split()[:3] == ["[b]odd", "interrupted", "5/10"]


def test_a_rate_that_counts_no_tokens_is_listed_with_its_unit(new_run: NewRun) -> None:
    run = new_run(5, total=10)
    run.events.write_text(run.events.read_text().replace('"world_size": 2', '"rate_unit": "samples/s"'))
    stream = io.StringIO()
    Console(file=stream, width=120).print(runs_table([run]))
    assert stream.getvalue().count("samples/s") == 1


def test_submitted_runs_are_listed_with_their_engine(new_run: NewRun) -> None:
    placed, local = new_run(5, name="placed", total=10, finish=None), new_run(5, name="local")
    stream = io.StringIO()
    placements = {placed.path: Placement("finished", "slurm 4711")}
    Console(file=stream, width=120).print(runs_table([placed, local], placements))
    heads, first, second = stream.getvalue().splitlines()
    assert heads.split()[-1] == "engine"
    assert first.split()[:2] == ["placed", "finished"], "the records have not been fetched since"
    assert first.split()[-2:] == ["slurm", "4711"]
    assert second.split()[-1] == "–"


def test_names_of_runs_can_be_read_on_a_narrow_terminal(new_run: NewRun) -> None:
    runs = [new_run(300, name="several-targets"), new_run(5, name="odd", total=10_000, finish="interrupted")]
    stream = io.StringIO()
    Console(file=stream, width=80).print(runs_table(runs))
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("several") for line in lines)


def change_steps(run: RunDirectory, **fields: Any) -> RunDirectory:
    lines = [json.loads(line) | fields for line in run.metrics.read_text().splitlines()]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def loading(run: RunDirectory, data: float, **load: float) -> RunDirectory:
    """The run with these seconds of each step: of the wait for data, and of the parts of loading."""
    return change_steps(run, phases={"data": data, "forward_backward": 1.0}, load_seconds=load)


def test_the_part_of_loading_that_dominates_is_named(new_run: NewRun) -> None:
    report = read_report(loading(new_run(4), 0.5, read=0.1, decode=0.8, collate=0.1))
    text = "decode dominates, 80 % of 4.00 s in loader threads (data.workers = 1"
    assert text in run_summary(report)
    assert text in render_report_page(report)
    assert "dominates" not in run_summary(read_report(new_run(4, "older")))


@pytest.mark.parametrize(("part", "key"), [("read", ""), ("dataset", " with data.worker_processes = true")])
def test_the_workers_that_would_keep_up_are_named(new_run: NewRun, part: str, key: str) -> None:
    run = loading(new_run(4), 0.5, **{part: 2.5}, collate=0.0)
    assert f"waiting for data 33 %: {part} dominates" in data_loading_text(read_report(run))
    assert f"(data.workers = 1; 3{key} would keep up)" in data_loading_text(read_report(run))


def test_loading_that_no_step_waits_for_is_not_mentioned(new_run: NewRun) -> None:
    run = loading(new_run(4), 0.001, read=2.5, decode=0.0, collate=0.0)
    assert data_loading_text(read_report(run)) == ""


def test_traffic_with_stores_is_one_line(new_run: NewRun) -> None:
    run = new_run(4)
    assert store_traffic_text(read_report(run)) == ""
    requests = {"store_requests": {"s3": 300}, "store_bytes": {"s3": 2**20}}
    nodes = {"node_requests": {"0": 100, "1": 200}, "node_bytes": {"0": 2**18, "1": 3 * 2**18}}
    report = read_report(change_steps(run, **requests, **nodes, cache_blocks={"hit": 3, "miss": 1}))
    text = "stores: s3 1,200 requests, 4.0 MiB; node cache: 75 % of 16 blocks; on 2 nodes 400 to 800 "
    text += "requests each, 1.0 MiB to 3.0 MiB"
    assert store_traffic_text(report) == text
    assert text in run_summary(report)
    assert text in render_report_page(report)
