"""Schema of a suite file, and its reading.

```toml
title = "Replicas of a small decoder"
metrics = ["samples_per_second", "step_seconds"]
baseline = "dp_replicate=1"

[job]                           # or: job = "gpt.toml", beside this file
model.preset = "gpt-1m"
data.text = ["stdlib"]
train.steps = 40

[over]                          # each combination is a contender
"parallel.dp_replicate" = [1, 2]

[rule]
rounds = 5
budget = "10m"
```
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from wanma.bench.programs.command_program import compile_patterns
from wanma.bench.programs.contender import Contender, Fault, Patterns
from wanma.bench.programs.places import ENVIRONMENTS, SUITE, Places, place_contender, word
from wanma.bench.programs.python_environment import PythonEnvironment, environments_folder, read_pins
from wanma.bench.programs.redaction import redact_text
from wanma.bench.programs.target import Target, parse_target
from wanma.bench.runner import Rule
from wanma.bench.suites.job_words import JobWords
from wanma.bench.suites.scale_table import PublishedTable, ScaleTable, doubled_counts
from wanma.bench.suites.scaled_contenders import with_equal_threads, with_weak_batches
from wanma.job.errors import EXIT_USAGE, WanmaError, did_you_mean
from wanma.job.file.loading import to_job
from wanma.job.file.parser import parse_config_file, read_text
from wanma.job.file.serialization import toml_value
from wanma.job.sections.base import Section

JOB_FILE = "job.toml"
"""Name of the contenders' job file, in the folder of the result."""
SHIPPED = Path(__file__).parent / "shipped"
"""Folder of the shipped suites."""
PINS_FOLDER = "environments"
"""Name of the folder beside a suite that has the pins of its Python environments, as NAME.txt."""
MAX_HASHED_BYTES = 1 << 22
"""Size up to which a file that a command names is part of the hash of its suite."""
Value = bool | int | float | str | list[Any]


class ContenderTable(Section):
    """Contender with a name of its own."""

    name: str
    description: str = ""
    """Sentence on the contender, for readers of the result."""
    settings: dict[str, Value] = Field(default_factory=dict)
    """Overrides of the job by key."""
    command: list[str] = Field(default_factory=list)
    """Command instead of the job; `{python}` is its interpreter, `{suite}` the folder of the suite.

    It may name keys of the job: see `job_words`. The places are filled in when it runs: see `places`.
    """
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables besides those of the caller."""
    python_environment: str | None = None
    """Name of the Python environment of the command, whose pins are in `environments/NAME.txt` beside the
    suite; None: that of wanma."""
    rank_variables: bool = False
    """True gives a command the variables of wanma's ranks: threads, and on CPUs those of the allocator."""
    patterns: Patterns = Patterns()
    fault: Fault | None = None


class SmokeTable(Section):
    """The suite in seconds, which shows that it works."""

    steps: Annotated[int, Field(ge=1)] | None = 4
    rounds: Annotated[int, Field(ge=1, le=1000)] = 1
    settings: dict[str, Value] = Field(default_factory=dict)
    contenders: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of contenders; default: all."""


class SuiteFile(Section):
    """Content of a suite file."""

    version: Literal[1] = 1
    """Version of the schema."""
    title: str = ""
    description: str = ""
    """Sentences on the suite, for readers of the result."""
    job: str | dict[str, Any] | None = None
    """Job of the contenders: its tables, or a file beside this one."""
    contenders: list[ContenderTable] = Field(default_factory=list)
    over: dict[str, list[Value]] = Field(default_factory=dict)
    weak: bool = False
    """True if the global batch grows with the ranks of a contender: weak scaling."""
    baseline: str | None = None
    target: str | None = None
    metrics: list[str] = Field(default_factory=list)
    """Names of the metrics to be shown first."""
    link_megabits_per_second: Annotated[float, Field(gt=0)] | None = None
    """Rate of the link between two nodes of this machine on which each job runs; needs root. Jobs that an
    engine places use the links that are there."""
    prepare: Literal["cifar10"] | None = None
    """Data that is made before the first execution; the job names its folder by `{data}`."""
    needs: list[str] = Field(default_factory=list)
    """Modules without which the suite cannot run, such as "transformers"."""
    rule: Rule = Rule()
    smoke: SmokeTable = SmokeTable()
    published: list[PublishedTable] = Field(default_factory=list)
    """Published scalings of such a training, beside which forecasts stand."""
    scale: ScaleTable | None = None
    """Scaling of the job, forecast beside the contenders; `wanma bench scale` writes it."""


@dataclass(frozen=True)
class Suite:
    """Suite whose contenders are known."""

    name: str
    file: SuiteFile
    contenders: tuple[Contender, ...]
    digest: str
    """SHA-256 of all that decides what an execution does, in hexadecimal."""
    job_text: str = ""
    """Text of the job file of the contenders; empty: they are commands."""
    folder: Path = Path()
    """Folder of the suite file, in which relative paths start."""
    environments: Path | None = None
    """Folder of the Python environments; None: see `environments_folder`."""

    @property
    def places(self) -> Places:
        """Return the places of this machine that the words of the contenders stand for."""
        return Places(self.folder, environments_folder(self.environments))

    @property
    def python_environments(self) -> list[PythonEnvironment]:
        """Return the Python environments of the contenders, as they are on this machine."""
        placed = (place_contender(one, self.places).python_environment for one in self.contenders)
        return list({one.folder: one for one in placed if one is not None}.values())

    @property
    def title(self) -> str:
        return self.file.title or self.name

    @property
    def target(self) -> Target | None:
        return None if self.file.target is None else parse_target(self.file.target)


def known_suites() -> dict[str, Path]:
    """Return the files of the shipped suites by name."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.toml"))}


