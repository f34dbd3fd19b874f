"""Signal dispositions of a rank's process, and its first steps.

A rank of wanma's own ignores requests to end: batch systems send SIGTERM to every process of a job, a
terminal its Ctrl-C, and the supervisor decides what follows. A user's script outside of a session reacts to
them as any Python program does.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from wanma.job.run.child_process import kill_on_parent_exit


def configure_child_process(parent: int) -> None:
    """Set up a process that the fork server has started.

    It ends with its parent, has its own session, and ignores Ctrl-C and SIGTERM.
    """
    kill_on_parent_exit(parent)
    os.setsid()
    ignore_stop_signals()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.register_at_fork(after_in_child=_restore_sigterm_in_child)


def ignore_stop_signals() -> None:
    """Ignore Ctrl-C and SIGTERM.

    SIGTERM by a handler, since an ignored signal would be ignored by every child of this process, too.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _ignore_signal)
    signal.siginterrupt(signal.SIGTERM, False)  # system calls of native code are not interrupted


def restore_stop_signals() -> None:
    """Restore Python's dispositions: Ctrl-C raises KeyboardInterrupt, SIGTERM ends the process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def stop_signals_ignored() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM inside the context; a script's own handlers stay."""
    if threading.current_thread() is not threading.main_thread() or not _has_default_handlers():
        yield
        return
    ignore_stop_signals()
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is _ignore_signal:
            restore_stop_signals()


def _has_default_handlers() -> bool:
    defaults = (signal.default_int_handler, signal.SIG_DFL)
    return tuple(map(signal.getsignal, (signal.SIGINT, signal.SIGTERM))) == defaults


def _restore_sigterm_in_child() -> None:
    """Let a forked child end by SIGTERM, unless the script says otherwise."""
    if signal.getsignal(signal.SIGTERM) is _ignore_signal:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _ignore_signal(_number: int, _frame: FrameType | None) -> None:
    pass
