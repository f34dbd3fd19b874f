import pytest

from wanma.api import machines, planning
from wanma.api.planning import first_layout, notes
from wanma.job.cluster import Cluster, Device, Node
from wanma.job.errors import WanmaError
from wanma.job.load import job_from
from wanma.planner.choose import Planned

JOB = {"model": {"preset": "gpt-1m"}, "parallel": {"compile": True}, "cluster": {"device": "cpu"}}


def test_without_a_compiler_compile_is_off_with_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "cpp_compiler", lambda: None)
    job = job_from(JOB)
    plan = first_layout(job).plan
    assert not plan.compile
    assert notes(job, Planned(plan, None)) == [
        "parallel.compile is off: on a CPU it needs a C++ compiler, and none was found (apt-get install g++)"
    ]


def test_with_a_compiler_the_job_is_followed_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "cpp_compiler", lambda: "/usr/bin/g++")
    job = job_from(JOB)
    plan = first_layout(job).plan
    assert plan.compile
    assert notes(job, Planned(plan, None)) == []


def test_fp8_without_torchao_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Device("cuda", "H100", 80 << 30, {"fp8": 1979e12})
    monkeypatch.setattr(machines, "discover", lambda: Cluster((Node("box", 8, 64 << 30, (gpu,)),)))
    job = job_from({"model": {"preset": "gpt-1m"}, "train": {"fp8": True, "precision": "bf16"}})
    monkeypatch.setattr(planning, "find_spec", lambda _: None)
    with pytest.raises(WanmaError, match=r"train\.fp8 needs the package `torchao`") as refusal:
        first_layout(job)
    assert refusal.value.exit_code == 2
    monkeypatch.setattr(planning, "find_spec", lambda _: object())
    assert first_layout(job).plan.approximate == ("fp8",)
