"""Arguments shared by several commands, lookup of runs by name, and shell completion."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from wanma.job.errors import EXIT_USAGE, WanmaError, did_you_mean
from wanma.job.run.run_directory import RunDirectory, is_run, list_runs

Completer = Callable[..., Iterable[str]]


def add_job_arguments(parser: argparse.ArgumentParser, *, is_required: bool = True) -> None:
    """Add the arguments JOB and KEY=VALUE.

    Args:
        is_required: False if an option may replace JOB.
    """
    job = parser.add_argument(
        "job", metavar="JOB", type=Path, nargs=None if is_required else "?", help="job file, .toml or .yaml"
    )
    overrides = parser.add_argument(
        "overrides", metavar="KEY=VALUE", nargs="*", default=[], help="overrides, e.g. train.steps=500"
    )
    set_completer(job, complete_job_files)
    set_completer(overrides, complete_overrides)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument RUN and its folder option; `resolve_run` reads them."""
    run = parser.add_argument(
        "run_name", metavar="RUN", nargs="?", help="name or folder of a run; default: the newest"
    )
    set_completer(run, complete_run_names)
    add_runs_folder_option(parser)


def add_step_option(parser: argparse.ArgumentParser) -> None:
    """Add the option --step, which selects one checkpoint of the run."""
    parser.add_argument(
        "--step",
        metavar="N",
        type=int,
        help="use the checkpoint of step N; default: the newest complete one",
    )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a run's place: --engine and --detach."""
    parser.add_argument(
        "--engine", metavar="NAME", help="place of the run (cluster.engine); `wanma engines` lists them"
    )
    parser.add_argument(
        "-d",
        "--detach",
        action="store_true",
        help="start in the background, or submit, and return",
    )


def add_rendezvous_options(parser: argparse.ArgumentParser) -> None:
    """Add the options by which nodes that run the same command meet: --rendezvous and --node-rank."""
    parser.add_argument(
        "--rendezvous", metavar="HOST:PORT", help="rendezvous address of the nodes (cluster.rendezvous)"
    )
    parser.add_argument("--node-rank", metavar="R", help="rank of this node (cluster.node_rank)")


def add_cluster_override_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="override of a [cluster] key; repeatable",
    )


def add_runs_folder_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--runs", metavar="DIR", type=Path, default=Path("runs"), help="folder of runs; default: runs"
    )


