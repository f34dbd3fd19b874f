"""Parser of the command line (argparse), with errors for unknown commands and options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from wanma import __version__
from wanma.cli.bench import bench
from wanma.cli.commands import (
    checkpoint,
    cluster,
    doctor,
    export,
    job,
    launch,
    plan,
    render,
    runs,
    sample,
    train,
)
from wanma.cli.data import data
from wanma.cli.engines import logs, submitted_runs
from wanma.cli.installation import completion, init, version
from wanma.cli.observe import dashboard, diagnose, observe, profile
from wanma.job.errors import JobError, did_you_mean

COMMANDS = (
    init,
    train,
    plan,
    render,
    launch,
    runs,
    submitted_runs,
    logs,
    diagnose,
    profile,
    dashboard,
    observe,
    sample,
    export,
    checkpoint,
    data,
    doctor,
    cluster,
    bench,
    job,
    completion,
    version,
)

_DESCRIPTION = """\
Distributed AI training: plan, train, recover, measure and explain.

start here:
  wanma doctor                          check devices, network and packages of this node
  wanma init gpt                        write an example to start from; without a name: list all
  wanma train JOB.toml --dry-run        check a job and show its plan; starts nothing
  wanma train JOB.toml [KEY=VALUE ...]  train; the same command resumes after a stop
  wanma show                            results of the newest run
"""

_MOVED = {
    "wanma cluster --calibrate": "it is now `wanma bench machine --save`",
    "wanma bench collectives": "it is now `wanma bench machine --collectives NAME,NAME`",
    "wanma bench environment": "it is now pip: `wanma bench train SUITE` names the command of a missing one",
}
"""Replacement of an earlier action or option, by the words that named it."""


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):  # argparse leaves out their indentation
            longest = max(map(len, action.choices)) + self._current_indent + self._indent_increment
            self._action_max_length = max(self._action_max_length, longest)


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors are `JobError`; it does not guess options from their beginning."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(formatter_class=_Formatter, allow_abbrev=False, **keywords)

    def error(self, message: str) -> NoReturn:
        raise JobError(f"{self.prog}: {message}", f"see `{self.prog} --help`")


def build_parser() -> Parser:
    """Return the parser of all commands."""
    parser = Parser(prog="wanma", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"wanma {__version__}")
    # torch.distributed.launch and deepspeed put it before the command; their variables say the same.
    parser.add_argument("--local-rank", "--local_rank", dest="launcher_local_rank", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for module in COMMANDS:
        module.add_parsers(commands)
    _describe(parser)

    def overview(_: argparse.Namespace) -> int:
        parser.print_help()
        return 0

    parser.set_defaults(run=overview)
    return parser


def parse(parser: Parser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments; overrides may stand before and after options.

    Raises:
        JobError: unknown command or option, a missing or wrong argument.
    """
    names = set(_subcommands(parser))
    if arguments and not arguments[0].startswith("-") and arguments[0] not in names:
        raise _unknown_command(arguments[0], names)
    _check_moved(" ".join(("wanma", *arguments[:2])))
    # argparse accepts one block of positionals: later ones are returned as `unparsed`.
    parsed, unparsed = parser.parse_known_args(arguments)
    if unparsed:
        unknown = [text for text in unparsed if text.startswith("-") or not hasattr(parsed, "overrides")]
        if unknown:
            raise _unknown_argument(unknown[0], parsed, parser)
        parsed.overrides = [*parsed.overrides, *unparsed]
    parsed.command_line = ["wanma", *arguments]
    return parsed


def _unknown_command(name: str, names: set[str]) -> JobError:
    if name.endswith((".toml", ".yaml", ".yml")):
        return JobError(f"'{name}' is not a command.", f"to train it: wanma train {name}")
    return JobError(
        f"unknown command '{name}'.{did_you_mean(name, names)}", "see the commands with `wanma --help`"
    )


def _check_moved(words: str) -> None:
    """Check that words of the command line name no earlier action or option.

    Raises:
        JobError: they do; the hint names the replacement.
    """
    if words in _MOVED:
        raise JobError(f"there is no longer {words}", _MOVED[words])


def _unknown_argument(argument: str, parsed: argparse.Namespace, parser: argparse.ArgumentParser) -> JobError:
    for name in (parsed.command, getattr(parsed, "action", None)):
        parser = _subcommands(parser).get(name or "", parser)
    prog = parser.prog
    hint = f"see `{prog} --help`"
    if not argument.startswith("-"):
        return JobError(f"{prog}: unexpected argument '{argument}'", hint)
    name = argument.partition("=")[0]
    _check_moved(f"{prog} {name}")
    if "." in name:
        return JobError(
            f"{prog}: unknown option {argument}", "write overrides without dashes: train.steps=500"
        )
    if hasattr(parsed, "overrides"):
        from wanma.job.file.other_names import key_of_option

        if (key := key_of_option(name)) is not None:
            return JobError(f"{prog}: unknown option {name}", f"it is a key of the job: {key}=VALUE")
    options = parser._option_string_actions
    return JobError(f"{prog}: unknown option {name}.{did_you_mean(name, options)}", hint)


def _describe(parser: argparse.ArgumentParser) -> None:
    """Give each command without a description its line in the list of commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for listed in action._choices_actions:
                command = action.choices[listed.dest]
                text = listed.help or ""
                command.description = command.description or f"{text[:1].upper()}{text[1:]}."
                _describe(command)


def _subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of the commands, or of the actions of a command, by name."""
    commands: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            commands |= action.choices
    return commands
