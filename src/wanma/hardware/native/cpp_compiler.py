"""Lookup of the C++ compiler that `torch.compile` needs on a CPU."""

from __future__ import annotations

import os
import shutil

NO_COMPILER_MESSAGE = (
    "parallel.compile is off: on a CPU it needs a C++ compiler, and none was found (apt-get install g++)"
)


def find_cpp_compiler() -> str | None:
    """Return the path of the compiler that torch would find: $CXX, else the usual names; None: none."""
    names = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    return next((path for name in names if name and (path := shutil.which(name))), None)
