"""Launcher of a user's own script on several ranks, under the supervisor (`wanma launch SCRIPT`)."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from wanma.api.launch.mpi_gang import MpiSettings, make_gang_key
from wanma.api.launch.mpi_launcher import find_mpi_launcher
from wanma.api.launch.script_budget import with_budget
from wanma.api.launch.script_record import ScriptRecord
from wanma.api.launch.tasks import Task, service_roles
from wanma.api.run.run_records import (
    SUPERVISOR_EVENT_KINDS,
    count_events,
    lock_run,
    record_run_end,
    record_supervisor_event,
)
from wanma.api.session import SESSION_EVENT
from wanma.elastic.launch_config import LaunchConfig, ScriptSettings, StoreKind
from wanma.elastic.protocol.shared_secret import load_rendezvous_secret
from wanma.elastic.transport.endpoint import resolve_endpoint
from wanma.elastic.workers.environment import make_worker_environment
from wanma.elastic.workers.signal_dispositions import stop_signals_ignored
from wanma.elastic.workers.worker_output import OUTPUT_EVENT
from wanma.engines.launchers.job_placement import place_cluster
from wanma.engines.launchers.launcher_placement import LauncherPlacement
from wanma.engines.local.foreground import run_local as run_local
from wanma.hardware.discovery.network_interfaces import check_interface
from wanma.hardware.discovery.node import discover_node
from wanma.hardware.discovery.topology_address import resolve_topology_address
from wanma.job.errors import EXIT_INTERRUPTED, JobError, WanmaError
from wanma.job.file.cluster_overrides import parse_cluster_section
from wanma.job.plan.plan import Plan
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import Event
from wanma.job.sections.cluster import ClusterSection
from wanma.job.sections.observe import ObserveSection
from wanma.observe.alerts.monitor import USAGE_EVENT
from wanma.observe.console.console import Console
from wanma.observe.console.opening import open_console
from wanma.observe.run_observer import RunObserver
from wanma.observe.trackers.tracker import check_trackers

PRELOAD = (
    "torch",
    "wanma.api.launch.script_worker",
    "wanma.api.session",
    "wanma.training.loop.session",
    "wanma.torch_internals.uncompiled:defer_compiler",
)
"""Modules preloaded for scripts with a session of wanma; others start in an empty process, as in torchrun.

The plan is the script's: ranks whose plan splits or compiles the model import the compiler themselves.
"""
_ELF = b"\x7fELF"
FrameworkName = Literal["torch", "tensorflow", "horovod", "jax", "mpi"]


@dataclass(frozen=True)
class Program:
    """Program that each rank runs."""

    script: str
    """Path of a Python file or of a compiled program, or name of a module."""
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    local_rank_option: str = ""
    """Name of the option that passes the local rank, such as '--local-rank'; empty: none."""
    interpreter: str = ""
    """Python interpreter of the script; empty: that of wanma."""

    @property
    def name(self) -> str:
        return self.script.rpartition(".")[2] if self.is_module else Path(self.script).stem

    @property
    def is_executed(self) -> bool:
        """True if each rank's process becomes another program: an interpreter, or the script itself."""
        return bool(self.interpreter) or self.is_program

    @property
    def is_program(self) -> bool:
        """True if the script is a compiled program (ELF)."""
        if self.is_module:
            return False
        with Path(self.script).open("rb") as file:
            return file.read(len(_ELF)) == _ELF

    @property
    def command(self) -> list[str]:
        """Command of each rank, as the user would give it without wanma."""
        runner = [] if self.is_program else [self.interpreter or sys.executable]
        module = ["-m"] if self.is_module else []
        return [*runner, *module, self.script, *self.arguments]

    def check_executable(self) -> None:
        """Refuse a compiled program that cannot be started.

        Raises:
            JobError: it has no permission to be executed, or is to run in an interpreter.
        """
        if not self.is_program:
            return
        if self.interpreter:
            raise JobError(
                f"wanma launch: {self.script} is a compiled program, and --python is for Python files",
                "leave --python out",
            )
        if not os.access(self.script, os.X_OK):
            raise JobError(
                f"wanma launch: {self.script} is a compiled program without permission to be executed",
                f"chmod +x {self.script}",
            )

    def content(self) -> bytes:
        """Return the source of a file; for a module, which is only searched for where it runs, its name."""
        return self.script.encode() if self.is_module else Path(self.script).read_bytes()

    def has_session(self) -> bool:
        """Return True if the source uses more of wanma here than `wanma.log`.

        Imports of the user's other modules are not followed; another interpreter imports its own.
        """
        try:
            tree = ast.parse(b"" if self.is_module or self.interpreter else self.content())
        except (SyntaxError, ValueError):
            return False
        imported, used = set(), set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used.add(f"{node.value.id}.{node.attr}")
        names = {name.partition(".")[2] for name in imported if name.partition(".")[0] == "wanma"}
        attributes = {name.partition(".")[2] for name in used if name.partition(".")[0] == "wanma"}
        logs_only = "log" in names | attributes and names | attributes <= {"", "log"}
        return bool(names) and not logs_only


