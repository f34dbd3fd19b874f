"""Batch script of a run for sbatch: one supervisor on each node, and a requeue at the time limit."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

from wanma.engines.engine import CODE_ARCHIVE_VARIABLE, PLACED_BY_VARIABLE, Submission
from wanma.engines.environment.install import COMPLETE
from wanma.engines.slurm.discovery import component_section
from wanma.job.run.run_directory import RunDirectory

ScriptKind = Literal["first", "joining", "allocation"]
CANCEL_FILE = "cancelled"
"""File in the folder of the submission whose presence forbids a requeue."""
EARLY_STOP_EXIT_CODE = 128 + signal.SIGUSR1
"""Exit code of a script or supervisor that a signal ended before it had read the job."""
SUPERVISOR_STARTS = 4
"""Starts of a node's supervisor within one job."""


def render_batch_script(submission: Submission, *, kind: ScriptKind = "first") -> str:
    """Return the batch script of a run.

    Args:
        submission: supervisors to place.
        kind: the run's first job; a further one whose one node joins it; or a script for the shell of an
            allocation, whose Ctrl-C stops the run with a checkpoint.
    """
    joins = kind == "joining"
    lines = ["#!/bin/bash"]
    for number, component in enumerate(_components(submission)):
        lines += ["#SBATCH hetjob"] if number else []
        lines += [f"#SBATCH {option}" for option in _options(component, joins=joins)]
    lines += [f"# Supervisors of the wanma run in {submission.run_directory}", "set -u"]
    lines += [f"export {PLACED_BY_VARIABLE}=slurm"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in sorted(submission.environment.items())]
    if submission.code is not None:
        lines += [f"export {CODE_ARCHIVE_VARIABLE}={shlex.quote(str(submission.code))}"]
    if kind == "first":
        lines += _end_lines(submission)
    if submission.interpreter:
        lines += _environment_lines(Path(submission.interpreter).parents[1])
    lines += submission.settings.slurm.setup
    if kind == "first":
        lines += _early_stop_lines(submission)
    lookup = shlex.join(
        [
            *(_interpreter(submission), "-m", "wanma.engines.rendezvous_lookup"),
            submission.settings.claims or str(submission.run_directory),
        ]
    )
    if joins:
        lines += [f"rendezvous=$({lookup}) || exit 0  # the run has ended meanwhile"]
    else:
        lines += [
            'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            'rendezvous="$first:$((20000 + SLURM_JOB_ID % 10000))"',
        ]
        if submission.is_elastic:  # after a requeue the run may live on other nodes
            lines += [f'rendezvous=$({lookup} "$rendezvous")']
    command = " \\\n    ".join(_step(submission))
    if kind == "allocation":
        lines += [
            "trap 'scancel --signal=INT \"$SLURM_JOB_ID\"' INT",
            f"setsid {command} &",
            'while kill -0 "$!" 2>/dev/null; do wait "$!"; code=$?; done',
        ]
    else:
        lines += [command, "code=$?"]
    if kind == "first":
        lines += ['[ "$code" -eq 0 ] || end "$code"']
    return "\n".join([*lines, 'exit "$code"']) + "\n"


def _end_lines(submission: Submission) -> list[str]:
    """Return the function that ends the script with the exit code of the run, and continues the run."""
    return [
        "# Stopped before its end, at the time limit or for a job of higher priority, the run goes on:",
        "# its job is requeued, or a further one submitted.",
        "end() {",
        "    trap - TERM USR1",
        f'    {_module(submission, "continuation")} "$1" "$SECONDS"',
        "    exit",
        "}",
        f"trap 'end {EARLY_STOP_EXIT_CODE}' TERM USR1",
    ]


def _early_stop_lines(submission: Submission) -> list[str]:
    """Return the lines that end the script if the run was stopped before its first step of Slurm.

    Slurm signals steps, and there was none while the lines of `setup` ran.
    """
    if not submission.settings.slurm.setup:
        return ["trap - TERM USR1"]
    return [f'{_module(submission, "early_stop")} || end "$?"', "trap - TERM USR1"]


def _module(submission: Submission, name: str) -> str:
    """Return the command of a module of this package, which gets the run directory."""
    words = [_interpreter(submission), "-P", "-m", f"wanma.engines.slurm.{name}"]
    return shlex.join([*words, str(submission.run_directory)])


def _environment_lines(environment: Path) -> list[str]:
    """Return the lines that keep the environment from removal, or end the script if it was removed."""
    lock = shlex.quote(f"{environment}.lock")
    return [
        f"if [ -e {lock} ]; then exec 9<{lock} && flock --shared 9; fi  # the environment is in use",
        f"if [ ! -e {shlex.quote(str(environment / COMPLETE))} ]; then",
        "    echo 'the environment is gone; submit the run again' >&2",
        "    exit 1",
        "fi",
        f"touch --no-create {lock}",
    ]


def _components(submission: Submission) -> list[Submission]:
    """Return the submission of each kind of nodes: of a heterogeneous job several, else one."""
    settings = submission.settings
    if not settings.slurm.components:
        return [submission]
    sections = [component_section(settings, component) for component in settings.slurm.components]
    return [
        replace(submission, nodes=section.nodes, min_nodes=section.nodes, settings=section)
        for section in sections
    ]


