"""Records of a run of two ranks for diagnoses, as a run writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wanma.diagnosis.evidence import read_evidence
from wanma.diagnosis.finding import Finding
from wanma.diagnosis.findings import diagnose
from wanma.elastic.detection.straggler_detector import StragglerDetector
from wanma.elastic.protocol.messages import RankWorkTime
from wanma.job.run.run_directory import RunDirectory
from wanma.report.run_report import read_report

GIB = 1 << 30
FORECAST = {"step": {"compute": 0.8, "data": 0.1, "optimizer": 0.1, "seconds": 1.0, "uncertainty": 0.1}}
HEALTHY = {"compute": 0.85, "communication": 0.03, "data": 0.01, "optimizer": 0.11}


class Records:
    """Records of a run of two ranks on one node, a step a second."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDirectory(folder / "gpt")
        self.run.create()
        self.run.job.write_text("[train]\nsteps = 1000\n")
        self.run.plan.write_text(json.dumps({"plan": {}, "forecast": FORECAST}))
        self.steps: list[dict[str, Any]] = []
        self.usage: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = [
            {"kind": "start", "time": 0.0, "step": 0, "steps": 1000, "world_size": 2, "host": "elsewhere"}
        ]

    def train(
        self,
        parts: dict[str, float],
        *,
        ranks: tuple[dict[str, float], ...] = ({}, {}),
        steps: int = 300,
        growth: float = 0.0,
        groups: tuple[int, ...] = (0, 0),
        foreign: float = 0.0,
        disk_wait: float | None = None,
        change: Callable[[int], dict[str, Any]] = lambda _: {},
        **values: Any,
    ) -> None:
        """Record steps.

        Args:
            parts: seconds of a step by phase; `compute`, `bubble`, and exposed communication by kind.
            ranks: seconds of each rank a step, `compute` and `data`, and `cores`.
            growth: bytes by which the memory of rank 1 grows a second.
            groups: peer group of each rank.
            foreign: processors of the node's four that other programs use.
            disk_wait: share of the time in which some program of the node waits for a disk; None: unknown.
            change: values of a step's record that differ, by its number.
        """
        kinds = {kind: parts[kind] for kind in ("tensor", "context", "expert", "pipeline") if kind in parts}
        phases = {name: value for name, value in parts.items() if name not in ("compute", "bubble", *kinds)}
        inside = sum(kinds.values()) + parts.get("compute", 0.0)
        phases |= {"forward_backward": inside}
        total = sum(phases.values())
        detector = StragglerDetector(1.5)
        for step in range(1, steps + 1):
            record = {
                "step": step,
                "time": step * total,
                "step_seconds": total,
                "loss": 2.0,
                "grad_norm": 1.0,
            }
            record |= {"phases": phases, "compute_seconds": parts.get("compute", 0.0)}
            record |= {"exposed_communication_seconds": kinds, "communication_seconds": kinds}
            record |= {"bubble_seconds": parts["bubble"]} if "bubble" in parts else {}
            self.steps.append({**record, **values, **change(step)})
            entries = [
                {
                    "rank": rank,
                    "is_alive": True,
                    "steps": step,
                    "peer_group": groups[rank],
                    "cpu_seconds": step * total * work.get("cores", 1.0),
                    "memory_bytes": 4 * GIB + rank * growth * step * total,
                    "compute_seconds": step * work.get("compute", parts.get("compute", 0.0)),
                    "data_seconds": step * work.get("data", parts.get("data", 0.0)),
                }
                for rank, work in enumerate(ranks)
            ]
            usage = {"time": step * total, "ranks": entries, "disk_read_bytes": step * 1000, "cpus": 4}
            usage["cpu_seconds"] = step * total * foreign + sum(entry["cpu_seconds"] for entry in entries)
            usage |= {} if disk_wait is None else {"disk_wait_seconds": step * total * disk_wait}
            self.usage.append(usage)
            times = [
                RankWorkTime(
                    entry["rank"],
                    step,
                    entry["peer_group"],
                    entry["data_seconds"],
                    entry["compute_seconds"],
                )
                for entry in entries
            ]
            self.events += [
                {"kind": "straggler", "time": step * total, **asdict(found)}
                for found in detector.update(times, len(ranks), step * total)
            ]

    def diagnose(self) -> list[Finding]:
        for path, records in (
            (self.run.metrics, self.steps),
            (self.run.events, self.events),
            (self.run.node_usage(0), self.usage),
        ):
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return diagnose(read_evidence(read_report(self.run)))
