"""Transfer of memory files from rank to rank: conversations of a sender and a receiver that run concurrently.

    problems = converse([send_image(path, 0, 2, group), receive_image(file, 2, 2, group)])

The messages are: the header with the size of the chunks; the receiver's answer whether it has memory; content
and rank manifest in chunks. The receiver hashes the data, and writes the header last. A conversation yields
each message once it is posted, and both sides post their n-th message in the same round of `converse`, so
conversations in a ring never wait for each other.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Iterable

import torch
import torch.distributed as dist
import xxhash

from wanma.checkpoint.in_memory.memory_file import PACKED_BYTES, FoundImage, Head, ImageFile, unpack_head

CHUNK_BYTES = 4 << 20
"""Maximum bytes of one message: small beside training's messages, so that training never waits long."""
LEAST_CHUNK_BYTES = 64 << 10
"""Maximum bytes of one message where the sender wants short ones."""

Talk = Generator[dist.Work, None, str]
"""Conversation: one side of a transfer, which yields posted messages and returns the problem, or ''."""
_YES, _NO = 1, 0
_CHUNK = struct.Struct("<Q")
FIRST_BYTES = PACKED_BYTES + _CHUNK.size
"""Bytes of the first message: the header, and the size of the chunks."""


def converse(talks: Iterable[Talk], before_round: Callable[[], None] = lambda: None) -> list[str]:
    """Run conversations to their ends; all ranks that take part call it at the same time.

    Args:
        talks: this rank's conversations.
        before_round: called before each round of messages; if it waits, the other side waits too.

    Returns:
        The problems, a sentence each.

    Raises:
        RuntimeError: a rank is gone, or silent for longer than the group's timeout.
    """
    problems, going_on = [], list(talks)
    while going_on:
        before_round()
        posted = []
        for talk in going_on:
            try:
                posted.append((talk, next(talk)))
            except StopIteration as end:
                problems += [end.value] if end.value else []
        for _, work in posted:
            work.wait()
        going_on = [talk for talk, _ in posted]
    return problems


def send_image(
    path: str | None,
    owner: int,
    to: int,
    group: dist.ProcessGroup | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Talk:
    """Send the complete memory file at `path`, written by rank `owner`; None: there is none after all.

    Args:
        path: the memory file.
        owner: the rank whose state it holds.
        to: the receiving rank.
        group: a Gloo process group; None: all ranks.
        chunk_bytes: maximum bytes of one message.
    """
    image, problem = None, ""
    if path is not None:
        try:
            image = FoundImage(path)
        except (OSError, ValueError) as error:
            problem = f"rank {owner}'s snapshot cannot be sent: {error}"
    packed = image.head.pack() if image is not None else bytes(PACKED_BYTES)
    packed += _CHUNK.pack(chunk_bytes)
    yield _post(dist.isend(torch.frombuffer(bytearray(packed), dtype=torch.uint8), to, group, owner))
    if image is None:
        return problem
    answer = torch.empty(1, dtype=torch.uint8)
    yield _post(dist.irecv(answer, to, group, owner))
    if answer.item() == _YES:
        for chunk in torch.frombuffer(image.body, dtype=torch.uint8).split(chunk_bytes):
            yield _post(dist.isend(chunk, to, group, owner))
    return ""  # the receiver reports the reason


def receive_image(file: ImageFile, owner: int, source: int, group: dist.ProcessGroup | None = None) -> Talk:
    """Receive the memory file of rank `owner` from rank `source` into `file`, whose content is replaced."""
    packed = torch.empty(FIRST_BYTES, dtype=torch.uint8)
    yield _post(dist.irecv(packed, source, group, owner))
    head = unpack_head(packed[:PACKED_BYTES].numpy().tobytes())
    (chunk_bytes,) = _CHUNK.unpack(packed[PACKED_BYTES:].numpy().tobytes())
    if head is None or not head.complete:
        return f"rank {owner} has no whole snapshot to be copied"
    problem, memory = "", memoryview(b"")
    try:
        memory = _prepare(file, head)
    except OSError as error:
        problem = f"no memory for a copy of rank {owner}'s snapshot: {error.strerror or error}"
    answer = torch.tensor([_NO if problem else _YES], dtype=torch.uint8)
    yield _post(dist.isend(answer, source, group, owner))
    if problem:
        return problem
    digest = xxhash.xxh3_128()
    for chunk in torch.frombuffer(memory, dtype=torch.uint8).split(chunk_bytes):
        yield _post(dist.irecv(chunk, source, group, owner))
        digest.update(chunk.numpy().data)
    if digest.digest() != head.digest:
        return f"rank {owner}'s snapshot of step {head.step} was damaged on its way, or before"
    file.finish_copy(head)
    return ""


def _prepare(file: ImageFile, head: Head) -> memoryview:
    """Reserve memory for content and rank manifest: a write to unreserved memory kills the process."""
    file.begin(head)
    memory = file.content(head.content_bytes + head.table_bytes)
    file.reserve(0)
    return memory


def _post(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is in the group"
    return work
