"""The house: a room imports only rooms on lower floors, whatever way the import is written."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("no_garbage_collection")

SOURCE = Path(__file__).parents[1] / "src" / "wanma"

FLOORS = {
    "cli": 8,
    "api": 7,
    "bench": 7,
    "diagnosis": 7,
    "sweep": 7,
    "evaluation": 7,
    "registry": 7,
    "pipeline": 7,
    "serving": 7,
    "federated": 7,
    "dashboard": 7,
    "engines": 6,
    "elastic": 5,
    "training": 4,
    "parameter_server": 4,
    "parallel": 3,
    "planner": 2,
    "report": 2,
    "models": 1,
    "data": 1,
    "hardware": 1,
    "collectives": 1,
    "checkpoint": 1,
    "observe": 1,
    "job": 0,
    "torch_internals": 0,
}
"""The table in docs/design/floors.md; a new room gets its floor in both."""

ROOT_FILES = {
    "__init__.py": set(FLOORS),  # the public names, loaded on first use
    "__main__.py": {"cli"},
}

LONGEST_FILE = 500
LONGEST_FUNCTION = 80

UNDEFINING_WORDS = {"what", "how", "where", "whether", "when", "which", "who", "why", "of", "that", "those"}
"""First words of docstrings that do not say what a thing is or what a function does."""
LARGEST_FOLDER = 16

TORCH_FREE = (
    "wanma",
    "wanma.api.checkpoints.operations",
    "wanma.api.checkpoints.output_text",
    "wanma.api.launch.script_launch",
    "wanma.api.plan_report.command",
    "wanma.api.run.job_run",
    "wanma.cli.main",
    "wanma.cli.parser",
    "wanma.cli.arguments",
    "wanma.job.file.reference",
    "wanma.job.file.loading",
    "wanma.job.plan.plan",
    "wanma.job.run.run_directory",
    "wanma.job.run.worker",
    "wanma.job.file.serialization",
    "wanma.data.formats.detection",
    "wanma.data.index.build",
    "wanma.data.opening",
    "wanma.data.tables.table_dataset",
    "wanma.data.text.preparation_process",
    "wanma.data.tools.inspection",
    "wanma.data.tools.verification",
    "wanma.hardware.catalogue.lookup",
    "wanma.hardware.cluster_file.reader",
    "wanma.hardware.cluster_file.export",
    "wanma.hardware.discovery.node",
    "wanma.hardware.checks.doctor",
    "wanma.models.config.resolution",
    "wanma.observe.console.opening",
    "wanma.report.report_page",
    "wanma.report.run_report",
    "wanma.report.terminal",
    "wanma.torch_internals.loaded",
    "wanma.torch_internals.table",
    "wanma.torch_internals.versions",
)
"""Modules that must start at once: importing torch takes the better part of a second."""

FILES = sorted(SOURCE.rglob("*.py"))
SCRIPTS = SOURCE / "bench" / "suites" / "shipped"
"""Files of suites, among them scripts of other frameworks: data, which no module imports."""
ROOMS = sorted({path.relative_to(SOURCE).parts[0] for path in FILES if path.parent != SOURCE})


def test_every_folder_is_a_room_of_the_house() -> None:
    folders = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders - set(FLOORS) == set(), "give a new room its floor here and in docs/design/floors.md"


def test_only_the_public_names_live_outside_the_rooms() -> None:
    assert {path.name for path in SOURCE.glob("*.py")} <= set(ROOT_FILES)


def test_the_documented_table_is_the_one_that_is_held() -> None:
    text = (SOURCE.parents[1] / "docs" / "design" / "floors.md").read_text()
    rows = re.findall(r"^\| (\d) \| ([^|]+) \|", text, re.MULTILINE)
    assert {room: int(floor) for floor, rooms in rows for room in re.findall(r"`(\w+)`", rooms)} == FLOORS


def test_the_documented_sub_packages_are_those_of_the_source() -> None:
    text = (SOURCE.parents[1] / "docs" / "design" / "floors.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", text, re.MULTILINE))
    packages = {
        room: {path.parent.name for path in (SOURCE / room).glob("*/__init__.py")}
        for room in FLOORS
        if (SOURCE / room).is_dir()
    }
    assert {room: set(re.findall(r"`(\w+)`", rows.get(room, ""))) for room in packages} == packages


def test_a_room_imports_only_rooms_on_lower_floors() -> None:
    wrong = []
    for path in FILES:
        parts = path.relative_to(SOURCE).parts
        for line, room in imported_rooms(path):
            if len(parts) == 1:
                allowed = room in ROOT_FILES[parts[0]]
            else:
                allowed = room == parts[0] or FLOORS.get(room, 99) < FLOORS[parts[0]]
            if not allowed:
                wrong.append(f"{path}:{line}: {parts[0]} may not import {room}")
    assert not wrong, "\n" + "\n".join(wrong)


def test_a_file_reads_in_one_sitting() -> None:
    sizes = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in FILES}
    long = {name: size for name, size in sizes.items() if size > LONGEST_FILE}
    assert long == {}, "look for the second idea in it"


def test_a_function_is_seen_on_one_screen() -> None:
    long = [
        f"{path.relative_to(SOURCE)}:{node.name}"
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.end_lineno is not None and node.end_lineno - node.lineno >= LONGEST_FUNCTION
    ]
    assert long == [], "cut it where its code has a seam"


def test_a_docstring_begins_with_a_definition() -> None:
    root = SOURCE.parents[1]
    others = [
        path
        for folder in ("benchmarks", "examples", "tests")
        for path in sorted((root / folder).rglob("*.py"))
    ]
    wrong = [
        f"{path.relative_to(root)}:{line}: {text.strip().splitlines()[0]}"
        for path in (*FILES, *others)
        for line, text in docstrings(nodes(path))
        if (word := re.match(r"\W*([A-Za-z]+)", text)) and word[1].lower() in UNDEFINING_WORDS
    ]
    assert not wrong, "a noun phrase for what it is, or a verb phrase for what it does:\n" + "\n".join(wrong)


@pytest.mark.parametrize("room", ROOMS)
def test_no_files_of_a_room_import_each_other_in_a_circle(room: str) -> None:
    assert not circle(room_imports(room))


@pytest.mark.parametrize("room", ROOMS)
def test_no_sub_packages_of_a_room_import_each_other_in_a_circle(room: str) -> None:
    packages: dict[str, set[str]] = {}
    for module, imports in room_imports(room).items():
        package = sub_package(module)
        packages.setdefault(package, set()).update({sub_package(other) for other in imports} - {package})
    assert not circle(packages)


def test_a_folder_is_surveyed_at_a_glance() -> None:
    folders = {path.parent for path in FILES}
    sizes = {str(folder.relative_to(SOURCE)): len(list(folder.glob("*.py"))) for folder in folders}
    assert {folder: size for folder, size in sizes.items() if size > LARGEST_FOLDER} == {}, (
        "cut it into sub-packages, each named for what it holds"
    )


def test_a_room_has_one_level_of_sub_packages() -> None:
    modules = [path for path in FILES if not path.is_relative_to(SCRIPTS)]
    assert [str(path) for path in modules if len(path.relative_to(SOURCE).parts) > 3] == []


def test_what_must_start_at_once_does_not_import_torch() -> None:
    """One after another in one process: the first that imports it is named."""
    program = (
        "import importlib, sys\n"
        "for module in sys.argv[1:]:\n"
        "    importlib.import_module(module)\n"
        "    assert 'torch' not in sys.modules, module\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, *TORCH_FREE], check=False, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("source", "room"),
    [
        ("import wanma.planner.search", "planner"),
        ("from wanma.planner import search", "planner"),
        ("from wanma import planner", "planner"),
        ("from ..planner import search", "planner"),
        ("from .. import planner", "planner"),
        ("def f():\n    import wanma.planner", "planner"),
        ("importlib.import_module('wanma.planner.search')", "planner"),
        ("PRELOAD = ['wanma.planner.search:main']", "planner"),
    ],
)
def test_no_way_of_importing_is_overlooked(tmp_path: Path, source: str, room: str) -> None:
    path = SOURCE / "training" / "imagined.py"
    assert [found for _, found in _imports(list(ast.walk(ast.parse(source))), path)] == [room]


@pytest.mark.parametrize(
    "source",
    [
        "from wanma.training.run import trainer",
        "from wanma.training.run.trainer import Trainer",
        "from ..run.trainer import Trainer",
        "def f():\n    import wanma.training.run.trainer",
        "if TYPE_CHECKING:\n    from wanma.training.run.trainer import Trainer",
    ],
)
def test_no_import_within_a_room_is_overlooked(source: str) -> None:
    path = SOURCE / "training" / "loop" / "imagined.py"
    found = [module for _, module in _imported_modules(ast.walk(ast.parse(source)), path)]
    assert found == ["wanma.training.run.trainer"]


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"b"}})) == {"b", "c"}


def docstrings(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, text) of docstrings, those below constants and attributes included."""
    for node in nodes:
        for statement in getattr(node, "body", ()) if not isinstance(node, ast.Lambda | ast.IfExp) else ():
            match statement:
                case ast.Expr(ast.Constant(str(text))):
                    yield statement.lineno, text


