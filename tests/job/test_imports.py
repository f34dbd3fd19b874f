import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from wanma.job.errors import EXIT_USAGE, JobError
from wanma.job.file.import_path import import_object


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_an_object_is_found_by_module_and_attributes() -> None:
    assert import_object("math:sqrt", "model.factory") is math.sqrt
    assert import_object("pathlib:Path.cwd", "data.factory")() == Path.cwd()


def test_the_working_directory_is_searched_first_and_stays_searchable_last(here: Path) -> None:
    (here / "users_code.py").write_text(
        "def later():\n    import users_sibling\n    return users_sibling.NAME\n"
    )
    (here / "users_sibling.py").write_text("NAME = 'sibling'\n")
    later = import_object("users_code:later", "model.factory")
    assert sys.path[-1] == str(here)
    assert sys.path[0] != str(here)
    assert later() == "sibling"


def test_packages_of_the_working_directory_work(here: Path) -> None:
    (here / "users_package").mkdir()
    (here / "users_package" / "inner.py").write_text("class Model:\n    size = 3\n")
    assert import_object("users_package.inner:Model.size", "model.factory") == 3


@pytest.mark.parametrize("path", ["math.sqrt", "math:", ":sqrt", ""])
def test_a_malformed_path_says_how_to_write_it(path: str) -> None:
    with pytest.raises(JobError, match=r"model.loss = [\s\S]*module:function"):
        import_object(path, "model.loss")


def test_a_missing_module_says_where_it_was_looked_for(here: Path) -> None:
    with pytest.raises(JobError, match="module 'users_nothing' does not exist") as caught:
        import_object("users_nothing.inner:f", "model.factory")
    assert str(here) in caught.value.hint
    assert caught.value.exit_code == EXIT_USAGE


def test_a_missing_attribute_says_what_is_close() -> None:
    with pytest.raises(JobError, match=r"math has no 'sqr'\. Did you mean 'sqrt'"):
        import_object("math:sqr", "model.factory")


def test_a_module_that_needs_something_missing_names_that(here: Path) -> None:
    (here / "users_broken.py").write_text("import users_requirement\n")
    with pytest.raises(JobError, match="it needs 'users_requirement'"):
        import_object("users_broken:f", "model.factory")


@pytest.mark.parametrize(("code", "cause"), [("1 / 0", "ZeroDivisionError"), ("def (", "SyntaxError")])
def test_a_module_that_fails_tells_its_error(here: Path, code: str, cause: str) -> None:
    (here / "users_failing.py").write_text(code)
    with pytest.raises(JobError, match=f"users_failing failed: {cause}") as caught:
        import_object("users_failing:f", "model.factory")
    assert caught.value.__cause__ is not None
