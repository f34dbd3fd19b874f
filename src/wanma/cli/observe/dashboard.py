"""Command `wanma dashboard`: live page of the runs in a folder."""

from __future__ import annotations

import argparse
import getpass
import socket

from wanma.cli.arguments import add_runs_folder_option

DEFAULT_PORT, MAX_PORT = 8265, 65535


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "dashboard",
        help="show the runs in a browser, as they train; changes nothing",
        epilog="example:\n  wanma dashboard --runs /data/runs    # it prints the line of ssh, too",
    )
    add_runs_folder_option(parser)
    parser.add_argument(
        "--port", type=_parse_port, default=DEFAULT_PORT, help="port on this machine; default: %(default)s"
    )
    parser.add_argument(
        "--host",
        metavar="NAME",
        action="append",
        default=[],
        help="further name under which a proxy passes requests on; repeatable",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from wanma.diagnosis.presentation import diagnosis_text
    from wanma.job.errors import EXIT_USAGE, WanmaError, missing_extra_error

    try:
        import uvicorn

        from wanma.dashboard.server import make_application
    except ImportError as error:
        raise missing_extra_error(str(error.name), "dashboard", "wanma dashboard") from error
    application = make_application(arguments.runs, diagnosis_text, arguments.host)
    try:
        listener = socket.create_server(("127.0.0.1", arguments.port))
    except OSError as error:
        raise WanmaError(
            f"port {arguments.port} of this machine cannot be used: {error.strerror or error}",
            "give another with --port, or 0 for any that is free",
            EXIT_USAGE,
        ) from error
    port = listener.getsockname()[1]
    print(f"http://127.0.0.1:{port}/")
    try:
        login = f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):  # a container's user may have no name
        login = socket.gethostname()
    print(f"from another machine: ssh -N -L {port}:127.0.0.1:{port} {login}")
    print("Ctrl-C ends it", flush=True)
    server = uvicorn.Server(uvicorn.Config(application, log_level="warning", timeout_graceful_shutdown=1))
    server.run(sockets=[listener])
    return 0


def _parse_port(text: str) -> int:
    if not text.isdecimal() or int(text) > MAX_PORT:
        raise argparse.ArgumentTypeError(f"'{text}' is not a port from 0 to {MAX_PORT}")
    return int(text)