def circle(imports: Mapping[str, set[str]]) -> list[str]:
    """Names that import each other in a circle, the first repeated at the end; empty if there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def module_name(path: Path) -> str:
    """Dotted name of the module or package that a file holds."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(("wanma", *parts)).removesuffix(".__init__")


def sub_package(module: str) -> str:
    """`wanma.room.package` that a module belongs to; a file beside the packages stands for itself."""
    return ".".join(module.split(".")[:3])


def room_imports(room: str) -> dict[str, set[str]]:
    """Modules of `room` and the other modules of it that each imports, those for types included."""
    modules = {module_name(path): path for path in FILES if path.relative_to(SOURCE).parts[0] == room}
    return {
        module: {imported for _, imported in _imported_modules(nodes(path), path)} & modules.keys() - {module}
        for module, path in modules.items()
    }


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of a file's syntax tree, parsed once for all tests."""
    return list(ast.walk(ast.parse(path.read_text(), str(path))))


def imported_rooms(path: Path) -> Iterator[tuple[int, str]]:
    """(line, room) of everything that a file imports or names as a module of ours."""
    yield from _imports(nodes(path), path)


def _imports(nodes: Collection[ast.AST], path: Path) -> Iterator[tuple[int, str]]:
    named = (
        (node.lineno, node.value)
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(r"wanma(\.\w+)+(:\w+)?", node.value)
    )
    for line, module in (*_imported_modules(nodes, path), *named):
        top, _, rest = module.partition(".")
        room = re.split(r"[.:]", rest)[0]
        if top == "wanma" and room and not room.startswith("__"):
            yield line, room


def _imported_modules(nodes: Iterable[ast.AST], path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of what a file imports; a name that is a module of ours counts as one."""
    package = ("wanma", *path.relative_to(SOURCE).parts[:-1])
    for node in nodes:
        if isinstance(node, ast.Import):
            for name in node.names:
                yield node.lineno, name.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, node.module) if node.module else base)
            for imported in {_module_of(module, name.name) for name in node.names}:
                yield node.lineno, imported


@cache
def _module_of(module: str, name: str) -> str:
    folder = SOURCE.joinpath(*module.split(".")[1:])
    if module == "wanma" or (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file():
        return f"{module}.{name}"
    return module
