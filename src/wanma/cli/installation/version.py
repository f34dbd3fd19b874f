"""Command `wanma version`: versions to include in a bug report, and licenses of the dependencies."""

from __future__ import annotations

import argparse


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "version",
        help="print the versions of wanma, Python and torch",
        epilog="examples:\n  wanma version\n  wanma version --licenses",
    )
    parser.add_argument(
        "--licenses", action="store_true", help="print the installed dependencies with version and license"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.licenses:
        _print_licenses()
        return 0
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


def _print_licenses() -> None:
    from wanma.hardware.checks.dependency_licenses import list_dependency_licenses

    entries = list_dependency_licenses()
    names = max(len(entry.package) for entry in entries)
    versions = max(len(entry.version) for entry in entries)
    for entry in entries:
        print(f"{entry.package:{names}}  {entry.version:{versions}}  {entry.license}")
