"""Output of `wanma data stats`, `convert` and `mix` for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from wanma.api.data.file_text import file_text
from wanma.observe.units import MISSING_TEXT, bytes_text, count_text, number_text, percent_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from wanma.api.data.run_mixture import RunMixture
    from wanma.data.tools.conversion import Conversion
    from wanma.data.tools.statistics import DataStatistics, FileStatistics, SourceStatistics

MAX_SHOWN_FILES = 20
"""Maximum files shown, unless all are requested."""
_BAR_COLUMNS = 30


def statistics_texts(found: DataStatistics, *, show_all: bool) -> Iterator[str | RenderableType]:
    """Yield the parts of the output of statistics.

    Args:
        show_all: show all files, not only the largest.
    """
    yield _sources_table(found.sources)
    for source in found.sources:
        yield ""
        yield f"{source.name}: bytes of a row"
        yield _histogram(source)
        files = source.files if show_all else _largest(source)
        if len(source.files) > 1:
            yield _files_table(files)
        if len(files) < len(source.files):
            yield f"the largest {len(files):,} of {len(source.files):,} files; --all shows the others"
        if source.damaged_files:
            yield f"damaged: {count_text(len(source.damaged_files), 'file')}; see `wanma data verify`"
    if found.most_repeated:
        yield ""
        yield "repeated most:"
        for one in found.most_repeated:
            yield f"  {one.rows:,} times: {file_text(one.file)}: row {one.row:,}"


def _sources_table(sources: Sequence[SourceStatistics]) -> Table:
    table = _table(("source", "format"), ("files", "rows", "stored", "content", "duplicates", "damaged"))
    for one in sources:
        table.add_row(
            Text(one.name),
            one.format,
            f"{len(one.files):,}",
            f"{one.rows:,}",
            bytes_text(one.size),
            bytes_text(one.content_bytes),
            f"{one.duplicates:,} ({percent_text(one.duplicates / max(one.rows, 1))})",
            f"{one.damaged:,}",
        )
    return table


def _largest(source: SourceStatistics) -> Sequence[FileStatistics]:
    order = sorted(source.files, key=lambda one: -one.size)[:MAX_SHOWN_FILES]
    return [one for one in source.files if one in order]


def _files_table(files: Sequence[FileStatistics]) -> Table:
    table = _table(("file",), ("rows", "stored", "content", "duplicates", "damaged"))
    for one in files:
        table.add_row(
            Text(file_text(one.file)),
            f"{one.rows:,}",
            bytes_text(one.size),
            bytes_text(one.content_bytes),
            f"{one.duplicates:,}",
            f"{one.damaged:,}",
        )
    return table


def _histogram(source: SourceStatistics) -> Table:
    grid = Table(box=None, show_header=False, pad_edge=False)
    for justify in ("right", "right", "left"):
        grid.add_column(justify=justify, no_wrap=True)
    most = max((rows for _, rows in source.histogram), default=1)
    for size, rows in source.histogram:
        bar = "█" * round(_BAR_COLUMNS * rows / most) or ("▏" if rows else "")
        grid.add_row(f"  up to {bytes_text(size)}", f"{rows:,}", bar)
    return grid


def conversion_text(done: Conversion) -> str:
    """Return the result of a conversion."""
    shards = count_text(done.shards, "shard")
    if done.resumed_shards:
        shards += f" ({done.resumed_shards:,} of them written before)"
    lines = [
        f"{done.folder}: {done.format}, {count_text(done.rows, 'row')} in {shards}, {bytes_text(done.size)}",
        f"content {done.fingerprint}, equal after reading back",
    ]
    if done.damages:
        rows = sum(one.rows for one in done.damages if one.row is not None)
        files = sum(one.row is None for one in done.damages)
        lines.append(f"left out: {count_text(files, 'damaged file')} and {count_text(rows, 'damaged row')}")
        lines += [
            f"  {file_text(one.file)}{'' if one.row is None else f': row {one.row:,}'}: {one.cause}"
            for one in done.damages[:MAX_SHOWN_FILES]
        ]
    return "\n".join(lines)


def mixture_texts(found: RunMixture) -> Iterator[str | RenderableType]:
    """Yield the parts of the output about the mixture of a run."""
    yield f"{found.run}: {count_text(found.samples, 'sample')} after {count_text(found.step, 'step')}"
    numbers = ("samples", "share", "weight", "tokens", "epochs")
    table = _table(("source",), numbers)
    for one in found.sources:
        table.add_row(
            Text(one.name),
            f"{one.samples:,}",
            percent_text(one.seen_share),
            percent_text(one.weight_share),
            MISSING_TEXT if one.tokens is None else f"{one.tokens:,}",
            number_text(found.epochs.get(one.name)),
        )
    yield table
    if found.checkpoint_step is not None and found.checkpoint_step != found.step:
        yield (
            f"newest checkpoint: step {found.checkpoint_step:,}, after {found.checkpoint_samples:,} samples; "
            "a resumed run sees the samples behind it again"
        )


def _table(texts: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in texts:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table
