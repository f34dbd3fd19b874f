"""Offload targets of device memory: host memory or disk, with the copies there and back."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from wanma.parallel.memory.disk_pool import Scratch


class Away(ABC):
    """Offload target with its copies there and back."""

    @abstractmethod
    def send(self, content: Tensor) -> Sent:
        """Begin to copy `content`, (bytes,) uint8 on the device, which may be freed at once."""

    @abstractmethod
    def settle(self) -> None:
        """Release staging memory: all of a block has been sent, or is about to be fetched."""


class Sent(ABC):
    """Content at an offload target, kept until nobody refers to it any more."""

    @abstractmethod
    def begin(self) -> None:
        """Begin to fetch the content: `bring` follows soon."""

    @abstractmethod
    def bring(self) -> Tensor:
        """Return the content, (bytes,) uint8 on the device, for the current stream."""


class Disk(Away):
    """Offload target in mapped files; each copy is waited for."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch

    def send(self, content: Tensor) -> Sent:
        place = self._scratch.borrow(content.numel())
        place.copy_(content)
        sent = _OnDisk(place, content.device)
        weakref.finalize(sent, self._scratch.give_back, place).atexit = False
        return sent

    def settle(self) -> None:
        self._scratch.rest()


class _OnDisk(Sent):
    def __init__(self, place: Tensor, device: torch.device) -> None:
        self._place, self._device = place, device

    def begin(self) -> None:
        pass  # the kernel reads ahead

    def bring(self) -> Tensor:
        # A copy also on a CPU: the place is used again as soon as autograd is done with its node, but what
        # its formula has returned may still be a view of what it was given.
        return torch.empty_like(self._place, device=self._device).copy_(self._place)


class Host(Away):
    """Offload target in pinned host memory, by copies on a stream of their own beside the computation."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()

    def send(self, content: Tensor) -> Sent:
        # torch's allocator of pinned memory keeps and reuses it.
        place = torch.empty(content.shape, dtype=content.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            place.copy_(content, non_blocking=True)
        content.record_stream(self._stream)  # so that its memory is not reused before it has been read
        return _OnHost(place, content.device, self._stream)

    def settle(self) -> None:
        pass


class _OnHost(Sent):
    def __init__(self, place: Tensor, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._place, self._device, self._stream = place, device, stream
        self._coming: tuple[Tensor, torch.cuda.Event] | None = None

    def begin(self) -> None:
        if self._coming is not None:
            return
        fresh = torch.empty(self._place.shape, dtype=self._place.dtype, device=self._device)
        # The memory may be what earlier work on the current stream still reads.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            fresh.copy_(self._place, non_blocking=True)
        fresh.record_stream(self._stream)
        self._coming = fresh, self._stream.record_event()

    def bring(self) -> Tensor:
        self.begin()
        assert self._coming is not None
        fresh, arrived = self._coming
        torch.cuda.current_stream().wait_event(arrived)
        return fresh


class Parcel:
    """Offloaded storage, for all tensors that lie in it.

    While a parcel exists, the identity of the storage it was made of belongs to no other.
    """

    def __init__(self, storage: UntypedStorage, away: Away) -> None:
        self._identity = StorageWeakRef(storage)
        content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self._sent = away.send(content)
        self._here: UntypedStorage | None = None

    def begin(self) -> None:
        """Begin to fetch the storage: `open` follows soon."""
        if self._here is None:
            self._sent.begin()

    def open(self) -> UntypedStorage:
        """Return the storage's content on its device, where it stays while anybody refers to the parcel."""
        if self._here is None:
            self._here = self._sent.bring().untyped_storage()
        return self._here
