"""Ray engine: a placement group for the nodes of a run, an actor in each bundle, and records in the run directory."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wanma.engines.engine import EngineCluster, Explanation, Handle, RunStatus, Submission
from wanma.engines.ray.client import RayClient, missing_ray, ray_client
from wanma.engines.ray.discovery import choose_nodes, explain_waiting, read_nodes
from wanma.engines.ray.node_records import MARKER_FILE, node_file, read_node_records
from wanma.engines.ray.placements import actor_group, actor_index, actor_name, group_name
from wanma.engines.ray.ray_job import render_ray_job
from wanma.engines.recorded_state import read_recorded_state
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.run.run_directory import RunDirectory, write_atomically
from wanma.job.sections.cluster import ClusterSection

START_SECONDS = 90.0
"""Deadline, in seconds, of a start: the actors' processes import wanma."""
STOP_SECONDS = 10.0
"""Time, in seconds, that supervisors have for an end at once."""
CANCEL_FILE = "cancelled"
"""File in the folder of the submission: the user has cancelled the run."""


class RayEngine:
    """Engine of a Ray cluster; its handle holds the prefix of the run's names there, and the names of actors."""

    name = "ray"
    ends_with_caller = False

    def unusable_reason(self) -> str | None:
        return missing_ray()

    def discover(self, section: ClusterSection, /) -> EngineCluster | None:
        client = ray_client(section.ray.address)
        nodes = read_nodes(client.ask("nodes"))
        return choose_nodes(section.ray, nodes, client.head)

    def render(self, submission: Submission) -> str:
        return render_ray_job(submission)

    def foreground_command(self, _submission: Submission, /) -> list[str] | None:
        return None

    def submit(self, submission: Submission) -> Handle:
        client, run = ray_client(submission.settings.ray.address), RunDirectory(submission.run_directory)
        for file in (*run.engine_files.glob("ray-node-*.json"), run.engine_files / CANCEL_FILE):
            file.unlink(missing_ok=True)
        prefix = f"wanma-{submission.name}-{uuid.uuid4().hex[:8]}-"
        write_atomically(run.engine_files / MARKER_FILE, prefix)
        handle: Handle = {
            "address": submission.settings.ray.address,
            "prefix": prefix,
            "run_directory": str(run.path),
            "submitted": time.time(),
            "bundle": _bundle(submission),
            "first_nodes": submission.min_nodes,
            "started_nodes": 0,
            "actors": [],
        }
        try:
            handle = _add_nodes(client, handle, submission, {0: list(range(submission.min_nodes))})
            if submission.is_elastic and read_node_records(
                run
            ):  # else they would take the nodes of the others
                handle = self.resize(handle, submission, submission.nodes)
        except WanmaError as error:
            client.ask("remove", prefix=prefix)
            error.exit_code = EXIT_USAGE
            raise
        return {**handle, "address": client.head}

    def statuses(self, handles: Sequence[Handle]) -> list[RunStatus]:
        states = {address: ray_client(address).ask("state") for address in {h["address"] for h in handles}}
        return [_status(handle, states[handle["address"]]) for handle in handles]

    def hosts(self, handle: Handle, /) -> tuple[str, ...]:
        return tuple(dict.fromkeys(record["host"] for record in _records(handle).values()))

    def log_files(self, handle: Handle) -> list[Path]:
        return [
            path
            for index in _records(handle)
            if (path := node_file(handle["run_directory"], index, "log")).exists()
        ]

    def fetch(self, _handle: Handle, /) -> None:
        """Nothing to do: the run directory is on a file system that this machine shares."""

    def checkpoint_advice(self, _handle: Handle, /) -> str | None:
        return None

    def cancel(self, handle: Handle, *, is_immediate: bool) -> None:
        (RunDirectory(Path(handle["run_directory"])).engine_files / CANCEL_FILE).touch()
        client, records = _client(handle), _records(handle)
        running = [name for name in _living(handle, client) if actor_index(name) in records]
        client.ask("remove_groups", names=_waiting_groups(handle, client))
        client.ask("stop", names=running, signals="SIGTERM SIGINT" if is_immediate else "SIGINT", seconds=60)
        deadline = time.monotonic() + STOP_SECONDS
        while is_immediate and _living(handle, client) and time.monotonic() < deadline:
            time.sleep(0.2)
        if is_immediate:
            client.ask("remove", prefix=handle["prefix"])

    def resize(
        self, handle: Handle, submission: Submission, nodes: int, /, *, may_shrink: bool = True
    ) -> Handle:
        client, first = _client(handle), group_name(handle["prefix"], 0)
        living = _living(handle, client)
        if not living:
            raise WanmaError("the run has ended", "the same `wanma train` command resumes it", EXIT_USAGE)
        missing = nodes - len(living)
        if missing > 0:
            used = {
                number for name, number in handle["actors"] if name in living and actor_group(name) == first
            }
            lost = [number for number in range(handle["first_nodes"]) if number not in used][:missing]
            index = handle["started_nodes"] + len(lost)
            further = {number: [0] for number in range(index, index + missing - len(lost))}
            return _add_nodes(client, handle, submission, {0: lost, **further})
        leaving = [name for name in reversed(living) if actor_group(name) != first][: -missing or None]
        leaving = leaving if may_shrink and missing else []
        waiting = set(_waiting_groups(handle, client))
        groups = [actor_group(name) for name in leaving]
        client.ask("remove_groups", names=[group for group in groups if group in waiting])
        client.ask(
            "stop", names=[name for name in leaving if actor_group(name) not in waiting], signals="SIGTERM"
        )
        return {**handle, "actors": [actor for actor in handle["actors"] if actor[0] not in leaving]}

    def failed_requests(self, handle: Handle, /) -> int:
        records = _records(handle)
        joined = [actor_index(name) for name, _ in handle["actors"][handle["first_nodes"] :]]
        failed = [bool(records.get(index, {"exit": 0})["exit"]) for index in reversed(joined)]
        return failed.index(False) if False in failed else len(failed)

    def discard(self, _handle: Handle, /) -> None:
        """Nothing to do: the nodes have no files of the run but those of the run directory."""

    def release(self, handle: Handle) -> Handle:
        client = _client(handle)
        waiting = _waiting_groups(handle, client)
        client.ask("remove_groups", names=waiting)
        return {
            **handle,
            "actors": [actor for actor in handle["actors"] if actor_group(actor[0]) not in waiting],
        }

    def explain(self, handle: Handle, /) -> Explanation:
        client = _client(handle)
        status = _status(handle, client.ask("state"))
        if status.state != "pending":
            return Explanation(f"the run does not wait: it is {status.state}")
        return explain_waiting(handle["first_nodes"], handle["bundle"], read_nodes(client.ask("nodes")))

    def shell_command(self, handle: Handle, node: str | None, /) -> list[str]:
        hosts = self.hosts(handle)
        if not hosts:
            raise WanmaError("the run has no node yet", "`wanma status` shows its state", EXIT_USAGE)
        return ["ssh", "-t", node or hosts[0]]


