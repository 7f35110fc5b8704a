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
PLACEHOLDER = "#1d1d1e"


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


def _figure(columns: int = 1, rows: int = 1) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10})
    figure, axes = plt.subplots(rows, columns, figsize=(7.2, 3.9 if rows == 1 else 2.4 * rows), layout="constrained")
    for panel in axes.flat if columns * rows > 1 else [axes]:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", color="#8888", linewidth=0.5)
        panel.tick_params(colors=PLACEHOLDER)
        for part in (*panel.spines.values(), panel.xaxis.label, panel.yaxis.label):
            part.set_color(PLACEHOLDER)
    return figure, axes


class Drawing(str):
    """An SVG whose text takes the colour of the page; `png` is the same on white."""

    png: bytes = b""


def _svg(figure: Any) -> Drawing:
    import matplotlib.pyplot as plt

    buffer, pixels = io.StringIO(), io.BytesIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    figure.savefig(pixels, format="png", dpi=160, facecolor="white", metadata={"Software": None})
    plt.close(figure)
    text = buffer.getvalue()
    text = text[text.index("<svg"):].replace(PLACEHOLDER, "currentColor")
    made = Drawing(re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'width="100%"', text, count=1))
    made.png = pixels.getvalue()
    return made


COMPLETION_STYLES = {"": "--", "phi": "-", "centroid": ":", "moments": "-.", "sampling": (0, (1, 2, 4, 2))}
SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8c6bb1", "#7f7f7f")
SHADES = ("#4292c6", "#2b9d8f", "#e08214", "#d6604d")


def error_lines(budgets: Sequence[float], errors: Mapping[str, Sequence[float]]) -> Drawing:
    """Error by budget, a line a method (`topk+phi`); the colour says what is read, the style what completes it."""
    figure, axes = _figure()
    ends = []
    for method, line in errors.items():
        selector, _, completion = method.partition("+")
        colour = METHOD_HUES.get(selector, HUES["full"])
        axes.plot(_places(budgets), line, color=colour, linestyle=COMPLETION_STYLES.get(completion, "-"), marker="o",
                  markersize=3, linewidth=1.7)
        ends.append((line[-1], method.replace("+phi", " + φ").replace("+", " + "), colour))
    top = max(max(line) for line in errors.values())
    for height, label, colour in _apart(sorted(ends), 0.06 * top, top):
        axes.annotate(label, (len(budgets) - 0.85, height), color=colour, fontsize=9, va="center",
                      annotation_clip=False)
    axes.set_xlim(-0.2, len(budgets) + 0.6)
    axes.set_ylim(0, 1.05 * top)
    _budget_axis(axes, budgets)
    axes.set_ylabel("relative error of the output")
    return _svg(figure)


def gain_by_quartile(budgets: Sequence[float], gains: Mapping[str, Sequence[float]]) -> Drawing:
    """What completion takes off the error, by budget, a line a quarter of the heads."""
    figure, axes = _figure()
    axes.axhline(0, color="#888888", linewidth=0.8)
    for (name, line), colour in zip(gains.items(), SHADES, strict=False):
        axes.plot(_places(budgets), line, color=colour, marker="o", markersize=3, linewidth=1.7, label=name)
    axes.set_yscale("symlog", linthresh=0.01)
    _budget_axis(axes, budgets)
    axes.set_ylabel("error taken off")
    _legend(axes)
    return _svg(figure)


def by_layer(
    layers: Sequence[int], lines: Mapping[str, Sequence[float]], what: str, *, log: bool = False,
    band: tuple[Sequence[float], Sequence[float]] | None = None,
) -> Drawing:
    """Something by layer, a line a name."""
    figure, axes = _figure()
    if band is not None:
        axes.fill_between(layers, *band, color=SERIES[0], alpha=0.15, linewidth=0)
    for (name, line), colour in zip(lines.items(), SERIES * 3, strict=False):
        axes.plot(layers, line, color=colour, marker="o", markersize=3, linewidth=1.7, label=name)
    if log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, max(1.02, *(max(line) for line in lines.values())))
    axes.set_xlabel("layer")
    axes.set_ylabel(what)
    _legend(axes)
    return _svg(figure)


def kernel_scatter(pairs: Sequence[Sequence[float]]) -> Drawing:
    """Logits of the teacher against the student's, with the line where they agree."""
    figure, axes = _figure()
    teacher, student = zip(*pairs, strict=True)
    low = min(*teacher, *student)
    axes.plot([low, 0], [low, 0], color="#888888", linewidth=1)
    axes.scatter(teacher, student, s=7, color=SERIES[0], alpha=0.35, linewidths=0, rasterized=True)
    axes.set_xlabel("s, teacher [nats below the query's best]")
    axes.set_ylabel("ŝ, feature maps")
    return _svg(figure)


