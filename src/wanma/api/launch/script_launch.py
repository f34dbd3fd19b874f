"""Launcher of a user's own script on several ranks, under the supervisor (`wanma launch SCRIPT`)."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from wanma.api.launch.script_record import ScriptRecord
from wanma.api.run.run_records import count_events, lock_run, record_run_end
from wanma.api.session import SESSION_EVENT
from wanma.elastic.launch_config import LaunchConfig
from wanma.elastic.workers.environment import make_worker_environment
from wanma.elastic.workers.worker_output import OUTPUT_EVENT
from wanma.engines.local import run_local as run_local
from wanma.hardware.discovery.network_interfaces import check_interface
from wanma.hardware.discovery.node import discover_node
from wanma.hardware.discovery.topology_address import resolve_topology_address
from wanma.job.errors import WanmaError
from wanma.job.file.cluster_overrides import parse_cluster_section
from wanma.job.plan.plan import Plan
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import Event
from wanma.job.sections.cluster import ClusterSection
from wanma.job.sections.observe import ObserveSection
from wanma.observe.console.console import Console
from wanma.observe.console.opening import open_console

PRELOAD = (
    "torch",
    "torch._dynamo",
    "wanma.api.launch.script_worker",
    "wanma.api.session",
    "wanma.training.loop.session",
)
"""Modules preloaded for scripts that import wanma; others start in an empty process, as in torchrun."""


@dataclass(frozen=True)
class Program:
    """Program that each rank runs."""

    script: str
    """Path of a Python file, or name of a module."""
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    local_rank_option: str = ""
    """Name of the option that passes the local rank, such as '--local-rank'; empty: none."""

    @property
    def name(self) -> str:
        return self.script.rpartition(".")[2] if self.is_module else Path(self.script).stem

    def content(self) -> bytes:
        """Return the source of a file; for a module, which is only searched for where it runs, its name."""
        return self.script.encode() if self.is_module else Path(self.script).read_bytes()

    def imports_wanma(self) -> bool:
        """Return True if the source imports wanma; imports of the user's other modules are not followed."""
        try:
            tree = ast.parse(b"" if self.is_module else self.content())
        except (SyntaxError, ValueError):
            return False
        names = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.append(node.module or "")
        return any(name.partition(".")[0] == "wanma" for name in names)


def launch_script(
    program: Program,
    ranks: int,
    *,
    run_directory: Path | None = None,
    overrides: Sequence[str] = (),
    shown_ranks: Sequence[int] | None = None,
) -> int:
    """Run `program` once per rank, with the environment variables from which `wanma.session` reads its place.

    Args:
        ranks: processes on this node, and on each of the others.
        run_directory: default: runs / the script's name.
        overrides: keys of `[cluster]`, such as 'cluster.nodes=2'.
        shown_ranks: ranks whose output is shown; default: all.

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
    check_interface(section.network_interface)
    run = RunDirectory(run_directory or Path("runs") / program.name)
    run.create()
    with lock_run(run) if section.nodes == 1 else nullcontext(), _ScriptConsole(run, shown_ranks) as console:
        record = ScriptRecord(run, program.script, program.arguments, ranks, section.nodes)
        earlier_events = count_events(run)
        try:
            outcome = run_local(
                _launch(run, program, ranks, section), record.with_restart_records(console.write)
            )
        except WanmaError as error:  # no rank was started
            record.record_end(error.exit_code, error.message, console.write)
            raise
        failure = outcome.failure_text if outcome.failure is not None else None
        exit_code = (
            outcome.failure.script_exit_code if outcome.failure is not None else 0
        ) or outcome.exit_code
        record.record_end(exit_code, failure or "", console.write)
        if failure is not None:
            console.write({"kind": "message", "level": "error", "text": failure})
        if run.job.exists():  # a session was opened here: this is a training
            record_run_end(run, failure, console.write, earlier_events)
    return exit_code


def _launch(run: RunDirectory, program: Program, ranks: int, section: ClusterSection) -> LaunchConfig:
    cluster = discover_node()
    uses_wanma = program.imports_wanma()
    has_gpu = section.device != "cpu" and any(node.devices for node in cluster.nodes)
    threads = section.threads_per_rank or (0 if uses_wanma else _omp_num_threads())
    threads = threads or max(cluster.nodes[0].cores // ranks, 1)
    plan = Plan(
        dp_replicate=ranks * section.nodes,
        threads_per_rank=threads,
        device="cuda" if has_gpu else "cpu",
    )
    agreed = _launch_fingerprint(program, ranks, section)
    silent_retries = (
        section.max_restarts if "max_restarts" in section.model_fields_set else 0
    )  # torchrun's default
    order = {
        "script": program.script if program.is_module else str(Path(program.script).absolute()),
        "is_module": program.is_module,
        "arguments": program.arguments,
        "local_rank_option": program.local_rank_option,
        "cluster": section.model_dump(mode="json", exclude_unset=True),
        "run_id": f"{program.name}-{os.getpid() if section.nodes == 1 else agreed}",
        "max_restarts": section.max_restarts if uses_wanma else silent_retries,
        # The supervisor sets this variable for the fork server only.
        "unset": [] if "OPENBLAS_NUM_THREADS" in os.environ else ["OPENBLAS_NUM_THREADS"],
    }
    allocator = (
        section.host_allocator if uses_wanma or "host_allocator" in section.model_fields_set else "system"
    )
    return LaunchConfig(
        run_directory=run.path.absolute(),
        entry="wanma.api.launch.script_worker:run_script_worker",
        payload=json.dumps(order).encode(),
        preload_modules=PRELOAD if uses_wanma else ("wanma.api.launch.script_worker",),
        ranks_per_node=ranks,
        threads_per_rank=threads,
        nodes=section.nodes,
        node_rank=section.node_rank,
        rendezvous=section.rendezvous,
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
        is_script=True,
        max_restarts_before_first_step=silent_retries,
    )


def _omp_num_threads() -> int:
    """Return the user's OMP_NUM_THREADS, which torchrun leaves unchanged; 0: none."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdecimal() else 0


def _launch_fingerprint(program: Program, ranks: int, section: ClusterSection) -> str:
    """Return the hash that all nodes of one launch must share, wherever the script is on each."""
    node_settings = {
        "node_rank": None,
        "network_interface": None,
        "topology_address": None,
        "threads_per_rank": None,
    }
    common_section = section.model_copy(update=node_settings)
    fingerprint_values = [
        list(program.arguments),
        program.local_rank_option,
        ranks,
        common_section.model_dump(mode="json"),
    ]
    content = program.content() + json.dumps(fingerprint_values, sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()[:16]


class _ScriptConsole:
    """Console that the script's job configures, once its session is open; plain lines before.

    Args:
        shown_ranks: ranks whose output is shown; None: all.
    """

    def __init__(self, run: RunDirectory, shown_ranks: Sequence[int] | None) -> None:
        self._run, self._shown_ranks = run, shown_ranks
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

    def write(self, event: Event) -> None:
        if event["kind"] == OUTPUT_EVENT:
            if self._shown_ranks is None or event["rank"] in self._shown_ranks:
                (self._console or self._startup_console).print_line(f"[rank {event['rank']}] {event['text']}")
        elif self._console is not None:
            self._console.write(event)
        elif event["kind"] == SESSION_EVENT:
            observe = ObserveSection(**event["observe"])
            self._console = self._stack.enter_context(open_console(self._run, observe, event["steps"]))
        elif "text" in event:
            self._startup_console.print_message(event)
