"""Parser of TOML and YAML files: nested tables and the line of each key, or an error that names the line."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wanma.job.errors import JobError, closest_match, first_names, missing_extra_error
from wanma.job.file.key_lines import KeyPath, Token, toml_key_lines, toml_tokens, yaml_key_lines, yaml_tokens

_TEMPLATE_HINT = "print one to start from with `wanma job --toml`"


def parse_config_file(
    path: Path, kind: str = "job file", missing_file_hint: str | None = None
) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """Read the tables of a TOML or (.yaml, .yml) YAML file, and the line of each key.

    Args:
        kind: kind of file, as errors name it.
        missing_file_hint: hint for a missing file; default: the job files nearby.

    Raises:
        JobError: the file cannot be read or is not valid; names the line, or similar files if it is absent.
    """
    text = read_text(path, kind, missing_file_hint)
    with _errors_named(path, kind):
        if _is_yaml(path):
            tables, node = _parse_yaml(path, text)
            return tables, yaml_key_lines(node) if node is not None else {}
        return _parse_toml(path, text), toml_key_lines(text)


def parse_tokens(path: Path, text: str) -> tuple[dict[str, Any], list[Token]]:
    """Parse the text of a job file: its tables, and the position of each key and text value.

    Raises:
        JobError: the text is not valid; names the line.
    """
    with _errors_named(path, "job file"):
        if _is_yaml(path):
            tables, node = _parse_yaml(path, text)
            return tables, yaml_tokens(node) if node is not None else []
        return _parse_toml(path, text), toml_tokens(text)


@contextmanager
def _errors_named(path: Path, description: str) -> Iterator[None]:
    """Turn the errors of a parser into a `JobError` that names the file."""
    try:
        yield
    except RecursionError:
        raise JobError(f"{path} is nested too deeply to be a {description}") from None
    except ValueError as error:  # a well-formed number or date that does not exist
        raise JobError(f"{path}: {error}") from None


def _is_yaml(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml")


def read_text(path: Path, what: str = "job file", starter: str | None = None) -> str:
    """Return the text of a file, its line ends as one character.

    Raises:
        JobError: the file cannot be read, or is not text.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise JobError(
            f"there is no {what} {path}.{_closest_name_hint(path)}", _nearby_files_hint(path, starter)
        ) from None
    except IsADirectoryError:
        job_file = path / "job.toml"
        hint = f"did you mean {job_file}?" if job_file.is_file() else _nearby_files_hint(job_file, starter)
        raise JobError(f"{path} is a folder, not a {what}", hint) from None
    except UnicodeDecodeError as error:
        raise JobError(f"{path} is not a {what}: byte {error.start} is not valid UTF-8 text") from None
    except OSError as error:
        raise JobError(f"cannot read the {what} {path}: {error.strerror or error}") from error


def _closest_name_hint(path: Path) -> str:
    """Return a hint with the closest name among the job files nearby, compared without the common suffix."""
    files_by_stem = {file.stem: file for file in reversed(_job_files(path))}
    close = closest_match(path.stem, files_by_stem) or closest_match(path.name, files_by_stem)
    return "" if close is None else f" Did you mean '{files_by_stem[close]}'?"


def _nearby_files_hint(path: Path, missing_file_hint: str | None) -> str:
    if missing_file_hint is not None:
        return missing_file_hint
    files = _job_files(path)
    if not files:
        return _TEMPLATE_HINT
    return f"job files nearby: {first_names([str(file) for file in files], 8)}"


def _job_files(path: Path) -> list[Path]:
    """List the TOML files beside `path`, in the working directory and in ./examples, except Python's own."""
    folders = dict.fromkeys([path.parent, Path(), Path("examples")])
    files = [file for folder in folders for file in sorted(folder.glob("*.toml"))]
    return [file for file in dict.fromkeys(files) if file.name != "pyproject.toml" and file.exists()]


def _parse_toml(path: Path, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _toml_syntax_error(path, text, str(error)) from None


def _toml_syntax_error(path: Path, text: str, message: str) -> JobError:
    position = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", message)
    lines = text.splitlines()
    line = int(position[1]) if position and position[1] else max(len(lines), 1)
    problem = message[: position.start()] if position else message
    written = lines[line - 1].strip() if line <= len(lines) else ""
    hint = ""
    if unquoted := re.fullmatch(r"([\w.-]+)\s*=\s*([A-Za-z/~][^\"'\[\]{}]*)", written):
        hint = f'put text in quotes: {unquoted[1]} = "{unquoted[2].strip()}"'
    elif text.lstrip().startswith("{"):
        hint = "this looks like JSON: name the file .yaml, JSON is valid YAML"
    elif re.fullmatch(r"[\w.-]+\s*:.*", written):
        hint = "this looks like YAML: write `key = value`, or name the file .yaml"
    line_text = f"\n  {written}" if written else ""
    return JobError(f"{path}:{line}: not valid TOML: {problem[:1].lower()}{problem[1:]}{line_text}", hint)


def _parse_yaml(path: Path, text: str) -> tuple[dict[str, Any], Any]:
    """Return the tables of a YAML text, and its composed node; None if it is empty."""
    try:
        import yaml
    except ImportError:
        raise missing_extra_error("pyyaml", "yaml", f"reading {path}") from None

    class Loader(yaml.SafeLoader):
        """YAML loader: safe, reads 1e-3 as a number (YAML 1.1 wants 1.0e-3), refuses a repeated key."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            names: set[str] = set()
            for key, _ in node.value:
                name = str(key.value)
                if name in names:
                    raise yaml.constructor.ConstructorError(
                        problem=f"'{name}' is given twice", problem_mark=key.start_mark
                    )
                names.add(name)
            return dict(super().construct_mapping(node, deep))

    number = re.compile(r"[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    loader = Loader(text)
    try:
        node = loader.get_single_node()
        value = {} if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise JobError(f"{path}{line}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    finally:
        loader.dispose()
    if not isinstance(value, dict):
        raise JobError(f"{path}: a job file is a mapping of sections (model, data, train, ...)")
    return value, node
