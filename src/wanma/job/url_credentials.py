"""URLs of storage: credentials belong into the environment, and never into a file or a message of ours."""

from __future__ import annotations

import re

WHERE_CREDENTIALS_GO = (
    "leave credentials to the storage library: its environment variables (AWS_PROFILE, "
    "GOOGLE_APPLICATION_CREDENTIALS ...), its own files, or ~/.config/fsspec"
)

_USER = re.compile(r"(\w://)[^\s/@'\"]*:[^\s/@'\"]*@")
_QUERY = re.compile(r"(\w://[^\s?'\"]*)\?[^\s'\"]*")


def has_credentials(url: str) -> bool:
    """Whether a password or a signature may be part of `url`, which is kept and shown."""
    return without_credentials(url) != url


def without_credentials(text: str) -> str:
    """`text`, such as the message of a storage library, with what is secret in its URLs left out."""
    return _QUERY.sub(r"\1?***", _USER.sub(r"\1***@", text))
