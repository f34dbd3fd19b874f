"""Forecast of parameter servers: memory of a server and of worker 0, traffic of a step, and its bound.

A worker pulls all dense parameters and the rows of its batch, and pushes their gradients; the servers add up
and update. Ids follow Zipf's law, as in `cost.embedding_exchange`. Pure functions, without torch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from wanma.job.errors import JobError
from wanma.job.forecast.forecast import STEP_TIME_KINDS, Forecast, ServerForecast, StepTime
from wanma.job.plan.plan import Plan
from wanma.observe.units import bytes_text, count_text
from wanma.planner.cost.embedding_exchange import ZIPF_EXPONENT, TableBytes, distinct_ids, table_memory_error
from wanma.planner.cost.optimizer_update import COMMON_UPDATE_BYTES
from wanma.planner.forecast.problem import USABLE_HOST_MEMORY_SHARE, PlanningProblem
from wanma.planner.memory.model_states import optimizer_state_elements
from wanma.planner.memory.peak import CPU_RUNTIME_BYTES

_ELEMENT_BYTES, _ID_BYTES = 4, 8
_COPIES = 6
"""Copies of a byte between the memory of a server and that of a worker: out of the parameters, into the
kernel, out of it, into one tensor, into the model, and the memory that is cleared for them."""
_REQUEST_SECONDS = 5e-4
"""Seconds of a request without content: its header is written, read and answered."""
_PIECE_BYTES = 160 << 20
"""Bytes of worker 0 while it moves a piece of tables on disk: received, unpacked, and pages of its files."""
_STEP_REQUESTS, _UPDATE_REQUESTS = 3, 2
"""Requests of a worker in a step, and of the coordinator in an update, each of which waits for the last."""
COMPUTE, WORKER_LINK, SERVER_LINK, UPDATES = (
    "the workers' computations",
    "the workers' transfers",
    "the servers' transfers",
    "the servers' updates",
)
"""Parts of a step, as a forecast names the longest."""


class _Amounts(NamedTuple):
    """Elements that servers hold, and that a step moves."""

    dense: float
    tables: float
    state: float
    """Optimizer state of the dense parameters."""
    table_state: float
    marked_rows: float
    """Rows of tables of which a step changes some alone: servers and worker 0 note which have changed."""
    worker_rows: float
    """Elements of the rows of one worker's step."""
    worker_ids: float
    update_rows: float
    """Elements of the rows of one update."""

    @property
    def held(self) -> float:
        """Parameters and state."""
        return self.dense + self.tables + self.state + self.table_state

    @property
    def pulled(self) -> float:
        """Elements that a worker pulls in a step, and whose gradients it pushes."""
        return self.dense + self.worker_rows


def worker_plan(problem: PlanningProblem, plan: Plan) -> Plan:
    """Return the plan of one worker of parameter servers, which exchanges nothing with other ranks.

    Returns:
        `plan` itself for a job without servers.
    """
    return replace(plan, dp_replicate=1, batch_shares=()) if problem.job.servers.count else plan


def step_plan(problem: PlanningProblem, plan: Plan) -> Plan:
    """Return the plan by whose data ranks a global batch is shared: an asynchronous worker takes it whole."""
    return plan if problem.job.servers.mode == "synchronous" else worker_plan(problem, plan)


def chief_memory(problem: PlanningProblem, plan: Plan, worker: Forecast) -> Forecast:
    """Return the memory of worker 0: it holds the whole model and optimizer state, and copies them to save.

    With `plan.embedding_memory_bytes` tables, their state and the copy lie on its disk.

    Args:
        worker: memory of one process that trains the dense part alone.
    """
    amounts = _amounts(problem, plan)
    rows, tables = _ELEMENT_BYTES * amounts.worker_rows, _table_bytes(amounts)
    in_memory, is_on_disk = tables.in_memory(plan), plan.embedding_memory_bytes is not None
    parameters = _ELEMENT_BYTES * amounts.dense + in_memory.weights
    return replace(
        worker,
        parameters_bytes=int(worker.parameters_bytes + rows + parameters),
        gradients_bytes=int(worker.gradients_bytes + rows),
        optimizer_bytes=int(_ELEMENT_BYTES * amounts.state + in_memory.state),
        disk_bytes=worker.disk_bytes + (int(sum(tables)) if is_on_disk else 0),
        buffers_bytes=int(worker.buffers_bytes + _buffer_bytes(plan, amounts)),
        servers=ServerForecast(
            problem.job.servers.count,
            int(_server_memory(problem, plan, amounts)),
            int(_worker_bytes(problem, amounts)),
        ),
    )


