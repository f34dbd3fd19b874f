"""Shipped examples: job files and scripts that a user copies into a folder of their own.

The wheel carries the folder `examples` of the repository; in a clone it is read where it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from wanma.job.errors import EXIT_FAILED, JobError, closest_match

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = (_PACKAGE / "examples", _PACKAGE.parents[1] / "examples")
"""Folder of the wheel, and that of a clone."""
_COMMAND = re.compile(
    r"\b(?:wanma (?:train|plan|launch)|python) [\w./-]*examples/.*?(?=\s{2,}|#|\"\"\"|$)", re.M
)


@dataclass(frozen=True)
class Example:
    """Shipped example.

    Args:
        name: name for `wanma init`: that of the file, without its suffix.
        file: path of the shipped file.
        text: its content as a user gets it, with commands for the folder that it is written to.
        summary: first sentence of its head.
        commands: commands that its head gives, in order.
        needs_data: True if the user downloads data for it; its head names them.
    """

    name: str
    file: Path
    text: str
    summary: str
    commands: tuple[str, ...]
    needs_data: bool


def list_examples(folders: Iterable[Path] = _FOLDERS) -> list[Example]:
    """Return all shipped examples: job files, then scripts, each by name.

    Raises:
        JobError: the installation has none.
    """
    folder = next((one for one in folders if one.is_dir()), None)
    if folder is None:
        raise JobError("this installation of wanma has no examples", "install the wheel, or use a clone")
    files = [path for suffix in ("toml", "py") for path in sorted(folder.glob(f"*.{suffix}"))]
    return [_read(path, [file.name for file in files]) for path in files]


def write_example(name: str, folder: Path, examples: Sequence[Example]) -> Path:
    """Write an example into a folder, and return its new file. An existing file is never changed.

    Args:
        name: name of the example, with or without the suffix of its file.

    Raises:
        JobError: there is no example of this name, the file exists, or it cannot be written.
    """
    example = find_example(name, examples)
    target = folder / example.file.name
    try:
        with target.open("x", encoding="utf-8") as file:
            try:
                file.write(example.text)
                file.flush()
            except OSError:
                with suppress(OSError):
                    target.unlink()
                raise
    except FileExistsError:
        raise JobError(f"{target} exists and is not changed", "rename it, or run in another folder") from None
    except OSError as error:
        raise JobError(
            f"cannot write {target.absolute()}: {error.strerror or error}",
            "run in a folder that you may write to",
            EXIT_FAILED,
        ) from error
    return target


def find_example(name: str, examples: Sequence[Example]) -> Example:
    """Return the example of this name, with or without the suffix of its file.

    Raises:
        JobError: there is none.
    """
    for example in examples:
        if name in (example.name, example.file.name):
            return example
    close = closest_match(name, [example.name for example in examples])
    suggestion = "" if close is None else f" Did you mean '{close}'?"
    raise JobError(f"there is no example '{name}'.{suggestion}", "see all with `wanma init`")


def _read(file: Path, shipped: Sequence[str]) -> Example:
    original = file.read_text(encoding="utf-8")
    head = _head(original, file.suffix)
    commands = [match.group().strip() for match in _COMMAND.finditer(head)]
    return Example(
        name=file.stem,
        file=file,
        text=_without_folder(original, shipped),
        summary=_summary(head),
        commands=tuple(_without_folder(command, shipped) for command in commands),
        needs_data="yours to fetch" in head,
    )


def _head(text: str, suffix: str) -> str:
    """Return the comment at the top of a job file, or the docstring of a script."""
    if suffix == ".py":
        return text.split('"""')[1]
    lines = text.splitlines()
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(line[1:].removeprefix(" ") for line in lines[:end])


def _summary(head: str) -> str:
    """Return the first sentence."""
    paragraph = " ".join(head.strip().partition("\n\n")[0].split())
    return re.split(r"(?<=[.:]) (?=[A-Z])", paragraph)[0].rstrip(".:")


def _without_folder(text: str, shipped: Sequence[str]) -> str:
    """Return a text in which shipped files have no folder: a user has them side by side."""
    names = "|".join(map(re.escape, shipped))
    return re.sub(rf"(?<![\w/])examples/(?={names})", "", text)
