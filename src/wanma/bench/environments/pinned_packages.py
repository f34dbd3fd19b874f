"""Pinned packages of a Python environment: versions, and hashes of their files.

    torch==2.13.0
        # sha256:024c6cc0c1b085f2f91f20a3dc27b0471d021c31ce84b81be3afdc39f791fd9d
    triton==3.7.1  # optional

The hashes of pip's own notation, `--hash=sha256:...`, are read as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from wanma.engines.environment.lock_file import canonical
from wanma.job.errors import EXIT_USAGE, WanmaError

OPTIONAL = "optional"
"""Comment of a pin that counts only if a build of another package needs it, such as PyTorch's for GPUs."""
_PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;,*\\]+)((?:\s+--hash=sha256:[0-9a-f]{64})*)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_COMMENTED_HASH = re.compile(r"\s*#\s*sha256:([0-9a-f]{64})\s*")


@dataclass(frozen=True)
class Pin:
    """Version of a package, and what its files are known by."""

    version: str
    hashes: tuple[str, ...] = ()
    """SHA-256 of each file of the version, in hexadecimal; empty: unknown."""
    is_optional: bool = False

    def requirement(self, name: str) -> str:
        """Return the line of pip for a package of this name."""
        return " ".join([f"{name}=={self.version}", *(f"--hash=sha256:{value}" for value in self.hashes)])


def read_pins(requirements: Path) -> dict[str, Pin]:
    """Return the pins of a file of requirements, by canonical name of the package.

    Raises:
        WanmaError: the file cannot be read, or a line is no `name==version`.
    """
    try:
        lines = requirements.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise WanmaError(
            f"{requirements} cannot be read: {error.strerror}",
            "write the pins of the environment there, as `name==version`, or correct python_environment",
            EXIT_USAGE,
        ) from error
    pins: dict[str, Pin] = {}
    name, start, joined = "", 0, ""
    for number, line in enumerate(lines, 1):
        if name and (match := _COMMENTED_HASH.fullmatch(line)):
            pins[name] = replace(pins[name], hashes=(*pins[name].hashes, match[1]))
            continue
        text, _, comment = line.partition("#")
        start = start if joined else number
        joined += text.strip()
        if joined.endswith("\\"):
            joined = joined[:-1] + " "
            continue
        text, joined = joined.strip(), ""
        if not text:
            continue
        if (match := _PIN.fullmatch(text)) is None:
            raise WanmaError(
                f"{requirements}:{start}: '{text}' pins no version",
                "write name==version; `pip freeze` does",
                EXIT_USAGE,
            )
        name = canonical(match[1])
        pins[name] = Pin(match[2], tuple(_HASH.findall(match[3])), comment.strip() == OPTIONAL)
    return pins


def required_versions(pins: Mapping[str, Pin]) -> dict[str, str]:
    """Return the versions that an environment must have, by canonical name."""
    return {name: pin.version for name, pin in pins.items() if not pin.is_optional}
