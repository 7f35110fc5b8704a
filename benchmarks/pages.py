"""Pages of results: one renderer. What is shown where is said in `specs.py`; every number is of a row.

    python benchmarks/pages.py                        # docs/results/*.md, and the tables in other pages
    python benchmarks/pages.py --collect FILE ...     # first adds these files' rows to the subjects of their names
    python benchmarks/pages.py --collect FILE ... --instead   # in place of all rows of their cases and methods

`mkdocs.yml` names this file as a hook: pictures are drawn while the site is built, and are not committed.
"""

from __future__ import annotations

import argparse
import functools
import io
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._rows import RESULTS, SUFFIX, add_rows, filled, load, read_rows, take_over

ROOT = RESULTS.parents[1]
Row = dict[str, Any]
Where = Mapping[str, Any]
MISSING = "–"
CURVES = {"kl": "KL to full attention by ms per token", "offload": "Tokens per second by GPU memory",
          "host": "KL to full attention by ms per token, keys in CPU memory", "bytes": "KL by MB over the bus"}
"""Pictures of `curves.py`, and what they show."""


@dataclass(frozen=True)
class Cell:
    """One number of one row, and how it is written.

    rows: the subject (`<rows>.jsonl.gz`). where: fields that select the row; a tuple allows any of its values. of: the
    field that is shown. form: of the scaled number, after `less` was taken off. spread: `±` half the interval or `to`
    its ends. under: fields, in place of those of `where`, that select a row whose number is divided by this one.
    """

    title: str = ""
    where: Where = field(default_factory=dict)
    form: str = "{:.1f}"
    of: str = "value"
    scale: float = 1.0
    less: float = 0.0
    spread: str = ""
    under: Where | None = None
    rows: str = ""

    def drawn(self, rows: Sequence[Row], where: Where, used: list[Row] | None = None) -> str:
        """The cell's text; a dash where no row is. rows: where the cell names no subject. Raises ValueError where
        several rows differ."""
        rows = subject(self.rows) if self.rows else rows
        found = self.found(rows, {**where, **self.where}, used)
        if found is None:
            return MISSING
        value = found[self.of]
        if self.under is not None:
            other = self.found(rows, {**where, **self.where, **self.under}, used)
            if other is None:
                return MISSING
            value = other[self.of] / value
        text = self.written(value)
        if self.spread == "±":
            half = self.scale * (found["high"] - found["low"]) / 2
            number, unit = re.fullmatch(r"(\{.*?\})(.*)", self.form, re.DOTALL).groups()
            text = self.written(value).removesuffix(unit) + " ± " + number.replace("+", "").format(half) + unit
        elif self.spread == "to":
            least = 2 if ".2f" in self.form else 1
            text += f" ({bound(self.scale * found['low'], least)} to {bound(self.scale * found['high'], least)})"
        return text

    def written(self, value: Any) -> str:
        if isinstance(value, int | float) and (self.scale, self.less) != (1.0, 0.0):
            value = self.scale * (value - self.less)
        return re.sub(r"-(?=[\d.])", "−", self.form.format(value))

    def found(self, rows: Sequence[Row], where: Where, used: list[Row] | None = None) -> Row | None:
        chosen = [r for r in rows if selects(where, r) and r.get(self.of) is not None]
        if len({(r[self.of], r.get("low"), r.get("high")) for r in chosen}) > 1:
            raise ValueError(f"{len(chosen)} rows of {dict(where)}, expected one: "
                             f"{[(r.get('machine'), r.get('commit'), r[self.of]) for r in chosen[:4]]}")
        if chosen and used is not None:
            used.append(chosen[0])
        return chosen[0] if chosen else None


