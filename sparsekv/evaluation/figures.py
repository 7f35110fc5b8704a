"""Figures as SVG, one hue a method everywhere, labels on the lines, readable in light and dark.

Text and axes are drawn in `currentColor`, so a page's own colour scheme applies.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sparsekv.evaluation.tables import plain

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


def score_by_budget(rows: Sequence[Mapping[str, Any]], case: str, methods: Sequence[str] | None = None) -> Drawing:
    """Score of the methods (all without `methods`) by budget with its interval; rows of metric `score`. The colour says
    what is read, the line's style what completes it, or that a selector has other options."""
    figure, axes = _figure()
    known = [r for r in rows if r["case"] == case and r["metric"] == "score" and r["value"] is not None
             and (methods is None or r["method"] in methods)]
    budgets = sorted({r["budget"] for r in known if r["budget"] is not None}) or [1.0]
    places = {b: i for i, b in enumerate(budgets)}
    names = list(dict.fromkeys(r["method"] for r in known))
    ends: list[tuple[float, str, str]] = []
    styles = {}
    for number, method in enumerate(names):
        line = sorted((r for r in known if r["method"] == method), key=lambda r: r["budget"] or 0.0)
        name, _, completion = plain(method).partition("+")
        colour = METHOD_HUES.get(name, HUES["full"])
        label = shown(method)
        styles[label] = "-" if name in ("full", "streaming") else COMPLETION_STYLES.get(completion, "-")
        if plain(method) != method:
            styles[label] = ":"
        if line[0]["budget"] is None:
            axes.axhline(line[0]["value"], color=colour, linestyle=styles[label], linewidth=1.8)
        else:
            # side by side, so that no interval hides another
            x = [places[r["budget"]] + 0.0075 * (len(budgets) - 1) * (number - (len(names) - 1) / 2) for r in line]
            y = [r["value"] for r in line]
            spread = [[r["value"] - r["low"] for r in line], [r["high"] - r["value"] for r in line]]
            axes.plot(x, y, color=colour, linestyle=styles[label], linewidth=1.7, marker="o", markersize=3.5)
            axes.errorbar(x, y, spread, color=colour, fmt="none", elinewidth=1, alpha=0.45)
        ends.append((line[-1]["value"], label, colour))
    top = max([1.0, *(r["high"] for r in known)])
    _end_labels(axes, ends, styles, top, len(budgets) - 1)
    axes.set_ylim(0, 1.04 * top)
    axes.set_xticks(range(len(budgets)), [f"{100 * b:g} %" for b in budgets])
    axes.set_xlabel("share of the context a query may retrieve")
    axes.set_ylabel("score [points of 100]")
    return _svg(figure)


def _end_labels(
    axes: Any, ends: Sequence[tuple[float, str, str]], styles: Mapping[str, Any], top: float, last: int,
) -> None:
    """Names at the right of the plot, each after a piece of its line, moved apart where two would touch. ends: height,
    name, colour; last: where the lines end."""
    beside = axes.get_yaxis_transform()  # across in parts of the plot's width, up in data
    for height, label, colour in _apart(sorted(ends), 0.062 * top, top):
        axes.plot([1.02, 1.08], [height] * 2, color=colour, linestyle=styles[label], linewidth=1.7, clip_on=False,
                  transform=beside)
        axes.annotate(label, (1.09, height), xycoords=beside, color=colour, fontsize=9, va="center",
                      annotation_clip=False)
    margin = 0.06 * max(last, 1)
    axes.set_xlim(-margin, last + margin)


def shown(method: str) -> str:
    """A method's name for readers: `topk + φ`."""
    return method.replace(":", ", ", 1).replace("+phi", " + φ").replace("+", " + ").replace("  ", " ")


def mass_curve(fractions: Sequence[float], quartiles: Mapping[str, Sequence[float]]) -> str:
    """Share of the mid region's attention mass in its best keys, for heads from peaked to diffuse."""
    figure, axes = _figure()
    for (name, shares), colour in zip(quartiles.items(), SHADES, strict=False):
        axes.plot(fractions, shares, color=colour, linewidth=1.8, label=name)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    ticks = [0.001, 0.01, 0.1, 1.0]
    axes.set_xticks(ticks, ["0.1 %", "1 %", "10 %", "100 %"])
    axes.minorticks_off()
    axes.set_xlabel("best keys of the mid region, as a share of it")
    axes.set_ylabel("share of the mid region's attention mass")
    _legend(axes)
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
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    made = Drawing(re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'width="100%"', text, count=1))
    made.png = pixels.getvalue()
    return made


