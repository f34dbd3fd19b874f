"""Section `[observe]` of a job file: console and records."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from wanma.job.sections.base import Section

MAX_RUN_NAME_BYTES = 200
"""Maximum bytes of a run's name; file systems allow 255, and files beside the run directory add to it."""


class ObserveSection(Section):
    """Display and records of a run."""

    model_config = ConfigDict(hide_input_in_errors=True)  # one may be a secret by mistake

    name: str | None = Field(None, description="name of the job and its run; default: the job file's name")
    runs: str = Field("runs", description="folder of run directories")
    console: Literal["auto", "live", "plain", "quiet"] = Field(
        "auto", description="console style; auto: live on a terminal, else plain"
    )
    log_every_steps: int = Field(
        10, ge=1, le=1_000_000_000_000, description="plain console: steps between two lines"
    )
    gradient_norms_every_steps: int = Field(
        0,
        ge=0,
        le=1_000_000_000_000,
        description="steps between records of each layer's gradient norm; 0: never",
    )
    callbacks: list[str] = Field(
        default_factory=list,
        description="'package.module:Class' or object of a wanma.Callback, called during the run",
    )
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port of each node's metrics for Prometheus; 0: any that is free; default: no endpoint",
    )
    metrics_host: str = Field(
        "127.0.0.1",
        description="address that it listens on; 0.0.0.0: all of each node, and metrics_token is needed",
    )
    metrics_token: str = Field(
        "", description="token that readers of the metrics must send; env:NAME or file:PATH of it"
    )
    alerts: bool = Field(True, description="watch the run by the rules of alerts")
    alert_webhook: str = Field("", description="URL that gets each alert; env:NAME or file:PATH of it")
    alert_body: str = Field(
        "",
        description="body of that request, with {text}, {alert}, {severity}, {run}, {job}; "
        "default: all as JSON",
    )
    alert_command: list[str] = Field(
        default_factory=list, description="command, as words, that reads each alert as JSON"
    )
    trackers: list[str] = Field(
        default_factory=list,
        description="copies of the records: mlflow, wandb, an entry point, 'package.module:Class'",
    )
    tensorboard: bool = Field(False, description="write TensorBoard files into the run directory")

    @field_validator("metrics_token", "alert_webhook")
    @classmethod
    def _check_secret_source(cls, value: str) -> str:
        if value and not value.startswith(("env:", "file:")):
            # Without the value, which is the secret.
            raise ValueError("must be 'env:NAME' or 'file:PATH': the job is written into the run directory")
        return value

    @model_validator(mode="after")
    def _check_run_name(self) -> ObserveSection:
        if self.name is not None and (reason := invalid_run_name_reason(self.name)) is not None:
            raise ValueError(f"name {reason}")
        return self


def invalid_run_name_reason(name: str) -> str | None:
    """Return the reason why `name` is no valid run name, or None.

    A name is one folder in `runs`, and an argument of commands.
    """
    if not name.strip() or name != name.strip() or not name.isprintable():
        return f"must not begin or end with a blank, or contain control characters (given: {name!r})"
    if name in (".", "..") or "/" in name:
        return f"must be the name of one folder; set the parent folder with observe.runs (given: {name!r})"
    if name.startswith("-"):
        return f"must not begin with '-', like an option of a command (given: {name!r})"
    if len(name.encode()) > MAX_RUN_NAME_BYTES:
        return f"must be at most {MAX_RUN_NAME_BYTES} bytes long (given: {len(name.encode())})"
    return None
