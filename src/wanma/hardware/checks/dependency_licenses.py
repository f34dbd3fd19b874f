"""Licenses of wanma's dependencies, direct and indirect, as the installed packages declare them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution


@dataclass(frozen=True)
class DependencyLicense:
    """License of one installed package."""

    package: str
    version: str
    license: str
    """SPDX expression, or the package's own words."""


def list_dependency_licenses(root: str = "wanma") -> list[DependencyLicense]:
    """List `root` and the installed packages that it needs, with all its extras, sorted by name.

    Extras of other packages are left out, because no requirement of wanma asks for one.
    """
    found: dict[str, DependencyLicense] = {}
    queue = [root]
    while queue:
        name = queue.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in found:
            continue
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue  # an extra that is not installed, or a requirement of another platform
        found[key] = DependencyLicense(key, package.version, license_of(package))
        queue += _required_names(package.requires or (), with_extras=key == root)
    return [found[key] for key in sorted(found)]


def license_of(package: Distribution) -> str:
    """Return a package's license: its SPDX expression, else its classifiers, else its first line of text."""
    expressions, classifiers, texts = (
        package.metadata.get_all(field) or () for field in ("License-Expression", "Classifier", "License")
    )
    if expressions:
        return str(expressions[0])
    named = [
        line.rpartition(" :: ")[2]
        for line in classifiers
        if line.startswith("License :: ") and "DFSG" not in line
    ]
    lines = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
    return ", ".join(named) or (lines[0] if lines else _title_of_license_file(package))


def _title_of_license_file(package: Distribution) -> str:
    file = next((file for file in package.files or () if file.name.upper().startswith("LICEN")), None)
    if file is None:
        return "not declared"
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    return f"not declared; its {file.name} begins: {' '.join(lines[0].split())}" if lines else "not declared"


def _required_names(requirements: Sequence[str], *, with_extras: bool) -> Iterator[str]:
    for requirement in requirements:
        specifier, _, marker = requirement.partition(";")
        match = re.match(r"[A-Za-z0-9._-]+", specifier)
        if match is not None and (with_extras or re.search(r"\bextra\b", marker) is None):
            yield match[0]
