"""One HTML file that needs no network: verdict, text, tables and figures; light, dark, phone and print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsekv.util.disk import placed, write_text
from sparsekv.util.errors import printable
from sparsekv.util.pages import Drawing, markdown, template


@dataclass(frozen=True)
class Table:
    """`rows` of strings under `header`; `note` says how to read it; `marked`: the row of the default setting."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    marked: int | None = None

    def text(self) -> str:
        """Write it as Markdown, without title and note."""
        return markdown(self.header, self.rows)


@dataclass(frozen=True)
class Figure:
    """A drawing with its title and caption."""

    title: str
    svg: Drawing
    caption: str


def write_pngs(folder: Path, figures: Sequence[Figure]) -> list[Path]:
    """The figures as `figures/<title>.png` under a folder."""
    paths = []
    for figure in figures:
        name = "".join(c if c.isalnum() else "-" for c in figure.title.lower().replace("ŝ", "s-hat")).strip("-")
        paths.append(folder / "figures" / f"{'-'.join(filter(None, name.split('-')))}.png")
        with placed(paths[-1]) as temporary:
            temporary.write_bytes(figure.svg.png)
    return paths


def write_report(
    path: Path, title: str, intro: str, tables: Sequence[Table], figures: Sequence[Figure],
    details: Sequence[Table] = (), verdict: Mapping[str, str] | None = None,
) -> Path:
    """Write the page and return its path: what is gained, lost and set (`verdict`, by name), tables, figures, and what
    only a second look needs, `details`, at the end."""
    from jinja2 import Template

    page = Template(template("sparsekv.evaluation", "page.html.j2"), autoescape=True).render(
        title=title, intro=intro, tables=tables, figures=figures, details=details, verdict=verdict)
    write_text(path, printable(page) + "\n")
    return path