@dataclass(frozen=True)
class Table:
    """Rows of a subject: a line for every combination of the fields in `lines`, a column a cell.

    lines: fields and their headers. where: fields of all rows; a tuple also gives the order of the lines. words: what
    values are called, beside `WORDS`. made_by: fields of the rows that make a line, where not all do. chart: what
    the axis of the page's picture says, which is bars of the columns; without it there is none. curves: a picture of
    `curves.py` above the table. Columns without any row are left out.
    """

    title: str
    rows: str
    lines: Mapping[str, str]
    columns: Sequence[Cell]
    where: Where = field(default_factory=dict)
    note: str = ""
    words: Mapping[Any, str] = field(default_factory=dict)
    made_by: Where = field(default_factory=dict)
    chart: str = ""
    curves: str = ""

    def pool(self) -> list[Row]:
        """The rows that fields select which no column overrides."""
        other = {name for c in self.columns for name in (*c.where, *(c.under or ()))}
        fixed = {name: value for name, value in self.where.items() if name not in other}
        return [r for r in subject(self.rows) if selects(fixed, r)]

    def keys(self) -> list[tuple[Any, ...]]:
        """The values of every line, in order."""
        found = dict.fromkeys(
            tuple(freeze(r.get(f)) for f in self.lines) for r in self.pool()
            if selects({**self.where, **self.made_by}, r)
            and any(selects({**self.where, **c.where}, r) for c in self.columns))
        places = [self.where.get(f) if isinstance(self.where.get(f), tuple) else None for f in self.lines]

        def order(key: tuple[Any, ...]) -> tuple[int, ...]:
            return tuple(p.index(k) if p else 0 for p, k in zip(places, key, strict=True))

        return sorted(found, key=order)

    def cells(self, used: list[Row] | None = None) -> list[list[str]]:
        """Names and cells of every line."""
        made, rows = [], self.pool()
        for key in self.keys():
            where = {**self.where, **dict(zip(self.lines, map(thaw, key), strict=True))}
            names = [named(k, self.words) for k in key]
            made.append([*names, *(c.drawn(rows, where, used) for c in self.columns)])
        return [line for line in made if set(line[len(self.lines):]) != {MISSING}]

    def drawn(self) -> list[str]:
        used: list[Row] = []
        if not (cells := self.cells(used)):
            return []
        header, names = [*self.lines.values(), *(c.title for c in self.columns)], len(self.lines)
        shown = [i for i in range(len(header)) if i < names or any(line[i] != MISSING for line in cells)]
        table = grid([header[i] for i in shown], [[line[i] for i in shown] for line in cells], names)
        return section(self.title, self.note, [*([f"<!-- picture: {self.curves} -->", ""] if self.curves else []),
                                               *table], used)


@dataclass(frozen=True)
class Grid:
    """Lines that have a cell each of their own: words and cells."""

    title: str
    header: Sequence[str]
    lines: Sequence[Sequence[str | Cell]]
    note: str = ""
    origin: bool = True

    def drawn(self) -> list[str]:
        used: list[Row] = []
        lines = [[c if isinstance(c, str) else c.drawn((), {}, used) for c in line] for line in self.lines]
        return section(self.title, self.note, grid(self.header, lines, 1), used if self.origin else [])


@dataclass(frozen=True)
class Text:
    """A paragraph with cells in the places of `{}`."""

    text: str
    cells: Sequence[Cell]

    def drawn(self) -> list[str]:
        return [self.text.format(*(c.drawn((), {}) for c in self.cells))]


@dataclass(frozen=True)
class Page:
    """A page of docs/results/: its heading, what a reader must know, tables."""

    title: str
    intro: str
    parts: Sequence[Table | Grid]

    def drawn(self, name: str) -> str:
        picture = [f"<!-- picture: {name} -->", ""] if chart(self) is not None else []
        lines = [f"# {self.title}", "", self.intro, "", *picture]
        return "\n".join(lines + [line for part in self.parts for line in part.drawn()]).rstrip() + "\n"


def section(title: str, note: str, table: Sequence[str], used: Sequence[Row]) -> list[str]:
    made = [f"## {title}", ""] if title else []
    where = origin(used)
    about = " ".join(x for x in (note, where) if x)
    return [*made, *([about, ""] if about else []), *table, ""]


def grid(header: Sequence[str], lines: Sequence[Sequence[str]], left: int) -> list[str]:
    """A Markdown table; numbers to the right."""
    rule = ["---" if i < left else "---:" for i in range(len(header))]
    return [f"| {' | '.join(line)} |" for line in (header, rule, *lines)]


subject = functools.cache(load)


def selects(where: Where, r: Row) -> bool:
    return all(r.get(k) in v if isinstance(v, tuple) else r.get(k) == v for k, v in where.items())


def freeze(value: Any) -> Any:
    return tuple(sorted(value.items())) if isinstance(value, dict) else value


def thaw(value: Any) -> Any:
    return dict(value) if isinstance(value, tuple) else value


def bound(value: float, least: int = 1) -> str:
    """An end of an interval with `least` decimals, or two where one would hide on which side of zero it is."""
    return f"{value:.{2 if value and abs(value) < 0.05 else least}f}".replace("-", "−")


def card(machine: str) -> str:
    """A row's machine in short."""
    return machine.partition(", torch")[0].replace("NVIDIA ", "").replace(" 80GB HBM3", "")


def origin(used: Sequence[Row]) -> str:
    """Machines and commits of rows, in a sentence."""
    by: dict[str, list[str]] = {}
    for r in used:
        names = by.setdefault(card(r["machine"]), [])
        names += [c for c in r["commit"].split(" and ") if c not in names]
    return "; ".join(f"{m}, {'commit' if len(c) == 1 else 'commits'} {', '.join(c)}" for m, c in by.items()) + (
        "." if by else "")


