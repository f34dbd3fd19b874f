"""Entry point of the command `wanma`; the only place that turns errors into text and exit codes.

It imports as little as it can before it handles Ctrl-C.
"""

from __future__ import annotations

import codecs
import errno
import gc
import io
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk or quota."""
DENIED_ERRNOS = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Error numbers of a file that this user may not read or write."""
GC_THRESHOLD = 50_000
"""New objects from one garbage collection to the next; Python's 700 make a tenth of all imports' time."""
EXIT_BROKEN_PIPE = 141
"""Exit code: the output was read no further, as in `wanma runs | head -1`; shells report SIGPIPE so."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; print at most one error message."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    has_default_handler = argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if has_default_handler:
        signal.signal(signal.SIGINT, _stop_importing)
    from wanma.elastic.supervisor.stop_signals import StartHandler, StopRequest
    from wanma.job.errors import EXIT_FAILED, EXIT_INTERRUPTED, WanmaError

    try:
        if has_default_handler:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        _print_any_character()
        if argv is None and arguments[:1] in (["train"], ["launch"]):
            StartHandler.install()  # first of all: a batch system may stop a run that has hardly begun
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except WanmaError as error:
        _print_error(error.message, error.hint)
        return error.exit_code
    except BrokenPipeError:
        _discard_output()
        return EXIT_BROKEN_PIPE
    except StopRequest as request:
        _print_error(request.message, request.hint)
        return request.exit_code
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        if isinstance(error, OSError) and (message_and_hint := _system_message(error)):
            _print_error(*message_and_hint)
            return EXIT_FAILED
        import traceback

        traceback.print_exc()
        _print_error(
            f"this is a bug in wanma ({type(error).__name__}), not in your job",
            "please report it with the lines above, the command and the output of `wanma version`",
        )
        return EXIT_FAILED


def _stop_importing(_number: int, _frame: FrameType | None) -> None:
    """End the command as Ctrl-C does later: an exception here would be a traceback of the first imports."""
    os.write(2, b"\nstopped\n")
    os._exit(128 + signal.SIGINT)


def _run(arguments: list[str]) -> int:
    gc.set_threshold(GC_THRESHOLD)
    from wanma.cli.parser import build_parser, parse

    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell requests completions; prints them and exits
        import argcomplete

        argcomplete.autocomplete(parser, always_complete_options=False)
    parsed = parse(parser, arguments)
    return int(parsed.run(parsed))


def _system_message(error: OSError) -> tuple[str, str] | None:
    """Return message and hint for an error that the system's state explains; None: it is a bug."""
    if error.errno in DISK_FULL_ERRNOS:
        target = error.filename or "the output of this command"
        return f"{error.strerror}: {target}", "free some space on its disk"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{error.strerror}: this system's limit is too low", "raise it: ulimit -n 4096"
    if error.errno in DENIED_ERRNOS and error.filename:
        return f"{error.strerror}: {error.filename}", "give this user the right to it, or name another"
    return None


def _print_any_character() -> None:
    """Print '?' for characters such as '→' that the locale of standard output lacks, instead of failing."""
    stream = sys.stdout
    if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
        stream.reconfigure(errors="replace")


def _discard_output() -> None:
    """Discard buffered output that has no reader or no room; Python would fail on it at exit."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


def _print_error(message: str, hint: str) -> None:
    red, plain = ("\x1b[1;31m", "\x1b[0m") if _uses_color() else ("", "")
    try:
        sys.stdout.flush()
    except OSError:
        _discard_output()
    print(f"{red}error:{plain} {message}" + (f"\n  {hint}" if hint else ""), file=sys.stderr)


def _uses_color() -> bool:
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


if __name__ == "__main__":
    sys.exit(main())