def _bundle(submission: Submission) -> dict[str, float]:
    """Return the resources of one node of the run."""
    gpus = {"GPU": submission.gpus_per_node} if submission.gpus_per_node else {}
    return {"CPU": submission.cores_per_node, **gpus, **submission.settings.ray.resources}


def _add_nodes(
    client: RayClient, handle: Handle, submission: Submission, places: Mapping[int, Sequence[int]]
) -> Handle:
    """Start actors in bundles, by number of the group; groups other than a known first one are new."""
    prefix, known = handle["prefix"], list(handle["actors"])
    index = handle["started_nodes"]
    added: list[list[Any]] = []
    for group, bundles in places.items():
        for bundle in bundles:
            added.append([actor_name(prefix, group, index), bundle])
            index += 1
    new = [group for group in places if group or not known]
    actors = [*known, *added]
    first = actors[0][0] if submission.nodes > 1 else ""
    reports = client.ask(
        "start",
        seconds=START_SECONDS,
        groups={group_name(prefix, group): len(places[group]) for group in new},
        bundle=handle["bundle"],
        actors={name: [actor_group(name), bundle] for name, bundle in added},
        requests={name: _request(submission, handle, name, first, bool(known)) for name, _ in added},
    )
    problems = [report["problem"] for report in reports.values() if report["problem"]]
    if problems and not known:
        raise WanmaError(
            problems[0],
            "all nodes of a run on Ray must see its folders: use a shared file system, and --run-dir DIR on it",
        )
    return {**handle, "actors": actors, "started_nodes": index}


