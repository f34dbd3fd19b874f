"""Command `wanma observe render DIR`: files for Prometheus and Grafana."""

from __future__ import annotations

import argparse
from pathlib import Path

from wanma.cli.arguments import add_runs_folder_option

_EXAMPLES = """\
examples:
  wanma observe render monitoring     # scrape configuration, alert rules, dashboards, runbook
  prometheus --config.file monitoring/prometheus/prometheus.yml
  wanma train job.toml --metrics-port 0                 # Prometheus finds its endpoint by itself

The rules are those by which each run watches itself (observe.alerts).
"""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("observe", help="write files for Prometheus and Grafana", epilog=_EXAMPLES)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    render = actions.add_parser("render", help="write scrape configuration, rules, dashboards and runbook")
    render.add_argument(
        "folder", metavar="DIR", type=Path, help="folder; files of the same names are replaced"
    )
    render.add_argument(
        "--prometheus",
        metavar="URL",
        default="http://127.0.0.1:9090",
        help="address of Prometheus, for Grafana; default: %(default)s",
    )
    add_runs_folder_option(render)
    render.set_defaults(run=_render)


def _render(arguments: argparse.Namespace) -> int:
    from wanma.job.errors import EXIT_USAGE, WanmaError
    from wanma.observe.render.files import render_files

    try:
        files = render_files(arguments.folder, arguments.runs, arguments.prometheus)
    except OSError as error:
        raise WanmaError(
            f"cannot write {error.filename or arguments.folder}: {error.strerror or error}",
            "give another folder",
            EXIT_USAGE,
        ) from error
    for file in files:
        print(file)
    return 0
