"""Tracker of MLflow; its own variables say where: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from wanma.observe.trackers.tracker import Scalars, TrackedRun

BATCH_METRICS, BATCH_PARAMETERS = 1000, 100
"""Most values of one request (MLflow's REST API, log-batch)."""
VALUE_CHARACTERS = 500
"""Most characters of a parameter's value that every version of MLflow takes."""
_STATUS = {"finished": "FINISHED", "failed": "FAILED", "crashed": "FAILED"}
"""Status by outcome; another is KILLED, which MLflow shows as stopped."""


class MlflowTracker:
    """Tracker of one run in MLflow; the same run goes on after a resume.

    A point of the same metric, step and time is stored once, so that repetition is harmless.
    """

    def __init__(self) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client: Any = MlflowClient()
        self._metric, self._parameter = Metric, Param
        self._run_id = ""

    def open(self, run: TrackedRun) -> None:
        client, name = self._client, os.environ.get("MLFLOW_EXPERIMENT_NAME", "wanma")
        if "run_id" in run.state:
            self._run_id = run.state["run_id"]
            client.update_run(self._run_id, status="RUNNING")
        else:
            found = client.get_experiment_by_name(name)
            experiment = found.experiment_id if found is not None else client.create_experiment(name)
            self._run_id = run.state["run_id"] = client.create_run(experiment, run_name=run.name).info.run_id
        if not run.state.get("has_parameters"):  # a request for them may have failed before
            texts = [self._parameter(key, value[:VALUE_CHARACTERS]) for key, value in run.settings.items()]
            for index in range(0, len(texts), BATCH_PARAMETERS):
                client.log_batch(self._run_id, params=texts[index : index + BATCH_PARAMETERS])
            run.state["has_parameters"] = True

    def log(self, scalars: Sequence[Scalars]) -> None:
        metrics = [
            self._metric(tag, value, int(1000 * entry.time), entry.step)
            for entry in scalars
            for tag, value in entry.values.items()
        ]
        for index in range(0, len(metrics), BATCH_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[index : index + BATCH_METRICS])

    def finish(self, outcome: str) -> None:
        self._client.set_terminated(self._run_id, _STATUS.get(outcome, "KILLED"))
