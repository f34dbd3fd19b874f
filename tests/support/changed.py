"""Selection of the tests that a change touches, by the graph of imports: `pytest --changed-since=REVISION`.

An edge leads from a file to each file that it imports (also inside functions), to each module that it names
in a string (as `"package.module:function"`), and to each file that is no module, by its name. Tests are
ordered by their distance from the change, so that the nearest fail first.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = {"src": "", "tests": "", "benchmarks": "benchmarks", "examples": "examples"}
"""Folders of Python files, and the package that each begins with."""
EVERYTHING = ("pyproject.toml", "constraints.txt")
"""Files that all tests depend on."""
COMMAND_LINE = "wanma.cli.main"
"""Module on which a test depends that runs `wanma` in another process."""


def changed_files(revision: str, root: Path = ROOT) -> set[str]:
    """Return the paths that differ from the common ancestor with `revision`, untracked ones included."""
    base = _git(root, "merge-base", revision, "HEAD").strip()
    tracked = _git(root, "diff", "--name-only", base).splitlines()
    return {*tracked, *_git(root, "ls-files", "--others", "--exclude-standard").splitlines()}


def distances(changed: Iterable[str], root: Path = ROOT) -> dict[str, int]:
    """Return the number of imports between each file that depends on a changed one and that file.

    Args:
        changed: paths relative to `root`.
        root: root of the repository.
    """
    users: dict[str, set[str]] = {}
    for path, uses in import_graph(root, other_files=_other(changed)).items():
        for used in uses:
            users.setdefault(used, set()).add(path)
    found = dict.fromkeys(changed, 0)
    queue = deque(found)
    while queue:
        path = queue.popleft()
        for user in users.get(path, ()):
            if user not in found:
                found[user] = found[path] + 1
                queue.append(user)
    return found


def import_graph(root: Path = ROOT, other_files: Iterable[str] = ()) -> dict[str, set[str]]:
    """Return the files that each Python file uses, as paths relative to `root`."""
    texts = {
        str(path.relative_to(root)): path.read_text()
        for folder in SOURCES
        for path in sorted((root / folder).rglob("*.py"))
    }
    modules = {_module(path): path for path in texts}
    others = list(other_files)
    graph = {}
    for path, text in texts.items():
        tree = ast.parse(text)
        names = {*_imports(tree, _module(path), path.endswith("__init__.py")), *_named(tree, modules)}
        uses = {modules[name] for name in names if name in modules}
        uses |= {other for other in others if _mentions(text, other)}
        for folder in Path(path).parents:
            if (conftest := str(folder / "conftest.py")) in texts:
                uses.add(conftest)
        graph[path] = uses - {path}
    return graph


def needs_everything(changed: Iterable[str]) -> bool:
    """Return whether all tests depend on one of the files."""
    return any(path in EVERYTHING for path in changed)


def _other(changed: Iterable[str]) -> list[str]:
    return [path for path in changed if not path.endswith(".py")]


def _mentions(text: str, path: str) -> bool:
    """Return whether a file's text names a file that is no module, or, below docs and src, its folder."""
    name = Path(path).name
    if re.search(rf"[\"'/ `]{re.escape(name)}\b", text):
        return True
    folder = Path(path).parent.name
    return path.startswith(("docs/", "src/")) and f'"{folder}"' in text


def _module(path: str) -> str:
    parts = list(Path(path).with_suffix("").parts)
    if parts[0] in ("src", "tests"):
        del parts[0]
    if parts[-1] == "__init__":
        del parts[-1]
    return ".".join(parts)


def _imports(tree: ast.Module, module: str, is_package: bool) -> Iterator[str]:
    """Yield the modules that a file imports with their packages, except those for type checkers alone."""
    for node in _walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_packages(alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            yield from _with_packages(base)
            for alias in node.names:
                yield f"{base}.{alias.name}"


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        yield from _walk(child)


def _with_packages(module: str) -> Iterator[str]:
    parts = module.split(".")
    return (".".join(parts[: end + 1]) for end in range(len(parts)))


def _named(tree: ast.Module, modules: Mapping[str, str]) -> Iterator[str]:
    """Yield the modules that strings name, and the command line where `wanma` is run."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0]
            if "." in name and name in modules:
                yield name
            elif name == "wanma":
                yield COMMAND_LINE


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout
