"""Slurm engine: submit by sbatch, ask by squeue, scontrol and sacct, stop by scancel."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from wanma.engines.engine import Engine, EngineCluster, Explanation, Handle, RunStatus, Submission
from wanma.engines.lease.shell_time import limit_time
from wanma.engines.scheduler_command import SchedulerCommandError, run_scheduler_command
from wanma.engines.slurm.accounting import find_accounted_jobs
from wanma.engines.slurm.batch_script import CANCEL_FILE, render_batch_script, script_file
from wanma.engines.slurm.discovery import discover_cluster
from wanma.engines.slurm.explanation import explain_job, explain_refusal, list_nodes, show_job
from wanma.engines.slurm.jobs import cancel_job, resize_jobs, submit_script, write_script
from wanma.engines.slurm.orphaned_job import exit_code_file
from wanma.engines.slurm.records import Record, run_state
from wanma.engines.slurm.stalled_jobs import STALLED_JOBS_FILE
from wanma.job.errors import EXIT_INTERRUPTED, EXIT_USAGE, WanmaError
from wanma.job.run.run_directory import RunDirectory
from wanma.job.sections.cluster import ClusterSection

PROGRAMS = ("sbatch", "squeue", "scontrol", "scancel")


class SlurmEngine(Engine):
    """Engine of a Slurm cluster; its handle holds the jobs of a run, the first of which started it."""

    name = "slurm"
    ends_with_caller = False
    preference = "Slurm prefers features, not hosts: cluster.slurm.prefer names one that the site gave them"

    def unusable_reason(self) -> str | None:
        missing = [program for program in PROGRAMS if shutil.which(program) is None]
        if missing:
            return f"{', '.join(missing)} not found: use a login node of a Slurm cluster"
        try:
            run_scheduler_command(["scontrol", "ping"], seconds=10)
        except SchedulerCommandError as error:
            return explain_refusal(error).message
        return None

    def discover(
        self, section: ClusterSection, _data: Mapping[str, str] | None = None, /
    ) -> EngineCluster | None:
        return discover_cluster(section)

    def render(self, submission: Submission) -> str:
        return render_batch_script(submission)

    def foreground_command(self, submission: Submission, /) -> list[str] | None:
        if "SLURM_JOB_ID" not in os.environ or "SLURM_STEP_ID" in os.environ:
            return None
        nodes = int(os.environ.get("SLURM_JOB_NUM_NODES") or 1)
        if nodes != submission.nodes:
            raise WanmaError(
                f"this shell has an allocation of {nodes} nodes, and cluster.nodes = {submission.nodes}",
                f"give --nodes {nodes}, or leave the shell of salloc to submit a job of its own",
                EXIT_USAGE,
            )
        script = script_file(submission.run_directory)
        write_script(script, render_batch_script(submission, kind="allocation"))
        return ["bash", str(script)]

    def submit(self, submission: Submission) -> Handle:
        script = script_file(submission.run_directory)
        for file in (CANCEL_FILE, STALLED_JOBS_FILE):
            (RunDirectory(submission.run_directory).engine_files / file).unlink(missing_ok=True)
        job = submit_script(script, render_batch_script(submission), submission)
        return {"jobs": [job], "run_directory": str(submission.run_directory)}

    def statuses(self, handles: Sequence[Handle]) -> list[RunStatus]:
        jobs = ",".join(str(handle["jobs"][0]) for handle in handles)
        if not jobs:
            return []
        try:
            # All jobs of the user: a list with a forgotten job would be refused as a whole.
            text = run_scheduler_command(
                ["squeue", "--noheader", "--states=all", f"--user={os.getuid()}", "--format=%A|%i|%T|%N|%r"]
            )
        except SchedulerCommandError as error:
            raise explain_refusal(error) from error
        rows: dict[str, list[str]] = {}
        for job, name, *fields in (line.split("|", 4) for line in text.splitlines()):
            leader, _, component = name.partition("+")
            if component not in ("", "0") and leader in rows:  # of a heterogeneous job
                rows[leader][1] = ",".join(hosts for hosts in (rows[leader][1], fields[1]) if hosts)
            else:
                rows[job] = fields
        forgotten = [job for handle in handles if (job := str(handle["jobs"][0])) not in rows]
        accounted = find_accounted_jobs(forgotten)
        return [self._status(handle, rows, accounted) for handle in handles]

    def hosts(self, handle: Handle, /) -> tuple[str, ...]:
        records = [record for job in handle["jobs"] if (record := show_job(str(job))) is not None]
        lists = [record["NodeList"] for record in records if record.get("NodeList", "(null)") != "(null)"]
        if not lists:
            return ()
        text = run_scheduler_command(["scontrol", "show", "hostnames", ",".join(lists)])
        return tuple(dict.fromkeys(text.split()))

    def log_files(self, handle: Handle) -> list[Path]:
        folder = RunDirectory(Path(handle["run_directory"])).engine_files
        jobs = [*handle.get("earlier_jobs", []), *handle["jobs"]]
        return [path for job in jobs if (path := folder / f"slurm-{job}.log").exists()]

    def cancel(self, handle: Handle, *, is_immediate: bool) -> None:
        marker = RunDirectory(Path(handle["run_directory"])).engine_files / CANCEL_FILE
        marker.touch()  # no requeue, also of a job that ends by the time limit meanwhile
        for job in reversed(handle["jobs"]):
            record = show_job(job)
            if record is None or run_state(record["JobState"]) not in ("pending", "running"):
                continue
            if is_immediate or run_state(record["JobState"]) == "pending":
                cancel_job(job)
            else:
                cancel_job(job, "--signal=INT")  # reaches the supervisors, which save and end

    def resize(
        self, handle: Handle, submission: Submission, nodes: int, /, *, may_shrink: bool = True
    ) -> Handle:
        return resize_jobs(handle, submission, nodes, may_shrink=may_shrink)

    def failed_requests(self, handle: Handle, /) -> int:
        states = [show_job(job) for job in reversed(handle["jobs"][1:])]
        failed = [record is not None and record["JobState"] == "FAILED" for record in states]
        return failed.index(False) if False in failed else len(failed)

    def release(self, handle: Handle) -> Handle:
        first, *joining = handle["jobs"]
        for job in joining:
            record = show_job(job)
            if record is not None and run_state(record["JobState"]) == "pending":
                cancel_job(job)
        return {**handle, "jobs": [first]}

    def explain(self, handle: Handle) -> Explanation:
        job = handle["jobs"][0]
        record = show_job(job)
        if record is None:
            record = find_accounted_jobs([job]).get(job)
        if record is None:
            return Explanation(f"Slurm has forgotten job {job}: it ended some time ago")
        if run_state(record["JobState"]) != "pending":
            return Explanation(f"job {job} does not wait: it is {record['JobState'].lower()}")
        return explain_job(record, list_nodes())

    def shell_command(self, handle: Handle, node: str | None, minutes: float | None, /) -> list[str]:
        where = [f"--nodelist={node}"] if node is not None else []
        return [
            "srun",
            f"--jobid={handle['jobs'][0]}",
            "--overlap",
            "--nodes=1",
            "--ntasks=1",
            *where,
            "--pty",
            *limit_time(minutes),
            os.environ.get("SHELL") or "/bin/sh",
        ]

    def _status(
        self, handle: Handle, rows: Mapping[str, Sequence[str]], accounted: Mapping[str, Record]
    ) -> RunStatus:
        """Return the state of a run, which is that of its first job."""
        job = str(handle["jobs"][0])
        if job not in rows:
            record = accounted.get(job, {"JobState": ""})
            if run_state(record["JobState"]) in ("finished", "cancelled", "failed"):
                return _ended_status(handle, record)
            return RunStatus("unknown", None, f"Slurm has forgotten job {job}", (), (job,))
        job_state, _, reason = rows[job]
        state = run_state(job_state)
        if state == "pending":
            return RunStatus(state, None, reason, (), (job,))
        if state == "running":
            running = [name for name in handle["jobs"] if run_state(rows.get(name, [""])[0]) == "running"]
            nodes = tuple(hosts for name in running if (hosts := rows[name][1]))
            return RunStatus(state, None, "", nodes, tuple(running))
        return _ended_status(handle, show_job(job) or {"JobState": job_state})


def _ended_status(handle: Handle, record: Record) -> RunStatus:
    job = str(handle["jobs"][0])
    code = int(record.get("ExitCode", "0:0").partition(":")[0])
    state = run_state(record["JobState"])
    orphan_exit_code = exit_code_file(RunDirectory(Path(handle["run_directory"])), job)
    if state == "cancelled" and orphan_exit_code.exists():
        code = int(orphan_exit_code.read_text())
        state = "finished" if code == 0 else "failed"
    if state == "failed" and code == EXIT_INTERRUPTED:
        state = "cancelled"  # stopped in order by `wanma cancel`
    reason = "" if state != "failed" else f"Slurm: job {job} {record['JobState']}, {record.get('Reason', '')}"
    return RunStatus(state, code, reason.removesuffix(", None").removesuffix(", "), (), (job,))
