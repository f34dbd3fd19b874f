"""Requirements of pip from a `pylock.toml` (PEP 751), which older versions of pip do not read."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

from wanma.job.errors import JobError

_PUBLIC_INDEX = "https://pypi.org/simple"


def pylock_requirements(text: str, title: str) -> str:
    """Return requirements with hashes; of an index that is not PyPI, its URL.

    Args:
        text: content of the file.
        title: its path, for messages.

    Raises:
        JobError: it is no such file, or has a package without a version or hash.
    """
    try:
        content = tomllib.loads(text)
        packages = content["packages"]
        lines, indexes = [], set()
        for package in packages:
            lines.append(_requirement(package, title))
            indexes.add(str(package.get("index", _PUBLIC_INDEX)).rstrip("/"))
    except (tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError) as error:
        raise JobError(
            f"cluster.environment = '{title}' is no lock file of PEP 751: {error}",
            "write it anew, e.g. with `uv export --format pylock.toml`",
        ) from error
    options = [f"--extra-index-url {url}" for url in sorted(indexes - {_PUBLIC_INDEX})]
    return "\n".join([*options, *lines]) + "\n"


def _requirement(package: Mapping[str, Any], title: str) -> str:
    name, marker = package["name"], package.get("marker", "")
    if "extras" in marker or "dependency_groups" in marker:
        raise JobError(
            f"cluster.environment = '{title}': {name} is in an extra or a group, which are chosen on export",
            "write the file with those that the run needs, e.g. `uv export --extra gpu --format pylock.toml`",
        )
    ending = f" ; {marker}" if marker else ""
    if (archive := package.get("archive")) is not None and "url" in archive:
        hashes = [archive["hashes"]["sha256"]]
        requirement = f"{name} @ {archive['url']}"
    else:
        files = [*package.get("wheels", ()), *([package["sdist"]] if "sdist" in package else ())]
        hashes = sorted({file["hashes"]["sha256"] for file in files})
        if "version" not in package or not hashes:
            raise JobError(
                f"cluster.environment = '{title}': {name} has no version with hashes",
                "build a wheel of it, and lock that; wanma sends the code of the working directory itself",
            )
        requirement = f"{name}=={package['version']}"
    return " \\\n    ".join([requirement + ending, *(f"--hash=sha256:{value}" for value in hashes)])