def add_json_option(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def resolve_run(arguments: argparse.Namespace, *, allow_scripts: bool = False) -> RunDirectory:
    """Return the run of RUN: a folder, a name below `--runs`, or the newest.

    Args:
        allow_scripts: include scripts without a session, of which only the end is recorded.

    Raises:
        WanmaError: there is none.
    """
    return find_run(arguments.run_name, arguments.runs, allow_scripts=allow_scripts)


def find_run(name: str | None, folder: Path, *, allow_scripts: bool = False) -> RunDirectory:
    """Return the run with this name, as in `resolve_run`."""
    runs = [run for run in list_runs(folder) if allow_scripts or run.job.is_file()]
    if name is None:
        if not runs:
            raise WanmaError(
                f"there are no runs in {folder.absolute()}",
                "start one with `wanma train JOB`, or search another folder with `--runs DIR`",
                EXIT_USAGE,
            )
        return runs[0]
    for path in (Path(name), folder / name):
        if (path / "job.toml").is_file() or (allow_scripts and is_run(path)):
            return RunDirectory(path)
        if is_run(path):
            raise WanmaError(
                f"the script that `wanma launch` ran in {path} did not open a wanma.session",
                "train in a wanma.session for records and checkpoints; see the outcome with `wanma show`",
                EXIT_USAGE,
            )
    names = [run.name for run in runs]
    known = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    raise WanmaError(
        f"there is no run '{name}'.{did_you_mean(name, names)}",
        f"runs in {folder}: {known or 'none'}",
        EXIT_USAGE,
    )


def resolve_checkpoint_location(name: str | None, runs: Path) -> str:
    """Return the place of the checkpoints of `name`: a URL, a folder with checkpoints, or that of a run.

    Raises:
        WanmaError: `name` is none of them.
    """
    if name is not None and "://" in name:
        return name
    if name is not None:
        has_checkpoint = (
            next(Path(name).glob("step-*"), None) is not None or (Path(name) / "manifest.json").is_file()
        )
        if has_checkpoint or Path(name).name.startswith("step-"):
            return name
        if Path(name).is_dir() and not (Path(name) / "job.toml").is_file():
            raise WanmaError(
                f"'{name}' is a folder without checkpoints: neither manifest.json nor step-* is in it",
                "name a run, a checkpoint folder, or a folder of checkpoints",
                EXIT_USAGE,
            )
    return str(find_run(name, runs).checkpoints)


def open_run(path: Path) -> RunDirectory:
    """Return the run in folder `path`.

    Raises:
        WanmaError: there is no run.
    """
    if not (path / "job.toml").is_file():
        raise WanmaError(f"there is no run in {path}", "list the runs with `wanma runs`", EXIT_USAGE)
    return RunDirectory(path)


def parse_integers(text: str) -> list[int]:
    """Parse a list of numbers such as '1,2,4', for argparse."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of numbers, such as 1,2,4") from None


def parse_count(text: str) -> int:
    """Parse a number of at least 1, such as 8 or 100_000, for argparse."""
    digits = text.replace("_", "").replace(",", "")
    if not digits.isdecimal() or int(digits) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of at least 1")
    return int(digits)


def parse_share(text: str) -> float:
    """Parse a number between 0 and 1, for argparse."""
    value = _parse_number(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not between 0 and 1, such as 0.02")
    return value


def parse_amount(text: str) -> float:
    """Parse a number that is not negative, for argparse."""
    value = _parse_number(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"'{text}' is less than 0")
    return value


def parse_url(text: str) -> str:
    """Parse a URL of http or https, without a slash at its end, for argparse."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"'{text}' does not begin with http:// or https://")
    return text.rstrip("/")


def _parse_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number")
    return value


def parse_names(text: str) -> list[str]:
    """Parse names with commas between them, for argparse."""
    return [part.strip() for part in text.split(",") if part.strip()]


def override_texts(values: Mapping[str, object]) -> list[str]:
    """Return options that are another form of a key as overrides, so that one place checks them.

    Args:
        values: values by key; None: the option is not given.
    """
    return [f"{key}={value}" for key, value in values.items() if value is not None]


def set_completer(action: argparse.Action, completer: Completer) -> None:
    """Set the completer of an argument, for argcomplete."""
    action.completer = completer  # type: ignore[attr-defined]  # argcomplete looks for it there


def complete_job_files(prefix: str, **_: Any) -> list[str]:
    from argcomplete.completers import FilesCompleter

    return list(FilesCompleter(("toml", "yaml", "yml"))(prefix))


def complete_overrides(prefix: str, **_: Any) -> list[str]:
    """Complete keys, as in 'train.st', then the values of an enumeration, as in 'train.precision='."""
    from wanma.job.file.schema import schema_tables

    name, chosen, _value = prefix.partition("=")
    keys = {
        key.path: key
        for table in schema_tables()
        if not (table.is_repeated or table.is_of_entry)
        for key in table.keys
    }
    if not chosen:
        return [f"{path}=" for path in keys if path.startswith(prefix)]
    if name == "parallel":
        return ["parallel=auto"]
    return [f"{name}={value}" for value in (keys[name].choices if name in keys else ())]


def complete_checkpoint_locations(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    from argcomplete.completers import DirectoriesCompleter

    return [*complete_run_names(prefix, parsed_args), *DirectoriesCompleter()(prefix)]


def complete_run_names(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    return [run.name for run in list_runs(parsed_args.runs) if run.name.startswith(prefix)]
