"""Failures of ssh and of a host's interpreter, recognised from their own output, each as one error."""

from __future__ import annotations

import re

from wanma.engines.hosts.connections import Host, HostError

SSH_FAILED = 255
"""Exit code of ssh for its own failures; any other one is the remote command's."""
_NOT_FOUND = (126, 127)
"""Exit codes of a shell that cannot start a command."""


_FAILURES: tuple[tuple[str, str, str], ...] = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|host key for .* has changed",
        "its host key has changed: it was installed anew, or another machine answers in its place",
        "if the change is expected: `ssh-keygen -R {name}`, then `ssh {text}` and compare the new key",
    ),
    (
        r"Host key verification failed|No .* host key is known for",
        "its host key is unknown here",
        "`ssh {text}` once, compare the key that it shows, and accept it",
    ),
    (
        r"Too many authentication failures",
        "it refused the keys: too many were offered",
        "name the right one in ~/.ssh/config: IdentityFile and IdentitiesOnly yes",
    ),
    (
        r"Permission denied \(",
        "it refused the login",
        "`ssh-copy-id {text}`, or load the key with `ssh-add`: wanma never asks for a password",
    ),
    (
        r"Could not resolve hostname",
        "its name is not known here",
        "correct cluster.ssh.hosts, or ~/.ssh/config",
    ),
    (
        r"Connection refused",
        "nothing listens there: connection refused",
        "check the port, and that sshd runs on the host",
    ),
    (
        r"timed out|No route to host|Network is unreachable|Operation timed out",
        "it cannot be reached: {cause}",
        "check that the host is up, and the network and firewall on the way to it",
    ),
    (
        r"Bad configuration option|command-line.*[Bb]ad|unknown option|illegal option",
        "ssh refuses its options: {cause}",
        "correct cluster.ssh.options, or ~/.ssh/config",
    ),
    (
        r"Connection closed|Connection reset|kex_exchange_identification|closed by remote host|Broken pipe",
        "it ended the connection: {cause}",
        "see the log of sshd on the host; MaxStartups limits the logins at the same time",
    ),
)


def explain_exit(host: Host, code: int, errors: str, python: str) -> HostError:
    """Return the error of a call of ssh that ended with a code other than 0.

    Args:
        host: the host.
        code: exit code.
        errors: standard error.
        python: interpreter on the host.
    """
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    if code == SSH_FAILED:
        for pattern, meaning, way_out in _FAILURES:
            match = re.search(pattern, errors)
            if match is not None:
                cause = next((line for line in lines if match[0] in line), match[0])
                values = {"text": host.text, "name": host.name, "cause": cause}
                return HostError(host, f"{host.text}: {meaning.format(**values)}", way_out.format(**values))
        cause = lines[-1] if lines else "ssh gave no reason"
        return HostError(host, f"{host.text}: {cause}", f"try `ssh {host.text} true`")
    if code in _NOT_FOUND:
        return HostError(
            host,
            f"{host.text}: the interpreter {python} cannot be started: {lines[-1] if lines else 'not found'}",
            "set cluster.ssh.python to the interpreter with wanma, e.g. '/opt/wanma/bin/python'",
        )
    return HostError(
        host,
        f"{host.text}: {python} ended with exit code {code}: {' '.join(lines[-3:]) or 'it gave no reason'}",
        "set cluster.ssh.python to an interpreter of Python 3.11 or newer",
    )


def explain_problem(host: Host, problem: str, text: str) -> HostError:
    """Return the error of a program of ours on the host that could not do its work."""
    if problem == "full":
        return HostError(
            host,
            f"{host.text}: the disk is full: {text}",
            "free space there, or choose another folder with cluster.ssh.folder",
        )
    if problem == "unwritable":
        return HostError(
            host,
            f"{host.text}: cannot write {text}",
            "make the folder writable, or choose another with cluster.ssh.folder",
        )
    if problem == "origin":
        return HostError(
            host,
            f"{host.text}: the run directory there belongs to another run, {text}",
            "choose another observe.name or cluster.ssh.folder, or remove that directory",
        )
    if problem == "active":
        return HostError(
            host,
            f"{host.text}: the run is running there already",
            "`wanma attach` shows it, `wanma cancel` stops it",
        )
    return HostError(host, f"{host.text}: {text}", "see the message of the host")
