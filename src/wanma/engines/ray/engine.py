"""Ray engine: a placement group for a run, an actor in each bundle, and records in the run directory."""

from __future__ import annotations

import re
import shlex
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wanma.engines.engine import Engine, EngineCluster, Explanation, Handle, RunStatus, Submission
from wanma.engines.engine_record import make_engine_record
from wanma.engines.lease.shell_time import limit_time
from wanma.engines.ray.client import RayClient, missing_ray, ray_client
from wanma.engines.ray.discovery import choose_nodes, explain_waiting
from wanma.engines.ray.node_records import MARKER_FILE, group_of, index_of, node_file, read_node_records
from wanma.engines.ray.ray_job import render_ray_job
from wanma.engines.recorded_state import read_recorded_state
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.run.run_directory import RunDirectory, write_atomically
from wanma.job.sections.cluster import ClusterSection

START_SECONDS = 90.0
"""Deadline, in seconds, of a start: the processes of the actors import wanma."""
GRANT_SECONDS = 2.0
"""Time, in seconds, after which a placement group that waits does so for want of nodes."""
JOINING_GROUP = re.compile(r"wanma-.+-[0-9a-f]{8}-g[1-9]\d*")
"""Names of the placement groups of nodes that join a run."""
STOP_SECONDS = 10.0
"""Time, in seconds, that supervisors have for an end at once."""
CANCEL_FILE = "cancelled"
"""File in the folder of the submission: the user has cancelled the run."""