def histogram(edges: Sequence[float], counts: Sequence[int], what: str) -> Drawing:
    """Shares of a histogram."""
    figure, axes = _figure()
    total = max(sum(counts), 1)
    axes.stairs([c / total for c in counts], edges, color=SERIES[0], fill=True, alpha=0.6)
    axes.axvline(0, color="#888888", linewidth=1)
    axes.set_xlabel(what)
    axes.set_ylabel("share of the keys")
    return _svg(figure)


def trade_off(times: Mapping[str, float], ratio: float | None) -> Drawing:
    """Speed of top-k + φ against exact top-k over I/O slowdown (across) and retrieval ratio (up), from times to load,
    attend and complete; contours of break-even with the cost of φ scaled (completion paper, appendix G)."""
    import numpy as np

    slowdown, ratios = np.meshgrid(np.geomspace(1, 1000, 121), np.linspace(1, 10, 91))
    load, attend, complete = (times[k] for k in ("load", "attend", "complete"))

    def speed(scale: float) -> Any:
        return (ratios * (slowdown * load + attend)) / (slowdown * load + attend + scale * complete)

    figure, axes = _figure()
    axes.grid(False)
    levels = np.linspace(-1, 1, 21)
    image = axes.contourf(slowdown, ratios, np.log10(speed(1.0)).clip(-1, 1), levels=levels, cmap="RdYlBu", alpha=0.85)
    for scale, colour in zip((1.0, 0.3, 0.1, 0.01), ("#000000", "#333333", "#666666", "#999999"), strict=True):
        field = speed(scale)
        if field.min() < 1 < field.max():
            line = axes.contour(slowdown, ratios, field, levels=[1.0], colors=[colour], linewidths=1.6)
            axes.clabel(line, fmt={1.0: f"φ × {scale:g}"}, fontsize=8)
    if ratio is not None:
        axes.axhline(min(ratio, 10), color="#000000", linestyle="--", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("I/O slowdown")
    axes.set_ylabel("retrieval ratio")
    bar = figure.colorbar(image, ax=axes, ticks=[-1, -0.5, 0, 0.5, 1])
    bar.ax.set_yticklabels(["÷ 10", "÷ 3.2", "same", "× 3.2", "× 10"])
    bar.ax.tick_params(colors=PLACEHOLDER)
    return _svg(figure)


def needle_map(lengths: Sequence[int], depths: Sequence[float], panels: Mapping[str, Sequence[Sequence[float]]]
               ) -> Drawing:
    """Needles found by depth (down) and length (across), a panel a method; panels: name -> `[depth][length]` in 0..1,
    NaN where nothing was asked."""
    columns = min(3, len(panels))
    figure, axes = _figure(columns, -(-len(panels) // columns))
    flat = [axes] if len(panels) == 1 else list(axes.flat)
    for panel, (name, grid) in zip(flat, panels.items(), strict=False):
        panel.grid(False)
        panel.pcolormesh(grid, cmap="RdYlGn", vmin=0, vmax=1, edgecolors="#ffffff", linewidth=0.6)
        panel.invert_yaxis()
        panel.set_xticks([i + 0.5 for i in range(len(lengths))], [str(n) for n in lengths], fontsize=8)
        panel.set_yticks([i + 0.5 for i in range(len(depths))], [f"{100 * x:.0f} %" for x in depths], fontsize=8)
        panel.set_title(name, fontsize=9, color=PLACEHOLDER)
    for panel in flat[len(panels):]:
        panel.set_axis_off()
    return _svg(figure)


def bars(groups: Sequence[str], values: Mapping[str, Sequence[float | None]], what: str) -> Drawing:
    """A bar a group and name; None leaves a gap."""
    figure, axes = _figure()
    width = 0.8 / max(len(values), 1)
    for i, (name, heights) in enumerate(values.items()):
        colour = SERIES[i % len(SERIES)]
        places = [g + (i + 0.5) * width - 0.4 for g in range(len(groups))]
        axes.bar(places, [h or 0.0 for h in heights], width * 0.92, color=colour, label=name)
    axes.set_xticks(range(len(groups)), groups, fontsize=8)
    axes.set_ylabel(what)
    _legend(axes)
    return _svg(figure)


def _places(budgets: Sequence[float]) -> list[int]:
    """Budgets stand evenly: zero has no place on a logarithmic axis."""
    return list(range(len(budgets)))


def _budget_axis(axes: Any, budgets: Sequence[float]) -> None:
    axes.set_xticks(_places(budgets), ["sink + tail" if b == 0 else f"{100 * b:g} %" for b in budgets])
    axes.set_xlabel("share of the context retrieved per query (anchors come on top)")


def _legend(axes: Any) -> None:
    axes.legend(fontsize=8, frameon=False, labelcolor=PLACEHOLDER, ncols=2)
