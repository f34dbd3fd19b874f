"""Run directories that not all nodes share: rank 0's node has the checkpoints, and sends them to the others.

`find_private_folders` looks who sees rank 0's folder of checkpoints. `PrivateFolders.bring_newest` moves the
newest checkpoint to rank 0's node, if it is on another one, as after a change of the order of the nodes;
`PrivateFolders.distribute` gives each node a copy to load from, which `close` removes.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from threading import Thread

import torch.distributed as dist

from wanma.checkpoint.format.manifest import MANIFEST_FILE, step_folder_name
from wanma.checkpoint.format.memory_map import map_private
from wanma.checkpoint.load.verification import find_defects
from wanma.checkpoint.save.checkpointer import CheckpointRelay
from wanma.checkpoint.save.relay import StoreChannel
from wanma.checkpoint.store.checkpoint_folder import finalize_folder, list_committed, read_manifest
from wanma.collectives.object_all_gather import all_gather_objects
from wanma.job.errors import WanmaError
from wanma.job.run.worker import WorkerContext

TRANSFER_SECONDS = 600.0
"""Longest silence, in seconds, of the other side of a transfer."""
PROGRESS_INTERVAL_SECONDS = 5.0
"""Seconds between two signs of life during a transfer."""
VISIBLE_SECONDS = 0.5
"""Time, in seconds, in which a new file in a shared folder is seen by all nodes."""
COPY_FOLDER = "copied"
"""Folder of the run directory for copies to load from; of each node its own."""


def find_private_folders(worker: WorkerContext) -> PrivateFolders:
    """Look which ranks see rank 0's folder of checkpoints; every rank calls it."""
    if len(worker.local_world_sizes) < 2 or worker.store_port == 0:
        return PrivateFolders(worker, ())
    folder = worker.run_directory / "checkpoints"
    names = [f".shared-{secrets.token_hex(8)}"]
    if worker.rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / names[0]).touch()
        except OSError as error:
            names = [f"cannot use the checkpoint folder {folder}: {error.strerror or error}"]
    dist.broadcast_object_list(names, src=0)
    if not names[0].startswith("."):
        raise WanmaError(names[0], "free space there, or choose another run directory with --run-dir DIR")
    deadline = time.monotonic() + VISIBLE_SECONDS
    while not (sees := (folder / names[0]).exists()) and time.monotonic() < deadline:
        time.sleep(0.05)
    seen = all_gather_objects(sees, worker.world_size)
    if worker.rank == 0:
        (folder / names[0]).unlink(missing_ok=True)
    return PrivateFolders(worker, tuple(rank for rank, found in enumerate(seen) if not found))