COMPLETION_STYLES = {"": "--", "phi": "-", "centroid": ":", "moments": "-.", "sampling": (0, (1, 2, 4, 2))}
SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8c6bb1", "#7f7f7f")
SHADES = ("#4292c6", "#2b9d8f", "#e08214", "#d6604d")


def error_lines(budgets: Sequence[float], errors: Mapping[str, Sequence[float]]) -> Drawing:
    """Error by budget, a line a method (`topk+phi`); the colour says what is read, the style what completes it."""
    figure, axes = _figure()
    ends, styles = [], {}
    for method, line in errors.items():
        selector, _, completion = method.partition("+")
        colour, label = METHOD_HUES.get(selector, HUES["full"]), shown(method)
        styles[label] = COMPLETION_STYLES.get(completion, "-")
        axes.plot(_places(budgets), line, color=colour, linestyle=styles[label], marker="o", markersize=3,
                  linewidth=1.7)
        ends.append((line[-1], label, colour))
    top = max(max(line) for line in errors.values())
    _end_labels(axes, ends, styles, top, len(budgets) - 1)
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
    axes.yaxis.set_major_formatter(_plain)
    _budget_axis(axes, budgets)
    axes.set_ylabel("relative error taken off by φ")
    _legend(axes)
    return _svg(figure)


def by_layer(
    layers: Sequence[int], lines: Mapping[str, Sequence[float]], what: str, *, log: bool = False,
    band: tuple[Sequence[float], Sequence[float]] | None = None,
) -> Drawing:
    """Something by layer, a line a name."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = _figure()
    if band is not None:
        axes.fill_between(layers, *band, color=SERIES[0], alpha=0.15, linewidth=0)
    for (name, line), colour in zip(lines.items(), SERIES * 3, strict=False):
        axes.plot(layers, line, color=colour, marker="o", markersize=3, linewidth=1.7, label=name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(_plain)
        axes.yaxis.set_minor_formatter(_plain if _decades(lines) < 1.5 else "")
    else:
        axes.set_ylim(0, max(1.02, *(max(line) for line in lines.values())))
    axes.set_xlabel("layer")
    axes.set_ylabel(what)
    _legend(axes)
    return _svg(figure)


def _plain(value: float, _: int | None = None) -> str:
    """A tick as one writes it, not as a power of ten."""
    return f"{value:g}".replace("-", "−")


def _decades(lines: Mapping[str, Sequence[float]]) -> float:
    every = [x for line in lines.values() for x in line if x > 0]
    return math.log10(max(every) / min(every)) if every else 0.0


def kernel_scatter(pairs: Sequence[Sequence[float]]) -> Drawing:
    """Logits of the teacher against the student's, with the line where they agree."""
    figure, axes = _figure()
    teacher, student = zip(*pairs, strict=True)
    low = min(*teacher, *student)
    axes.plot([low, 0], [low, 0], color="#888888", linewidth=1)
    axes.scatter(teacher, student, s=7, color=SERIES[0], alpha=0.35, linewidths=0, rasterized=True)
    axes.set_xlabel("s, teacher [nats below the query's best]")
    axes.set_ylabel("ŝ, feature maps [nats]")
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

    slowdown, ratios = np.meshgrid(np.geomspace(1, 1000, 121), np.geomspace(1, 10, 121))
    load, attend, complete = (times[k] for k in ("load", "attend", "complete"))

    def speed(scale: float) -> Any:
        return (ratios * (slowdown * load + attend)) / (slowdown * load + attend + scale * complete)

    figure, axes = _figure()
    axes.grid(False)
    levels = np.linspace(-1, 1, 21)
    image = axes.contourf(slowdown, ratios, np.log10(speed(1.0)).clip(-1, 1), levels=levels, cmap="RdYlBu", alpha=0.85)
    for scale, style in zip((1.0, 0.3, 0.1, 0.01), ("-", "--", "-.", ":"), strict=True):
        field = speed(scale)
        if field.min() < 1 < field.max():
            axes.contour(slowdown, ratios, field, levels=[1.0], colors=["#000000"], linewidths=1.6, linestyles=[style])
            axes.plot([], [], color=PLACEHOLDER, linestyle=style, linewidth=1.6,
                      label="break-even" + ("" if scale == 1 else f", φ at {scale:g} of its cost"))
    if ratio is not None:
        axes.axhline(min(ratio, 10), color="#7a0177", linewidth=1.6)
        axes.plot([], [], color="#7a0177", linewidth=1.6, label=f"measured here: {ratio:.2g} times the tokens")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1000"])
    axes.set_yticks([1, 1.5, 2, 3, 5, 10], ["1", "1.5", "2", "3", "5", "10"])
    axes.minorticks_off()
    axes.set_xlabel("I/O slowdown [times]")
    axes.set_ylabel("retrieval ratio [times the tokens]")
    _legend(axes, columns=2)
    _colour_bar(figure, image, [axes], [-1, -0.5, 0, 0.5, 1], ["÷ 10", "÷ 3.2", "same", "× 3.2", "× 10"])
    return _svg(figure)


