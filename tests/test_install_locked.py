"""Lock file: every pin has hashes, and what is installed is exactly what they name."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest

from support.install_locked import (
    LOCK,
    Pin,
    archive_hash,
    canonical,
    hashed_requirements,
    project_requirements,
    read_lock,
    write_lock,
)

ONE, TWO, THREE = "1" * 64, "2" * 64, "3" * 64
TEXT = f"# pins\nPy_YAML==6.0.3\n    # sha256:{ONE}\n    # sha256:{TWO}\nrich==15.0.0\n    # sha256:{TWO}\n"


def test_every_pin_of_the_lock_has_hashes() -> None:
    lock = read_lock(LOCK.read_text())
    assert len(lock) > 100
    assert [name for name, pin in lock.items() if not pin.hashes] == []


@pytest.mark.parametrize("group", ["core", "build", "dev", "docs", "peers", "tensorflow", "jax"])
def test_every_direct_dependency_is_pinned(group: str) -> None:
    names = {canonical(re.split(r"[^A-Za-z0-9._-]", line)[0]) for line in project_requirements([group])}
    assert names <= read_lock(LOCK.read_text()).keys()


def test_a_lock_is_read_and_written() -> None:
    lock = read_lock(TEXT)
    assert lock == {"py-yaml": Pin("6.0.3", (ONE, TWO)), "rich": Pin("15.0.0", (TWO,))}
    assert write_lock(TEXT, {name: pin.hashes for name, pin in lock.items()}) == TEXT
    assert read_lock(write_lock(TEXT, {"py-yaml": [TWO], "rich": [ONE]}))["rich"] == Pin("15.0.0", (ONE,))


def chosen(name: str, version: str) -> dict[str, Any]:
    """Entry of pip's report."""
    source = {
        "url": "https://user:password@example.org/file.whl",
        "archive_info": {"hashes": {"sha256": THREE}},
    }
    return {"metadata": {"name": name, "version": version}, "download_info": source}


def test_a_package_is_checked_by_the_hashes_of_the_lock() -> None:
    line = hashed_requirements([chosen("Rich", "15.0.0")], read_lock(TEXT))
    assert line == f"Rich==15.0.0 --hash=sha256:{TWO}\n"


def test_a_local_build_is_taken_as_its_index_has_it_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    line = hashed_requirements([chosen("rich", "15.0.0+cpu")], read_lock(TEXT))
    assert line == f"rich==15.0.0+cpu --hash=sha256:{THREE}\n"
    told = capsys.readouterr().out
    assert told.startswith("rich 15.0.0+cpu is a local build")
    assert "example.org" in told
    assert "password" not in told


def test_a_package_without_hash_is_not_installed() -> None:
    with pytest.raises(SystemExit, match="no hash of numpy"):
        hashed_requirements([chosen("rich", "15.0.0"), chosen("numpy", "2.4.6")], read_lock(TEXT))


def test_the_hash_of_a_local_build_is_read_as_old_and_new_versions_of_pip_report_it(tmp_path: Path) -> None:
    wheel = tmp_path / "a package-1.0+cpu-py3-none-any.whl"
    wheel.write_bytes(b"content")
    value = hashlib.sha256(b"content").hexdigest()
    for info in ({"hashes": {"sha256": value}}, {"hash": f"sha256={value}"}, {}):
        assert archive_hash({"url": wheel.as_uri(), "archive_info": info}) == value
