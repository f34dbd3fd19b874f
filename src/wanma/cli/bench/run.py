"""Action `wanma bench run`: any programs, measured by the same meter as a training of wanma."""

from __future__ import annotations

import argparse

from wanma.cli.bench.arguments import add_measuring_options, add_turns_option, measure

_EXAMPLES = """\
examples:
  wanma bench run --loss 'loss ([0-9.]+)' -- torchrun --nproc-per-node 2 train_ddp.py
  wanma bench run --command 'python a.py' --command 'python b.py' --figure 'accuracy=acc: ([0-9.]+)'
  wanma bench run --step 'step [0-9]+' --samples 'batch ([0-9]+)' --until 'loss<=2' -- python train.py

A pattern is a regular expression whose group 1 is the number. Without patterns a script may print a line
such as `wanma step loss 2.5 samples 32` at the end of each step.
"""


def add_parsers(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = actions.add_parser(
        "run", help="measure any programs: other frameworks' scripts, unchanged", epilog=_EXAMPLES
    )
    parser.add_argument("words", metavar="COMMAND", nargs="*", help="a command and its arguments, after --")
    parser.add_argument(
        "--command",
        metavar="TEXT",
        dest="texts",
        action="append",
        default=[],
        help="a command as one text; repeatable: the commands take turns",
    )
    for name, text in (
        ("step", "pattern of a line that ends a step"),
        ("loss", "pattern of the loss"),
        ("samples", "pattern of the samples of a step"),
        ("targets", "pattern of the tokens, or labelled samples, of a step"),
        ("samples-per-second", "pattern of the throughput, where the program reports no samples"),
    ):
        parser.add_argument(f"--{name}", metavar="REGEX", help=text)
    parser.add_argument(
        "--figure",
        metavar="NAME=REGEX",
        action="append",
        default=[],
        help="pattern of a figure of the whole execution, such as accuracy; repeatable",
    )
    add_measuring_options(parser)
    add_turns_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from wanma.bench.suites.suite_of_commands import suite_of_commands

    suite, rule = suite_of_commands(
        [*([arguments.words] if arguments.words else []), *arguments.texts],
        patterns={
            name: getattr(arguments, name)
            for name in ("step", "loss", "samples", "targets", "samples_per_second")
        },
        figures=arguments.figure,
        target=arguments.until,
        turns=arguments.turns,
    )
    return measure(suite, rule, arguments)
