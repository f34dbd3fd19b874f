"""SSH engine: hosts of the user's own, one supervisor on each, asked and stopped over ssh."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from wanma.engines.code.provenance import record_provenance
from wanma.engines.code.snapshot import CodeSnapshot, make_snapshot
from wanma.engines.engine import (
    NOTES_KEY,
    Engine,
    EngineCluster,
    Explanation,
    Handle,
    RunState,
    RunStatus,
    Submission,
)
from wanma.engines.environment.archive import (
    EnvironmentArchive,
    load_archive,
    make_archive,
    save_archive,
)
from wanma.engines.hosts.connections import Host, HostError, Reply, join_errors
from wanma.engines.hosts.records import RecordSource, fetch_records, record_owner, send_history
from wanma.engines.lease.shell_time import limit_time
from wanma.engines.ssh import host_supervision
from wanma.engines.ssh.connection import SshConnections, remote_path
from wanma.engines.ssh.discovery import (
    HostFacts,
    ProbedHosts,
    make_engine_cluster,
    probe_hosts,
    require_hosts,
)
from wanma.engines.ssh.failures import explain_problem
from wanma.engines.ssh.hosts import list_hosts
from wanma.engines.ssh.placement import (
    HeldRun,
    PlacedNode,
    candidate_addresses,
    command_arguments,
    find_rendezvous,
    let_leave,
    prepare_hosts,
    remove_run,
    start_supervisors,
    stop_supervisors,
)
from wanma.job.errors import EXIT_INTERRUPTED, EXIT_USAGE, WanmaError
from wanma.job.run.run_directory import RunDirectory
from wanma.job.sections.cluster import ClusterSection


class SshEngine(Engine):
    """Engine of hosts that ssh reaches; its handle names them, and the settings of ssh."""

    name = "ssh"
    ends_with_caller = True

    def __init__(self) -> None:
        self._connections: dict[tuple[str, tuple[str, ...]], SshConnections] = {}
        self._probed: dict[tuple[Host, ...], ProbedHosts] = {}
        self._archives: dict[tuple[str | None, bool, Path], EnvironmentArchive | None] = {}
        self._pythons: dict[Host, str] = {}
        self._held: HeldRun | None = None

    def unusable_reason(self) -> str | None:
        return None if shutil.which("ssh") is not None else "ssh not found: install OpenSSH"

    def discover(
        self, section: ClusterSection, data: Mapping[str, str] | None = None, /
    ) -> EngineCluster | None:
        hosts = list_hosts(section.ssh, Path.cwd())
        archive = self._archive(section, Path.cwd())
        probed = self._probe(hosts, section, archive, data)
        return make_engine_cluster(probed, section.min_nodes or section.nodes)

    def render(self, submission: Submission) -> str:
        settings = submission.settings.ssh
        lines = []
        for rank, host in enumerate(_ordered(submission)[: submission.nodes]):
            folder = f"{settings.folder}/runs/{submission.name}"
            node = PlacedNode(host, host.name, rank, folder, "", python=self._pythons.get(host, ""))
            rendezvous = f"{_ordered(submission)[0].name}:PORT" if submission.nodes > 1 else None
            words = command_arguments(node, submission, rendezvous, joins=False)
            python = node.python or settings.python
            lines.append(f"{host.text}: {shlex.join([python, '-m', 'wanma', *words])}")
        return "\n".join(lines) + "\n"

    def submit(self, submission: Submission) -> Handle:
        hosts = _ordered(submission)
        archive = self._archive(submission.settings, submission.folder)
        probed = self._probe(hosts, submission.settings, archive)
        require_hosts(probed, submission.min_nodes)
        by_host = {facts.host: facts for facts in probed.usable}
        chosen = [by_host[host] for host in hosts if host in by_host][: submission.nodes]
        nodes = [_placed(facts, submission, rank) for rank, facts in enumerate(chosen)]
        connections = self._connect(submission.settings.ssh.python, submission.settings.ssh.options)
        snapshot = _snapshot(submission)
        code = RunDirectory(submission.run_directory).code
        environment = save_archive(archive, code).name if archive is not None else None
        prepare_hosts(connections, nodes, submission, snapshot)
        send_history(connections, _sources(nodes), RunDirectory(submission.run_directory))
        missing = probed.failures if len(nodes) < submission.nodes else ()
        left_out = [f"left out: {error.message}" for error in missing]
        rendezvous = None
        if submission.nodes > 1:
            rendezvous = _rendezvous(connections, chosen, nodes, submission.settings.network_interface)
        self._held = start_supervisors(connections, nodes, submission, snapshot.digest, rendezvous)
        return {
            "nodes": [node.to_json() for node in nodes],
            "python": submission.settings.ssh.python,
            "options": submission.settings.ssh.options,
            "requeue_exit_code": submission.settings.requeue_exit_code,
            "rendezvous": rendezvous,
            "digest": snapshot.digest,
            "environment": environment,
            "run_directory": str(submission.run_directory),
            NOTES_KEY: [*probed.notes, *left_out, *snapshot.notes],
        }

    def statuses(self, handles: Sequence[Handle]) -> list[RunStatus]:
        states: list[dict[int, dict[str, Any]]] = [{} for _ in handles]

        def ask(key: tuple[str, tuple[str, ...]], chosen: Sequence[int]) -> list[HostError]:
            questions: dict[Host, list[tuple[int, PlacedNode]]] = {}
            for number in chosen:
                for node in _nodes(handles[number]):
                    questions.setdefault(node.host, []).append((number, node))
            nodes = {host: [node for _, node in asked] for host, asked in questions.items()}
            answers, failed = _ask_states(self._connect(*key), nodes)
            for host, answer in answers.items():
                for (number, node), state in zip(questions[host], answer.value, strict=True):
                    states[number][node.rank] = state
            return failed

        groups = _by_connection(handles)
        with ThreadPoolExecutor(max(len(groups), 1)) as pool:  # one deadline for all hosts
            failures = {
                error.host: error for failed in pool.map(ask, groups, groups.values()) for error in failed
            }
        return [_status(handle, found, failures) for handle, found in zip(handles, states, strict=True)]

    def hosts(self, handle: Handle, /) -> tuple[str, ...]:
        return tuple(dict.fromkeys(node.hostname for node in _nodes(handle)))

    def log_files(self, handle: Handle) -> list[Path]:
        folder = RunDirectory(Path(handle["run_directory"])).engine_files
        paths = [folder / f"output-{node.rank}.log" for node in reversed(_nodes(handle))]
        return [path for path in paths if path.exists()]

    def fetch(self, handle: Handle, /) -> None:
        run = RunDirectory(Path(handle["run_directory"]))
        fetch_records(self._connect_to(handle), _sources(_nodes(handle)), run)

    def checkpoint_advice(self, handle: Handle, /) -> str | None:
        nodes, run = _nodes(handle), RunDirectory(Path(handle["run_directory"]))
        owner = record_owner(run, _sources(nodes)).host
        first = next((node for node in nodes if node.host.text == owner), nodes[0])
        words = ["ssh", *handle["options"], *(["-p", str(first.host.port)] if first.host.port else [])]
        target = f"{first.host.destination}:{first.folder}/checkpoints/"
        own = f"{handle['run_directory']}/checkpoints/"
        return shlex.join(["rsync", "-a", "-e", shlex.join(words), target, own])

    def cancel(self, handle: Handle, *, is_immediate: bool) -> None:
        nodes = _nodes(handle)
        failures = stop_supervisors(self._connect_to(handle), nodes, is_immediate=is_immediate)
        if failures and (is_immediate or len(failures) == len(nodes)):
            raise join_errors(failures, "hosts of the run do not answer:")

    def resize(
        self, handle: Handle, submission: Submission, nodes: int, /, *, may_shrink: bool = True
    ) -> Handle:
        placed = _nodes(handle)
        active = self._active(handle, placed)
        if nodes < len(active) and may_shrink:
            leaving = active[nodes:]  # never the first one, which has the records
            let_leave(self._connect_to(handle), leaving)
            changed = [replace(node, is_leaving=node.is_leaving or node in leaving) for node in placed]
            return {**handle, "nodes": [node.to_json() for node in changed]}
        hosts = [host for host in _ordered(submission) if host not in {node.host for node in active}]
        wanted = max(nodes - len(active), 0)
        name = handle.get("environment")
        code = RunDirectory(submission.run_directory).code
        probed = self._probe(hosts, submission.settings, load_archive(code / name) if name else None)
        require_hosts(probed, wanted)
        first_rank = max(node.rank for node in placed) + 1
        added = [
            _placed(facts, submission, first_rank + number)
            for number, facts in enumerate(probed.usable[:wanted])
        ]
        if not added:
            return handle
        connections = self._connect_to(handle)
        snapshot = _snapshot(submission, handle["digest"])
        unheld = replace(submission, is_held=False)  # they outlive this command
        prepare_hosts(connections, added, unheld, snapshot)
        start_supervisors(connections, added, unheld, handle["digest"], handle["rendezvous"], joins=True)
        return {**handle, "nodes": [node.to_json() for node in (*placed, *added)]}

    def discard(self, handle: Handle, /) -> None:
        remove_run(self._connect_to(handle), _nodes(handle), Path(handle["run_directory"]))

    def explain(self, handle: Handle, /) -> Explanation:
        (status,) = self.statuses([handle])
        down = self._failures(handle)
        advice = tuple(f"{error.message}: {error.hint}" for error in down)
        if down and not status.is_over:
            names = ", ".join(error.host.text for error in down)
            return Explanation(f"the run is {status.state}, and these hosts do not answer: {names}", advice)
        return Explanation(f"nothing blocks it: the run is {status.state}", advice)

    def shell_command(self, handle: Handle, node: str | None, minutes: float | None, /) -> list[str]:
        nodes = _nodes(handle)
        chosen = [
            placed
            for placed in nodes
            if node is None or node in (placed.host.text, placed.host.name, placed.hostname)
        ]
        if not chosen:
            names = ", ".join(placed.host.text for placed in nodes)
            raise WanmaError(f"the run is not on a host '{node}'", f"its hosts: {names}", EXIT_USAGE)
        words = self._connect_to(handle).command(chosen[0].host, "-t")
        limit = "".join(
            f"{remote_path(word)} " for word in limit_time(minutes, chosen[0].python or handle["python"])
        )
        return [*words, f'cd {shlex.quote(chosen[0].folder)} && exec {limit}"${{SHELL:-/bin/sh}}" -l']

    def _probe(
        self,
        hosts: Sequence[Host],
        section: ClusterSection,
        archive: EnvironmentArchive | None,
        data: Mapping[str, str] | None = None,
    ) -> ProbedHosts:
        """Return the facts of hosts, which make the run's environment; one command asks for them once."""
        key = tuple(sorted(hosts, key=lambda host: host.text))
        if key not in self._probed:
            connections = self._connect(section.ssh.python, section.ssh.options)
            self._probed[key] = probe_hosts(connections, hosts, section.ssh.folder, archive, data)
            self._pythons |= {facts.host: facts.python for facts in self._probed[key].usable}
        return self._probed[key]

    def _archive(self, section: ClusterSection, folder: Path) -> EnvironmentArchive | None:
        """Return the archive of the run's environment; one command reads the lock file once."""
        key = section.environment, section.system_site_packages, folder
        if key not in self._archives:
            self._archives[key] = make_archive(section, folder)
        return self._archives[key]

    def _connect(self, python: str, options: Sequence[str]) -> SshConnections:
        key = python, tuple(options)
        if key not in self._connections:
            self._connections[key] = SshConnections(python, options)
        return self._connections[key]

    def _connect_to(self, handle: Handle) -> SshConnections:
        return self._connect(handle["python"], handle["options"])

    def _active(self, handle: Handle, placed: Sequence[PlacedNode]) -> list[PlacedNode]:
        """Return the hosts of a run whose supervisors live, but for those that leave.

        A host that does not answer is lost to the run.
        """
        answers, _ = _ask_states(self._connect_to(handle), {node.host: [node] for node in placed})
        return [
            node
            for node in placed
            if not node.is_leaving and node.host in answers and answers[node.host].value[0]["is_alive"]
        ]

    def _failures(self, handle: Handle) -> list[HostError]:
        """Return the hosts of a run that do not answer."""
        return _ask_states(self._connect_to(handle), {node.host: [] for node in _nodes(handle)})[1]


