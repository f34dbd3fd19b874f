"""The doctor names what is here and what to do about what is not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from support.command import share_compiled
from wanma.hardware.checks import doctor
from wanma.hardware.checks.doctor import (
    CheckResult,
    probe_gloo_loopback,
    run_checks,
)
from wanma.hardware.discovery.network_interfaces import Interface, NetworkRoute
from wanma.hardware.measurement import cpu_peak
from wanma.hardware.native import native_library


@pytest.fixture(autouse=True)
def _quick_and_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share_compiled(tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cpu_peak, "PROBE_SECONDS", 0.01)
    monkeypatch.setattr(doctor, "WRITE_PROBE_BYTES", 1 << 20)


def by_name(findings: list[CheckResult]) -> dict[str, CheckResult]:
    return {finding.name: finding for finding in findings}


def test_this_machine_can_train_and_the_probe_leaves_nothing_behind(tmp_path: Path) -> None:
    found = by_name(run_checks(tmp_path / "runs" / "not" / "there"))
    assert found["torch"].status == "ok"
    assert found["collectives"].status == "ok"
    assert found["Gloo on loopback"] == CheckResult("Gloo on loopback", "ok", "two ranks reduced a tensor")
    assert str(tmp_path) in found["disk"].text
    assert "GFLOP/s" in found["CPU peak"].text
    assert found["collectives within a node"].status == "ok"
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_every_problem_comes_with_advice(tmp_path: Path) -> None:
    assert all(finding.remedy for finding in run_checks(tmp_path) if finding.status != "ok")


def test_a_missing_compiler_is_one_sentence_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    finding = doctor._check_compiler()
    assert finding.status == "missing"
    assert "apt-get install g++" in finding.remedy


def test_collectives_of_one_machine_are_told_with_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = "shared memory (parallel.collectives), compiled on this node"
    assert doctor._check_shared_memory_collectives().text == shared
    monkeypatch.setattr(native_library, "find_cpp_compiler", lambda: "/bin/false")
    refused = doctor._check_shared_memory_collectives()
    assert refused.status == "warn"
    assert refused.text.startswith("Gloo, over TCP: /bin/false cannot compile group.cpp")
    assert "CXX" in refused.remedy
    monkeypatch.setattr(native_library, "find_cpp_compiler", lambda: None)
    missing = doctor._check_shared_memory_collectives()
    assert (missing.text, missing.remedy) == (
        "Gloo, over TCP: no C++ compiler was found (apt-get install g++)",
        "apt-get install g++",
    )


def test_a_library_of_the_wheel_is_told_with_its_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "x86-64-v3" / "group.so"
    monkeypatch.setattr(doctor, "find_carried_library", lambda _: library)
    monkeypatch.setattr(doctor, "find_or_build_library", lambda _: native_library.NativeLibrary(library))
    found = doctor._check_shared_memory_collectives()
    assert found.text == "shared memory (parallel.collectives), carried by the wheel for x86-64-v3"
    monkeypatch.setattr(doctor, "find_cpp_compiler", lambda: None)
    assert "Gloo" not in doctor._check_compiler().remedy


@pytest.mark.parametrize(
    ("version", "finding"),
    [
        (
            "2.10.0+cpu",
            ("warn", "2.10.0+cpu: older than 2.11, the first supported", "pip install 'torch>=2.11'"),
        ),
        ("2.15.2+cu132", ("ok", "2.15.2+cu132 (tested: 2.11 to 2.15)", "")),
        ("2.16.0+cu140", ("warn", "2.16.0: newer than any tried here: 2.15", "")),
    ],
)
def test_an_old_torch_and_one_newer_than_any_tried_are_warnings(
    monkeypatch: pytest.MonkeyPatch, version: str, finding: tuple[str, str, str]
) -> None:
    import torch

    monkeypatch.setattr(torch, "__version__", version)
    found = doctor._check_torch()
    assert (found.status, found.text, found.remedy) == finding


def test_a_missing_extra_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "EXTRAS", {"gpu": ("no_such_module_here", "GPU power")})
    assert doctor._check_extras() == [
        CheckResult("extra: gpu", "missing", "for GPU power", "pip install 'wanma[gpu]'")
    ]


def test_the_network_is_told_with_the_interface_that_several_machines_would_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = (Interface("eth0", ("10.0.0.5",), True), Interface("lo", ("127.0.0.1",), True))
    monkeypatch.setattr(doctor, "list_interfaces", lambda: known)
    monkeypatch.setattr(
        doctor, "default_routes", lambda _: [NetworkRoute("eth0", "10.0.0.5", "by the default route")]
    )
    monkeypatch.setattr("socket.gethostbyname", lambda _: "127.0.1.1")
    network, way, name = doctor._check_network()
    assert network.text == "eth0 10.0.0.5, lo 127.0.0.1"
    assert way.text == "eth0 (10.0.0.5), by the default route; a run takes the route to cluster.rendezvous"
    assert "127.0.1.1 on this node" in name.text
    assert "cluster.rendezvous it is replaced" in name.text
    monkeypatch.setattr(doctor, "default_routes", lambda _: [])
    *_, name = doctor._check_network()
    assert "127.0.1.1 on this node" in name.text
    assert "to an address" in name.remedy


def test_an_interface_in_the_environment_that_is_not_there_is_pointed_out() -> None:
    known = {"eth0", "ib0", "ib1"}
    wrong = doctor._check_network_variables(known, {"GLOO_SOCKET_IFNAME": "eno1"})
    assert [finding.status for finding in wrong] == ["warn"]
    assert wrong[0].text == "GLOO_SOCKET_IFNAME=eno1, but this node has no interface eno1"
    assert "eth0, ib0, ib1" in wrong[0].remedy
    for value in ("ib", "=eth0", "^docker,lo", "ib0,ib1"):
        assert doctor._check_network_variables(known, {"NCCL_SOCKET_IFNAME": value}) == []


def test_too_many_threads_in_the_environment_are_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "100000")
    assert doctor._check_cores().status == "warn"


def test_a_place_that_cannot_be_written_is_a_finding_not_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path, size: int) -> Callable[[], object]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor, "disk_write_run", refuse)
    finding = doctor._check_disk(tmp_path)
    assert finding.status == "warn"
    assert finding.text == f"cannot write to {tmp_path}: Permission denied"


def test_gloo_reduces_over_the_loopback() -> None:
    assert probe_gloo_loopback() == ""
