"""Elements of an HTML page: document, cards, tables, bars and key figures.

A page is one file without network requests. Text is escaped where it enters; arguments called HTML are not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from html import escape
from importlib.resources import files


@dataclass(frozen=True)
class KeyFigure:
    """Key figure with its label."""

    label: str
    value: str
    note: str = ""


def document(title: str, parts: Iterable[str], *, changes: str = "") -> str:
    """Return a whole page of HTML `parts`; empty ones are left out.

    Args:
        changes: URL of the server's events at which the page renews itself; empty: it does not.
    """
    names = ("page.css", "page.js", *(["live.js"] if changes else []))
    style, *scripts = (files("wanma.report.components").joinpath(name).read_text("utf-8") for name in names)
    script, sources = "\n".join(scripts), " connect-src 'self';" if changes else ""
    main = f'<main data-changes="{escape(changes)}">' if changes else "<main>"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" '
        f"content=\"default-src 'none';{sources} style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
        f"<title>{escape(title)} · wanma</title><style>{style}</style></head>\n<body>{main}\n"
        + "\n".join(part for part in parts if part)
        + f"\n</main><script>{script}</script></body></html>\n"
    )


def key_figure_tiles(figures: Iterable[KeyFigure]) -> str:
    """Render key figures side by side."""
    tiles = (
        f'<div class="tile"><span class="label">{escape(tile.label)}</span>'
        f'<span class="value">{escape(tile.value)}</span>'
        f'<span class="aside">{escape(tile.note)}</span></div>'
        for tile in figures
    )
    return f'<section class="tiles">{"".join(tiles)}</section>'


def card(title: str, body: str) -> str:
    """Render a card with a title and the HTML `body`."""
    return f'<div class="card"><h2>{escape(title)}</h2>{body}</div>'


def bar(segments: Iterable[tuple[str, float]]) -> str:
    """Render a bar of segments, pairs of a CSS class and a share of the whole width."""
    segments_html = "".join(
        f'<span class="{css}" style="width:{100 * share:.2f}%"></span>' for css, share in segments
    )
    return f'<div class="bar">{segments_html}</div>'


def bar_caption(label: str, number: str) -> str:
    return f'<p class="under"><span>{escape(label)}</span><b>{escape(number)}</b></p>'


def legend_entry(name: str, colour: int) -> str:
    """Render a name with its colour beside it."""
    return f'<span class="key c{colour}">{escape(name)}</span>'


def table_row(first: str, *numbers: str) -> str:
    """Render a row of a table; `first` is HTML."""
    cells = "".join(f'<td class="n">{escape(number)}</td>' for number in numbers)
    return f"<tr><td>{first}</td>{cells}</tr>"


def table_header(names: Iterable[str], numbers: Collection[str] = ()) -> str:
    """Render the first row of a table; the columns in `numbers` are right-aligned."""
    cells = (f"<th{' class=n' if name in numbers else ''}>{escape(name)}</th>" for name in names)
    return f"<tr>{''.join(cells)}</tr>"


def reason_list(texts: Iterable[str]) -> str:
    """Render sentences to be folded out; empty where there are none."""
    items = "".join(f"<li>{escape(str(text))}</li>" for text in texts)
    return f"<details><summary>Reasons</summary><ul>{items}</ul></details>" if items else ""