def with_server_time(problem: PlanningProblem, plan: Plan, step: StepTime) -> tuple[StepTime, str]:
    """Return the time of a step with its traffic and update, and the part that bounds it.

    Of asynchronous workers it is the time from one update to the next.

    Args:
        step: time of a worker's own computation.
    """
    amounts, servers = _amounts(problem, plan), problem.job.servers.count
    workers = plan.data_parallel_size
    rate = _link_rate(problem, plan)
    worker_link = _worker_bytes(problem, amounts) / rate + _STEP_REQUESTS * _REQUEST_SECONDS
    server_link = _worker_bytes(problem, amounts) / servers / rate
    update = _update_seconds(problem, plan, amounts, rate)
    if problem.job.servers.mode == "synchronous":
        parts = {
            COMPUTE: step.seconds,
            WORKER_LINK: worker_link,
            SERVER_LINK: workers * server_link,
            UPDATES: update,
        }
        exchange = max(worker_link, workers * server_link)
        seconds = step.seconds + exchange + update
        timed = replace(step, seconds=seconds, data=step.data + exchange, optimizer=step.optimizer + update)
        return timed, max(parts, key=lambda name: parts[name])
    own = step.seconds + worker_link + update
    parts = {
        COMPUTE if step.seconds >= worker_link else WORKER_LINK: own / workers,
        SERVER_LINK: server_link,
        UPDATES: update,
    }
    seconds = max(parts.values())
    kinds = {kind: getattr(step, kind) / workers for kind in STEP_TIME_KINDS}
    kinds["optimizer"] += update / workers
    kinds["data"] += seconds - (step.seconds + update) / workers
    return replace(step, seconds=seconds, **kinds), max(parts, key=lambda name: parts[name])


def pause_seconds(problem: PlanningProblem, plan: Plan) -> float:
    """Return the seconds per step in which worker 0 reads what has changed, before validations and saves."""
    job, moved = problem.job, _amounts(problem, plan).held
    share = sum(1 / every for every in (job.checkpoint.every_steps, job.train.validate_every_steps) if every)
    if share and job.train.embedding_optimizer:
        for table in problem.server_tables:
            used = distinct_ids(table.rows, problem.global_batch / share * table.ids_per_sample)
            moved -= (table.rows - used) * (table.width + table.state_elements_per_row)
    return share * _ELEMENT_BYTES * moved / _link_rate(problem, plan)


def server_reasons(problem: PlanningProblem, plan: Plan, forecast: Forecast) -> tuple[str, ...]:
    """Describe servers, their traffic, its rate and the bound of a step; empty without servers."""
    if (servers := forecast.servers) is None:
        return ()
    memory = problem.hardware.host.memory_bytes_per_second
    source = "assumed" if problem.hardware.host.doubt else "measured"
    bounded = f"; of a step, {servers.bound} take longest" if servers.bound else ""
    place = ""
    if plan.embedding_memory_bytes is not None:
        place = f", embedding tables in a file of {bytes_text(forecast.disk_bytes)}"
    return (
        f"{count_text(servers.count, 'parameter server')}, {bytes_text(servers.memory_bytes)} of memory "
        f"each; worker 0 needs {bytes_text(forecast.memory_bytes)}: it reads the whole model and its "
        f"optimizer state to save them{place}",
        f"a step moves {bytes_text(servers.exchanged_bytes)} between a worker and the servers, all dense "
        f"parameters and used rows (ids by Zipf's law, exponent {ZIPF_EXPONENT}){bounded}",
        f"they move at {bytes_text(int(_link_rate(problem, plan)))}/s: memory passes "
        f"{bytes_text(int(memory))}/s for each rank ({source}), {_COPIES} copies of each byte and "
        f"{1000 * _REQUEST_SECONDS:g} ms for each request are assumed",
    )


def server_memory_error(problem: PlanningProblem, plan: Plan, forecast: Forecast) -> JobError | None:
    """Return the error for servers and workers that do not fit on a node, or None."""
    servers, job, (node,) = forecast.servers, problem.job, problem.cluster.nodes
    if servers is None:
        return None
    whole = replace(problem.workload, tables=problem.server_tables)
    no_room = table_memory_error(whole, replace(worker_plan(problem, plan), embedding="row_wise"))
    if no_room is not None:  # worker 0 holds all of them, however many ranks there are
        return JobError(no_room.message, no_room.hint.partition(",")[0])
    if plan.device == "cuda" and forecast.memory_bytes > problem.memory_limit_bytes:
        return JobError(
            f"the plan does not fit: worker 0 needs {bytes_text(forecast.memory_bytes)} on its device, the "
            f"limit is {bytes_text(int(problem.memory_limit_bytes))}; it holds the whole model to save it",
            "set parallel.embedding_memory_bytes for its tables, cluster.device = 'cpu', a lower "
            "parallel.micro_batch, or train without servers.count",
        )
    nodes = job.cluster.nodes
    needed = math.ceil(servers.count / nodes) * servers.memory_bytes
    if plan.device == "cpu":
        amounts = _amounts(problem, plan)  # other workers hold no whole model, and save none
        tables = sum(_table_bytes(amounts).in_memory(plan))
        own = _ELEMENT_BYTES * (amounts.dense + amounts.state - amounts.pulled) + tables
        own += _buffer_bytes(plan, amounts)
        others = plan.world_size // nodes - 1
        needed += int(forecast.memory_bytes + others * (forecast.memory_bytes - own))
    if needed <= node.memory_bytes * USABLE_HOST_MEMORY_SHARE:
        return None
    return JobError(
        f"the plan does not fit: servers.count = {servers.count}, each with "
        f"{bytes_text(servers.memory_bytes)}, worker 0 with {bytes_text(forecast.memory_bytes)} and the "
        f"other workers need {bytes_text(needed)} on {node.name}, which has {bytes_text(node.memory_bytes)}",
        "set parallel.embedding_memory_bytes for the tables of worker 0, lower parallel.dp_replicate, "
        "parallel.micro_batch or servers.replicas, or reduce the model",
    )


