"""Colours and styles of methods, and their labels at the ends of lines."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sparsekv.core.registry import ESTIMATOR_ROWS, FULL, GREY, row_of
from sparsekv.evaluation.methods import label, plain

# Okabe and Ito's palette, distinct under the common colour-vision deficiencies
SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8c6bb1", "#7f7f7f")
"""Colours of lines that are no methods."""
SHADES = ("#4292c6", "#2b9d8f", "#e08214", "#d6604d")
"""Colours of quarters of the heads, from peaked to diffuse."""


def look(method: str) -> tuple[str, str, Any]:
    """Label (options by their values alone), colour and line style of a method: solid completed by φ, dashed by
    nothing, dotted with other options."""
    selector, _, completion = plain(method).partition("+")
    row, estimator = row_of(selector), ESTIMATOR_ROWS.get(completion)
    style = "-" if selector == FULL else "--" if not completion else "-." if estimator is None else estimator.line
    name = re.sub(r"([,:]) ?\w+=", ", ", label(method))
    return name, GREY if row is None else row.colour, style if plain(method) == method else ":"


def end_labels(axes: Any, ends: Mapping[str, float], top: float, last: int) -> None:
    """Methods at the right of the plot, each after a piece of its line, moved apart where two would touch. ends: the
    height at which a method's line ends; last: where the lines end."""
    beside = axes.get_yaxis_transform()  # across in parts of the plot's width, up in data
    methods = sorted(ends, key=ends.__getitem__)
    for method, height in zip(methods, _apart([ends[m] for m in methods], 0.062 * top, top), strict=True):
        name, colour, style = look(method)
        axes.plot([1.02, 1.08], [height] * 2, color=colour, linestyle=style, linewidth=1.7, clip_on=False,
                  transform=beside)
        axes.annotate(name, (1.09, height), xycoords=beside, color=colour, fontsize=9, va="center",
                      annotation_clip=False)
    margin = 0.06 * max(last, 1)
    axes.set_xlim(-margin, last + margin)


def _apart(wanted: Sequence[float], gap: float, top: float) -> list[float]:
    """Heights, lowest first, moved so that none touches another and none stands above `top`."""
    heights: list[float] = []
    for height in wanted:
        heights.append(max(height, heights[-1] + gap) if heights else height)
    for i in range(len(heights) - 1, -1, -1):
        heights[i] = min(heights[i], top if i == len(heights) - 1 else heights[i + 1] - gap)
    return heights


def written(value: float, _: int | None = None) -> str:
    """A tick as one writes it, not as a power of ten."""
    return f"{value:g}".replace("-", "−")
