"""Pins of an environment: versions, hashes in both notations, and pins of builds alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from wanma.bench.environments.pinned_packages import Pin, read_pins, required_versions
from wanma.job.errors import WanmaError

FIRST, SECOND = "1" * 64, "2" * 64


def read(folder: Path, text: str) -> dict[str, Pin]:
    path = folder / "pins.txt"
    path.write_text(text)
    return read_pins(path)


def test_hashes_are_comments_or_options_of_pip(tmp_path: Path) -> None:
    commented = f"# all\nMy_Torch==2.13.0  # the framework\n    # sha256:{FIRST}\n    # sha256:{SECOND}\n"
    options = f"my-torch==2.13.0 \\\n    --hash=sha256:{FIRST} \\\n    --hash=sha256:{SECOND}\n    # via a\n"
    expected = {"my-torch": Pin("2.13.0", (FIRST, SECOND))}
    assert read(tmp_path, commented) == expected
    assert read(tmp_path, options) == expected
    assert expected["my-torch"].requirement("my-torch") == (
        f"my-torch==2.13.0 --hash=sha256:{FIRST} --hash=sha256:{SECOND}"
    )


def test_pins_of_builds_are_not_required(tmp_path: Path) -> None:
    pins = read(tmp_path, f"torch==2\ntriton==3  # optional\n    # sha256:{FIRST}\n")
    assert pins["triton"] == Pin("3", (FIRST,), is_optional=True)
    assert required_versions(pins) == {"torch": "2"}


@pytest.mark.parametrize(
    ("text", "place"), [("torch==2  # all\n\nnumpy>=2\n", 3), ("a==1\nb==1 \\\n  --hash=md5:1\n", 2)]
)
def test_a_line_that_pins_no_version_is_refused_with_its_place(tmp_path: Path, text: str, place: int) -> None:
    with pytest.raises(WanmaError, match=rf"pins\.txt:{place}: '.*' pins"):
        read(tmp_path, text)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WanmaError, match="cannot be read"):
        read_pins(tmp_path / "absent.txt")
