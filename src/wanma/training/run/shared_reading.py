"""Division of reading among ranks that need the same samples: tensor, context and pipeline parallel peers.

Within a node one of them reads, and the others map its batches. A node whose ranks need no inputs is sent the
rest over TCP. Stages of a pipeline that need neither inputs nor targets read nothing, where their rows can be
made without.
"""

from __future__ import annotations

import os
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from wanma.data.batch import Batch
from wanma.data.datasets.dataset import BatchedDataset
from wanma.data.handover.batch_client import BatchClient
from wanma.data.handover.batch_layout import Content
from wanma.data.handover.batch_server import SECRET_BYTES
from wanma.data.handover.messages import ServerEndpoint
from wanma.data.handover.sample_reading import PeerReading, PeerServer, SampleReading, UnreadRows
from wanma.data.sampling.permutation import IndexArray
from wanma.job.errors import JobError, WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.sections.data import DataSection
from wanma.training.run.data_parts import assign_rows_to_parts
from wanma.training.run.node_address import node_address, nodes_of_ranks
from wanma.training.run.trainer import Trainer


@dataclass(frozen=True)
class ReadingDivision:
    """Division of reading among all ranks."""

    readers: tuple[int | None, ...]
    """Rank that reads for each rank, perhaps itself; None: nothing is read for it."""
    nodes: tuple[int, ...]
    """Node of each rank."""

    def consumers(self, reader: int) -> list[int]:
        """Return the ranks for which a rank reads, itself included."""
        return [rank for rank, other in enumerate(self.readers) if other == reader]

    def is_local(self, rank: int) -> bool:
        """Return True if the rank that reads for `rank` is on the same node."""
        reader = self.readers[rank]
        return reader is not None and self.nodes[reader] == self.nodes[rank]

    def has_remote_consumers(self, reader: int) -> bool:
        return any(not self.is_local(rank) for rank in self.consumers(reader))

    @property
    def is_shared(self) -> bool:
        """True if a rank reads for another."""
        return any(reader not in (None, rank) for rank, reader in enumerate(self.readers))

    def describe(self) -> str:
        """Describe the division in one sentence; empty: each rank reads by itself."""
        texts = []
        counts = Counter(reader for reader in self.readers if reader is not None)
        if max(counts.values(), default=1) > 1:
            sizes = sorted(set(counts.values()))
            size = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
            texts.append(f"{len(counts)} of {len(self.readers)} ranks read, each for {size} ranks")
        if unread := self.readers.count(None):
            texts.append(f"{unread} ranks of middle pipeline stages read nothing")
        return "; ".join(texts)


def divide_reading(
    plan: Plan, local_world_sizes: Sequence[int], *, is_shared: bool, reads_rows: bool
) -> ReadingDivision:
    """Divide reading among the ranks of a plan.

    Args:
        plan: plan of the run.
        local_world_sizes: ranks of each node; empty: all are on one.
        is_shared: true if ranks that need the same samples share their reading.
        reads_rows: true if stages that need neither inputs nor targets need something else of the data.
    """
    nodes = nodes_of_ranks(local_world_sizes, plan.world_size)
    if not is_shared:
        return ReadingDivision(
            tuple(
                rank if reads_rows or content_of(plan, rank) != "rows" else None
                for rank in range(plan.world_size)
            ),
            nodes,
        )
    first_readers: dict[int, int] = {}
    node_readers: dict[tuple[int, int], int] = {}
    for rank in range(plan.world_size):
        if content_of(plan, rank) == "complete":
            group = plan.data_parallel_rank(rank)
            first_readers.setdefault(group, rank)
            node_readers.setdefault((group, nodes[rank]), rank)
    readers: list[int | None] = []
    for rank in range(plan.world_size):
        group = plan.data_parallel_rank(rank)
        reads_nothing = content_of(plan, rank) == "rows" and not reads_rows
        reader = node_readers.get((group, nodes[rank]), first_readers[group])
        readers.append(None if reads_nothing else reader)
    return ReadingDivision(tuple(readers), nodes)


def content_of(plan: Plan, rank: int) -> Content:
    """Return the part of its batches that a rank needs."""
    if 0 in plan.stages_of_pipeline_rank(plan.coordinates(rank)["pp"]):
        return "complete"
    return "targets" if plan.has_last_stage(rank) else "rows"


