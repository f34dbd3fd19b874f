"""HTTP endpoint of the metrics, read as Prometheus reads it."""

from __future__ import annotations

import json
import os
import re
import socket
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from wanma.job.errors import JobError
from wanma.job.sections.observe import ObserveSection
from wanma.observe.endpoint import TARGETS_FOLDER, MetricsEndpoint, remove_stale_targets
from wanma.observe.series.run_series import Sample

RANK = (("node", "0"), ("rank", "1"))
SAMPLES = [Sample("loss", (), 2.5), Sample("loss", (), float("nan")), Sample("rank_steps", RANK, 7.0)]


@contextmanager
def endpoint(
    token: str = "", host: str = "127.0.0.1", port: int = 0, **more: object
) -> Iterator[MetricsEndpoint]:
    with MetricsEndpoint(host, port, token, lambda: SAMPLES[::2], {"run": 'a "b"'}, **more) as opened:  # type: ignore[arg-type]
        yield opened


def get(port: int, path: str = "/metrics", **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""


def test_samples_are_read_with_their_labels_and_kinds() -> None:
    with endpoint() as opened:
        status, text = get(opened.port)
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert status == 200
    assert families["wanma_loss"].type == "gauge"
    assert families["wanma_loss"].samples[0].labels == {"run": 'a "b"'}
    steps = families["wanma_rank_steps"]
    assert steps.type == "counter"
    assert steps.samples[0].name == "wanma_rank_steps_total"
    assert steps.samples[0].labels == {"run": 'a "b"', "node": "0", "rank": "1"}


def test_an_address_of_ipv6(tmp_path: Path) -> None:
    with endpoint(host="::1") as opened:
        opened.announce(tmp_path, "gpt-0", {})
        (entry,) = json.loads((tmp_path / TARGETS_FOLDER / "gpt-0.json").read_text())
        with urllib.request.urlopen(f"http://{entry['targets'][0]}/metrics", timeout=20) as answer:
            assert answer.status == 200


def test_a_token_is_asked_for() -> None:
    with endpoint("secret") as opened:
        assert get(opened.port)[0] == 401
        assert get(opened.port, Authorization="Bearer wrong")[0] == 401
        assert get(opened.port, Authorization="Bearer secret")[0] == 200
        assert get(opened.port, "/job.toml", Authorization="Bearer secret")[0] == 404


def test_other_machines_need_a_token() -> None:
    with pytest.raises(JobError, match=r"observe\.metrics_host .* token"), endpoint(host="0.0.0.0"):
        pass
    with pytest.raises(JobError, match=r"observe\.metrics_host") as caught:
        MetricsEndpoint("203.0.113.1", 0, "token", list, {})
    assert "0.0.0.0" in str(caught.value.hint)


def test_the_guides_settings_let_another_machine_read_each_node(tmp_path: Path) -> None:
    guide = Path(__file__).parents[2] / "docs" / "guides" / "prometheus-and-grafana.md"
    (block,) = re.findall(r"```toml\n(.*?)```", guide.read_text(), re.DOTALL)
    settings = ObserveSection(**tomllib.loads(block)["observe"])
    with endpoint("secret", host=settings.metrics_host) as opened:
        opened.announce(tmp_path, "gpt-1", {})
        (entry,) = json.loads((tmp_path / TARGETS_FOLDER / "gpt-1.json").read_text())
        assert entry["targets"] == [f"{socket.gethostname()}:{opened.port}"]
        assert get(opened.port, Authorization="Bearer secret")[0] == 200


def test_a_port_in_use_is_replaced_and_prometheus_finds_the_other(tmp_path: Path) -> None:
    warnings: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with endpoint(port=port, warn=warnings.append) as opened:
            opened.announce(tmp_path, "gpt-0", {"run": "gpt"})
            (entry,) = json.loads((tmp_path / TARGETS_FOLDER / "gpt-0.json").read_text())
            assert entry["targets"] == [f"127.0.0.1:{opened.port}"]
            assert opened.port != port
            assert f"observe.metrics_port = {port}" in warnings[0]
    assert not list((tmp_path / TARGETS_FOLDER).iterdir())


def test_the_file_of_an_endpoint_whose_process_was_killed_goes(tmp_path: Path) -> None:
    folder = tmp_path / TARGETS_FOLDER
    folder.mkdir()
    for name, host, process in (
        ("dead", socket.gethostname(), 2**22 + 1),
        ("alive", socket.gethostname(), os.getpid()),
        ("elsewhere", "another", 2**22 + 1),
    ):
        entry = {"targets": ["127.0.0.1:1"], "labels": {"host": host, "__meta_process": str(process)}}
        (folder / f"{name}.json").write_text(json.dumps([entry]))
    remove_stale_targets(tmp_path)
    assert sorted(path.stem for path in folder.iterdir()) == ["alive", "elsewhere"]
