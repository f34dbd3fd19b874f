"""Environments on hosts: made once on each, from the archive that is sent to those which lack it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from wanma.engines.environment import install
from wanma.engines.environment.archive import EnvironmentArchive
from wanma.engines.environment.progress import InstallProgress
from wanma.engines.environment.shared_folder import FOLDER
from wanma.engines.hosts.connections import AT_ONCE, Host, HostError
from wanma.engines.ssh.connection import HeldCall, SshConnections

SILENCE_SECONDS = 120.0
"""Deadline of each sign of life of an installation, in seconds."""


def install_environments(
    connections: SshConnections, hosts: Sequence[Host], archive: EnvironmentArchive, folder: str
) -> tuple[dict[Host, str], list[HostError]]:
    """Return the interpreter of the environment on each host, made unless it exists, and the failures.

    Args:
        connections: connections to the hosts.
        hosts: the hosts.
        archive: the environment.
        folder: `cluster.ssh.folder`.
    """
    progress = InstallProgress(archive, [host.text for host in hosts])
    request = {
        "folder": f"{folder.rstrip('/')}/{FOLDER}",
        "digest": archive.digest,
        "bytes": len(archive.data),
        "values": archive.values(os.environ),
    }
    pythons: dict[Host, str] = {}
    failures: list[HostError] = []
    calls: list[HeldCall] = []
    with ThreadPoolExecutor(min(AT_ONCE, max(len(hosts), 1))) as pool:
        running = {
            host: pool.submit(_install, connections, host, request, archive, progress, calls)
            for host in hosts
        }
        try:
            for host, future in running.items():
                try:
                    pythons[host] = future.result()
                except HostError as error:
                    failures.append(error)
        except BaseException:  # Ctrl-C: what goes on would be waited for
            pool.shutdown(wait=False, cancel_futures=True)
            for call in calls:
                call.kill()
            raise
    return pythons, failures


def _install(
    connections: SshConnections,
    host: Host,
    request: Mapping[str, Any],
    archive: EnvironmentArchive,
    progress: InstallProgress,
    calls: list[HeldCall],
) -> str:
    call = connections.hold(host, install, request)
    calls.append(call)
    try:
        answer: dict[str, Any] = call.first
        if "needs_archive" in answer:
            progress.start(host.text)
            call.send(archive.data)
            answer = call.read(SILENCE_SECONDS)
        while "progress" in answer:
            progress.update(host.text, answer["progress"])
            answer = call.read(SILENCE_SECONDS)
    finally:
        call.close()
        call.wait(5)
        call.kill()
    if "problem" in answer:
        raise HostError(host, f"{host.text}: {answer['text']}", answer["hint"])
    progress.end(host.text, is_new=answer["is_new"])
    return str(answer["python"])