@contextmanager
def share_reading(trainer: Trainer, data: BatchedDataset, *, couples_rows: bool = True) -> Iterator[None]:
    """Let ranks that need the same samples share their reading within the context; every rank calls it.

    Args:
        trainer: this rank's run.
        data: data of the run, closed with the context.
        couples_rows: true if a loss or a forward of the user's may couple samples of a step by their rows.

    Raises:
        JobError: `data.shared_reading` is 'always', and the data or the system cannot.
        WanmaError: the server of a rank cannot be started.
    """
    plan, section = trainer.plan, trainer.job.data
    with closing(data):
        assign_rows_to_parts(trainer, data, couples_rows=couples_rows)
        if plan.pp * plan.cp * plan.tp == 1:
            yield
            return
        division = divide_reading(
            plan,
            trainer.worker.local_world_sizes,
            is_shared=_is_shared(section, data),
            reads_rows=data.unread_batch(np.zeros(1, np.int64)) is None,
        )
        if text := division.describe():
            trainer.message(f"data: {text}")
        reading = _open_reading(division, trainer, data)
        data.sample_source, trainer.step_data.reading = reading, reading
        try:
            yield
        finally:
            data.sample_source = None
            reading.close()


def _is_shared(section: DataSection, data: BatchedDataset) -> bool:
    """Return whether ranks that need the same samples share their reading; the same on all ranks."""
    if section.shared_reading == "never":
        return False
    has_files = hasattr(os, "memfd_create")
    if section.shared_reading == "auto":
        return data.is_costly_to_read and data.can_share_reading and has_files
    if not data.can_share_reading:
        raise JobError(
            "data.shared_reading = 'always' is not supported: an iterable dataset is read in its order by "
            "each rank",
            "remove data.shared_reading, or use a map-style dataset",
        )
    if not has_files:
        raise JobError(
            "data.shared_reading = 'always' needs memfd_create, which this system does not have",
            "remove data.shared_reading",
        )
    return True


def _open_reading(division: ReadingDivision, trainer: Trainer, data: BatchedDataset) -> SampleReading:
    """Return the way in which this rank gets its samples; starts servers, and exchanges their endpoints."""
    rank = trainer.worker.rank
    reader = division.readers[rank]
    server: PeerServer | None = None
    secret = secrets.token_bytes(SECRET_BYTES)
    if reader == rank and len(division.consumers(rank)) > 1:
        server = _start_server(division, trainer, data, secret)
    endpoints: list[tuple[ServerEndpoint, bytes] | None] = [None] * trainer.plan.world_size
    if division.is_shared:
        own = None if server is None else (server.server.endpoint, secret)
        try:
            # Collective: no rank asks for a batch before all have prepared their data.
            dist.all_gather_object(endpoints, own)
        except BaseException:
            if server is not None:
                server.close()
            raise
    if server is not None:
        return server
    if reader is None:
        return UnreadRows(lambda sample_indices: _unread_batch(data, sample_indices))
    if reader == rank:
        return SampleReading(data.read_samples)
    found = endpoints[reader]
    assert found is not None
    client = BatchClient(found[0], found[1], is_local=division.is_local(rank))
    return PeerReading(data.read_samples, client, content_of(trainer.plan, rank))


def _start_server(
    division: ReadingDivision, trainer: Trainer, data: BatchedDataset, secret: bytes
) -> PeerServer:
    section, worker = trainer.job.data, trainer.worker
    try:
        return PeerServer(
            data.read_samples,
            consumers=len(division.consumers(worker.rank)),
            readers=max(section.worker_count, data.loader_threads),
            limit_bytes=2 * section.prefetch_bytes,  # peers may be as far ahead of this rank as it of them
            rank=worker.rank,
            secret=secret,
            host=node_address(worker) if division.has_remote_consumers(worker.rank) else "",
        )
    except OSError as error:
        raise WanmaError(
            f"data: rank {worker.rank} cannot hand samples over to its peers: {error}",
            "set data.shared_reading = 'never': each rank then reads its samples itself",
        ) from error


def _unread_batch(data: BatchedDataset, sample_indices: IndexArray) -> Batch:
    batch = data.unread_batch(sample_indices)
    assert batch is not None
    return batch