def named(value: Any, words: Mapping[Any, str]) -> str:
    """A value in words: its own, those of methods and cases, or as it is."""
    from benchmarks.specs import WORDS

    if value in words or value in WORDS:
        return words[value] if value in words else WORDS[value]
    if isinstance(value, tuple):
        return ", ".join(f"{n} of {WORDS.get(kind, kind)}" for kind, n in value)
    if found := re.fullmatch(r"(?:(tp2)-)?(\w+?)-(?:load-([\d.]+)|(\d+[kM])-b(\d+))(-fp8)?", str(value)):
        two, model, rate, length, requests, eight = found.groups()
        said = f"{rate} requests/s" if rate else f"{requests} × {length}"
        return f"{WORDS.get(model, model)}, {said}{', fp8 cache' if eight else ''}{', 2 GPUs' if two else ''}"
    if isinstance(value, int) and value >= 1024 and value % 1024 == 0:
        return f"{value // 1024}k"
    if isinstance(value, float) and 0 < value < 1:
        return f"{100 * value:g} %"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|")


def chart(page: Page) -> Table | None:
    return next((p for p in page.parts if getattr(p, "chart", "")), None)


def picture(table: Table) -> bytes:
    """A table as SVG: bars of the columns, a group per line."""
    import matplotlib

    from sparsekv.evaluation.canvas import SERIES

    matplotlib.use("svg")
    from matplotlib import pyplot

    columns = [c for c in table.columns if c.of == "value" and c.under is None]
    names, values = [], []
    for key in table.keys():
        where = {**table.where, **dict(zip(table.lines, map(thaw, key), strict=True))}
        found = [c.found(table.pool(), {**where, **c.where}) for c in columns]
        if any(r is not None for r in found):
            names.append(", ".join(named(k, table.words) for k in key if k is not None))
            values.append([float("nan") if r is None else c.scale * (r["value"] - c.less)
                           for c, r in zip(columns, found, strict=True)])
    titles = [c.title for c in columns]
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": table.title, "font.family": "sans-serif",
                            "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = pyplot.subplots(figsize=(7.2, 0.5 + 0.16 * len(names) * (len(titles) + 1)))
        for i, title in enumerate(titles):
            axes.barh([n + (i - (len(titles) - 1) / 2) / (len(titles) + 1) for n in range(len(names))],
                      [v[i] for v in values], 1 / (len(titles) + 1), label=title, color=SERIES[i])
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlabel(table.chart)
        axes.legend(frameon=False, fontsize=8)
        axes.grid(alpha=0.25)
        out = io.BytesIO()
        figure.savefig(out, format="svg", bbox_inches="tight", facecolor="white", metadata={"Date": None})
        pyplot.close(figure)
    return out.getvalue()


def on_files(files: Any, config: Any) -> Any:
    """Add the pictures of all pages to the site (mkdocs hook)."""
    from mkdocs.structure.files import File

    from benchmarks import curves
    from benchmarks.specs import PAGES

    drawn = {name: picture(table) for name, page in PAGES.items() if (table := chart(page)) is not None}
    for name, content in (drawn | {name: curves.picture(name) for name in CURVES}).items():
        if content is not None:
            files.append(File.generated(config, f"results/{name}.svg", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, files: Any, **_: Any) -> str:
    """Show pictures in their places, as far as they were drawn (mkdocs hook)."""
    folder = page.file.src_uri.rpartition("/")[0]

    def shown(found: re.Match[str]) -> str:
        name = found[1]
        if files.get_file_from_path(f"results/{name}.svg") is None:
            return ""
        return f"![{CURVES.get(name, 'The first table as a picture')}]({'' if folder else 'results/'}{name}.svg)"

    return re.sub(r"<!-- picture: (\w+) -->", shown, markdown)


def pages() -> dict[Path, str]:
    """Every page that has something drawn, by its path, as the rows are now."""
    from benchmarks.specs import PAGES, PLACES

    made = {RESULTS / f"{name}.md": page.drawn(name) for name, page in PAGES.items()}
    for path, parts in PLACES.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        for name, part in parts.items():
            lines = part.drawn() or ["", MISSING, ""]
            text = filled(text, ["", *lines] if lines[-1] == "" else lines, name)
        made[ROOT / path] = text
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collect", type=Path, nargs="+", default=[], help="files of rows to add, by their names")
    parser.add_argument("--instead", action="store_true", help="drop all other rows of the cases and methods in them, "
                                                               "those of other machines too")
    options = parser.parse_args()
    for path in options.collect:
        name = path.name.removesuffix(SUFFIX).removesuffix(".json")
        if options.instead:
            take_over(name, read_rows(path))
        else:
            add_rows(name, read_rows(path))
    from benchmarks import _methods

    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    _methods.write()


if __name__ == "__main__":
    main()