def find_suite(name: str) -> Path:
    """Return the file of a suite or job, which `name` is, or of the known suite with this name.

    Raises:
        WanmaError: there is none.
    """
    path = Path(name)
    if path.suffix == ".toml" or path.is_file():
        return path
    known = known_suites()
    if name not in known:
        raise WanmaError(
            f"there is no suite '{name}'.{did_you_mean(name, known)}",
            f"name a file, or one of: {', '.join(known)}",
            EXIT_USAGE,
        )
    return known[name]


def is_suite(path: Path) -> bool:
    """Return True if a file is a suite, and no job: only a suite has contenders, or a table of its own."""
    tables, _ = parse_config_file(path)
    return not {"model", "data", "train"} & tables.keys()


def read_suite_file(path: Path) -> SuiteFile:
    """Read a suite file.

    Raises:
        WanmaError: the file cannot be read, or is wrong.
    """
    tables, _ = parse_config_file(path)
    try:
        return SuiteFile.model_validate_json(json.dumps(tables), strict=True)
    except ValidationError as error:
        tables_of_a_suite = (SuiteFile, ContenderTable, Patterns, Fault, Rule, SmokeTable)
        known = [one.alias or name for table in tables_of_a_suite for name, one in table.model_fields.items()]
        lines = []
        for item in error.errors(include_url=False):
            is_unknown = item["type"] == "extra_forbidden"
            text = f"unknown key.{did_you_mean(str(item['loc'][-1]), known)}" if is_unknown else item["msg"]
            lines.append(f"{'.'.join(map(str, item['loc']))}: {text}")
        raise WanmaError(
            f"{path} is not a suite: " + "; ".join(lines),
            "see the keys of a suite in docs/guides/benchmark.md",
            EXIT_USAGE,
        ) from None


def make_suite(
    name: str,
    file: SuiteFile,
    folder: Path,
    *,
    source: str = "",
    overrides: Sequence[str] = (),
    is_smoke: bool = False,
    environments: Path | None = None,
) -> Suite:
    """Return the suite of a file's content.

    Args:
        folder: folder in which relative paths start.
        source: file of the content, as errors name it; default: the name.
        overrides: settings of all contenders from elsewhere, as errors name them.

    Raises:
        WanmaError: the content contradicts itself, or its job cannot be read.
    """
    text = _job_text(file, folder)
    steps = file.smoke.steps if is_smoke else file.rule.steps
    extra = file.smoke.settings if is_smoke else {}
    job_file = str(folder / file.job) if isinstance(file.job, str) else source or name
    place = source_text(source or name, overrides)
    contenders = []
    for table in _tables(file):
        settings = {key: override_text(value) for key, value in {**table.settings, **extra}.items()}
        words = JobWords(text, settings, steps, f"{place}, contender '{table.name}'", job_file)
        contenders.append(_contender(table, words, folder))
    if file.weak and not is_smoke:  # a suite in small has batches of its own
        contenders = with_weak_batches(contenders, text)
    contenders = with_equal_threads(contenders, text)
    if file.link_megabits_per_second is not None:
        rate = file.link_megabits_per_second
        contenders = [
            replace(one, link_megabits_per_second=rate) if one.kind == "job" else one for one in contenders
        ]
    if is_smoke and file.smoke.contenders is not None:
        contenders = contenders[: file.smoke.contenders]
    names = [contender.name for contender in contenders]
    if doubled := sorted({one for one in names if names.count(one) > 1}):
        raise WanmaError(f"two contenders are called {', '.join(doubled)}", "give each a name", EXIT_USAGE)
    if file.baseline is not None and file.baseline not in names and not is_smoke:
        raise WanmaError(
            f"baseline: there is no contender '{file.baseline}'",
            f"contenders: {', '.join(names)}",
            EXIT_USAGE,
        )
    if file.target is not None:
        parse_target(file.target)
    places = Places(folder, environments_folder(environments))
    files = [file_hashes(one, place_contender(one, places), folder) for one in contenders]
    deciding = [replace(one, description="").to_json() for one in contenders]
    parts: list[Any] = [deciding, files, text, file.target, steps, is_smoke]
    parts += [{"turns": file.rule.turn_seconds}] if file.rule.turn_seconds else []
    content = json.dumps(parts, sort_keys=True).encode()
    return Suite(
        name, file, tuple(contenders), hashlib.sha256(content).hexdigest(), text, folder, environments
    )


