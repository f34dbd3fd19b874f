"""Command `wanma version`: versions to include in a bug report."""

from __future__ import annotations

import argparse


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "version", help="print the versions of wanma, Python and torch", epilog="example:\n  wanma version"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:  # noqa: ARG001  # every command takes its arguments
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from wanma import __version__

    print(f"wanma {__version__}")
    print(f"python {platform.python_version()}")
    for package in ("torch", "numpy"):
        try:
            print(f"{package} {version(package)}")
        except PackageNotFoundError:
            print(f"{package} is not installed")
    print(platform.platform())
    return 0
