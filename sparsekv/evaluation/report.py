"""One HTML file that needs no network: text, tables and figures; light, dark and print."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsekv.util.disk import placed, write_text
from sparsekv.util.errors import printable

STYLE = """
:root { color-scheme: light dark; --ink: #1d1d1f; --paper: #ffffff; --soft: #6a6a70; --line: #d8d8dc; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8ea; --paper: #16171a; --soft: #a0a0a8; --line: #3a3b40; } }
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2.5rem auto;
  max-width: 54rem; padding: 0 1.25rem; }
h1 { font-size: 1.6rem; line-height: 1.25; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .38rem .6rem; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; } th { color: var(--soft); font-weight: 600; }
th, td:not(:first-child) { white-space: nowrap; } .wide { overflow-x: auto; }
figure { margin: .6rem 0 0; } figcaption, .note { color: var(--soft); font-size: .9rem; }
figure svg { display: block; width: 100%; height: auto; }
@media screen and (prefers-color-scheme: dark) { figure svg { filter: brightness(1.3); } }
@page { margin: 14mm; }
@media print { :root { color-scheme: light; --ink: #000; --paper: #fff; --soft: #444; --line: #bbb; }
  body { font-size: 9.5pt; line-height: 1.35; margin: 0; padding: 0; max-width: none; }
  h2 { margin: 1.2rem 0 .3rem; } th, td { padding: .1rem .4rem; } .wide { overflow: visible; }
  section { break-inside: avoid; } figure svg { width: 150mm; max-height: 225mm; } }
"""
WORD = re.compile(r"[^\W\d_]{4}")
"""What a cell of numbers and units does not have."""


@dataclass(frozen=True)
class Table:
    """`rows` of strings under `header`; `note` says how to read it."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def text(self) -> str:
        """As Markdown, without title and note; numbers to the right, the first column and words to the left."""
        columns = list(zip(*self.rows, strict=True)) or [()] * len(self.header)
        rule = ["---"] + ["---" if any(WORD.search(cell) for cell in column) else "---:" for column in columns[1:]]
        return "\n".join("| " + " | ".join(line) + " |" for line in (self.header, rule, *self.rows))


@dataclass(frozen=True)
class Figure:
    """An SVG with its title and caption."""

    title: str
    svg: str
    caption: str


def write_pngs(folder: Path, figures: Sequence[Figure]) -> list[Path]:
    """The figures as `figures/<title>.png` under a folder; those not drawn here (plain SVG text) are passed over."""
    paths = []
    for figure in figures:
        png = getattr(figure.svg, "png", b"")
        if png:
            name = "".join(c if c.isalnum() else "-" for c in figure.title.lower().replace("ŝ", "s-hat")).strip("-")
            path = folder / "figures" / f"{'-'.join(filter(None, name.split('-')))}.png"
            with placed(path) as temporary:
                temporary.write_bytes(png)
            paths.append(path)
    return paths


def write_report(
    path: Path, title: str, intro: str, tables: Sequence[Table], figures: Sequence[Figure],
    details: Sequence[Table] = (),
) -> Path:
    """Write the page and return its path: tables, figures, and what only a second look needs, `details`, at the end."""
    e = html.escape
    parts = [f"<h1>{e(title)}</h1>", f"<p>{e(intro)}</p>", *map(_table, tables)]
    for figure in figures:
        parts.append(f"<section><h2>{e(figure.title)}</h2><figure>{figure.svg}<figcaption>{e(figure.caption)}"
                     "</figcaption></figure></section>")
    parts += map(_table, details)
    page = (f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{e(title)}</title>'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n")
    write_text(path, printable(page))
    return path


def _table(table: Table) -> str:
    e = html.escape
    head = "".join(f"<th>{e(h)}</th>" for h in table.header)
    body = "".join("<tr>" + "".join(f"<td>{e(c)}</td>" for c in row) + "</tr>" for row in table.rows)
    note = f'<p class="note">{e(table.note)}</p>' if table.note else ""
    return (f'<section><h2>{e(table.title)}</h2><div class="wide"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>{note}</section>")