@dataclass(frozen=True)
class Framework:
    """Framework of a script, which decides by which variables its processes find each other."""

    name: FrameworkName = "torch"
    roles: tuple[str, ...] = ()
    """Role of each rank of all nodes, for TensorFlow; empty: all are workers."""

    def assign_tasks(self, ranks: int) -> tuple[Task, ...]:
        """Return the task of each of `ranks` ranks; empty if the framework knows none.

        Raises:
            JobError: there are more or fewer roles than ranks.
        """
        if self.name != "tensorflow":
            return ()
        if self.roles and len(self.roles) != ranks:
            raise JobError(
                f"wanma launch: --roles names {len(self.roles)} ranks, but there are {ranks}",
                "the roles' numbers together are --ranks times --nodes; without --ranks they decide it",
            )
        return Task.from_roles(self.roles or ("worker",) * ranks)

    def script_settings(self, tasks: Sequence[Task], is_executed: bool) -> ScriptSettings:
        """Return the supervisor's part of it."""
        stores: dict[FrameworkName, StoreKind] = {"torch": "torch", "horovod": "http"}
        services = service_roles([task.role for task in tasks])
        return ScriptSettings(
            store=stores.get(self.name, "none"),
            has_ports=self.name in ("tensorflow", "jax", "mpi"),
            tasks=tuple(task.name for task in tasks),
            service_ranks=frozenset(rank for rank, task in enumerate(tasks) if task.role in services),
            is_executed=is_executed,
        )


def launch_script(
    program: Program,
    ranks: int,
    *,
    framework: Framework = Framework(),
    run_directory: Path | None = None,
    overrides: Sequence[str] = (),
    shown_ranks: Sequence[int] | None = None,
    placement: LauncherPlacement | None = None,
) -> int:
    """Run `program` once per rank, with the environment variables from which it reads its place.

    Args:
        ranks: processes on this node, and on each of the others.
        framework: framework of the program.
        run_directory: default: runs / the script's name.
        overrides: keys of `[cluster]`, such as 'cluster.nodes=2'.
        shown_ranks: ranks whose output is shown; default: all.
        placement: place among the processes of another launcher, the default of nodes and rendezvous.

    Returns:
        the exit code: that of a script that ended itself, else as in `train_job`.

    Raises:
        WanmaError: an error before anything was started.
    """
    section = parse_cluster_section(
        overrides,
        "wanma launch",
        "give keys of [cluster] only, e.g. cluster.hang_timeout_seconds=900; set other keys in the "
        "script's job",
    )
    if placement is not None:
        section = place_cluster(section, placement)
    check_interface(section.network_interface)
    tasks = framework.assign_tasks(ranks * section.nodes)
    mpi = _mpi_settings(program, ranks, section, framework)
    run = RunDirectory(run_directory or Path("runs") / program.name)
    run.create()
    with (
        lock_run(run, section.nodes),
        _ScriptConsole(run, shown_ranks) as console,
    ):
        record = ScriptRecord(
            run,
            program.script,
            program.arguments,
            ranks,
            section.nodes,
            framework=framework.name,
            tasks=[task.name for task in tasks],
            start_timeout_seconds=section.start_timeout_seconds,
        )
        earlier_events = count_events(run)
        try:
            outcome = run_local(
                _launch(run, program, ranks, section, framework, tasks, mpi),
                with_budget(record.with_restart_records(console.write), run, section, ranks),
            )
        except WanmaError as error:  # no rank was started
            record.record_end(error.exit_code, error.message, console.write)
            raise
        except KeyboardInterrupt as request:  # before the supervisor handles signals: stopped, not crashed
            record.record_end(getattr(request, "exit_code", EXIT_INTERRUPTED), "", console.write)
            raise
        failure = outcome.failure_text if outcome.failure is not None else None
        exit_code = (
            outcome.failure.script_exit_code if outcome.failure is not None else 0
        ) or outcome.exit_code
        with stop_signals_ignored():  # another Ctrl-C does not make a run that ended a crashed one
            record.record_end(exit_code, failure or "", console.write)
            console.end(failure)
            if run.job.exists():  # a session was opened here: this is a training
                record_run_end(run, failure, console.write, earlier_events, is_aborted=exit_code != 0)
    return exit_code