def needle_map(lengths: Sequence[int], depths: Sequence[float], panels: Mapping[str, Sequence[Sequence[float]]]
               ) -> Drawing:
    """Needles found by depth (down) and length (across), a panel a method; panels: name -> `[depth][length]` in 0..1,
    NaN where nothing was asked."""
    from matplotlib.colors import LinearSegmentedColormap

    # two hues that stay apart under the common colour-vision deficiencies, and in grey
    shades = LinearSegmentedColormap.from_list("found", ["#D55E00", "#f3d9a4", "#0072B2"])
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = _figure(columns, rows)
    flat = [axes] if len(panels) == 1 else list(axes.flat)
    for number, (panel, (name, grid)) in enumerate(zip(flat, panels.items(), strict=False)):
        panel.grid(False)
        image = panel.pcolormesh(grid, cmap=shades, vmin=0, vmax=1, edgecolors="#80808080", linewidth=0.6)
        panel.invert_yaxis()
        panel.set_xticks([i + 0.5 for i in range(len(lengths))], [str(n) for n in lengths], fontsize=8)
        panel.set_yticks([i + 0.5 for i in range(len(depths))], [f"{100 * x:.0f} %" for x in depths], fontsize=8)
        panel.set_title(name, fontsize=9, color=PLACEHOLDER)
        if number % columns == 0:
            panel.set_ylabel("depth", fontsize=9)
        if number + columns >= len(panels):
            panel.set_xlabel("length [tokens]", fontsize=9)
    for panel in flat[len(panels):]:
        panel.set_axis_off()
    _colour_bar(figure, image, flat, [0, 0.5, 1], ["none found", "half", "all found"])
    return _svg(figure)


def _colour_bar(figure: Any, image: Any, axes: Any, ticks: Sequence[float], names: Sequence[str]) -> None:
    bar = figure.colorbar(image, ax=axes, ticks=ticks, shrink=min(1.0, 1.6 / len(axes)) if len(axes) > 3 else 1.0,
                          aspect=25)
    bar.ax.set_yticklabels(names, fontsize=8)
    bar.ax.tick_params(colors=PLACEHOLDER)
    bar.outline.set_visible(False)


def bars(groups: Sequence[str], values: Mapping[str, Sequence[float | None]], what: str, *, percent: bool = False
         ) -> Drawing:
    """A bar a group and name; None leaves a gap. percent: values are shares."""
    figure, axes = _figure()
    width = 0.8 / max(len(values), 2)
    left = -width * len(values) / 2
    for i, (name, heights) in enumerate(values.items()):
        colour = METHOD_HUES.get(name, SERIES[i % len(SERIES)])
        places = [g + left + (i + 0.5) * width for g in range(len(groups))]
        axes.bar(places, [h or 0.0 for h in heights], width * 0.92, color=colour, label=name)
    axes.set_xticks(range(len(groups)), [_wrapped(g) for g in groups], fontsize=8)
    if percent:
        axes.yaxis.set_major_formatter(lambda x, _: f"{100 * x:.6g} %")
    axes.set_ylabel(what)
    if len(values) > 1:
        _legend(axes)
    return _svg(figure)


def _wrapped(name: str, width: int = 13) -> str:
    """A long name in lines, broken at its underscores."""
    lines = [""]
    for part in name.split("_"):
        joined = f"{lines[-1]}_{part}" if lines[-1] else part
        if len(joined) <= width or not lines[-1]:
            lines[-1] = joined
        else:
            lines.append(part)
    return "_\n".join(lines)


def _places(budgets: Sequence[float]) -> list[int]:
    """Budgets stand evenly: zero has no place on a logarithmic axis."""
    return list(range(len(budgets)))


def _budget_axis(axes: Any, budgets: Sequence[float]) -> None:
    axes.set_xticks(_places(budgets), ["sink + tail" if b == 0 else f"{100 * b:g} %" for b in budgets])
    axes.set_xlabel("share of the context retrieved per query (anchors come on top)")


def _legend(axes: Any, columns: int = 5) -> None:
    """Above the plot, where no line runs through it."""
    if not axes.get_legend_handles_labels()[0]:
        return
    count = len(axes.get_legend_handles_labels()[0])
    axes.legend(fontsize=8, frameon=False, labelcolor=PLACEHOLDER, ncols=min(columns, count), loc="lower left",
                bbox_to_anchor=(0.0, 1.0), borderaxespad=0.2)