class PrivateFolders:
    """Ranks that do not see rank 0's folder of checkpoints, and the way of checkpoints to and from them.

    Args:
        worker: context of this rank.
        ranks: those ranks, the same on all.
    """

    def __init__(self, worker: WorkerContext, ranks: tuple[int, ...]) -> None:
        self._worker, self.ranks = worker, ranks
        self._folder = worker.run_directory / "checkpoints"
        self._copies = worker.run_directory / COPY_FOLDER / f"node-{worker.node_rank}"

    @property
    def is_private(self) -> bool:
        """True if this rank does not see rank 0's folder."""
        return self._worker.rank in self.ranks

    def find_local_defects(self, path: Path) -> list[str]:
        """List the defects of a checkpoint of rank 0's node; each rank that sees it reads a part."""
        if self.is_private:
            return []
        sharing = [rank for rank in range(self._worker.world_size) if rank not in self.ranks]
        return find_defects(path, sharing.index(self._worker.rank), len(sharing))

    @cached_property
    def relay(self) -> CheckpointRelay | None:
        """Relay of saves; None if all ranks share the folder."""
        return CheckpointRelay(self._open_channel(), self.ranks) if self.ranks else None

    def bring_newest(self, min_step: int) -> list[str]:
        """Bring the newest checkpoint of all nodes to rank 0's node; every rank calls it.

        Args:
            min_step: step up to which checkpoints are of no use.

        Returns:
            messages for the user.

        Raises:
            WanmaError: the transfer failed.
        """
        if not self.ranks:
            return []
        steps = (
            [step for step, _ in list_committed(self._folder)] if self._leads or not self.is_private else []
        )
        newest = all_gather_objects(max(steps, default=-1), self._worker.world_size)
        source = max(range(len(newest)), key=lambda rank: (newest[rank], -rank))
        step = newest[source]
        if source not in self.ranks or step <= min_step:
            return []
        name = step_folder_name(step)
        channel = self._open_channel()

        def transfer() -> None:
            if self._worker.rank == source:
                _send_checkpoint(channel, self._folder / name, [0])
            elif self._worker.rank == 0:
                partial = self._folder / f"{name}.partial-{self._worker.generation}-brought"
                _receive_checkpoint(channel, partial, 0)
                finalize_folder(partial, step)

        self._run_together(transfer, "bringing a checkpoint to rank 0's node")
        return [f"{name} was on the node of rank {source}, and has been copied to that of rank 0"]

    def distribute(self, path: Path) -> Path:
        """Return the path of a checkpoint of rank 0's node on this node; every rank calls it.

        Raises:
            WanmaError: the transfer failed.
        """
        if not self.ranks:
            return path
        leaders = self._private_leaders()
        channel = self._open_channel()
        copy = self._copies / path.name

        def transfer() -> None:
            if self._worker.rank == 0:
                _send_checkpoint(channel, path, leaders)
            elif self._worker.rank in leaders:
                shutil.rmtree(self._copies, ignore_errors=True)
                _receive_checkpoint(channel, copy, self._worker.rank)

        self._run_together(transfer, "copying a checkpoint to the other nodes")
        return copy if self.is_private else path

    def close(self) -> None:
        """Remove this node's copies; every rank calls it once it has loaded."""
        if not self.ranks:
            return
        dist.barrier()
        if self._leads and self.is_private:
            shutil.rmtree(self._copies.parent, ignore_errors=True)

    @property
    def _leads(self) -> bool:
        """True on the first rank of each node."""
        return self._worker.rank == self._worker.node_ranks[0]

    def _private_leaders(self) -> list[int]:
        leads = all_gather_objects(self._leads and self.is_private, self._worker.world_size)
        return [rank for rank, is_leader in enumerate(leads) if is_leader]

    def _open_channel(self) -> StoreChannel:
        """Return a channel with a connection of its own to the run's rendezvous store."""
        store = dist.TCPStore(  # type: ignore[attr-defined]  # public, but torch does not list it
            self._worker.store_host,
            self._worker.store_port,
            is_master=False,
            timeout=timedelta(seconds=TRANSFER_SECONDS),
        )
        return StoreChannel(dist.PrefixStore("wanma-checkpoint", store))  # type: ignore[attr-defined]  # likewise

    def _run_together(self, function: Callable[[], None], activity: str) -> None:
        """Run `function` on each rank, with signs of life; raise the first rank's error on all of them."""
        errors: list[WanmaError] = []

        def run() -> None:
            try:
                function()
            except (OSError, TimeoutError) as error:
                errors.append(WanmaError(f"rank {self._worker.rank}: {activity} failed: {error}"))
            except WanmaError as error:
                errors.append(error)

        thread = Thread(target=run, name="checkpoint-copy", daemon=True)
        thread.start()
        while True:
            self._worker.supervisor_client.report_progress(0, activity)
            thread.join(PROGRESS_INTERVAL_SECONDS)
            states = all_gather_objects((not thread.is_alive(), errors), self._worker.world_size)
            failures = [error for _, failed in states for error in failed]
            if failures:
                raise failures[0]
            if all(is_done for is_done, _ in states):
                return


def _send_checkpoint(channel: StoreChannel, path: Path, receivers: list[int]) -> None:
    """Send the files of a checkpoint, the manifest last, to one receiver after the other."""
    manifest = read_manifest(path)
    names = [*manifest.files, MANIFEST_FILE]
    for receiver in receivers:
        key = f"{path.name}/copy-{receiver}"
        channel.put(f"{key}/names", json.dumps(names).encode())
        for number, name in enumerate(names):
            size = (path / name).stat().st_size
            channel.put(f"{key}/{number}/size", str(size).encode())
            if size == 0:
                continue
            with (path / name).open("rb") as file:
                channel.send(f"{key}/{number}", map_private(file.fileno()), TRANSFER_SECONDS)
        channel.wait_for([f"{key}/received"], time.monotonic() + TRANSFER_SECONDS)


def _receive_checkpoint(channel: StoreChannel, folder: Path, receiver: int) -> None:
    """Write the files that `_send_checkpoint` sends, verified, into a new folder.

    Raises:
        WanmaError: a file was damaged on its way.
    """
    key = f"{folder.name.partition('.')[0]}/copy-{receiver}"
    folder.mkdir(parents=True)
    channel.wait_for([f"{key}/names"], time.monotonic() + TRANSFER_SECONDS)
    names = json.loads(channel.take(f"{key}/names"))
    digests = {}
    for number, name in enumerate(names):
        channel.wait_for([f"{key}/{number}/size"], time.monotonic() + TRANSFER_SECONDS)
        size = int(channel.take(f"{key}/{number}/size"))
        digest = hashlib.sha256()
        with (folder / Path(name).name).open("wb") as file:
            for block in channel.receive(f"{key}/{number}", size, TRANSFER_SECONDS):
                digest.update(block)
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        digests[name] = digest.hexdigest()
    for name, entry in read_manifest(folder).files.items():
        if digests.get(name) != entry.sha256:
            raise WanmaError(
                f"{name} of {folder.name} was damaged on its way to rank {receiver}",
                "check the network between the nodes",
            )
    channel.put(f"{key}/received", b"")
