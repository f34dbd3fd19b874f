"""Import of user objects that a job names by import path: model factories, data factories, losses."""

from __future__ import annotations

import importlib
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wanma.job.errors import JobError, did_you_mean

CODE_FOLDER_VARIABLE = "WANMA_CODE_FOLDER"
"""Environment variable of the folder of a code snapshot, in which a submitted run finds the user's code."""


def code_folder() -> Path:
    """Return the folder of the user's code: that of the run's code snapshot, or the working directory."""
    return Path(os.environ.get(CODE_FOLDER_VARIABLE) or Path.cwd())


def import_object(path: str, key: str) -> Any:
    """Return the object named by `path`, such as 'package.module:function' or 'package.module:Class.method'.

    The code folder is searched first: the working directory, as with `python -m`, or that of a code snapshot.

    Args:
        path: import path from the job.
        key: job key that holds it, such as "model.factory"; only for messages.

    Raises:
        JobError: the path is malformed, the module or the attribute is missing, or the module fails
            while it is imported.
    """
    module_name, colon, attributes = path.partition(":")
    if not colon or not module_name or not attributes:
        raise JobError(f"{key} = '{path}' is not an import path", "write it as 'package.module:function'")
    with _code_folder_first():
        target: Any = _import_module(module_name, path, key)
    parent_path = module_name
    for attribute in attributes.split("."):
        if not hasattr(target, attribute):
            public_names = [name for name in dir(target) if not name.startswith("_")]
            raise JobError(
                f"{key} = '{path}': {parent_path} has no "
                f"'{attribute}'.{did_you_mean(attribute, public_names)}",
                f"correct the name, or add it to {getattr(target, '__file__', None) or parent_path}",
            )
        target = getattr(target, attribute)
        parent_path = f"{parent_path}.{attribute}"
    return target


def _import_module(name: str, path: str, key: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name == missing or name.startswith(f"{missing}."):
            raise JobError(
                f"{key} = '{path}': module '{missing}' does not exist",
                f"start wanma in its folder, or install it (searched: {code_folder()} and Python's path)",
            ) from error
        raise JobError(
            f"{key} = '{path}': importing {name} failed because it needs '{missing}', which is not installed "
            f"for {sys.executable} on {socket.gethostname()}",
            f"install the package of '{missing}' there, or add it to the lock file of cluster.environment",
        ) from error
    except Exception as error:
        raise JobError(
            f"{key} = '{path}': importing {name} failed: {type(error).__name__}: {error}",
            f"see the full traceback: python -c 'import {name}'",
        ) from error


@contextmanager
def _code_folder_first() -> Iterator[None]:
    """Search the code folder first during one import and last afterwards.

    It stays last in the path, so that the imported code can import its siblings later; it does not stay
    first, so that a user's `profile.py` never replaces the standard library's for other imports.
    """
    directory = str(code_folder())
    was_on_path = directory in sys.path
    sys.path.insert(0, directory)
    # A file written after this process first listed its folder would otherwise not be seen.
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(directory)
        if not was_on_path:
            sys.path.append(directory)