def file_hashes(contender: Contender, placed: Contender, folder: Path) -> dict[str, str]:
    """Return the SHA-256 of small files that a command names, such as its script, by its word."""
    found = {}
    for name, text in zip(contender.command[1:], placed.command[1:], strict=True):
        for path in (Path(text), folder / text):
            with contextlib.suppress(OSError):  # a word that is no path: too long, say
                if path.is_file() and path.stat().st_size <= MAX_HASHED_BYTES:
                    found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
                    break
    return found


def _tables(file: SuiteFile) -> list[ContenderTable]:
    """Return the contenders of a file: those listed, each with every combination of `over`."""
    if file.scale is not None:
        return file.contenders  # there may be none: it is only forecast
    listed = file.contenders or [ContenderTable(name="")]
    if not file.over:
        return [table if table.name else table.model_copy(update={"name": "job"}) for table in listed]
    found = []
    for table in listed:
        for values in itertools.product(*file.over.values()):
            settings = dict(zip(file.over, values, strict=True))
            own = " ".join(
                f"{key.rpartition('.')[2]}={override_text(value)}" for key, value in settings.items()
            )
            name = " ".join(part for part in (table.name, redact_text(own)) if part)
            found.append(table.model_copy(update={"name": name, "settings": {**table.settings, **settings}}))
    return found


def source_text(file: str, overrides: Sequence[str]) -> str:
    """Return a file and the overrides of all its contenders, as errors name their place."""
    return " with ".join([file, *([" ".join(overrides)] if overrides else [])])


def _contender(table: ContenderTable, job: JobWords, folder: Path) -> Contender:
    if table.command:
        return _command(table, job, folder)
    if not job.job_text:
        raise WanmaError(
            f"the contender '{table.name}' has neither a command nor a job",
            'add `command = [...]` to it, or `job = "FILE"` or a table [job] to the suite',
            EXIT_USAGE,
        )
    if table.python_environment is not None or table.rank_variables:
        raise WanmaError(
            f"the contender '{table.name}' is a job: python_environment and rank_variables are for commands",
            "remove them: wanma runs in its own environment, with the variables of its ranks",
            EXIT_USAGE,
        )
    contender = Contender(
        table.name,
        "job",
        job=JOB_FILE,
        settings=job.settings,
        environment=table.environment,
        fault=table.fault,
        description=table.description,
    )
    # A wrong key is refused here, by its place.
    to_job(tomllib.loads(job.job_text), contender.overrides, job.source, job.file)
    return contender


def _command(table: ContenderTable, job: JobWords, folder: Path) -> Contender:
    """Return the contender of a command.

    Raises:
        WanmaError: it names a key of the job that is not set, or an environment without a file of pins.
    """
    found = None
    if (name := table.python_environment) is not None:
        pins = f"{PINS_FOLDER}/{name}.txt"
        found = PythonEnvironment(
            name,
            f"{word(ENVIRONMENTS)}/{name}",
            f"{word(SUITE)}/{pins}",
            read_pins(folder / pins),
        )
    if table.rank_variables and not job.job_text:
        raise WanmaError(
            f"the contender '{table.name}' wants the variables of ranks, and the suite has no job",
            'add `job = "FILE"` or a table [job] to the suite',
            EXIT_USAGE,
        )
    compile_patterns(table.patterns)
    environment = {name: job.fill(value) for name, value in table.environment.items()}
    return Contender(
        table.name,
        "command",
        command=tuple(job.fill(one) for one in table.command),
        environment={**(job.rank_variables() if table.rank_variables else {}), **environment},
        python_environment=found,
        patterns=table.patterns,
        description=table.description,
    )


def override_text(value: Value) -> str:
    """Return a value as an override has it."""
    return value if isinstance(value, str) else toml_value(value)


def _job_text(file: SuiteFile, folder: Path) -> str:
    """Return the job of a suite as the text of a job file; empty: it has none.

    Raises:
        WanmaError: the file of the job cannot be read, or is none.
    """
    if file.job is None:
        return ""
    tables = file.job
    if isinstance(tables, str):
        path = folder / tables
        tables, _ = parse_config_file(path)
        if path.suffix == ".toml":
            return read_text(path)
    lines: list[str] = []
    for section, content in tables.items():
        if not isinstance(content, Mapping):
            lines.insert(0, f"{section} = {toml_value(content)}")
            continue
        lines.append(f"\n[{section}]")
        lines += [f"{key} = {toml_value(value)}" for key, value in content.items()]
    return "\n".join(lines) + "\n"


def parse_over(texts: Sequence[str]) -> dict[str, list[Value]]:
    """Parse `KEY=V1,V2,...`, and `KEY=1..6` as 1, 2, 4, 6.

    Raises:
        WanmaError: a text is neither.
    """
    found: dict[str, list[Value]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        if not equals or not values:
            raise WanmaError(
                f"--over {text}: expected KEY=VALUE,VALUE", "for example parallel.tp=1,2,4", EXIT_USAGE
            )
        first, dots, last = values.partition("..")
        if dots and first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last):
            found[key] = [*doubled_counts(int(first), int(last))]
        else:
            found[key] = [part.strip() for part in values.split(",")]
    return found
