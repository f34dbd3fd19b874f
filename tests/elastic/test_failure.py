from __future__ import annotations

import signal

import pytest

from wanma.elastic.failure import (
    REDUCE_MEMORY_HINT,
    failure_from_exception,
    failure_from_exit_code,
    format_sigkill_hint,
    is_secondary_error,
    truncate_middle,
)
from wanma.job.errors import AllRanksError, WanmaError


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_the_text_says_who_why_where_and_what_to_do() -> None:
    failure = failure_from_exception(raised(KeyError("prize")), 3, 1, "host", "run/logs/rank-3.log")
    lines = failure.text().splitlines()
    assert lines[0] == "rank 3 (node 1, host) failed: KeyError: 'prize'"
    assert lines[2] == "Traceback (most recent call last):"
    assert lines[-1] == "  log: run/logs/rank-3.log"
    assert failure.exit_code == 1


def test_a_wrong_job_is_told_without_the_rank_that_happened_to_say_so_first() -> None:
    failure = failure_from_exception(
        raised(WanmaError("no data", "give some", exit_code=2)), 3, 0, "host", "log"
    )
    assert failure.text() == "no data\n  give some"


def test_a_wanma_error_keeps_its_hint_and_exit_code() -> None:
    error = WanmaError("no data", "give some", exit_code=2)
    failure = failure_from_exception(raised(error), 0, 0, "host", "log")
    assert (failure.cause, failure.hint, failure.exit_code, failure.traceback) == (
        "no data",
        "give some",
        2,
        "",
    )


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionResetError("Connection reset by peer"), True),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1"), True),
        (RuntimeError("Timed out waiting 1800000ms for recv operation to complete"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("connection closed by peer"), False),
    ],
)
def test_what_a_collective_raises_when_a_peer_died_is_a_consequence(error: Exception, expected: bool) -> None:
    assert is_secondary_error(error) is expected


def test_an_error_raised_from_a_consequence_is_one_too() -> None:
    error = WanmaError("rank 1 lost its peers")
    assert not is_secondary_error(error)
    error.__cause__ = BrokenPipeError("Broken pipe")
    assert is_secondary_error(error)


@pytest.mark.parametrize(
    ("code", "cause", "hint"),
    [
        (-signal.SIGKILL, "its process was killed by SIGKILL", "somebody did it"),
        (-signal.SIGSEGV, "its process was killed by SIGSEGV", "native code crashed"),
        (-signal.SIGHUP, "its process was killed by SIGHUP", ""),
        (-40, "its process was killed by signal 40", ""),
        (7, "its process exited with code 7 before its work was finished", ""),
    ],
)
def test_a_silent_end_is_named(code: int, cause: str, hint: str) -> None:
    failure = failure_from_exit_code(code, 0, 0, "host", "log", "somebody did it")
    assert failure.cause == cause
    assert failure.hint.startswith(hint)
    assert bool(failure.hint) == bool(hint)


TRACEBACK = "Traceback (most recent call last):\n  File 'train.py', line 3, in <module>\n    step()\n"


@pytest.mark.parametrize(
    ("output", "is_secondary"),
    [
        (f"{TRACEBACK}ValueError: no such column: prize\n[Gloo] connection closed by peer", False),
        (
            f"{TRACEBACK}JaxRuntimeError: UNKNOWN: Gloo all-reduce failed: Connection closed by peer [::1]",
            True,
        ),
        (
            f"{TRACEBACK}BrokenPipeError: [Errno 32] Broken pipe\n\nDuring it:\n\n{TRACEBACK}KeyError: 3",
            False,
        ),
        (f"{TRACEBACK}torch.distributed.DistBackendError: NCCL error", True),
        (f"{TRACEBACK}horovod.common.exceptions.HorovodInternalError: Horovod has been shut down.", True),
        ("loss 3.2\nconnection refused\nloss 3.1\nloss 3.0\nsegment 4 is missing", False),
        ("E0000 main.cc:4] UNAVAILABLE: Connection reset by peer", True),
        ("", False),
    ],
)
def test_a_program_that_ends_as_its_peer_has_died_fails_in_consequence(
    output: str, is_secondary: bool
) -> None:
    failure = failure_from_exit_code(1, 0, 0, "host", "log", "", last_output=output)
    assert failure.is_secondary == is_secondary


@pytest.mark.parametrize(
    ("before", "now", "begin", "is_memory"),
    [
        (None, None, "probably the kernel's out-of-memory killer (check `dmesg` on that node); use", True),
        (3, None, "probably the kernel's out-of-memory killer", True),
        (
            0,
            1,
            "killed by the kernel's out-of-memory killer: processes on this node can use 2.0 GiB in total; ",
            True,
        ),
        (3, 3, "not the kernel's out-of-memory killer, which killed nothing", False),
    ],
)
def test_a_kill_is_put_down_to_memory_as_far_as_the_kernel_s_count_allows(
    before: int | None, now: int | None, begin: str, is_memory: bool
) -> None:
    hint = format_sigkill_hint(before, now, usable_bytes=2 << 30)
    assert hint.startswith(begin)
    assert hint.endswith(REDUCE_MEMORY_HINT) == is_memory


def test_a_long_traceback_keeps_its_beginning_and_end() -> None:
    clipped = truncate_middle("a" * 50 + "b" * 50, max_characters=20)
    assert clipped == "a" * 10 + "\n... 80 characters omitted ...\n" + "b" * 10


def test_a_compiler_s_long_message_is_told_by_its_first_lines_and_its_errors() -> None:
    source = "\n".join(f"    auto tmp{number} = in_ptr{number}[0];" for number in range(4000))
    command = "g++ " + "-I/some/folder " * 200
    told = f"CppCompileError: C++ compile error\n\nCommand:\n{command}\n\nOutput:\n"
    message = f"{told}kernel.cpp:3:9: error: 'in_ptr' was not declared\n{source}"
    try:
        try:
            raise ValueError(message)
        except ValueError as error:
            raise RuntimeError(message) from error
    except RuntimeError as error:
        text = failure_from_exception(error, 1, 0, "here", "/run/rank-1.log").text()
    assert len(text) < 8000
    assert text.startswith("rank 1 (node 0, here) failed: RuntimeError: CppCompileError: C++ compile error")
    assert text.count("kernel.cpp:3:9: error: 'in_ptr' was not declared") == 3
    assert f"{len(message):,} characters in total" in text
    assert "log: /run/rank-1.log" in text


def test_what_all_ranks_found_together_blames_nobody_and_says_what_to_make_again() -> None:
    error = AllRanksError(
        "step 8: the loss is nan", "check the data", retry_step=8, outlier_ranks=("rank 1 (host)",)
    )
    failure = failure_from_exception(raised(error), 0, 0, "host", "run/logs/rank-0.log")
    assert failure.text() == "step 8: the loss is nan\n  check the data"
    assert (failure.rank, failure.retry_step, failure.outlier_ranks) == (None, 8, ("rank 1 (host)",))
    assert not failure.is_secondary
