"""The line that a user can mend is found among frames of wanma and of libraries."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from wanma.job.file.import_path import import_object
from wanma.job.user_frames import user_frame_text


def parse(text: str) -> object:
    return json.loads(text)


def caught(function: object, *arguments: object) -> BaseException:
    try:
        function(*arguments)  # type: ignore[operator]  # whatever the test wants to see fail
    except Exception as error:
        return error
    raise AssertionError("it did not fail")


def test_the_innermost_line_outside_the_libraries_is_the_user_s() -> None:
    line = parse.__code__.co_firstlineno + 1
    assert user_frame_text(caught(parse, "{")) == f"{__file__}:{line} in parse: return json.loads(text)"


def test_frames_of_wanma_are_never_the_user_s() -> None:
    error = caught(import_object, "no path", "model.factory")
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next  # without this test's own frame
    assert user_frame_text(error) == ""


def test_an_installed_factory_is_named_by_the_function_that_was_called() -> None:
    error = caught(json.loads, "{")
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next
    assert user_frame_text(error).startswith(f"{json.__file__}:")
    assert " in loads: " in user_frame_text(error)


def test_a_package_below_site_packages_is_a_library(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "users_line_library.py"
    package.parent.mkdir()
    package.write_text("def divide(x):\n    return 1 / x\n")
    sys.path.insert(0, os.fspath(package.parent))
    try:
        divide = import_object("users_line_library:divide", "test")
    finally:
        sys.path.remove(os.fspath(package.parent))
        sys.modules.pop("users_line_library", None)

    def mine() -> None:
        divide(0)

    assert f"{__file__}:" in user_frame_text(caught(mine))
    assert user_frame_text(caught(mine)).endswith(" in mine: divide(0)")
