"""Hadoop's own client, which pyspark carries (make hadoop), and Java."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

_REPOSITORY = Path(__file__).parents[2]
_ADAPTER = Path(__file__).parent / "hadoop_client" / "RuntimeDelegateImpl.java"


def _jars() -> Path | None:
    """Return the folder of pyspark's jars."""
    return next(iter((_REPOSITORY / ".venv-hadoop").glob("lib/python*/site-packages/pyspark/jars")), None)


needs_hadoop = pytest.mark.skipif(
    _jars() is None or shutil.which("javac") is None,
    reason="needs Hadoop's client and a JDK: make hadoop",
)


class HadoopClient:
    """Command `hadoop fs` from the client's jars.

    The shaded client lacks one class, which is compiled, and does not start without a configuration.

    Args:
        folder: new folder for both.
    """

    def __init__(self, folder: Path) -> None:
        jars = _jars()
        assert jars is not None
        folder.mkdir()
        (folder / "core-site.xml").write_text("<configuration/>\n")
        shaded = os.pathsep.join(str(jar) for jar in jars.glob("hadoop-client-*.jar"))
        subprocess.run(["javac", "-cp", shaded, "-d", folder, _ADAPTER], check=True)
        self._class_path = f"{folder}{os.pathsep}{jars}/*"

    def run(self, *words: str) -> str:
        """Run a command, and return its output.

        Raises:
            subprocess.CalledProcessError: it failed; with what it wrote.
        """
        command = ["java", "-cp", self._class_path, "org.apache.hadoop.fs.FsShell", *words]
        ran = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "HADOOP_USER_NAME": "root"},
        )
        if ran.returncode:
            raise subprocess.CalledProcessError(ran.returncode, f"{words} {ran.stderr}")
        return ran.stdout