def _launch(
    run: RunDirectory,
    program: Program,
    ranks: int,
    section: ClusterSection,
    framework: Framework,
    tasks: Sequence[Task],
    mpi: MpiSettings | None,
) -> LaunchConfig:
    cluster = discover_node()
    has_session = program.has_session()
    has_gpu = section.device != "cpu" and any(node.devices for node in cluster.nodes)
    threads = section.threads_per_rank or (0 if has_session else _omp_num_threads())
    threads = threads or max(cluster.nodes[0].cores // ranks, 1)
    plan = Plan(
        dp_replicate=ranks * section.nodes,
        threads_per_rank=threads,
        device="cuda" if has_gpu else "cpu",
    )
    agreed = _launch_fingerprint(program, ranks, section, framework)
    silent_retries = (
        section.max_restarts if "max_restarts" in section.model_fields_set else 0
    )  # torchrun's default
    order = {
        "script": program.script if program.is_module else str(Path(program.script).absolute()),
        "is_module": program.is_module,
        "arguments": program.arguments,
        "local_rank_option": program.local_rank_option,
        "interpreter": program.interpreter,
        "is_program": program.is_program,
        "mpi": mpi.to_json() if mpi is not None else None,
        "framework": framework.name,
        "roles": [task.role for task in tasks],
        "has_session": has_session,
        "local_devices": len(cluster.nodes[0].devices) if has_gpu else 0,
        "cluster": section.model_dump(mode="json", exclude_unset=True),
        "run_id": f"{program.name}-{os.getpid() if section.nodes == 1 else agreed}",
        "max_restarts": section.max_restarts if has_session else silent_retries,
        # The supervisor sets this variable for the fork server only.
        "unset": [] if "OPENBLAS_NUM_THREADS" in os.environ else ["OPENBLAS_NUM_THREADS"],
    }
    allocator = (
        section.host_allocator if has_session or "host_allocator" in section.model_fields_set else "system"
    )
    return LaunchConfig(
        run_directory=run.path.absolute(),
        entry="wanma.api.launch.script_worker:run_script_worker",
        payload=json.dumps(order).encode(),
        preload_modules=PRELOAD if has_session else ("wanma.api.launch.script_worker",),
        ranks_per_node=ranks,
        threads_per_rank=threads,
        nodes=section.nodes,
        node_rank=section.node_rank,
        rendezvous=section.rendezvous,
        claims=section.claims,
        network_interface=section.network_interface,
        topology_address=resolve_topology_address(section, os.environ).path,
        worker_environment=make_worker_environment(
            section.model_copy(update={"host_allocator": allocator}), plan
        ),
        start_timeout_seconds=section.start_timeout_seconds,
        hang_timeout_seconds=section.hang_timeout_seconds,
        grace_seconds=section.grace_seconds,
        requeue_exit_code=section.requeue_exit_code,
        job_hash=agreed,
        max_restarts=section.max_restarts,
        script=framework.script_settings(tasks, is_executed=program.is_executed),
        max_restarts_before_first_step=silent_retries,
    )


def _mpi_settings(
    program: Program, ranks: int, section: ClusterSection, framework: Framework
) -> MpiSettings | None:
    """Return this node's settings of a gang of MPI ranks; None for another framework.

    Raises:
        WanmaError: there is no usable mpirun, or no secret that the nodes share.
    """
    if framework.name != "mpi":
        return None
    launcher = find_mpi_launcher(program.interpreter, program.script, ranks)
    key = ""
    if section.nodes > 1 and section.rendezvous is not None:  # without it, the supervisor refuses
        secret = load_rendezvous_secret(resolve_endpoint(section.rendezvous).is_loopback, os.environ)
        key = make_gang_key(secret, _launch_fingerprint(program, ranks, section, framework))
    return MpiSettings(
        folder=launcher.folder,
        major_version=launcher.major_version,
        key=key,
        start_timeout_seconds=section.start_timeout_seconds,
    )


def _omp_num_threads() -> int:
    """Return the user's OMP_NUM_THREADS, which torchrun leaves unchanged; 0: none."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdecimal() else 0


def _launch_fingerprint(
    program: Program, ranks: int, section: ClusterSection, framework: Framework = Framework()
) -> str:
    """Return the hash that all nodes of one launch must share, wherever the script is on each."""
    node_settings = {
        "node_rank": None,
        "network_interface": None,
        "topology_address": None,
        "rendezvous": None,  # a node that joins later has the address at which it found the coordinator
        "threads_per_rank": None,
    }
    common_section = section.model_copy(update=node_settings)
    fingerprint_values = [
        list(program.arguments),
        program.local_rank_option,
        ranks,
        [framework.name, *framework.roles],
        common_section.model_dump(mode="json"),
    ]
    content = program.content() + json.dumps(fingerprint_values, sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()[:16]


class _ScriptConsole:
    """Console and observer that the script's job configures, once its session is open; plain lines before.

    Args:
        run: run directory.
        shown_ranks: ranks whose output is shown; None: all.
    """

    def __init__(self, run: RunDirectory, shown_ranks: Sequence[int] | None) -> None:
        self._run, self._shown_ranks, self._began = run, shown_ranks, time.time()
        self._observer: RunObserver | None = None
        self._stack = ExitStack()
        self._console: Console | None = None
        self._startup_console = Console(run, 0, sys.stdout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if self._console is None:
            self._startup_console.print_line(f"run directory: {self._run.path}")
        self._startup_console.stream.discard_pending()

    def end(self, failure: str | None) -> None:
        """Tell of the end of the run; `failure`: message of one that failed."""
        if self._observer is not None:
            self._observer.end(failure)
        if failure is not None:
            self.write({"kind": "message", "level": "error", "text": failure})

    def write(self, event: Event) -> None:
        if self._observer is not None:
            self._observer.on_event(event)
        if event["kind"] == USAGE_EVENT:
            return
        if event["kind"] in SUPERVISOR_EVENT_KINDS:
            if self._run.job.exists():  # a session was opened: this is a training
                record_supervisor_event(self._run, event, self.write)
        elif event["kind"] == OUTPUT_EVENT:
            if self._shown_ranks is None or event["rank"] in self._shown_ranks:
                (self._console or self._startup_console).print_line(f"[rank {event['rank']}] {event['text']}")
        elif self._console is not None:
            self._console.write(event)
        elif event["kind"] == SESSION_EVENT:
            observe = ObserveSection(**event["observe"])
            self._console = self._stack.enter_context(open_console(self._run, observe, event["steps"]))
            if self._observer is None:
                self._observe(observe, event)
        elif "text" in event:
            self._startup_console.print_message(event)

    def _observe(self, settings: ObserveSection, event: Event) -> None:
        try:
            check_trackers(settings.trackers)
            observer = RunObserver(
                self._run,
                settings,
                show=self.write,
                node=0,  # only rank 0 tells of its session
                checkpoint_interval_steps=event["checkpoint_interval_steps"],
                plan={},
                began=self._began,
            )
            self._observer = self._stack.enter_context(observer)
        except Exception as error:  # the ranks train already
            self.write({"kind": "message", "level": "warning", "text": f"not observed: {error}"})
