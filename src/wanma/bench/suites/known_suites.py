"""Suites that have a name: those that are shipped, and those that other packages bring along.

A package adds suites by an entry point of the group `wanma.suites`: its value is a folder of suite files.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

from wanma.job.errors import WanmaError

ENTRY_POINT_GROUP = f"{__name__.partition('.')[0]}.suites"
"""Group of entry points of folders in other packages: `wanma.suites`."""
SHIPPED = Path(__file__).parent / "shipped"
"""Folder of the shipped suites."""


def known_suites() -> dict[str, Path]:
    """Return the files of all suites by name: the shipped ones, then those of other packages.

    Raises:
        WanmaError: see `suite_folders`; or two suites have one name.
    """
    suites: dict[str, Path] = {}
    for entry, folder in suite_folders().items():
        for name, path in _suites_in(folder).items():
            if name in suites:
                raise WanmaError(
                    f"the entry point {entry} in {ENTRY_POINT_GROUP} has the suite '{name}', which is also "
                    f"{suites[name]}",
                    "rename the file in its package",
                )
            suites[name] = path
    return suites


def suite_folders() -> dict[str, Path]:
    """Return the folders of suites by the name of their entry point, the shipped ones first.

    Raises:
        WanmaError: an entry point cannot be loaded, is no folder, or takes a name that is in use.
    """
    folders = {SHIPPED.name: SHIPPED}
    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: (entry.name, entry.value)):
        place = f"the entry point {entry.name} = {entry.value} in {ENTRY_POINT_GROUP}"
        try:
            folder = Path(entry.load())
        except Exception as error:  # a foreign module may raise anything
            raise WanmaError(f"{place} cannot be loaded: {error}", "correct or remove its package") from error
        if not folder.is_dir():
            raise WanmaError(f"{place} is no folder of suites: {folder}", "correct or remove its package")
        if entry.name in folders:
            raise WanmaError(f"{place} takes a name that another folder of suites has", "rename it")
        folders[entry.name] = folder
    return folders


def _suites_in(folder: Path) -> dict[str, Path]:
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}
