"""`wanma data` in this process, in a folder of its own with a cache of its own."""

from __future__ import annotations

import io
import json
import os
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

from PIL import Image

from support.command import Ran
from wanma.cli.main import main


class DataCommand:
    """Folder in which `wanma data` runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, *arguments: str, columns: int | None = None) -> Ran:
        out, err = io.StringIO(), io.StringIO()
        environment = {"XDG_CACHE_HOME": str(self.folder / ".cache")}
        if columns is not None:
            environment["COLUMNS"] = str(columns)
        with (
            mock.patch.dict(os.environ, environment),
            chdir(self.folder),
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            code = main(["data", *arguments])
        return Ran(code, out.getvalue(), err.getvalue())

    def json(self, *arguments: str, code: int = 0) -> Any:
        """Run with --json, and return what it prints."""
        ran = self(*arguments, "--json").check(code)
        return json.loads(ran.out)

    def write_lines(self, name: str, records: list[dict[str, Any]]) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    def write_image(self, name: str, color: tuple[int, int, int], kind: str = "PNG") -> Path:
        """Write an image of 6 x 4 pixels."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (6, 4), color).save(path, kind)
        return path
