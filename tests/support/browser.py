"""Chromium, driven through the two pipes of its DevTools protocol: it loads pages and runs scripts."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.waiting import wait_until

PROGRAM = shutil.which("chromium")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


class Tab:
    """Tab of a browser.

    Attributes:
        errors: exceptions and messages of the console, of all pages so far.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = os.fdopen(commands, "wb", buffering=0)
        self._answers = os.fdopen(answers, "rb", buffering=0)
        self._numbers, self._rest, self._session = itertools.count(1), b"", ""
        self.errors: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; return its result."""
        number = next(self._numbers)
        command = {"id": number, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        self._commands.write(json.dumps(command).encode() + b"\0")
        while (message := self._receive()).get("id") != number:
            if message["method"] in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
                self.errors.append(json.dumps(message["params"]))
        assert "error" not in message, message
        result: dict[str, Any] = message["result"]
        return result

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = self._answers.read(1 << 16)
            assert part, "the browser has ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        parsed: dict[str, Any] = json.loads(message)
        return parsed

    def open(self, url: str, width: int = 1240, scheme: str = "light") -> None:
        """Load a page in a window of a width, in light or dark."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.send("Emulation.setEmulatedMedia", features=[feature])
        self.send("Page.navigate", url=url)
        wait_until(lambda: self.evaluate("document.readyState") == "complete", url, 30)

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 30) -> None:
        """Wait until an expression holds."""
        wait_until(lambda: self.evaluate(expression), expression, seconds)


@contextmanager
def opened_browser(profile: Path) -> Iterator[Tab]:
    """Start Chromium with a profile of its own; yields a tab."""
    assert PROGRAM is not None
    (command_out, command_in), (answer_out, answer_in) = os.pipe(), os.pipe()
    # The protocol wants the descriptors 3 and 4.
    shell = f'exec 3<&{command_out} 4>&{answer_in} && exec "$@"'
    process = subprocess.Popen(
        [
            "bash",
            "-c",
            shell,
            "bash",
            PROGRAM,
            *FLAGS,
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
        ],
        pass_fds=(command_out, answer_in),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(command_out)
    os.close(answer_in)
    try:
        yield Tab(command_in, answer_out)
    finally:
        process.terminate()
        process.wait()
