"""Location of the user's own code in a traceback."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

_PACKAGE_FOLDER = Path(__file__).parents[1]
_SITE_FOLDERS = ("site-packages", "dist-packages")


def user_frame_text(error: BaseException, *, allow_library: bool = True) -> str:
    """Return 'FILE:LINE in FUNCTION: SOURCE' of the innermost frame outside wanma and libraries.

    If every frame is a library's (a factory may be an installed package's), it is the outermost of those: the
    called function; not so without `allow_library`. Empty if there is no such Python frame.
    """
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if not _is_wanma_file(frame.filename)
    ]
    user_frames = [frame for frame in frames if not _is_library(frame.filename)]
    if not frames or not (user_frames or allow_library):
        return ""
    frame = user_frames[-1] if user_frames else frames[0]
    source = f": {frame.line}" if frame.line else ""
    return f"{frame.filename}:{frame.lineno} in {frame.name}{source}"


def _is_wanma_file(file: str) -> bool:
    return Path(file).is_relative_to(_PACKAGE_FOLDER)


def _is_library(file: str) -> bool:
    """Return True for Python's own files, those of installed packages, and code without a file.

    The last kind has names such as '<frozen importlib>'.
    """
    path = Path(file)
    is_installed = any(name in path.parts for name in _SITE_FOLDERS)
    return is_installed or file.startswith("<") or path.is_relative_to(sysconfig.get_path("stdlib"))


def calling_frame_text() -> str:
    """Return 'FILE:LINE in FUNCTION: SOURCE' of the innermost stack frame outside wanma and libraries.

    Empty if there is none.
    """
    frames = [frame for frame in traceback.extract_stack() if not _is_wanma_file(frame.filename)]
    user_frames = [frame for frame in frames if not _is_library(frame.filename)]
    if not user_frames:
        return ""
    source = f": {user_frames[-1].line}" if user_frames[-1].line else ""
    return f"{user_frames[-1].filename}:{user_frames[-1].lineno} in {user_frames[-1].name}{source}"
