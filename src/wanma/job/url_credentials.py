"""Detection and redaction of credentials in storage URLs, which belong into the environment."""

from __future__ import annotations

import re

CREDENTIALS_HINT = (
    "give credentials to the storage library: by its environment variables (AWS_PROFILE, "
    "GOOGLE_APPLICATION_CREDENTIALS ...), its own files, or ~/.config/fsspec"
)

_USER = re.compile(r"(\w://)[^\s/@'\"]*:[^\s/@'\"]*@")
_QUERY = re.compile(r"(\w://[^\s?'\"]*)\?[^\s'\"]*")
_SECRET_PARAMETER = re.compile(
    r"\w://[^\s?]*\?(?:[^\s]*&)?[^\s=&]*(?:token|key|sig|secret|password|credential)[^\s=&]*=", re.IGNORECASE
)


def has_credentials(url: str) -> bool:
    """Return True if `url`, which is stored and displayed, may hold a password or a signature."""
    return redact_credentials(url) != url


def has_secret(url: str) -> bool:
    """Return True if `url`, whose path may be a glob or have a query, holds a password, key or signature."""
    return bool(_USER.search(url) or _SECRET_PARAMETER.search(url))


def redact_credentials(text: str) -> str:
    """Return `text`, such as the message of a storage library, with the secrets in its URLs redacted."""
    return _QUERY.sub(r"\1?***", _USER.sub(r"\1***@", text))
