"""Program that runs a script as `__main__` in any Python, and ends at once if the script fails.

    python script_main.py SCRIPT [ARGUMENT...]
    python script_main.py -m MODULE [ARGUMENT...]

It imports the standard library alone: the interpreter may be that of an environment without wanma, and
older than wanma's. A failed process skips the functions of `atexit`. JAX's waits 5 minutes there for the
other processes, and then aborts with a stack of its own, far from the error.
"""

from __future__ import annotations

import builtins
import os
import runpy
import sys
from types import ModuleType, TracebackType


def main() -> None:
    """Run the script that the command line names, and end the process if it fails."""
    is_module = sys.argv[1] == "-m"
    script, *arguments = sys.argv[2 if is_module else 1 :]
    sys.argv = [script, *arguments]
    own_folder = os.path.dirname(os.path.realpath(__file__))
    if sys.path and os.path.realpath(sys.path[0]) == own_folder:  # PYTHONSAFEPATH leaves it out
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(script))
    try:
        run_as_main(script, is_module)
    except SystemExit as leaving:
        if leaving.code in (None, 0):
            raise
        if not isinstance(leaving.code, int):
            print(leaving.code, file=sys.stderr)
        _end_process(leaving.code & 0xFF if isinstance(leaving.code, int) else 1)
    except BaseException as error:
        error = error.with_traceback(_user_traceback(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)
        _end_process(1)


def run_as_main(script: str, is_module: bool) -> None:
    """Execute a file or a module as `__main__`, with the arguments and the path that `sys` has."""
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    # Unlike runpy's, this module stays in sys.modules, for threads that outlive the script's last line.
    main = ModuleType("__main__")
    main.__dict__.update(__file__=script, __builtins__=builtins)
    sys.modules["__main__"] = main
    with open(script, "rb") as file:
        source = file.read()
    exec(compile(source, script, "exec"), main.__dict__)


def _user_traceback(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the leading frames of this file and of runpy."""
    own_files = (__file__, "<frozen runpy>", runpy.__file__)
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in own_files:
        trace = trace.tb_next
    return trace


def _end_process(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
