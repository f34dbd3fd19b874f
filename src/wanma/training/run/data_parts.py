"""Parts of the data that lie on different nodes, joined to one data set on all ranks."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from wanma.collectives.object_all_gather import all_gather_objects
from wanma.data.datasets.dataset import BatchedDataset
from wanma.data.datasets.parted_dataset import DataPart, PartedDataset
from wanma.data.handover.batch_client import BatchClient
from wanma.data.handover.batch_server import SECRET_BYTES, BatchServer
from wanma.data.handover.messages import ServerEndpoint
from wanma.data.handover.part_rows import RowClients, serve_rows
from wanma.job.errors import AllRanksError, WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import WorkerContext
from wanma.job.sections.job import Job
from wanma.models.layers.batch_norm import GroupedBatchNorm
from wanma.models.layers.router import TopKRouter
from wanma.training.checkpointing.run_identity import ACCEPT_CHANGES
from wanma.training.run.node_address import node_address, nodes_of_ranks
from wanma.training.run.trainer import Trainer


@dataclass(frozen=True)
class _RankParts:
    """Parts of one rank's node, as it tells the others."""

    parts: tuple[DataPart, ...]
    entries: tuple[str, ...]
    """Entries of the job that its node has."""
    endpoint: ServerEndpoint | None
    """Endpoint of the rank's server; None: all ranks are on one node."""
    secret: bytes
    recorded: tuple[DataPart, ...]
    """Parts of the run so far, as rank 0 has them on record."""


def join_data_parts(data: BatchedDataset, job: Job, worker: WorkerContext, plan: Plan) -> BatchedDataset:
    """Make the parts of all nodes one data set; every rank calls it.

    Args:
        data: data of this rank; unless they lie in parts they are returned as they are.
        job: the job.
        worker: context of this rank.
        plan: plan of the run.

    Raises:
        AllRanksError: a part of the run so far is on no node, no node has an entry, or parts are of different
            forms.
        WanmaError: the server of a rank cannot be started.
    """
    if not isinstance(data, PartedDataset):
        return data
    nodes = nodes_of_ranks(worker.local_world_sizes, worker.world_size)
    secret, server = secrets.token_bytes(SECRET_BYTES), None
    if nodes[-1] > 0:
        server = _start_server(data, worker, secret)
    own = _RankParts(
        tuple(data.local_parts),
        data.local_entries,
        None if server is None else server.endpoint,
        secret,
        _read_record(worker) if worker.rank == 0 else (),
    )
    try:
        told = all_gather_objects(own, worker.world_size)
        parts = [part for one in told for part in one.parts]
        _refuse_missing_entries(job, {entry for one in told for entry in one.entries})
        _refuse_missing_parts(told[0].recorded, parts, job)
        owned = [frozenset(part.fingerprint for part in one.parts) for one in told]
        is_spread = any(fingerprints != owned[0] for fingerprints in owned)
        data.join(parts, _connect(data, told, nodes, worker.rank, server), is_spread=is_spread)
        data.data_rank_parts = _parts_of_data_ranks(owned, plan)
    except BaseException:
        if server is not None:
            server.close()
        raise
    return data


def assign_rows_to_parts(trainer: Trainer, data: BatchedDataset, *, couples_rows: bool) -> None:
    """Let samples of an interleaved order be computed where they lie; every rank calls it.

    Rank 0 records the parts.

    Args:
        trainer: this rank's run, which has accepted the data.
        data: data of the run.
        couples_rows: true if the loss or the forward may couple samples of a step by their rows.
    """
    if not isinstance(data, PartedDataset):
        return
    if trainer.worker.rank == 0:  # not before: a start that is refused changes no record
        _write_record(RunDirectory(trainer.worker.run_directory).data_parts, data.parts)
    if data.is_spread and data.is_interleaved:
        modules = trainer.state.parallel_model.modules()
        couples_rows |= any(isinstance(module, GroupedBatchNorm | TopKRouter) for module in modules)
        # Stages of a pipeline have different modules.
        data.keeps_row_order = any(all_gather_objects(couples_rows, trainer.plan.world_size))
    trainer.message(data.describe_placement(trainer.plan, trainer.job.train.global_batch))


def _start_server(data: PartedDataset, worker: WorkerContext, secret: bytes) -> BatchServer:
    try:
        return serve_rows(data.read_local_rows, worker.rank, secret, node_address(worker))
    except OSError as error:
        raise WanmaError(
            f"data.placement = 'parts': rank {worker.rank} cannot hand samples over to other nodes: {error}"
        ) from error


def _connect(
    data: PartedDataset,
    told: Sequence[_RankParts],
    nodes: Sequence[int],
    rank: int,
    server: BatchServer | None,
) -> RowClients:
    """Return the reader of the parts that this node does not have."""
    local = {part.fingerprint for part in data.local_parts}
    owners: dict[str, list[BatchClient]] = {}
    for other, one in enumerate(told):
        if nodes[other] == nodes[rank] or one.endpoint is None:
            continue
        client = BatchClient(one.endpoint, one.secret, is_local=False)
        for part in one.parts:
            if part.fingerprint not in local:
                owners.setdefault(part.fingerprint, []).append(client)
    return RowClients(owners, rank, server)


def _refuse_missing_entries(job: Job, found: Set[str]) -> None:
    """Refuse entries of the job that no node has; `found`: those that one has."""
    if missing := [entry for entry in job.data.entries if entry not in found]:
        raise AllRanksError(
            f"data.{job.data.entries_key}: no node has '{missing[0]}'",
            "paths are relative to where wanma is started on each node",
        )


def _refuse_missing_parts(recorded: Sequence[DataPart], parts: Sequence[DataPart], job: Job) -> None:
    """Refuse to go on without a part of the run so far."""
    if job.checkpoint.resume == ACCEPT_CHANGES:
        return
    found = {part.fingerprint for part in parts}
    missing = [part for part in recorded if part.fingerprint not in found]
    if missing:
        names = ", ".join(f"'{part.entry}' of node {part.host}" for part in missing)
        samples = sum(part.train_samples for part in missing)
        raise AllRanksError(
            f"data.placement = 'parts': no node of this run has {names} ({samples:,} training samples), or "
            "its files have changed",
            "start the run with that node, or copy its files to another one and add them to the entries",
        )


def _read_record(worker: WorkerContext) -> tuple[DataPart, ...]:
    """Return the parts of the run so far; none if it has not come to a checkpoint."""
    run = RunDirectory(worker.run_directory)
    if worker.restart is None and not any(run.checkpoints.glob("step-*")):
        return ()
    path = run.data_parts
    names = {field.name for field in fields(DataPart)}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return tuple(DataPart(**{key: one[key] for key in names}) for one in values)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WanmaError(
            f"{path} cannot be read: {error}", "remove it: the next start writes it anew"
        ) from error


def _write_record(path: Path, parts: Sequence[DataPart]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps([asdict(part) for part in parts], indent=2)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        temporary = path.with_name(f"{path.name}.new")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)


def _parts_of_data_ranks(owned: Sequence[frozenset[str]], plan: Plan) -> tuple[frozenset[str], ...]:
    """Return the parts on the node of each data rank, of that of its first rank if it spans several."""
    first_ranks: dict[int, int] = {}
    for rank in range(plan.world_size):
        first_ranks.setdefault(plan.data_parallel_rank(rank), rank)
    return tuple(owned[first_ranks[data_rank]] for data_rank in sorted(first_ranks))
