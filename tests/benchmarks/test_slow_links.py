"""The comparison over slow links: its jobs are wanma's, its machines two, its numbers of the records."""

import importlib
import json
from dataclasses import asdict, replace

from wanma.job.file.loading import load_job
from wanma.job.plan.plan import Plan
from wanma.planner.all_reduce_choice import all_reduce_unavailable_reason


def module(name):
    return importlib.import_module(f"benchmarks.slow_links.{name}")


def setting(**changes):
    plain = module("contenders").Setting("both+diloco", 100.0, 0.01, "fp32", "gpt-1m", 512, 64, 2, 1, 4)
    return replace(plain, **changes)


def test_every_contender_has_a_job_of_two_machines_that_sums_as_it_says(tmp_path):
    path = tmp_path / "job.toml"
    seen = {}
    for name, way in module("contenders").CONTENDERS.items():
        path.write_text(setting().job(way))
        job = load_job(path)
        assert (job.cluster.nodes, job.parallel.dp_replicate) == (2, 4)
        assert job.train.global_batch == 8
        assert (job.checkpoint.in_memory_every_steps, job.checkpoint.compare_replicas) == ("auto", True), (
            "as by default"
        )
        assert all_reduce_unavailable_reason(Plan(dp_replicate=4), "hierarchical", job.cluster.nodes) is None
        seen[name] = (job.parallel.overlap, job.parallel.all_reduce)
        assert job.parallel.compression == (name if name in ("bf16", "int8", "topk", "powersgd") else "none")
        assert (job.parallel.synchronize != "every_step") == (way.every > 1)
    assert {name: seen[name] for name in ("plain", "overlap", "hierarchical", "both")} == {
        "plain": (False, "backend"),
        "overlap": (True, "backend"),
        "hierarchical": (False, "hierarchical"),
        "both": (True, "auto"),
    }


def test_what_communicates_once_in_many_steps_is_measured_over_whole_numbers_of_them():
    seldom = module("contenders").CONTENDERS["diloco"]
    one, more = setting(), setting(steps=seldom.every + 1)
    assert (one.total_steps(seldom), one.total_steps(None)) == (2 + seldom.every, 6)
    assert more.total_steps(seldom) == 2 + 2 * seldom.every
    assert f"steps = {2 + seldom.every}\n" in one.job(seldom)
    assert "steps = 6\n" in one.job(None)


def test_both_contenders_run_on_both_machines_of_the_same_link():
    contenders = module("contenders")
    for command in (contenders.wanma_command(setting()), contenders.ddp_command(setting())):
        words = command.arguments
        assert words[:6] == ("python", "-m", "wanma.bench.programs.limited_link", "100", "0.01", "--")
        assert any("{node}" in word for word in words[6:])


def test_what_a_measured_step_waited_is_the_mean_without_warm_up(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    lines = [
        {"step": step, "exposed_communication_seconds": {"data": seconds}}
        for step, seconds in enumerate((9.0, 1.0, 2.0, 5.0))
    ]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert module("contenders").waited_seconds(metrics, 1, 2) == 1.5
    metrics.write_text('{"step": 1}\n{"step": 2}\n')
    assert module("contenders").waited_seconds(metrics, 0, 2) is None


def test_the_report_sets_each_way_beside_ddp():
    sample = {"tokens_per_second": 300.0, "losses": [2.0, 1.5], "disturbed": False, "waited": 0.25}
    peer = {**sample, "tokens_per_second": 100.0}
    del peer["waited"]
    taken = {"date": "2026-01-01", "commit": "abc", "both": sample, "diloco": sample, "DDP": peer}
    environment = {"machine": "a machine", "versions": {"torch": "2.13"}}
    piece = {
        "settings": asdict(setting()),
        "pairs": [taken],
        "environment": environment,
        "commands": {"wanma": "wanma train", "peer": "torchrun"},
        "job": "[model]\n",
    }
    text = module("report").report([piece])
    assert "## 100 Mbit/s, 10 ms" in text
    row = next(line for line in text.splitlines() if line.startswith("| both"))
    assert row.split(" | ")[1:5] == ["300", "3.00", "cannot tell", "0.25"]
    assert "| PyTorch's DDP | 100 | 1 | – | – | 1.5000 | 1 |" in text
    assert "| diloco: DiLoCo" in text
    assert module("report").report([]) == "Nothing has been measured yet.\n"