def _request(
    submission: Submission, handle: Handle, name: str, first: str, is_joining: bool
) -> dict[str, Any]:
    """Return the request of a `NodeActor`."""
    return {
        "run_directory": str(submission.run_directory),
        "folder": str(submission.folder),
        "prefix": handle["prefix"],
        "name": name,
        "first": first,
        "is_joining": is_joining,
        "claims": submission.settings.claims or str(submission.run_directory),
        "command": list(submission.command),
        "interpreter": submission.interpreter,
        "environment": dict(submission.environment),
        "code": str(submission.code or ""),
        "secret": submission.secret,
        "timeout_seconds": submission.settings.start_timeout_seconds,
    }


def _client(handle: Handle) -> RayClient:
    return ray_client(handle["address"])


def _records(handle: Handle) -> dict[int, dict[str, Any]]:
    return read_node_records(RunDirectory(Path(handle["run_directory"])))


def _living(handle: Handle, client: RayClient) -> list[str]:
    """Return the actors of a run that wait, or whose supervisors live, in the order of their start."""
    there, records = set(client.ask("state", prefix=handle["prefix"])["actors"]), _records(handle)
    names = [name for name, _ in handle["actors"] if name in there]
    return [name for name in names if records.get(actor_index(name), {"exit": None})["exit"] is None]


def _waiting_groups(handle: Handle, client: RayClient) -> list[str]:
    groups = client.ask("state", prefix=handle["prefix"])["groups"]
    return [name for name, group in groups.items() if group["state"] == "PENDING"]


def _status(handle: Handle, state: Mapping[str, Any]) -> RunStatus:
    """Return the state of a run by the placement groups and actors of all runs, and by its records."""
    prefix, records = handle["prefix"], _records(handle)
    names = (prefix.rstrip("-"),)
    groups = {name: group for name, group in state["groups"].items() if name.startswith(prefix)}
    actors = [name for name in state["actors"] if name.startswith(prefix)]
    first = groups.get(group_name(prefix, 0))
    if first is not None and first["state"] == "PENDING":
        reason = "the cluster has no such nodes" if first["is_infeasible"] else "their resources are in use"
        return RunStatus("pending", None, reason, (), names)
    started = [record for name in actors if (record := records.get(actor_index(name)))]
    hosts = dict.fromkeys(record["host"] for record in started if record["exit"] is None)
    is_starting = any(
        actor_index(name) not in records
        and groups.get(actor_group(name), {"state": ""})["state"] == "CREATED"
        for name in actors
    )
    if hosts or is_starting:
        return RunStatus("running", None, "", tuple(hosts), names)
    if actors or groups:  # as when the last node was lost
        _client(handle).ask("remove", prefix=prefix)
    return _ended_status(handle, records, names)


def _ended_status(
    handle: Handle, records: Mapping[int, Mapping[str, Any]], names: tuple[str, ...]
) -> RunStatus:
    run = RunDirectory(Path(handle["run_directory"]))
    recorded, failure, changed = read_recorded_state(run)
    is_new = changed > handle["submitted"]
    if recorded == "finished" and is_new:
        return RunStatus("finished", 0, "", (), names)
    if (recorded in ("interrupted", "aborted") and is_new) or (run.engine_files / CANCEL_FILE).exists():
        return RunStatus("cancelled", None, "", (), names)
    codes = [record["exit"] for record in records.values() if record["exit"]]
    problem = next((record["problem"] for record in records.values() if record["problem"]), "")
    cause = problem or (failure if is_new else "")
    what = "its nodes were lost" if records and not codes else "it ended before its first record"
    return RunStatus("failed", max(codes, default=None), cause or f"{what}; see `wanma logs`", (), names)
