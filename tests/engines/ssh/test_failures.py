"""Output of ssh and of hosts, recognised."""

from __future__ import annotations

import pytest

from wanma.engines.hosts.connections import HostError, join_errors
from wanma.engines.ssh.failures import explain_exit, explain_problem
from wanma.engines.ssh.hosts import parse_host

HOST = parse_host("me@gpu1:2222", "here")


@pytest.mark.parametrize(
    ("output", "message", "way_out"),
    [
        ("me@gpu1: Permission denied (publickey,password).", "refused the login", "ssh-copy-id me@gpu1:2222"),
        (
            "Received disconnect from 10.0.0.1: Too many authentication failures",
            "too many were offered",
            "IdentitiesOnly",
        ),
        ("Host key verification failed.", "its host key is unknown here", "`ssh me@gpu1:2222` once"),
        (
            "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
            "its host key has changed",
            "ssh-keygen -R gpu1",
        ),
        (
            "ssh: connect to host gpu1 port 2222: Connection refused",
            "connection refused",
            "sshd runs",
        ),
        (
            "ssh: connect to host gpu1 port 2222: Connection timed out",
            "it cannot be reached: ssh: connect to host gpu1 port 2222: Connection timed out",
            "firewall",
        ),
        ("ssh: connect to host gpu1 port 22: No route to host", "cannot be reached", "the host is up"),
        (
            "ssh: Could not resolve hostname gpu1: Name or service not known",
            "name is not known",
            "cluster.ssh.hosts",
        ),
        ("command-line: line 0: Bad configuration option: colour", "refuses its options", "ssh.options"),
        (
            "kex_exchange_identification: Connection closed by remote host",
            "ended the connection",
            "MaxStartups",
        ),
        ("something new", "something new", "try `ssh me@gpu1:2222 true`"),
    ],
)
def test_failure_of_ssh(output: str, message: str, way_out: str) -> None:
    error = explain_exit(HOST, 255, f"Warning: banner\n{output}\n", "python3")
    assert error.message.startswith("me@gpu1:2222: ")
    assert message in error.message
    assert way_out in error.hint


def test_missing_interpreter_and_one_that_fails() -> None:
    error = explain_exit(HOST, 127, "bash: line 1: python9: command not found", "python9")
    assert error.message == (
        "me@gpu1:2222: the interpreter python9 cannot be started: bash: line 1: python9: command not found"
    )
    assert "exit code 1: SyntaxError" in explain_exit(HOST, 1, "SyntaxError", "python2").message


def test_problems_of_the_host_itself() -> None:
    assert "the disk is full: /data" in explain_problem(HOST, "full", "/data").message
    assert "cluster.ssh.folder" in explain_problem(HOST, "unwritable", "/data: Permission denied").hint
    assert "belongs to another run, /a/runs/gpt on laptop" in (
        explain_problem(HOST, "origin", "/a/runs/gpt on laptop").message
    )


def test_several_hosts_make_one_message_with_each_way_out_once() -> None:
    error = join_errors(
        [HostError(HOST, "gpu1: down", "look"), HostError(HOST, "gpu2: down", "look")],
        "2 hosts do not answer:",
    )
    assert str(error) == "2 hosts do not answer:\n  gpu1: down\n  gpu2: down\n  look"
