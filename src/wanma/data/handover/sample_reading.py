"""Ways in which a rank gets its samples: it reads them, alone or for its peers, or a peer hands them over."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from wanma.data.batch import Batch
from wanma.data.handover.batch_client import BatchClient
from wanma.data.handover.batch_layout import Content, UnsupportedTensorError
from wanma.data.handover.batch_server import BatchServer
from wanma.data.handover.messages import BatchRequest
from wanma.data.handover.shared_batches import ReadSamples, SharedBatches
from wanma.data.sampling.permutation import IndexArray

log = logging.getLogger("wanma.data")


class SampleReading:
    """Way in which this rank gets its samples: it reads them alone, unless a subclass says otherwise."""

    def __init__(self, read: ReadSamples) -> None:
        self._read_samples = read
        self._lock = threading.Lock()
        self.training_samples_read = 0
        self._is_fallback_logged = False

    def take(self, is_validation: bool, sample_indices: IndexArray) -> Batch:
        """Return the batch of these samples."""
        return self._read(is_validation, sample_indices)

    def discard(self) -> None:
        """Drop batches that were read ahead, because other ones will be taken."""

    def close(self) -> None:
        """End the hand-over; no thread takes a batch any more."""

    def _read(self, is_validation: bool, sample_indices: IndexArray) -> Batch:
        batch = self._read_samples(is_validation, sample_indices)
        if not is_validation:
            with self._lock:
                self.training_samples_read += len(sample_indices)
        return batch

    def _read_unsupported(
        self, is_validation: bool, sample_indices: IndexArray, error: UnsupportedTensorError
    ) -> Batch:
        """Read what cannot be handed over, and log the reason once."""
        if not self._is_fallback_logged:
            self._is_fallback_logged = True
            log.warning("data: %s, so that each rank reads its samples itself", error)
        return self._read(is_validation, sample_indices)


class UnreadRows(SampleReading):
    """Rows of a pipeline stage that needs neither inputs nor targets: nothing is read.

    Args:
        make: function that makes a batch of these samples, without their content.
    """

    def __init__(self, make: Callable[[IndexArray], Batch]) -> None:
        super().__init__(lambda _, sample_indices: make(sample_indices))

    def take(self, is_validation: bool, sample_indices: IndexArray) -> Batch:
        return self._read_samples(is_validation, sample_indices)


class PeerServer(SampleReading):
    """Reading by this rank, for itself and for peers.

    Args:
        consumers: ranks that take each batch, this one included.
        readers: batches read at once.
        limit_bytes: limit in bytes of the batches that not all have taken; None: no limit.
        host: address at which other nodes reach this one; empty: no rank there needs batches.
    """

    def __init__(
        self,
        read: ReadSamples,
        *,
        consumers: int,
        readers: int,
        limit_bytes: int | None,
        rank: int,
        secret: bytes,
        host: str = "",
    ) -> None:
        super().__init__(read)
        self.batches = SharedBatches(self._read, consumers, readers, limit_bytes)
        self.server = BatchServer(
            lambda request: self.batches.take(request.is_validation, request.sample_indices),
            rank,
            secret,
            host,
        )

    def take(self, is_validation: bool, sample_indices: IndexArray) -> Batch:
        try:
            return self.batches.take(is_validation, sample_indices).map()
        except UnsupportedTensorError as error:
            return self._read_unsupported(is_validation, sample_indices, error)

    def discard(self) -> None:
        self.batches.discard()

    def close(self) -> None:
        self.server.close()
        self.batches.discard()


class PeerReading(SampleReading):
    """Reading by a peer, which hands the batches over.

    Args:
        read: function that reads samples in this process, used for those that cannot be handed over.
    """

    def __init__(self, read: ReadSamples, client: BatchClient, content: Content = "complete") -> None:
        super().__init__(read)
        self._client, self._content = client, content

    def take(self, is_validation: bool, sample_indices: IndexArray) -> Batch:
        try:
            return self._client.request(BatchRequest(is_validation, sample_indices, self._content))
        except UnsupportedTensorError as error:
            return self._read_unsupported(is_validation, sample_indices, error)

    def close(self) -> None:
        self._client.close()
