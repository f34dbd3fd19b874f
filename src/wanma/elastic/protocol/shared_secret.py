"""Shared secret of a run: from the environment, or from a private file within one node."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from wanma.job.errors import EXIT_USAGE, WanmaError

SECRET_VARIABLE = "WANMA_SECRET"
_MIN_CHARACTERS = 16


def load_rendezvous_secret(is_loopback: bool, environment: Mapping[str, str]) -> bytes:
    """Return the secret by which the supervisors of a run authenticate.

    Args:
        is_loopback: True if the rendezvous is reachable from this node only. Without `WANMA_SECRET`, a file
            that only this user can read then serves: it is made at first use and kept.
        environment: environment variables of the supervisor.

    Raises:
        WanmaError: there is no secret, it is too short, or the file is accessible to other users.
    """
    secret = environment.get(SECRET_VARIABLE, "")
    if secret:
        if len(secret) < _MIN_CHARACTERS:
            raise WanmaError(
                f"{SECRET_VARIABLE} is shorter than {_MIN_CHARACTERS} characters, so it could be guessed",
                f"generate one with `openssl rand -hex 16` and export it as {SECRET_VARIABLE} on every node",
                EXIT_USAGE,
            )
        return secret.encode(errors="surrogateescape")
    if not is_loopback:
        raise WanmaError(
            f"{SECRET_VARIABLE} is not set: nodes need a shared secret to connect over a network",
            f"generate one with `openssl rand -hex 16` and export it as {SECRET_VARIABLE} on every node",
            EXIT_USAGE,
        )
    state = environment.get("XDG_STATE_HOME")
    folder = Path(state) if state else Path(environment.get("HOME", "/")) / ".local" / "state"
    return _private_file(folder / "wanma" / "secret")


def _private_file(path: Path) -> bytes:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            fresh = path.with_name(f".secret.{os.getpid()}")
            descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.write(descriptor, secrets.token_hex(32).encode())
            os.close(descriptor)
            with contextlib.suppress(FileExistsError):  # the first of several supervisors wins
                os.link(fresh, path)
            fresh.unlink()
        status = path.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise WanmaError(
                f"the shared secret in {path} is accessible to other users",
                f"delete that file, or export {SECRET_VARIABLE} (`openssl rand -hex 16`) for every "
                "supervisor",
            )
        return path.read_bytes()
    except OSError as error:
        raise WanmaError(
            f"cannot store the shared secret in {path}: {error.strerror or error}",
            f"export {SECRET_VARIABLE} (`openssl rand -hex 16`) for every supervisor",
        ) from error
