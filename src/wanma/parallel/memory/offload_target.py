"""Offload targets of device memory: host memory or disk, with the copies there and back."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from wanma.parallel.memory.disk_pool import DiskPool


class OffloadTarget(ABC):
    """Offload target with its copies there and back."""

    @abstractmethod
    def offload(self, content: Tensor) -> OffloadHandle:
        """Begin to copy `content`, (bytes,) uint8 on the device, which may be freed at once."""

    @abstractmethod
    def release_staging(self) -> None:
        """Release staging memory: all of a block has been sent, or is about to be fetched."""


class OffloadHandle(ABC):
    """Content at an offload target, kept until the last reference to it is gone."""

    @abstractmethod
    def prefetch(self) -> None:
        """Begin to fetch the content: `reload` follows soon."""

    @abstractmethod
    def reload(self) -> Tensor:
        """Return the content, (bytes,) uint8 on the device, for the current stream."""


class DiskTarget(OffloadTarget):
    """Offload target in mapped files; each copy is waited for."""

    def __init__(self, disk_pool: DiskPool) -> None:
        self._disk_pool = disk_pool

    def offload(self, content: Tensor) -> OffloadHandle:
        block = self._disk_pool.acquire(content.numel())
        block.copy_(content)
        handle = _DiskHandle(block, content.device)
        weakref.finalize(handle, self._disk_pool.release, block).atexit = False
        return handle

    def release_staging(self) -> None:
        self._disk_pool.release_pages()


class _DiskHandle(OffloadHandle):
    def __init__(self, block: Tensor, device: torch.device) -> None:
        self._block, self._device = block, device

    def prefetch(self) -> None:
        pass  # the kernel reads ahead

    def reload(self) -> Tensor:
        # A copy also on a CPU: the place is used again as soon as autograd is done with its node, but what
        # its formula has returned may still be a view of what it was given.
        return torch.empty_like(self._block, device=self._device).copy_(self._block)


class HostTarget(OffloadTarget):
    """Offload target in pinned host memory, by copies on a stream of their own beside the computation."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def offload(self, content: Tensor) -> OffloadHandle:
        # torch's allocator of pinned memory keeps and reuses it.
        host_copy = torch.empty(content.shape, dtype=content.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            host_copy.copy_(content, non_blocking=True)
        content.record_stream(self._stream)  # so that its memory is not reused before it has been read
        return _HostHandle(host_copy, content.device, self._stream)

    def release_staging(self) -> None:
        pass


class _HostHandle(OffloadHandle):
    def __init__(self, host_copy: Tensor, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._host_copy, self._device, self._stream = host_copy, device, stream
        self._prefetched: tuple[Tensor, torch.cuda.Event] | None = None

    def prefetch(self) -> None:
        if self._prefetched is not None:
            return
        device_copy = torch.empty(self._host_copy.shape, dtype=self._host_copy.dtype, device=self._device)
        # The memory may be what earlier work on the current stream still reads.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            device_copy.copy_(self._host_copy, non_blocking=True)
        device_copy.record_stream(self._stream)
        self._prefetched = device_copy, self._stream.record_event()

    def reload(self) -> Tensor:
        self.prefetch()
        assert self._prefetched is not None
        device_copy, event = self._prefetched
        torch.cuda.current_stream().wait_event(event)
        return device_copy


class OffloadedStorage:
    """Offloaded storage, for all tensors that lie in it.

    While it exists, the identity of the storage it was made of belongs to no other.
    """

    def __init__(self, storage: UntypedStorage, target: OffloadTarget) -> None:
        self._identity = StorageWeakRef(storage)
        content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self._handle = target.offload(content)
        self._reloaded: UntypedStorage | None = None

    def prefetch(self) -> None:
        """Begin to fetch the storage: `reload` follows soon."""
        if self._reloaded is None:
            self._handle.prefetch()

    def reload(self) -> UntypedStorage:
        """Return the storage's content on its device, where it stays while anybody refers to this."""
        if self._reloaded is None:
            self._reloaded = self._handle.reload().untyped_storage()
        return self._reloaded
