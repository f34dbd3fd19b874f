"""Refusals of Ray in words, and Ray that is missing or does not answer."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import pytest

from wanma.engines.ray import bridge, client
from wanma.engines.ray.client import RayClient
from wanma.engines.ray.engine import RayEngine
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.sections.engines import RaySection

# As Ray 2.60 says it: ray._private.utils.check_version_info.
VERSIONS = """Version mismatch: The cluster was started with:
    Ray: 2.40.0
    Python: 3.9.1
This process on node 10.0.0.1 was started with:
    Ray: 2.60.0
    Python: 3.11.2
"""


def test_another_version_of_ray_or_python_is_one_error() -> None:
    error = bridge.explain_refusal(VERSIONS, "head:6379")
    for word in ("2.40.0", "3.9.1", "2.60.0", "3.11.2"):
        assert word in error.message
    assert "ray==2.40.0" in error.hint


def test_without_ray_the_install_command_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'wanma[ray]'" in (RayEngine().unusable_reason() or "")
    with pytest.raises(WanmaError) as raised:
        RayClient("auto").ask("nodes")
    assert raised.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize("program", ["import time; time.sleep(600)", "import os; os._exit(1)"])
def test_a_bridge_without_an_answer_ends_at_the_deadline(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = tmp_path / "python"
    silent.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{program}'\n")
    silent.chmod(0o755)
    monkeypatch.setattr(client.sys, "executable", str(silent))
    monkeypatch.setattr(client, "missing_ray", lambda: None)
    monkeypatch.setattr(client, "CONNECT_SECONDS", 0.5)
    with pytest.raises(WanmaError, match="gave no answer"):
        RayClient("head:6379").ask("nodes")


def test_a_process_with_many_open_files_gets_its_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge_program = tmp_path / "python"
    bridge_program.write_text("#!/bin/sh\nwhile read -r question; do echo '{\"value\": 7}'; done\n")
    bridge_program.chmod(0o755)
    monkeypatch.setattr(client.sys, "executable", str(bridge_program))
    monkeypatch.setattr(client, "missing_ray", lambda: None)
    ray = RayClient("head:6379")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
    opened = [os.dup(0)]
    try:
        while opened[-1] < 1024:
            opened.append(os.dup(0))
        assert ray.ask("nodes") == 7
    finally:
        ray._end()
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_groups_of_one_bundle_get_free_nodes_of_the_preferred_hosts() -> None:
    available = [{"CPU": 8.0}, {"CPU": 1.0}, {}, {"CPU": 2.0, "GPU": 1.0}, {"CPU": 8.0}]
    nodes = [{"id": str(n), "host": "abcad"[n], "available": one} for n, one in enumerate(available)]
    assert bridge.find_targets(["c", "a", "b", "gone"], {"CPU": 2.0}, nodes) == ["0", "3"]
    assert bridge.find_targets(["d", "a"], {"CPU": 1.0, "GPU": 1.0}, nodes) == ["3"]


@pytest.mark.parametrize("address", ["ray://head:10001", "http://head:8265", "head"])
def test_an_address_is_auto_or_that_of_a_head_node(address: str) -> None:
    RaySection(address="head.cluster:6379")
    with pytest.raises(ValueError, match="address"):
        RaySection(address=address)