def _ask_states(
    connections: SshConnections, nodes: Mapping[Host, Sequence[PlacedNode]]
) -> tuple[dict[Host, Reply], list[HostError]]:
    """Ask all hosts for the states of supervisors there, as `Connections.ask_each`."""
    runs = {host: [[node.folder, node.rank] for node in asked] for host, asked in nodes.items()}
    requests = {host: {"operation": "state", "runs": asked} for host, asked in runs.items()}
    return connections.ask_each(host_supervision, requests)


def _ordered(submission: Submission) -> list[Host]:
    """Return the hosts of the job, those that the plan is made for first."""
    hosts = list_hosts(submission.settings.ssh, submission.folder)
    order = {text: number for number, text in enumerate(submission.hosts)}
    return sorted(hosts, key=lambda host: order.get(host.text, len(order)))


def _placed(facts: HostFacts, submission: Submission, rank: int) -> PlacedNode:
    folder = facts.values["folder"].rstrip("/")
    return PlacedNode(
        facts.host,
        facts.values["hostname"],
        rank,
        f"{folder}/runs/{submission.name}",
        f"{folder}/code",
        python=facts.python,
    )


def _snapshot(submission: Submission, digest: str | None = None) -> CodeSnapshot:
    """Return the code of the run: that of the working directory, or the one that the run has begun with."""
    run = RunDirectory(submission.run_directory)
    archive = submission.code if digest is None else run.code / f"{digest}.tar"
    if archive is not None and archive.is_file():
        return CodeSnapshot(archive.stem, archive, 0, archive.stat().st_size)
    runs = run.path if run.path.parent == submission.folder else run.path.parent
    snapshot = make_snapshot(submission.folder, run.code, run_folder=runs)
    record_provenance(submission.folder, run, snapshot)
    return snapshot


