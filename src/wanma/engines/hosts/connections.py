"""Programs that run where the files of a run are: a host reached by ssh, or a pod.

Standard input carries the program and the caller's values, so that no command line is built from them.
"""

from __future__ import annotations

import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from wanma.engines.engine import QUERY_SECONDS
from wanma.job.errors import WanmaError

AT_ONCE = 64
"""Most hosts that are asked at the same time."""
REPLY_MARK = b"\nWANMA-REPLY "
"""Text before the answer of a program: a line of JSON, after which its bytes follow."""
BOOTSTRAP = (
    "import sys,json;sys.path[:]=[p for p in sys.path if p];i=sys.stdin.buffer\n"
    "h=json.loads(i.readline().decode())\n"
    'r=lambda v:(sys.stdout.write("\\nWANMA-REPLY "+json.dumps(v)+"\\n"),sys.stdout.flush())\n'
    'n={"__name__":"host"};exec(compile(i.read(h["program"]).decode(),"<wanma>","exec"),n)\n'
    'sys.exit(n["main"](h["request"],r))\n'
)
"""Program that runs the one on standard input, for `python -c`."""


@dataclass(frozen=True)
class Host:
    """Host as the user names it."""

    text: str
    """Host as the user wrote it, for messages, e.g. 'me@gpu1:2222'."""
    destination: str
    """Destination of ssh without the port, e.g. 'me@gpu1'."""
    port: int | None = None
    """Port; None: that of ssh_config."""

    @property
    def name(self) -> str:
        """Name or address without user and port."""
        return self.destination.rpartition("@")[2]


class HostError(WanmaError):
    """Failure to ask a host.

    Args:
        host: the host.
        message: the failure.
        hint: the way out.
    """

    def __init__(self, host: Host, message: str, hint: str) -> None:
        super().__init__(message, hint)
        self.host = host

    def __reduce__(self) -> tuple[type[HostError], tuple[Host, str, str]]:
        return type(self), (self.host, self.message, self.hint)


@dataclass(frozen=True)
class Reply:
    """Answer of a host."""

    value: Any
    data: bytes = b""
    """Bytes after the JSON value."""


class Connections(ABC):
    """Connections over which programs of this package run on hosts."""

    @abstractmethod
    def ask(
        self,
        host: Host,
        program: ModuleType,
        request: Mapping[str, Any],
        data: bytes | Path = b"",
        seconds: float = QUERY_SECONDS,
    ) -> Reply:
        """Run a program and return its answer. Raises `HostError`."""

    def ask_all(
        self, questions: Mapping[Host, Callable[[], Reply]]
    ) -> tuple[dict[Host, Reply], list[HostError]]:
        """Ask all hosts at the same time; return the answers, and the failures in the order of the hosts."""
        answers: dict[Host, Reply] = {}
        failures: list[HostError] = []
        if not questions:
            return answers, failures
        with ThreadPoolExecutor(min(AT_ONCE, len(questions))) as pool:
            running = {host: pool.submit(question) for host, question in questions.items()}
            for host, future in running.items():
                try:
                    answers[host] = future.result()
                except HostError as error:
                    failures.append(error)
        return answers, failures

    def ask_each(
        self, program: ModuleType, requests: Mapping[Host, Mapping[str, Any]]
    ) -> tuple[dict[Host, Reply], list[HostError]]:
        """Ask each host its own question to a program, as `ask_all`."""
        return self.ask_all(
            {host: partial(self.ask, host, program, request) for host, request in requests.items()}
        )


def make_message(program: ModuleType, request: Mapping[str, Any]) -> bytes:
    """Return the standard input of `BOOTSTRAP`: a program of this package and its request."""
    source = inspect.getsource(program).encode()
    return json.dumps({"program": len(source), "request": request}).encode() + b"\n" + source


def read_reply(output: bytes) -> Reply | None:
    """Return the answer in the standard output of a program; None: it gave none."""
    _, mark, after = output.partition(REPLY_MARK)
    line, _, rest = after.partition(b"\n")
    return Reply(json.loads(line), rest) if mark else None


def join_errors(errors: list[HostError], title: str) -> WanmaError:
    """Return one error for several hosts, with each way out once."""
    if len(errors) == 1:
        return WanmaError(errors[0].message, errors[0].hint)
    hints = list(dict.fromkeys(error.hint for error in errors if error.hint))
    return WanmaError("\n  ".join([title, *(error.message for error in errors)]), "; ".join(hints))
