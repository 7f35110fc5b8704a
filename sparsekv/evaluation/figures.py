"""Figures as SVG, one hue a method everywhere, labels on the lines, readable in light and dark.

Text and axes are drawn in `currentColor`, so a page's own colour scheme applies.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

# Okabe and Ito's palette, told apart under the common colour-vision deficiencies
HUES = {"full": "#7f7f7f", "sink_tail": "#CC79A7", "topk": "#0072B2", "router": "#D55E00", "oracle": "#009E73"}
PLACEHOLDER = "#123456"


def error_by_budget(points: dict[tuple[str, bool], list[tuple[float, float]]]) -> str:
    """Relative output error against the share of the context retrieved. points: (method, with φ) -> (budget, error)."""
    figure, axes = _figure()
    ends: list[tuple[float, str, str]] = []
    for (method, phi), line in points.items():
        x, y = zip(*sorted(line), strict=True)
        colour, style = HUES[method], "-" if phi else "--"
        name = {"topk": "exact top-k", "router": "router", "sink_tail": "sink + tail"}[method] + (" + φ" if phi else "")
        if len(x) == 1:
            axes.axhline(y[0], color=colour, linestyle=style, linewidth=1.4)
            axes.annotate(name, (0.01, y[0]), xytext=(6, 6), textcoords="offset points", color=colour, fontsize=9)
        else:
            axes.plot(x, y, color=colour, linestyle=style, marker="o", markersize=4, linewidth=1.8)
            ends.append((y[-1], name, colour))
    # labels stand at the ends of their lines, moved apart where two would touch
    gap, height = 0.045 * max(max(e for _, e in line) for line in points.values()), float("-inf")
    for y_end, name, colour in sorted(ends):
        height = max(y_end, height + gap)
        axes.annotate(name, (0.105, height), color=colour, fontsize=9, va="center", annotation_clip=False)
    axes.set_xscale("log")
    axes.set_xlim(0.009, 0.23)
    axes.set_ylim(bottom=0)
    ticks = [0.01, 0.02, 0.05, 0.10]
    axes.set_xticks(ticks, [f"{t:.0%}" for t in ticks])
    axes.minorticks_off()
    axes.set_xlabel("share of the context retrieved per query (anchors come on top)")
    axes.set_ylabel("relative error of the attention output")
    return _svg(figure)


METHOD_HUES = {"streaming": "#CC79A7", "topk": "#0072B2", "router": "#D55E00", "quest": "#009E73", "snapkv": "#E69F00",
               "token_select": "#56B4E9", "lfps": "#8c6bb1", "magicpig": "#a6761d"}


def score_by_budget(rows: Sequence[Mapping[str, Any]], case: str) -> str:
    """Score of every method by budget with its interval; rows of metric `score`. Solid lines: completed."""
    figure, axes = _figure()
    known = [r for r in rows if r["case"] == case and r["metric"] == "score" and r["value"] is not None]
    budgets = sorted({r["budget"] for r in known if r["budget"] is not None}) or [1.0]
    ends: list[tuple[float, str, str]] = []
    for method in dict.fromkeys(r["method"] for r in known):
        line = sorted((r for r in known if r["method"] == method), key=lambda r: r["budget"] or 0.0)
        name, _, completion = method.partition("+")
        colour = METHOD_HUES.get(name, HUES["full"])
        style = "-" if completion or name in ("full", "streaming") else "--"
        x = [r["budget"] for r in line] if line[0]["budget"] is not None else [budgets[0], budgets[-1]]
        y = [r["value"] for r in line] if line[0]["budget"] is not None else [line[0]["value"]] * 2
        axes.plot(x, y, color=colour, linestyle=style, linewidth=1.8, marker="o" if len(line) > 1 else "", markersize=4)
        if line[0]["budget"] is not None:
            low, high = ([r[end] for r in line] for end in ("low", "high"))
            axes.fill_between(x, low, high, color=colour, alpha=0.10, linewidth=0)
        ends.append((y[-1], method.replace("+phi", " + φ"), colour))
    top = max([1.0, *(r["high"] for r in known)])
    for height, label, colour in _apart(sorted(ends), 0.055 * top, top):
        axes.annotate(label, (budgets[-1] * 1.06, height), color=colour, fontsize=9, va="center", annotation_clip=False)
    axes.set_xscale("log")
    axes.set_xlim(budgets[0] * 0.93, budgets[-1] * 1.9)
    axes.set_ylim(0, 1.04 * top)
    axes.set_xticks(budgets, [f"{100 * b:g} %" for b in budgets])
    axes.minorticks_off()
    axes.set_xlabel("share of the context a query may retrieve")
    axes.set_ylabel("score, points of 100")
    return _svg(figure)


def mass_curve(fractions: Sequence[float], quartiles: Mapping[str, Sequence[float]]) -> str:
    """Share of the mid region's attention mass in its best keys, for heads from peaked to diffuse."""
    figure, axes = _figure()
    shades = ("#08519c", "#3182bd", "#6baed6", "#9ecae1")
    for (name, shares), colour in zip(quartiles.items(), shades, strict=False):
        axes.plot(fractions, shares, color=colour, linewidth=1.8)
        middle = len(fractions) // 3
        axes.annotate(name, (fractions[middle], shares[middle]), xytext=(8, -12), textcoords="offset points",
                      color=colour, fontsize=9)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    ticks = [0.001, 0.01, 0.1, 1.0]
    axes.set_xticks(ticks, ["0.1%", "1%", "10%", "100%"])
    axes.minorticks_off()
    axes.set_xlabel("best keys of the mid region, as a share of it")
    axes.set_ylabel("share of the mid region's attention mass")
    return _svg(figure)


def training_curves(curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> str:
    """Loss against step, one panel a part. curves: name -> (steps, losses)."""
    figure, axes = _figure(len(curves))
    for panel, (name, (steps, losses)) in zip(axes if len(curves) > 1 else [axes], curves.items(), strict=True):
        panel.plot(steps, losses, color=HUES["router"] if "router" in name else HUES["topk"], linewidth=1.6)
        panel.set_title(name, fontsize=10, color=PLACEHOLDER)
        panel.set_xlabel("step")
        panel.set_ylabel("loss, mean over heads")
        panel.set_ylim(bottom=0)
    return _svg(figure)


def _apart(labels: list[tuple[float, str, str]], gap: float, top: float) -> list[tuple[float, str, str]]:
    """Labels, lowest first, moved so that none touches another and none stands above `top`."""
    heights: list[float] = []
    for height, *_ in labels:
        heights.append(max(height, heights[-1] + gap) if heights else height)
    for i in range(len(heights) - 1, -1, -1):
        heights[i] = min(heights[i], top if i == len(heights) - 1 else heights[i + 1] - gap)
    return [(h, text, colour) for h, (_, text, colour) in zip(heights, labels, strict=True)]


def _figure(columns: int = 1) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10})
    figure, axes = plt.subplots(1, columns, figsize=(7.2, 3.9), layout="constrained")
    for panel in axes if columns > 1 else [axes]:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#8888", linewidth=0.5)
        panel.tick_params(colors=PLACEHOLDER)
        for part in (*panel.spines.values(), panel.xaxis.label, panel.yaxis.label):
            part.set_color(PLACEHOLDER)
    return figure, axes


def _svg(figure: Any) -> str:
    import matplotlib.pyplot as plt

    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    plt.close(figure)
    text = buffer.getvalue()
    text = text[text.index("<svg"):].replace(PLACEHOLDER, "currentColor")
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'width="100%"', text, count=1)
