"""Lock files: lines with fixed content are taken with all that they need, others are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.git import write
from support.wheels import make_wheel
from wanma.engines.environment.lock_file import read_lock
from wanma.job.errors import JobError


def test_pins_hashes_and_files_beside_the_lock_are_read(tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", "tiny", "1.0")
    make_wheel(tmp_path / "own", "mine", "2.0")
    write(
        tmp_path,
        {
            "requirements.lock": "# made by a tool\n"
            "--index-url https://${NAME}:${TOKEN}@pypi.example.org/simple\n"
            "--find-links wheels\n-r more/gpu.txt\n"
            "Tiny_Package[extra]==1.0 ; python_version >= '3.11' \\\n    --hash=sha256:"
            + "0"
            * 64
            + "  # why\n"
            "./own/mine-2.0-py3-none-any.whl\n"
            f"tool @ git+https://git@example.org/tool@{'a' * 40}\n"
            "other @ https://example.org/other-1.0.tar.gz#sha256=" + "1" * 64 + "\n",
            "more/gpu.txt": "-c limits.txt\nnumpy==2.0\n",
            "more/limits.txt": "numpy==2.0\n",
        },
    )
    lock = read_lock("requirements.lock", tmp_path)
    assert sorted(lock.files) == [
        "more/gpu.txt",
        "more/limits.txt",
        "own/mine-2.0-py3-none-any.whl",
        "requirements.lock",
        "wheels/tiny-1.0-py3-none-any.whl",
    ]
    assert sorted(set(lock.packages)) == ["mine", "numpy", "other", "tiny-package", "tool"]
    assert lock.variables == {"NAME", "TOKEN"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("numpy>=2", "line 2: 'numpy>=2' has no fixed content"),
        ("numpy==2.*", "has no fixed content"),
        ("numpy", "has no fixed content"),
        ("-e .", "has no fixed content"),
        ("./folder", "has no fixed content"),
        ("tool @ git+https://example.org/tool@main", "has no fixed content"),
        ("tool @ https://example.org/tool.tar.gz", "has no fixed content"),
        ("--index-url https://me:hunter2@example.org/simple", "line 2: the URL has a name or password"),
        ("--index-url=https://hunter2@example.org/simple", "the URL has a name or password"),
        ("tool @ https://example.org/tool-1.whl?token=hunter2", "the URL has a name or password"),
        ("-r ../other.txt", "lies outside the folder of the lock file"),
        ("-r missing.txt", "'missing.txt' cannot be read: No such file"),
        ("-f missing", "there is no folder"),
    ],
)
def test_a_line_without_fixed_content_or_with_a_password_is_refused(
    tmp_path: Path, line: str, message: str
) -> None:
    (tmp_path / "requirements.txt").write_text(f"tiny==1.0\n{line}\n")
    with pytest.raises(JobError) as error:
        read_lock("requirements.txt", tmp_path)
    assert message in error.value.message
    assert "hunter2" not in str(error.value)


def test_a_missing_or_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"'no\.txt' cannot be read: No such file"):
        read_lock("no.txt", tmp_path)
    (tmp_path / "empty.txt").write_text("# nothing\n")
    with pytest.raises(JobError, match=r"'empty\.txt' names no package"):
        read_lock("empty.txt", tmp_path)


PYLOCK = """
lock-version = "1.0"
created-by = "uv"
[[packages]]
name = "numpy"
version = "2.0"
index = "https://pypi.org/simple"
marker = "sys_platform == 'linux'"
sdist = { url = "https://example.org/numpy-2.0.tar.gz", hashes = { sha256 = "bb" } }
wheels = [{ url = "https://example.org/numpy-2.0-py3-none-any.whl", hashes = { sha256 = "aa" } }]
[[packages]]
name = "torch"
version = "2.13.0+cpu"
index = "https://download.pytorch.org/whl/cpu"
wheels = [{ url = "https://example.org/torch.whl", hashes = { sha256 = "cc" } }]
"""


def test_a_pylock_becomes_requirements_with_hashes(tmp_path: Path) -> None:
    (tmp_path / "pylock.toml").write_text(PYLOCK)
    lock = read_lock("pylock.toml", tmp_path)
    assert lock.files == {
        "requirements.txt": b"--extra-index-url https://download.pytorch.org/whl/cpu\n"
        b"numpy==2.0 ; sys_platform == 'linux' \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\n"
        b"torch==2.13.0+cpu \\\n    --hash=sha256:cc\n"
    }
    assert lock.packages == ["numpy", "torch"]


@pytest.mark.parametrize(
    ("package", "message"),
    [
        ('name = "mine"\ndirectory = { path = "." }', "mine has no version with hashes"),
        ('name = "a"\nversion = "1"\nmarker = "\'gpu\' in extras"', "a is in an extra or a group"),
        ('version = "1"', "is no lock file of PEP 751"),
    ],
)
def test_a_pylock_with_a_package_of_open_content_is_refused(
    tmp_path: Path, package: str, message: str
) -> None:
    (tmp_path / "pylock.gpu.toml").write_text(f"[[packages]]\n{package}\n")
    with pytest.raises(JobError, match=message):
        read_lock("pylock.gpu.toml", tmp_path)


def test_a_uv_lock_needs_uv_or_is_exported_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "uv.lock").write_text("version = 1\n")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(JobError, match="it is read by uv, which is not installed here"):
        read_lock("uv.lock", tmp_path)
    (tmp_path / "pylock.toml").write_text(PYLOCK)
    write(tmp_path, {"bin/uv": f'#!/bin/sh\necho "$@" > {tmp_path}/words\n/bin/cat {tmp_path}/pylock.toml\n'})
    (tmp_path / "bin" / "uv").chmod(0o755)
    assert read_lock("uv.lock", tmp_path).packages == ["numpy", "torch"]
    assert (tmp_path / "words").read_text() == (
        f"export --frozen --no-emit-project --no-dev --no-header --format pylock.toml --project {tmp_path}\n"
    )