class RayEngine(Engine):
    """Engine of a Ray cluster; its handle holds the prefix of a run's names, and its actors with bundles.

    All nodes see the run directory: what the interface does for others does nothing here.
    """

    name = "ray"
    ends_with_caller = False
    gives_way = True
    preference = "nodes that are asked for one by one prefer them"

    def unusable_reason(self) -> str | None:
        error = missing_ray()
        return f"{error.message} {error.hint}" if error is not None else None

    def discover(
        self, section: ClusterSection, _data: Mapping[str, str] | None = None, /
    ) -> EngineCluster | None:
        return choose_nodes(section, ray_client(section.ray.address).ask("nodes"))

    def render(self, submission: Submission) -> str:
        return render_ray_job(submission)

    def submit(self, submission: Submission) -> Handle:
        settings, files = submission.settings.ray, RunDirectory(submission.run_directory).engine_files
        for file in (*files.glob("ray-node-*.json"), files / CANCEL_FILE):
            file.unlink(missing_ok=True)
        prefix = f"wanma-{submission.name}-{uuid.uuid4().hex[:8]}-"
        write_atomically(files / MARKER_FILE, prefix)
        gpus = {"GPU": submission.gpus_per_node} if submission.gpus_per_node else {}
        handle: Handle = {
            "address": settings.address,
            "prefix": prefix,
            "run_directory": str(submission.run_directory),
            "submitted": time.time(),
            "bundle": {"CPU": submission.cores_per_node, **gpus, **settings.resources},
            "first_nodes": submission.min_nodes,
            "started_nodes": 0,
            "actors": {},
        }
        try:
            handle, is_granted = _start_nodes(handle, submission, {0: list(range(submission.min_nodes))})
            if submission.is_elastic and is_granted:  # earlier they would take the nodes of the others
                handle = self.resize(handle, submission, submission.nodes)
        except WanmaError as error:
            run = _look(handle)
            run.remove(run.groups)
            error.exit_code = EXIT_USAGE
            raise
        return {**handle, "address": ray_client(settings.address).head}

    def statuses(self, handles: Sequence[Handle]) -> list[RunStatus]:
        return [_status(handle) for handle in handles]

    def hosts(self, handle: Handle, /) -> tuple[str, ...]:
        records = read_node_records(handle["run_directory"])
        return tuple(dict.fromkeys(record["host"] for record in records.values()))

    def log_files(self, handle: Handle) -> list[Path]:
        folder = handle["run_directory"]
        return [node_file(folder, index, "log") for index in read_node_records(folder)]

    def cancel(self, handle: Handle, *, is_immediate: bool) -> None:
        (RunDirectory(Path(handle["run_directory"])).engine_files / CANCEL_FILE).touch()
        run, deadline = _look(handle), time.monotonic() + STOP_SECONDS
        run.stop(run.living, "SIGTERM SIGINT" if is_immediate else "SIGINT")
        while is_immediate and (run := _look(handle)).groups:
            if time.monotonic() > deadline:
                run.remove(run.groups)
            time.sleep(0.1)

    def resize(
        self, handle: Handle, submission: Submission, nodes: int, /, *, may_shrink: bool = True
    ) -> Handle:
        run, first = _look(handle), f"{handle['prefix']}g0"
        if not run.living:
            raise WanmaError("the run has ended", "the same `wanma train` command resumes it", EXIT_USAGE)
        run.remove(run.groups.keys() - {first, *map(group_of, run.actors)})  # those of lost nodes
        missing = nodes - len(run.living)
        if missing > 0:
            used = {handle["actors"].get(name) for name in run.living if group_of(name) == first}
            lost = [bundle for bundle in range(handle["first_nodes"]) if bundle not in used][:missing]
            index = handle["started_nodes"] + len(lost)
            further = {number: [0] for number in range(index, index + missing - len(lost))}
            if not may_shrink and _is_waited_for(handle):
                further = {}  # others come first
            return _start_nodes(handle, submission, {0: lost, **further})[0]
        leaving = run.joined[:-missing] if may_shrink else []
        run.stop(leaving, "SIGTERM")
        return _without(handle, leaving)

    def give_way(self, handle: Handle, /) -> Handle:
        if not _is_waited_for(handle):
            return handle
        run = _look(handle)
        leaving = [name for name in run.joined if not run.is_waiting(name)][:1]
        run.stop(leaving, "SIGTERM")
        return _without(handle, leaving)

    def failed_requests(self, handle: Handle, /) -> int:
        records = read_node_records(handle["run_directory"])
        joined = [index_of(name) for name in handle["actors"] if index_of(name) >= handle["first_nodes"]]
        failed = [bool(records.get(index, {"exit": 0})["exit"]) for index in reversed(joined)]
        return [*failed, False].index(False)

    def release(self, handle: Handle) -> Handle:
        run = _look(handle)
        waiting = [name for name in run.living if run.is_waiting(name)]
        run.stop(waiting, "")
        return _without(handle, waiting)

    def explain(self, handle: Handle, /) -> Explanation:
        if (state := _status(handle).state) != "pending":
            return Explanation(f"the run does not wait: it is {state}")
        nodes = ray_client(handle["address"]).ask("nodes")
        return explain_waiting(handle["first_nodes"], handle["bundle"], nodes)

    def shell_command(self, handle: Handle, node: str | None, minutes: float | None, /) -> list[str]:
        if not (hosts := self.hosts(handle)):
            raise WanmaError("the run has no node yet", "`wanma status` shows its state", EXIT_USAGE)
        words = ["ssh", "-t", node or hosts[0]]
        if minutes is None:
            return words
        return [*words, f'exec {shlex.join(limit_time(minutes))} "${{SHELL:-/bin/sh}}" -l']


@dataclass(frozen=True)
class _Run:
    """Placement groups, actors and records of a run.

    Args:
        client: client of its cluster.
        groups: placement groups by name.
        actors: all of its actors, those that leave too.
        living: actors that wait, or whose supervisors live and are to stay, in the order of their start.
        records: records of its nodes by index.
    """

    client: RayClient
    groups: Mapping[str, Mapping[str, Any]]
    actors: Sequence[str]
    living: Sequence[str]
    records: Mapping[int, Mapping[str, Any]]

    @property
    def joined(self) -> list[str]:
        """Actors of nodes beyond the first ones, the newest first."""
        return [name for name in reversed(self.living) if not group_of(name).endswith("-g0")]

    def is_waiting(self, actor: str) -> bool:
        return self.groups.get(group_of(actor), {}).get("state") == "PENDING"

    def is_granted(self, actor: str) -> bool:
        return self.groups.get(group_of(actor), {}).get("state") == "CREATED"

    def stop(self, actors: Sequence[str], signals: str) -> None:
        """Send signals to supervisors; nodes that wait are no longer wanted."""
        self.remove({group_of(name) for name in actors if self.is_waiting(name)})
        started = [name for name in actors if index_of(name) in self.records]
        self.client.ask("stop", names=started, signals=signals)

    def remove(self, groups: Collection[str]) -> None:
        self.client.ask("remove", names=list(groups))


