"""Transfer of memory files from rank to rank: conversations of a sender and a receiver that run concurrently.

    problems = run_transfers([send_memory_file(path, 0, 2, group), receive_memory_file(file, 2, 2, group)])

The messages are: the header with the size of the chunks; the receiver's answer whether it has memory; content
and rank manifest in chunks. The receiver hashes the data, and writes the header last. A conversation yields
each message once it is posted, and both sides post their n-th message in the same round of `run_transfers`,
so conversations in a ring never wait for each other.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Iterable

import torch
import torch.distributed as dist
import xxhash

from wanma.checkpoint.in_memory.memory_file import (
    PACKED_HEADER_BYTES,
    MemoryFileHeader,
    MemoryFileReader,
    MemoryFileWriter,
    unpack_header,
)

CHUNK_BYTES = 4 << 20
"""Maximum bytes of one message: small beside training's messages, so that training never waits long."""
MIN_CHUNK_BYTES = 64 << 10
"""Maximum bytes of one message where the sender wants short ones."""

TransferSteps = Generator[dist.Work, None, str]
"""Conversation: one side of a transfer, which yields posted messages and returns the problem, or ''."""
_ACCEPT, _REJECT = 1, 0
_CHUNK = struct.Struct("<Q")
FIRST_MESSAGE_BYTES = PACKED_HEADER_BYTES + _CHUNK.size
"""Bytes of the first message: the header, and the size of the chunks."""


def run_transfers(
    transfers: Iterable[TransferSteps], before_round: Callable[[], None] = lambda: None
) -> list[str]:
    """Run conversations to their ends; all ranks that take part call it at the same time.

    Args:
        transfers: this rank's conversations.
        before_round: called before each round of messages; if it waits, the other side waits too.

    Returns:
        The problems, a sentence each.

    Raises:
        RuntimeError: a rank is gone, or silent for longer than the group's timeout.
    """
    problems, active = [], list(transfers)
    while active:
        before_round()
        pending = []
        for steps in active:
            try:
                pending.append((steps, next(steps)))
            except StopIteration as stop:
                problems += [stop.value] if stop.value else []
        for _, work in pending:
            work.wait()
        active = [steps for steps, _ in pending]
    return problems


def send_memory_file(
    path: str | None,
    owner: int,
    target: int,
    group: dist.ProcessGroup | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> TransferSteps:
    """Send the complete memory file at `path`, written by rank `owner`; None: there is none after all.

    Args:
        path: the memory file.
        owner: the rank whose state it holds.
        target: the receiving rank.
        group: a Gloo process group; None: all ranks.
        chunk_bytes: maximum bytes of one message.
    """
    reader, problem = None, ""
    if path is not None:
        try:
            reader = MemoryFileReader(path)
        except (OSError, ValueError) as error:
            problem = f"the memory file of rank {owner} cannot be sent: {error}"
    packed = reader.header.pack() if reader is not None else bytes(PACKED_HEADER_BYTES)
    packed += _CHUNK.pack(chunk_bytes)
    yield _require_work(
        dist.isend(torch.frombuffer(bytearray(packed), dtype=torch.uint8), target, group, owner)
    )
    if reader is None:
        return problem
    answer = torch.empty(1, dtype=torch.uint8)
    yield _require_work(dist.irecv(answer, target, group, owner))
    if answer.item() == _ACCEPT:
        for chunk in torch.frombuffer(reader.body, dtype=torch.uint8).split(chunk_bytes):
            yield _require_work(dist.isend(chunk, target, group, owner))
    return ""  # the receiver reports the reason


def receive_memory_file(
    writer: MemoryFileWriter, owner: int, source: int, group: dist.ProcessGroup | None = None
) -> TransferSteps:
    """Receive the memory file of rank `owner` from rank `source` into `writer`, whose content is replaced."""
    packed = torch.empty(FIRST_MESSAGE_BYTES, dtype=torch.uint8)
    yield _require_work(dist.irecv(packed, source, group, owner))
    head = unpack_header(packed[:PACKED_HEADER_BYTES].numpy().tobytes())
    (chunk_bytes,) = _CHUNK.unpack(packed[PACKED_HEADER_BYTES:].numpy().tobytes())
    if head is None or not head.is_complete:
        return f"rank {owner} has no complete memory file to send"
    problem, memory = "", memoryview(b"")
    try:
        memory = _reserve_memory(writer, head)
    except OSError as error:
        problem = f"no host memory for the memory file of rank {owner}: {error.strerror or error}"
    answer = torch.tensor([_REJECT if problem else _ACCEPT], dtype=torch.uint8)
    yield _require_work(dist.isend(answer, source, group, owner))
    if problem:
        return problem
    digest = xxhash.xxh3_128()
    for chunk in torch.frombuffer(memory, dtype=torch.uint8).split(chunk_bytes):
        yield _require_work(dist.irecv(chunk, source, group, owner))
        digest.update(chunk.numpy().data)
    if digest.digest() != head.digest:
        return (
            f"the memory file of step {head.step}, rank {owner}, was received damaged: "
            "its content differs from its hash"
        )
    writer.finish_received(head)
    return ""


def _reserve_memory(writer: MemoryFileWriter, header: MemoryFileHeader) -> memoryview:
    """Reserve memory for content and rank manifest: a write to unreserved memory kills the process."""
    writer.mark_incomplete(header)
    memory = writer.content(header.content_bytes + header.rank_manifest_bytes)
    writer.reserve(0)
    return memory


def _require_work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is in the group"
    return work
