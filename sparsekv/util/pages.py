"""Tables in Markdown, templates of pages, and figures in the ink of the page."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

WORD = re.compile(r"[^\W\d_]{4}")
"""A word, which a cell of numbers and units does not have."""
INK = "#1d1d1e"
LOOK: dict[Any, Any] = {
    "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "axes.grid.axis": "y", "grid.color": "#8888", "grid.linewidth": 0.5, "axes.edgecolor": INK, "axes.labelcolor": INK,
    "axes.titlecolor": INK, "xtick.color": INK, "ytick.color": INK}


class Drawing(str):
    """An SVG whose text and axes take the colour of the page; `png` is the same on white."""

    png: bytes = b""


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; numbers to the right, the first column and words to the left."""
    columns = list(zip(*rows, strict=True)) or [()] * len(header)
    rule = ["---"] + ["---" if any(WORD.search(cell) for cell in column) else "---:" for column in columns[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *rows))


def template(package: str, name: str) -> str:
    """The Jinja source beside the modules of a package."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


def canvas(columns: int = 1, rows: int = 1, height: float = 3.9) -> Any:
    """A figure and its axes, one or an array. height: of a figure of one row [inches]."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(LOOK):
        figure = Figure(figsize=(7.2, height if rows == 1 else 2.4 * rows), layout="constrained")
        return figure, figure.subplots(rows, columns)


def drawn(figure: Any) -> Drawing:
    """The finished figure."""
    import matplotlib

    buffer, pixels = io.StringIO(), io.BytesIO()
    with matplotlib.rc_context(LOOK):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        figure.savefig(pixels, format="png", dpi=160, facecolor="white", metadata={"Software": None})
    text = buffer.getvalue()
    text = text[text.index("<svg"):].replace(INK, "currentColor")
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    made = Drawing(re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'width="100%"', text, count=1))
    made.png = pixels.getvalue()
    return made


def legend(axes: Any) -> None:
    """Above the plot, where no line runs through it."""
    count = len(axes.get_legend_handles_labels()[0])
    if count:
        axes.legend(fontsize=8, frameon=False, labelcolor=INK, ncols=min(5, count), loc="lower left",
                    bbox_to_anchor=(0.0, 1.0), borderaxespad=0.2)
