"""Hand-over of rows between nodes that have different parts of the data: each node reads its own parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from wanma.data.batch import Batch
from wanma.data.handover.batch_client import BatchClient
from wanma.data.handover.batch_layout import UnsupportedTensorError
from wanma.data.handover.batch_server import BatchServer
from wanma.data.handover.messages import BatchRequest
from wanma.data.handover.shared_batches import BatchFile
from wanma.data.sampling.permutation import IndexArray
from wanma.job.errors import WanmaError

ReadRows = Callable[[str, bool, IndexArray, IndexArray], Batch]
"""Function (part, of validation, rows, sample indices) that reads rows in this process."""


def serve_rows(read: ReadRows, rank: int, secret: bytes, host: str) -> BatchServer:
    """Start a server of this node's rows for ranks on other nodes.

    Raises:
        OSError: it cannot listen.
    """

    def take(request: BatchRequest) -> BatchFile:
        assert request.rows is not None
        return BatchFile(read(request.part, request.is_validation, request.rows, request.sample_indices))

    return BatchServer(take, rank, secret, host)


class RowClients:
    """Reader of the parts of other nodes, and this rank's server for them.

    Args:
        owners: for each part on other nodes, the clients of the ranks that have it.
        rank: rank of this process; ranks take different owners of a part.
        server: server of this rank's own parts, closed with the clients.
    """

    def __init__(
        self, owners: Mapping[str, Sequence[BatchClient]], rank: int, server: BatchServer | None
    ) -> None:
        self._clients = {part: clients[rank % len(clients)] for part, clients in owners.items()}
        self._server = server

    def read_rows(
        self, part: str, is_validation: bool, rows: IndexArray, sample_indices: IndexArray
    ) -> Batch:
        """Read rows of the part with this fingerprint.

        Raises:
            WanmaError: they cannot be read there, or that rank has ended.
        """
        try:
            return self._clients[part].request(
                BatchRequest(is_validation, sample_indices, part=part, rows=rows)
            )
        except UnsupportedTensorError as error:
            raise WanmaError(
                f"data.placement = 'parts': {error}", "give samples of plain tensors, or copy the data"
            ) from error

    def close(self) -> None:
        """Close all connections."""
        for client in set(self._clients.values()):
            client.close()
        if self._server is not None:
            self._server.close()
