"""Command for writers of pages.

PYTHONPATH=src:tests python -m support.pages                  # blocks run, by page, and those not run, why
PYTHONPATH=src:tests python -m support.pages docs/index.md    # run pages; show what their commands print
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from support.pages.blocks import all_pages, read_page
from support.pages.checks import form_mistakes, mistakes
from support.pages.runner import BlockError, Scratch, run_page, runs_in_process


def list_blocks() -> None:
    """Print the number of blocks that run on each page, and every exception with its reason."""
    total = 0
    exceptions = []
    for path in all_pages():
        page = read_page(path)
        count = len(page.blocks_to_run())
        total += count
        suite = "" if runs_in_process(page) else "  with --full"
        reason = page.reason_not_runnable or "still to be converted"
        print(f"{count:4}  {page.name}{suite}" if count else f"   -  {page.name}: {reason}")
        exceptions += [
            f"{block.place}: {block.reason_not_run}" for block in page.blocks if block.reason_not_run
        ]
    print(f"{total:4}  in all")
    if exceptions:
        print("\nnot run:")
        print(*exceptions, sep="\n")


def run_pages(paths: list[Path]) -> int:
    """Run the pages and print what each command printed; return the number of pages that are wrong."""
    wrong = 0
    for path in paths:
        page = read_page(path.resolve())
        found = [*mistakes(page), *form_mistakes(page)]
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            scratch = Scratch(Path(folder) / "page")
            try:
                run_page(page, scratch)
            except BlockError as error:
                found.append(str(error))
            for ran in scratch.ran:
                print(f"$ {ran.command.text}\n{ran.printed}")
        print(f"{page.name}: {time.monotonic() - start:.1f} s", *found, sep="\n")
        wrong += bool(found)
    return wrong


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(run_pages([Path(name) for name in sys.argv[1:]]))
    list_blocks()
