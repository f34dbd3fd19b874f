"""Command `wanma observe render DIR`: files for Prometheus and Grafana."""

from __future__ import annotations

import argparse
from pathlib import Path

from wanma.cli.arguments import add_runs_folder_option, parse_url

_EXAMPLES = """\
examples:
  wanma observe render monitoring     # scrape configuration, alert rules, dashboards, runbook
  prometheus --config.file monitoring/prometheus/prometheus.yml
  wanma train job.toml --metrics-port 0                 # Prometheus finds its endpoint by itself

The rules are those by which each run watches itself (observe.alerts).
"""


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("observe", help="write files for Prometheus and Grafana", epilog=_EXAMPLES)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    render = actions.add_parser("render", help="write scrape configuration, rules, dashboards and runbook")
    render.add_argument(
        "folder", metavar="DIR", type=Path, help="folder; files of the same names are replaced"
    )
    render.add_argument(
        "--prometheus",
        metavar="URL",
        type=parse_url,
        default="http://127.0.0.1:9090",
        help="address of Prometheus, for Grafana; default: %(default)s",
    )
    render.add_argument(
        "--token-file",
        metavar="FILE",
        type=Path,
        help="file with the token of observe.metrics_token, where Prometheus runs",
    )
    render.add_argument(
        "--targets-url",
        metavar="URL",
        type=parse_url,
        help="address of /targets of `wanma dashboard`, where Prometheus does not see the folder of runs",
    )
    render.add_argument(
        "--runbook-url",
        metavar="URL",
        type=parse_url,
        help="address at which runbook.md can be read, for the links of alerts; default: its file",
    )
    render.add_argument(
        "--alertmanager",
        metavar="URL",
        type=parse_url,
        help="address of Alertmanager, which Prometheus then tells of alerts",
    )
    add_runs_folder_option(render)
    render.set_defaults(run=_render)


def _render(arguments: argparse.Namespace) -> int:
    from wanma.job.errors import EXIT_USAGE, WanmaError
    from wanma.observe.render.files import render_files

    try:
        files = render_files(
            arguments.folder,
            arguments.runs,
            arguments.prometheus,
            token_file=arguments.token_file,
            targets_url=arguments.targets_url,
            runbook_url=arguments.runbook_url,
            alertmanager_url=arguments.alertmanager,
        )
    except OSError as error:
        raise WanmaError(
            f"cannot write {error.filename or arguments.folder}: {error.strerror or error}",
            "give another folder",
            EXIT_USAGE,
        ) from error
    for file in files:
        print(file)
    return 0