def _options(submission: Submission, *, joins: bool) -> Iterator[str]:
    """Yield the options of sbatch."""
    slurm, files = submission.settings.slurm, RunDirectory(submission.run_directory).engine_files
    yield f"--job-name={_option_text(submission.name)}"
    if joins:
        yield "--nodes=1"
    elif submission.is_elastic:
        yield f"--nodes={submission.min_nodes}-{submission.nodes}"
    else:
        yield f"--nodes={submission.nodes}"
    # Not --ntasks-per-node: of a range of nodes Slurm would give the fewest, as the tasks fit there.
    if slurm.exclusive:
        yield "--exclusive"
    else:
        yield f"--cpus-per-task={submission.cores_per_node}"
    if slurm.gres is not None:
        yield f"--gres={slurm.gres}"
    elif submission.gpus_per_node:
        yield f"--gres=gpu:{submission.gpus_per_node}"
    placement = ("constraint", "prefer", "nodelist", "exclude")
    for name in ("partition", "account", "qos", "reservation", "time", *placement):
        if (value := getattr(slurm, name)) is not None:
            yield f"--{name}={_option_text(value)}"
    yield f"--chdir={_option_text(str(submission.folder))}"
    yield f"--output={_option_text(str(files / 'slurm-%j.log'))}"
    yield "--open-mode=append"
    if joins:
        yield "--no-requeue"
    else:
        yield "--requeue"
        yield f"--signal=USR1@{slurm.signal_seconds}"
    if submission.is_elastic:
        yield "--no-kill"  # the others go on when a node fails
    yield from slurm.options


def _option_text(text: str) -> str:
    """Return a value for a line `#SBATCH`, which sbatch splits into words as a shell does."""
    return shlex.quote(text)


def _step(submission: Submission) -> list[str]:
    """Return the words of the command that starts the supervisors, one line of the script each."""
    if not submission.settings.slurm.components:
        options, command = _srun(submission)
        end = ""
        if submission.is_elastic and submission.settings.slurm.container_runtime != "pyxis":
            # Node 0 has the batch script, which ends the job if it lives. Containers lack Slurm's commands.
            end = f'[ "$SLURM_NODEID" = 0 ] || {_module(submission, "orphaned_job")} "$code"'
        return ["srun", '--nodes="$SLURM_JOB_NUM_NODES"', *options, _restarting(command, end=end)]
    words = ["srun"]
    for number, component in enumerate(_components(submission)):
        options, command = _srun(replace(component, nodes=submission.nodes, min_nodes=submission.nodes))
        words += [":"] if number else []
        # The plan has work for each kind of nodes; the number of a task is that of its node.
        key = ' cluster.node_rank="$SLURM_PROCID"' if submission.command[0] == "train" else ""
        words += [f"--het-group={number}", f"--nodes={component.nodes}", *options, _restarting(command, key)]
    return words


def _restarting(command: str, key: str = "", end: str = "") -> str:
    """Return the command of a task that starts a supervisor again which SIGKILL has ended, as without memory.

    Args:
        command: the supervisor, with words for the shell of the batch script.
        key: further word, for the shell of the task.
        end: command after the last end, for the same shell.
    """
    script = "; ".join(
        [
            # Signals reach every process of the step: the shell waits for what the supervisor makes of them.
            "trap : INT TERM HUP USR1",
            f"for start in {' '.join(map(str, range(SUPERVISOR_STARTS)))}",
            'do [ $start = 0 ] || echo "SIGKILL ended the supervisor of $SLURMD_NODENAME; again:" >&2',
            f'"$@"{key}',
            "code=$?",
            "[ $code = 137 ] || break",
            "done",
            *([end] if end else []),
            "exit $code",
        ]
    )
    return f"sh -c {shlex.quote(script)} wanma {command}"


def _srun(submission: Submission) -> tuple[list[str], str]:
    """Return the options of srun for nodes of one kind, and the command on each node."""
    slurm = submission.settings.slurm
    options = ["--ntasks-per-node=1", "--cpu-bind=none"]
    # A supervisor that ends early tells the others itself; srun is to leave them time for a checkpoint.
    options += ["--kill-on-bad-exit=0", "--wait=0"]
    if submission.is_elastic:
        options += ["--no-kill"]
    if not slurm.exclusive:
        options += [f"--cpus-per-task={submission.cores_per_node}"]
    command = [_interpreter(submission), "-P", "-m", "wanma"]  # the working directory is no place of modules
    if slurm.container_runtime == "pyxis":
        options += [f"--container-image={shlex.quote(slurm.container or '')}"]
        options += [f"--container-mounts={shlex.quote(_mounts(submission))}"]
        options += [f"--container-workdir={shlex.quote(str(submission.folder))}"]
        command[0] = "python3"
    elif slurm.container_runtime == "apptainer":
        gpu = ["--nv"] if submission.gpus_per_node else []
        command = ["apptainer", "exec", *gpu, "--bind", _mounts(submission), "--pwd", str(submission.folder)]
        command += [slurm.container or "", "python3", "-P", "-m", "wanma"]
    action, *words = submission.command
    if submission.nodes > 1:
        return options, f'{shlex.join([*command, action])} --rendezvous "$rendezvous" {shlex.join(words)}'
    return options, shlex.join([*command, action, *words])


def _interpreter(submission: Submission) -> str:
    return submission.interpreter or sys.executable


def _mounts(submission: Submission) -> str:
    folders = dict.fromkeys([str(submission.folder), str(submission.run_directory)])
    return ",".join(f"{folder}:{folder}" for folder in folders)


def script_file(run_directory: Path) -> Path:
    """Return the path of the run's batch script."""
    return RunDirectory(run_directory).engine_files / "slurm.sh"
