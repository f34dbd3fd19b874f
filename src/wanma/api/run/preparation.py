"""Preparation of a run in its supervisor: plan, fork server and data; torch does not stay in the process."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from wanma.elastic.workers.environment import make_worker_environment
from wanma.elastic.workers.fork_server_handle import ForkServerHandle
from wanma.elastic.workers.linux_processes import require_linux
from wanma.elastic.workers.signal_dispositions import configure_child_process
from wanma.job.errors import WanmaError
from wanma.job.node_range import is_elastic
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.models.config.resolution import input_kind
from wanma.observe.console.dataset_progress import announcer, show_dataset_progress
from wanma.planner.preparation.job_planning import ModelReader, PreparedJob, initial_layout, prepare_job
from wanma.planner.preparation.job_workload import WorkloadResult, read_model
from wanma.torch_internals.loaded import COMPILER_MODULE

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


def prepare_run(
    job: Job,
    user_objects: dict[str, Any],
    world_size: int | None = None,
    fork_server: ForkServerHandle | None = None,
) -> tuple[ForkServerHandle, PreparedJob]:
    """Start the fork server, or complete it, and prepare data and plan while it imports torch.

    Arguments and errors are those of `train_job`.
    """
    is_quiet = job.observe.console == "quiet"
    with _model_reader(job, user_objects) as read:
        start = initial_layout(job, world_size=world_size, read=read)
        start_node = ForkServerHandle.start if fork_server is None else fork_server.complete
        node = start_node(preload_modules(job, start.plan), make_worker_environment(job.cluster, start.plan))
        try:
            with show_dataset_progress(is_quiet=is_quiet) as progress:
                prepared = prepare_job(
                    job,
                    start,
                    objects=user_objects,
                    progress=progress,
                    announce=announcer(is_quiet=is_quiet),
                    read_custom_model=is_elastic(job),
                    read=read,
                )
        except BaseException:
            node.close()
            raise
    return node, prepared


def preload_modules(job: Job, plan: Plan) -> tuple[str, ...]:
    """Return the modules that the fork server imports before it forks the ranks, and what it calls then.

    Only what splits or compiles the model imports the compiler, with two thirds of a second and 80 MB.
    """
    needed = {
        "wanma.parallel.data_parallel.sharded": not plan.computes_on_master_weights,
        "wanma.parallel.tensor.tensor_parallel": plan.tp > 1,
        "wanma.parallel.expert.expert_parallel": plan.ep > 1,
        "wanma.parallel.pipeline.pipeline_runner": plan.pp > 1,
        COMPILER_MODULE: plan.compile,
    }
    modules = [name for name, is_needed in needed.items() if is_needed]
    return (
        "torch",
        *([COMPILER_MODULE, *modules] if modules else []),
        "wanma.training.loop.train_worker",
        *(["wanma.models.huggingface.causal_model"] if job.model.huggingface is not None else []),
        *([] if modules else ["wanma.torch_internals.uncompiled:defer_compiler"]),
    )


@contextmanager
def _model_reader(job: Job, user_objects: dict[str, Any]) -> Iterator[ModelReader]:
    """Give the function that reads the model: where that needs torch, in a child process.

    Torch would stay in the supervisor, with 170 MiB. The child is forked before the preparation of data,
    whose threads may hold locks. Where this process has torch, other threads or objects of the user's, it
    reads.
    """
    train, model = job.train, job.model
    is_formula = input_kind(model) == "tokens" and not (
        model.huggingface or model.lora_rank or train.parameter_groups
    )
    if is_formula or user_objects or "torch" in sys.modules or threading.active_count() > 1:
        yield read_model
        return
    from multiprocessing.connection import Pipe  # only here: most jobs are decoders

    require_linux()
    ours, theirs = Pipe()
    sys.stdout.flush()  # else the child would print it, too
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _serve_readings(theirs, parent)
    theirs.close()

    def read(job: Job, _objects: dict[str, Any]) -> WorkloadResult:
        try:
            ours.send(job)
            answer = ours.recv()
        except (EOFError, OSError) as error:
            raise WanmaError(
                "the process that reads the model for its plan has ended",
                "see its message above; without one it was killed, probably for want of memory (dmesg)",
            ) from error
        if not isinstance(answer, WorkloadResult):
            raise answer
        return answer

    try:
        yield read
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        ours.close()


def _serve_readings(requests: Connection, parent: int) -> NoReturn:
    """Read models in the child process until the parent kills it."""
    try:
        configure_child_process(parent)
        while True:
            job = requests.recv()
            try:
                answer: WorkloadResult | BaseException = read_model(job)
            except BaseException as error:
                if not isinstance(error, WanmaError):
                    error.add_note(traceback.format_exc())
                answer = error
            sys.stdout.flush()
            requests.send(answer)
    except BaseException:  # the parent's copy of this stack must not run in the child
        traceback.print_exc()
    finally:
        os._exit(1)
