"""`wanma.session`: wanma inside one's own training loop, alone or under `wanma launch`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wanma.api.planning import Prepared, first_layout, notes
from wanma.api.run import changes, report_or_say, run_directory_of, write_down
from wanma.job.load import job_from
from wanma.job.run_directory import RunDirectory
from wanma.job.sections import Job
from wanma.job.worker import Unsupervised, Worker, current_worker
from wanma.observe.console import open_console
from wanma.planner.choose import complete

if TYPE_CHECKING:
    from wanma.training.session import Session


@contextmanager
def session(
    job: Job | Mapping[str, Any] | str | Path,
    *,
    overrides: Sequence[str] = (),
    run_directory: Path | str | None = None,
) -> Iterator[Session]:
    """A training session of this process: see `Session` for what to do with it.

    Under `wanma launch SCRIPT --ranks N` each of the N processes gets its rank's session, and the run
    directory is the launch's; otherwise this process is the only rank.

    Args:
        job: a job, its sections as nested mappings, or the path of a job file. `[model]` may be left out.
        run_directory: default: `observe.runs` / `observe.name`.

    Raises:
        WanmaError: the job is wrong, or wants another number of ranks than there are.
    """
    from wanma.parallel.mesh import process_grid
    from wanma.training.main import longest_silence, set_numerics
    from wanma.training.session import Session

    if isinstance(job, Mapping) and "model" not in job:
        job = {**job, "model": {"factory": "__main__:own_loop"}}
    job = job_from(job, overrides)
    cluster, start = first_layout(job)
    planned = complete(job, start, cluster, None)
    worker = current_worker.get()
    with ExitStack() as stack:
        if worker is None:
            run = run_directory_of(job, run_directory)
            console = stack.enter_context(open_console(run, job.observe, job.train.steps))
            worker = Worker.alone(run.path.absolute(), Unsupervised(console.write))
        run = RunDirectory(worker.run_directory)
        plan = planned.plan
        set_numerics(job, plan)
        grid = stack.enter_context(process_grid(worker, plan, longest_silence(job)))
        if worker.rank == 0:
            run.create()
            prepared = Prepared(cluster, planned, None, None)
            for note in [*changes(run, job), *notes(job, planned)]:
                worker.control.event({"kind": "message", "level": "info", "text": note})
            write_down(run, job, prepared, sys.argv)
        made = Session(job, plan, worker, grid)
        failed = True
        try:
            yield made
            failed = False
        finally:
            made.close(failed)
            if worker.rank == 0:
                report_or_say(run, worker.control.event)
