"""Wheels of packages with one module, so that pip has something to install without an index."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def make_wheel(
    folder: Path,
    name: str,
    version: str,
    requires: Sequence[str] = (),
    content: Mapping[str, str] | None = None,
) -> Path:
    """Write a wheel with this content.

    Default: its module NAME has VERSION, and its program NAME prints the interpreter.
    """
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    if content is None:
        module = f'import sys\n\nVERSION = "{version}"\n\n\ndef main():\n    print(sys.executable)\n'
        content = {
            f"{name}.py": module,
            f"{info}/entry_points.txt": f"[console_scripts]\n{name} = {name}:main\n",
        }
    files = {
        **content,
        f"{info}/METADATA": "\n".join(lines) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(zipfile.ZipInfo(path), text)  # without a time: equal bytes
    return wheel
