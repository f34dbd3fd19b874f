"""File names that suggest credentials."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

SECRET_PATTERNS = (".env*", "*.pem", "id_rsa*", "*credentials*", "*secret*")
"""Patterns, in lower case, of files and folders that probably hold credentials."""


def is_secret_name(path: str) -> bool:
    """Return True if a part of `path`, in either case, matches one of `SECRET_PATTERNS`."""
    return any(fnmatchcase(part, pattern) for part in path.lower().split("/") for pattern in SECRET_PATTERNS)


def secret_names(paths: Iterable[str]) -> list[str]:
    """Return the paths that look like credentials, sorted."""
    return sorted(path for path in paths if is_secret_name(path))


def git_exclusions() -> list[str]:
    """Return pathspecs of git that leave out what `is_secret_name` finds."""
    return [
        f":(top,exclude,icase,glob)**/{pattern}{below}"
        for pattern in SECRET_PATTERNS
        for below in ("", "/**")
    ]