def _look(handle: Handle) -> _Run:
    client, prefix = ray_client(handle["address"]), handle["prefix"]
    groups, actors = client.ask("groups", prefix=prefix), client.ask("actors", prefix=prefix)
    records = read_node_records(handle["run_directory"])
    ended = {index for index, record in records.items() if record["exit"] is not None}
    living = [name for name in handle["actors"] if name in actors and index_of(name) not in ended]
    return _Run(client, groups, actors, living, records)


def _is_waited_for(handle: Handle) -> bool:
    """Return True if a placement group of other work waits, for some time, for what one node of a run has.

    Nodes by which other runs of wanma grow do not count: two runs would take them from each other.
    """
    client, bundle, waiting = ray_client(handle["address"]), handle["bundle"], None
    for pause in (GRANT_SECONDS, 0):
        found = {
            name
            for name, group in client.ask("groups", prefix="").items()
            if group["state"] == "PENDING"
            and not group["is_infeasible"]
            and not name.startswith(handle["prefix"])
            and not JOINING_GROUP.fullmatch(name)
            and any(
                all(need <= bundle.get(key, 0) for key, need in part.items()) for part in group["bundles"]
            )
        }
        waiting = found if waiting is None else waiting & found
        if not waiting:
            return False
        time.sleep(pause)
    return True


def _without(handle: Handle, actors: Sequence[str]) -> Handle:
    left = {name: bundle for name, bundle in handle["actors"].items() if name not in actors}
    return {**handle, "actors": left}


def _start_nodes(
    handle: Handle, submission: Submission, places: Mapping[int, Sequence[int]]
) -> tuple[Handle, bool]:
    """Start actors in bundles of groups, those of new ones too; return the handle, and True if none waits."""
    prefix, index, is_joining = handle["prefix"], handle["started_nodes"], bool(handle["actors"])
    places_of = [(group, bundle) for group, bundles in places.items() for bundle in bundles]
    added = {f"{prefix}g{group}-{index + n}": bundle for n, (group, bundle) in enumerate(places_of)}
    actors = {**handle["actors"], **added}
    is_granted = ray_client(handle["address"]).ask(
        "start",
        seconds=START_SECONDS,
        groups={f"{prefix}g{group}": len(places[group]) for group in places if group or not is_joining},
        bundle=handle["bundle"],
        actors=added,
        preferred=list(submission.preferred_hosts),
        request={
            "submission": make_engine_record("ray", submission, {}).submission,
            "secret": submission.secret,
            "prefix": prefix,
            "first": next(iter(actors)) if submission.nodes > 1 else "",
            "is_joining": is_joining,
        },
    )
    return {**handle, "actors": actors, "started_nodes": index + len(added)}, is_granted


def _status(handle: Handle) -> RunStatus:
    """Return the state of a run, and give back what a run that has ended still has."""
    names = (handle["prefix"].rstrip("-"),)
    try:
        run = _look(handle)
    except WanmaError as error:  # clusters of other runs may answer
        return RunStatus("unknown", None, error.message, (), names)
    first = run.groups.get(f"{handle['prefix']}g0", {"state": ""})
    if first["state"] == "PENDING":
        reason = "the cluster has no such nodes" if first["is_infeasible"] else "their resources are in use"
        return RunStatus("pending", None, reason, (), names)
    started = [run.records.get(index_of(name)) for name in run.living]
    if any(started) or any(run.is_granted(name) for name in run.living):
        hosts = dict.fromkeys(record["host"] for record in started if record)
        return RunStatus("running", None, "", tuple(hosts), names)
    run.remove(run.groups)  # as when the last node was lost
    directory = RunDirectory(Path(handle["run_directory"]))
    recorded, failure, changed = read_recorded_state(directory)
    if changed <= handle["submitted"]:  # by an earlier submission
        recorded, failure = "new", ""
    if recorded == "finished":
        return RunStatus("finished", 0, "", (), names)
    if recorded in ("interrupted", "aborted") or (directory.engine_files / CANCEL_FILE).exists():
        return RunStatus("cancelled", None, "", (), names)
    codes = [record["exit"] for record in run.records.values() if record["exit"]]
    problems = [record["problem"] for record in run.records.values() if record["problem"]]
    cause = (*problems, failure, "its nodes were lost, or did not start it; see `wanma logs`")
    return RunStatus("failed", max(codes, default=None), next(filter(None, cause)), (), names)