def _rendezvous(
    connections: SshConnections,
    chosen: Sequence[HostFacts],
    nodes: Sequence[PlacedNode],
    interface: str | None,
) -> str:
    first = chosen[0]
    return find_rendezvous(connections, nodes, candidate_addresses(first.values, first.host, interface))


def _sources(nodes: Sequence[PlacedNode]) -> list[RecordSource]:
    return [RecordSource(node.host, node.folder) for node in nodes]


def _nodes(handle: Handle) -> list[PlacedNode]:
    return [PlacedNode.from_json(value) for value in handle["nodes"]]


def _by_connection(handles: Iterable[Handle]) -> dict[tuple[str, tuple[str, ...]], list[int]]:
    """Return the numbers of the handles by the settings of ssh that they need."""
    found: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for number, handle in enumerate(handles):
        found.setdefault((handle["python"], tuple(handle["options"])), []).append(number)
    return found


def _status(
    handle: Handle, states: Mapping[int, Mapping[str, Any]], failures: Mapping[Host, HostError]
) -> RunStatus:
    """Return the state of a run from those of its supervisors, of which one that finished speaks for all."""
    nodes = [
        node
        for node in _nodes(handle)
        if not node.is_leaving or states.get(node.rank, {"is_alive": False})["is_alive"]
    ]
    names = tuple(node.host.text for node in nodes)
    ids = tuple(f"{node.host.text}:{states[node.rank]['process']}" for node in nodes if node.rank in states)
    silent = [failures[node.host].message for node in nodes if node.host in failures]
    reason = "; ".join(silent)
    own = {node.rank: states[node.rank] for node in nodes if node.rank in states}
    if any(state["is_alive"] for state in own.values()):
        full = [node for node in nodes if own.get(node.rank, {}).get("is_full")]
        problems = [explain_problem(node.host, "full", node.folder) for node in full]
        reason = "; ".join([*silent, *(f"{error.message}: {error.hint}" for error in problems)])
        return RunStatus("running", None, reason, names, ids)
    codes = [state["exit"] for _, state in sorted(own.items())]
    if 0 in codes:
        return RunStatus("finished", 0, "", (), ids)
    cancelled = {EXIT_INTERRUPTED, handle["requeue_exit_code"]}
    is_cancelled = any(state["is_cancelled"] for state in own.values())
    if silent and not (is_cancelled and cancelled & set(codes)):
        return RunStatus("unknown", None, reason, names, ids)
    if is_cancelled or cancelled & set(codes):
        return RunStatus("cancelled", next((code for code in codes if code in cancelled), None), "", (), ids)
    code = next((code for code in codes if code is not None and code > 0), None)
    ends = (_end_text(node, own[node.rank]) for node in nodes)
    state: RunState = "failed"
    return RunStatus(state, code, "; ".join(ends), (), ids)


def _end_text(node: PlacedNode, state: Mapping[str, Any]) -> str:
    if not state["is_known"]:
        return f"{node.host.text}: its record in {node.folder} is gone"
    if state["exit"] is None:
        return f"{node.host.text}: the supervisor vanished, as by a restart of the host"
    if state["exit"] < 0:
        return f"{node.host.text}: the supervisor was killed by signal {-state['exit']}"
    return f"{node.host.text}: exit code {state['exit']}"
