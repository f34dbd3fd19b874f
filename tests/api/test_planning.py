import pytest

from wanma.api import planning
from wanma.api.planning import first_layout, notes
from wanma.job.load import job_from
from wanma.planner.choose import Planned

JOB = {"model": {"preset": "gpt-1m"}, "parallel": {"compile": True}, "cluster": {"device": "cpu"}}


def test_without_a_compiler_compile_is_off_with_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "cpp_compiler", lambda: None)
    job = job_from(JOB)
    _, plan = first_layout(job)
    assert not plan.compile
    assert notes(job, Planned(plan, None)) == [
        "parallel.compile is off: on a CPU it needs a C++ compiler, and none was found (apt-get install g++)"
    ]


def test_with_a_compiler_the_job_is_followed_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "cpp_compiler", lambda: "/usr/bin/g++")
    job = job_from(JOB)
    _, plan = first_layout(job)
    assert plan.compile
    assert notes(job, Planned(plan, None)) == []