# ---------------------------------------------------------------- inside


def _amounts(problem: PlanningProblem, plan: Plan) -> _Amounts:
    samples = problem.global_batch / step_plan(problem, plan).data_parallel_size
    tables = problem.server_tables

    def used(table_samples: float) -> list[float]:
        return [distinct_ids(table.rows, table_samples * table.ids_per_sample) for table in tables]

    def elements(rows: list[float]) -> float:
        return sum(count * table.width for count, table in zip(rows, tables, strict=True))

    return _Amounts(
        dense=problem.workload.dense_parameters,
        tables=sum(table.rows * table.width for table in tables),
        state=optimizer_state_elements(problem.workload, problem.job.train),
        table_state=sum(table.rows * table.state_elements_per_row for table in tables),
        marked_rows=sum(table.rows for table in tables) if problem.job.train.embedding_optimizer else 0.0,
        worker_rows=elements(used(samples)),
        worker_ids=sum(used(samples)),
        update_rows=elements(used(problem.global_batch)),
    )


def _table_bytes(amounts: _Amounts) -> TableBytes:
    return TableBytes(_ELEMENT_BYTES * amounts.tables, _ELEMENT_BYTES * amounts.table_state)


def _buffer_bytes(plan: Plan, amounts: _Amounts) -> float:
    """Return the bytes of worker 0 beside these: received for a step, or the copy that a save writes."""
    if plan.device != "cpu":
        return 0.0
    copied = _ELEMENT_BYTES * amounts.held
    if plan.embedding_memory_bytes is not None:
        copied = _PIECE_BYTES  # the copy is on disk, too
    return amounts.marked_rows + max(_ELEMENT_BYTES * amounts.pulled, copied)


def _worker_bytes(problem: PlanningProblem, amounts: _Amounts) -> float:
    """Return the bytes of one worker's step, both ways."""
    pushed = _ELEMENT_BYTES if problem.job.servers.compression == "none" else 2
    return (_ELEMENT_BYTES + pushed) * amounts.pulled + 2 * _ID_BYTES * amounts.worker_ids


def _server_memory(problem: PlanningProblem, plan: Plan, amounts: _Amounts) -> float:
    """Return the bytes of one server: its shards, and the pushes and pulls that it has at once."""
    section, workers = problem.job.servers, plan.data_parallel_size
    requests = 2 * workers * amounts.pulled + amounts.dense + amounts.update_rows
    beside = amounts.dense + (amounts.marked_rows or 2 * amounts.tables)  # gradients, or numbers of rows
    elements = section.replicas * (amounts.held + beside) + requests
    return CPU_RUNTIME_BYTES + _ELEMENT_BYTES * elements / section.count


def _link_rate(problem: PlanningProblem, plan: Plan) -> float:
    """Return the bytes per second between a server and a worker: of copies, or of a node's link."""
    hardware, nodes = problem.hardware, problem.job.cluster.nodes
    copies = hardware.host.memory_bytes_per_second / (2 * _COPIES)  # each reads and writes
    if nodes == 1:
        return copies
    return min(copies, hardware.links[-1].bandwidth_bytes_per_second * plan.world_size / nodes)


def _update_seconds(problem: PlanningProblem, plan: Plan, amounts: _Amounts, rate: float) -> float:
    """Return the seconds of an update: pushes are summed, measured and applied by each holder."""
    section = problem.job.servers
    contributors = plan.data_parallel_size if section.mode == "synchronous" else 1
    summed = amounts.dense + amounts.update_rows
    passes = _ELEMENT_BYTES * (contributors + 1) + 20  # the norm reads fp32, and writes and reads fp64
    rule = problem.framework.optimizer_bytes - COMMON_UPDATE_BYTES + 8  # the gradient is scaled before
    applied = rule * amounts.dense
    if problem.job.train.embedding_optimizer is None:
        applied += (rule + 8) * amounts.tables
    else:
        applied += 32 * amounts.update_rows
    moved = passes * summed + section.replicas * applied
    seconds = moved / section.count / problem.hardware.host.memory_bytes_per_second
    passed_on = (section.replicas - 1) * _ELEMENT_BYTES * summed / section.count / rate
    requests = _UPDATE_REQUESTS + section.replicas - 1
    return seconds + passed_on + requests * _REQUEST_SECONDS
