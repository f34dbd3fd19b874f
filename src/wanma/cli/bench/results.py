"""Actions on results: `wanma bench list`, `compare`, `reproduce` and `export`."""

from __future__ import annotations

import argparse
from pathlib import Path

from wanma.cli.bench.arguments import add_environments_option, add_results_option, print_blocks
from wanma.cli.output import print_progress, print_warning
from wanma.job.errors import EXIT_USAGE, WanmaError


def add_parsers(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    listing = actions.add_parser("list", help="list the results", epilog="examples:\n  wanma bench list")
    add_results_option(listing)
    listing.set_defaults(run=_list)

    shown = actions.add_parser(
        "show", help="show a result", epilog="examples:\n  wanma bench show 20261126-101530-gpt"
    )
    _add_result(shown, "result", "RESULT")
    add_results_option(shown)
    shown.set_defaults(run=_show)

    compared = actions.add_parser(
        "compare",
        help="compare two results of the same suite",
        epilog="examples:\n  wanma bench compare 20261120-101530-gpt 20261126-101530-gpt",
    )
    _add_result(compared, "before", "A")
    _add_result(compared, "after", "B")
    compared.add_argument(
        "--allow-differences", action="store_true", help="compare although hardware or settings differ"
    )
    add_results_option(compared)
    compared.set_defaults(run=_compare)

    reproduced = actions.add_parser(
        "reproduce",
        help="run a result again, and tell which figures lie within its intervals",
        epilog="examples:\n  wanma bench reproduce 20261126-101530-gpt",
    )
    _add_result(reproduced, "result", "RESULT")
    add_environments_option(reproduced)
    add_results_option(reproduced)
    reproduced.set_defaults(run=_reproduce)

    exported = actions.add_parser(
        "export",
        help="write a result as CSV or Markdown",
        epilog="examples:\n  wanma bench export RESULT --format csv --out folder",
    )
    _add_result(exported, "result", "RESULT")
    exported.add_argument("--format", choices=["csv", "markdown"], default="csv", help="default: csv")
    exported.add_argument("--out", metavar="DIR", type=Path, help="folder; default: that of the result")
    add_results_option(exported)
    exported.set_defaults(run=_export)


def _add_result(parser: argparse.ArgumentParser, name: str, metavar: str) -> None:
    parser.add_argument(name, metavar=metavar, help="name of a result, its beginning, or its folder")


def _list(arguments: argparse.Namespace) -> int:
    from wanma.bench.presentation.comparison_blocks import list_block
    from wanma.bench.results.directory import read_results

    problems: list[str] = []
    found = [result for _, result in read_results(arguments.results, problems)]
    if not found:
        print(f"there are no results in {arguments.results}; `wanma bench train JOB` makes one")
    else:
        print_blocks([list_block(found)])
    for problem in problems:
        print_warning(problem)
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from wanma.bench.display import blocks_of, page_of
    from wanma.bench.machine.machine_result import is_machine_result
    from wanma.bench.results.directory import find_result

    directory = find_result(arguments.results, arguments.result)
    result = directory.read()
    print_blocks(blocks_of(result, directory))
    if is_machine_result(result) and result.ended:
        directory.write_page(page_of(result, directory))  # its roofline has the trainings since
    if directory.page.exists():
        print(f"page: {directory.page}")
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from wanma.bench.comparisons.comparison import compare_results
    from wanma.bench.presentation.comparison_blocks import comparison_blocks
    from wanma.bench.results.directory import find_result

    before = find_result(arguments.results, arguments.before).read()
    after = find_result(arguments.results, arguments.after).read()
    comparison = compare_results(before, after, allows_differences=arguments.allow_differences)
    print_blocks(comparison_blocks(comparison))
    return 0


def _reproduce(arguments: argparse.Namespace) -> int:
    from wanma.bench.benchmark import reproduce
    from wanma.bench.comparisons.reproduction import is_reproduced
    from wanma.bench.presentation.comparison_blocks import reproduction_blocks
    from wanma.bench.results.directory import find_result

    stored = find_result(arguments.results, arguments.result)
    figures, directory = reproduce(stored, arguments.results, print_progress, arguments.environments)
    print_blocks(reproduction_blocks(figures))
    print(f"result: {directory.path}")
    return int(not is_reproduced(figures))


def _export(arguments: argparse.Namespace) -> int:
    from wanma.bench.presentation.result_blocks import section_blocks
    from wanma.bench.presentation.result_tables import (
        markdown_block,
        markdown_table,
        scaling_csv,
        steps_csv,
        summaries_csv,
    )
    from wanma.bench.results.directory import find_result

    directory = find_result(arguments.results, arguments.result)
    result, folder = directory.read(), arguments.out or directory.path
    texts = (
        {
            "steps.csv": steps_csv(result),
            "figures.csv": summaries_csv(result),
            "scaling.csv": scaling_csv(result),
        }
        if arguments.format == "csv"
        else {"result.md": "\n".join([markdown_table(result), *map(markdown_block, section_blocks(result))])}
    )
    written = {folder / name: text for name, text in texts.items() if text}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in written.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise WanmaError(
            f"cannot write {error.filename or folder}: {error.strerror or error}",
            "give another folder with --out DIR",
            EXIT_USAGE,
        ) from error
    print(f"written: {', '.join(map(str, written))}")
    return 0
