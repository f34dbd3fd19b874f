"""Builder of a Containerfile in a plain folder, by chroot: where podman and docker are not to be had.

    build = Build(debian_root(folder), context, {"EXTRAS": "yaml"})
    build.run(Path("Containerfile").read_text())
    build.start(["--version"])                  # as `podman run IMAGE --version`

The root takes the place of the base image. It is this machine's Debian without what was added by
hand: /usr/local, /opt and the home folders are empty. Changes go to a folder above it (overlayfs). Mounts end
with their step.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SHARED = ("usr", "etc", "var")
"""Folders of this machine below the root."""
OWN = ("opt", "root", "home", "run", "srv", "src", "work", "proc", "dev", "tmp")
"""Folders that are empty in the root."""
STEP_SECONDS = 1500.0
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


@dataclass(frozen=True)
class Root:
    """Root folder, and the shell lines that mount it."""

    path: Path
    mounts: tuple[str, ...]

    def chroot(
        self, line: str, identity: str, environment: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """Run a shell line in the root, in mounts and processes of its own.

        Args:
            line: the line.
            identity: numbers of user and group, UID:GID.
            environment: all environment variables.
        """
        script = [
            "set -e",
            "mount --make-rprivate /",
            *self.mounts,
            f"exec chroot --userspec={identity} {shlex.quote(str(self.path))} /bin/sh -c {shlex.quote(line)}",
        ]
        return subprocess.run(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c", "\n".join(script)],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=STEP_SECONDS,
            check=False,
        )


def debian_root(folder: Path, visible: Sequence[str] = ()) -> Root:
    """Return a root that is this machine's Debian as it was installed.

    Args:
        folder: folder for its files.
        visible: folders of this machine that the root has, too, for reading.
    """
    if os.geteuid() != 0 or shutil.which("apt-get") is None or not Path("/bin").is_symlink():
        pytest.skip("a build without podman needs root, and a Debian with merged /usr")
    root, upper, work = folder / "root", folder / "upper", folder / "work"
    mounts = []
    for name in SHARED:
        for path in (root / name, upper / name, work / name):
            path.mkdir(parents=True)
        options = f"lowerdir=/{name},upperdir={upper}/{name},workdir={work}/{name}"
        mounts.append(f"mount -t overlay overlay -o {shlex.quote(options)} {shlex.quote(str(root / name))}")
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    (upper / "usr" / "local").mkdir()
    os.setxattr(upper / "usr" / "local", "trusted.overlay.opaque", b"y")  # hides the machine's own
    for name in OWN:
        (root / name).mkdir()
    (root / "tmp").chmod(0o1777)
    mounts += [f"mount -t proc proc {shlex.quote(str(root / 'proc'))}"]
    mounts += [f"mount --rbind /dev {shlex.quote(str(root / 'dev'))}"]
    for place in visible:
        target = root / place.lstrip("/")
        target.mkdir(parents=True, exist_ok=True)
        mounts.append(f"mount --bind -o ro {shlex.quote(place)} {shlex.quote(str(target))}")
    return Root(root, tuple(mounts))


@dataclass
class Build:
    """Image that is being built, with the state that instructions leave to the next ones."""

    root: Root
    context: Path
    """Folder that COPY copies from."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Values of ARG."""
    outside: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the builder adds: indexes and proxies."""
    base: str = ""
    """Name of the base image."""
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": SYSTEM_PATH})
    user: str = "root"
    folder: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)
    """Values of the ARGs so far."""

    def run(self, text: str) -> None:
        """Carry out the instructions of a Containerfile.

        Raises:
            AssertionError: a step fails, or an instruction or argument is unknown.
        """
        for name, rest in instructions(text):
            instruction = getattr(self, f"_{name.lower()}", None)
            assert instruction is not None, f"instruction {name}"
            instruction(rest)
        unknown = set(self.arguments) - set(self.values)
        assert not unknown, f"no ARG {unknown}"

    def start(self, words: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        """Run the image's program, with other arguments than those of CMD if any are given."""
        return self.shell(shlex.join([*self.entrypoint, *(words or self.command)]))

    def shell(self, line: str, more: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run a shell line as the image's user in its working directory."""
        identity, home = self._user_record()
        environment = {"HOME": home, **self.environment, **self.outside, **(more or {})}
        return self.root.chroot(f"cd {shlex.quote(self.folder)} && {line}", identity, environment)

    def _from(self, rest: str) -> None:
        self.base = self._expand(rest)

    def _arg(self, rest: str) -> None:
        name, _, default = rest.partition("=")
        self.values[name] = self.arguments.get(name, self._expand(default))

    def _env(self, rest: str) -> None:
        words = dict(word.split("=", 1) for word in shlex.split(rest))
        self.environment |= {name: self._expand(value) for name, value in words.items()}

    def _user(self, rest: str) -> None:
        self.user = rest

    def _workdir(self, rest: str) -> None:
        done = self.root.chroot(f"mkdir -p {shlex.quote(rest)}", "0:0", self.environment)
        assert done.returncode == 0, done.stdout
        self.folder = rest

    def _entrypoint(self, rest: str) -> None:
        self.entrypoint = json.loads(rest)

    def _cmd(self, rest: str) -> None:
        self.command = json.loads(rest)

    def _copy(self, rest: str) -> None:
        *sources, target = self._expand(rest).split()
        place = self.root.path / str(Path(self.folder, target)).lstrip("/")
        assert place.relative_to(self.root.path).parts[0] in OWN, f"COPY to {target}"
        place.mkdir(parents=True, exist_ok=True)
        for source in sources:
            assert is_sent(source, self.context), f"COPY {source}, which .dockerignore keeps back"
            if (self.context / source).is_dir():
                leave_out = shutil.ignore_patterns("__pycache__", "*.so")
                shutil.copytree(self.context / source, place, dirs_exist_ok=True, ignore=leave_out)
            else:
                shutil.copy(self.context / source, place)

    def _run(self, rest: str) -> None:
        done = self.shell(rest, self.values)
        assert done.returncode == 0, f"RUN {rest}\n{done.stdout[-4000:]}"

    def _user_record(self) -> tuple[str, str]:
        """Return UID:GID and home folder of the user."""
        lines = self.root.chroot("cat /etc/passwd", "0:0", {"PATH": SYSTEM_PATH}).stdout.splitlines()
        found = [line.split(":") for line in lines if line.startswith(f"{self.user}:")]
        assert found, f"the image has no user {self.user}: {lines}"
        return f"{found[0][2]}:{found[0][3]}", found[0][5]

    def _expand(self, text: str) -> str:
        known = {**self.values, **self.environment}
        return _VARIABLE.sub(lambda match: known.get(match[1] or match[2], ""), text)


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Yield name and rest of each instruction; lines that end in a backslash go on."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, _, rest = line.strip().partition(" ")
        yield name.upper(), rest.strip()


def is_sent(path: str, context: Path) -> bool:
    """Return True if the builder gets a file or folder; of .dockerignore the last matching line counts."""
    sent = True
    names = [path, *(str(parent) for parent in Path(path).parents if str(parent) != ".")]
    for line in (context / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#") and any(fnmatch.fnmatch(one, line.lstrip("!")) for one in names):
            sent = line.startswith("!")
    return sent
