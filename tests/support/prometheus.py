"""Prometheus and Alertmanager of Debian, started for a test."""

from __future__ import annotations

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.networks import free_port
from support.waiting import wait_until

has_prometheus = bool(shutil.which("prometheus") and shutil.which("prometheus-alertmanager"))


class Prometheus:
    """Prometheus that reads the rendered files of a folder of runs, each second."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the present series of an expression: `metric`, with its labels, and `value`."""
        words = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{words}", timeout=20) as answer:
            result: dict[str, Any] = json.load(answer)["data"]
        return list(result["result"]) if result["resultType"] == "vector" else [result]

    def value(self, expression: str) -> float | None:
        """Return the value of the one series; None: there is none."""
        found = self.query(expression)
        return float(found[0]["value"][1]) if found else None


@contextmanager
def running_prometheus(folder: Path, rendered: Path, webhook: str = "") -> Iterator[Prometheus]:
    """Start Prometheus with the files of `wanma observe render`.

    Args:
        folder: folder for its data.
        rendered: folder of the files.
        webhook: URL that gets alerts, by the Alertmanager that the files name; empty: none.
    """
    port = free_port()
    text = (rendered / "prometheus" / "prometheus.yml").read_text().replace('"15s"', '"1s"')
    model = json.loads(text)
    configuration = rendered / "prometheus" / "quick.yml"
    configuration.write_text(json.dumps(model))
    listen = "--web.listen-address=127.0.0.1:"
    commands = [
        [
            "prometheus",
            f"--config.file={configuration}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"{listen}{port}",
        ]
    ]
    if webhook:
        ((manager,),) = [one["static_configs"] for one in model["alerting"]["alertmanagers"]]
        receiver = {"name": "test", "webhook_configs": [{"url": webhook}]}
        route = {"receiver": "test", "group_wait": "1s", "group_interval": "1s", "group_by": ["..."]}
        (folder / "alertmanager.yml").write_text(json.dumps({"route": route, "receivers": [receiver]}))
        commands.append(
            [
                "prometheus-alertmanager",
                f"--config.file={folder / 'alertmanager.yml'}",
                f"--storage.path={folder / 'alerts'}",
                f"--web.listen-address={manager['targets'][0]}",
                "--cluster.listen-address=",
            ]
        )
    processes = []
    try:
        for command in commands:
            with (folder / f"{command[0]}.log").open("w") as log:
                processes.append(subprocess.Popen(command, stdout=log, stderr=log))
        prometheus = Prometheus(port)
        wait_until(lambda: prometheus.query("vector(1)"), "Prometheus answers")
        yield prometheus
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
