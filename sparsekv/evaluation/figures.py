"""The figures of reports and pages, each from plain numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sparsekv.core.registry import row_of
from sparsekv.evaluation.canvas import SERIES, SHADES, end_labels, look, written
from sparsekv.evaluation.methods import percent
from sparsekv.util.pages import INK, Drawing, canvas, drawn, legend

LABEL = 13
"""Characters of a line of a group's name."""


def score_by_budget(rows: Sequence[Mapping[str, Any]], case: str, methods: Sequence[str] | None = None) -> Drawing:
    """Score of the methods (all without `methods`) by budget with its interval; rows of metric `score`. The colour says
    what is read, the line's style what completes it, or that a selector has other options."""
    figure, axes = canvas()
    known = _scored(rows, case, methods)
    budgets = sorted({r["budget"] for r in known if r["budget"] is not None}) or [1.0]
    places = {b: i for i, b in enumerate(budgets)}
    names = list(dict.fromkeys(r["method"] for r in known))
    ends = {}
    for number, method in enumerate(names):
        line = sorted((r for r in known if r["method"] == method), key=lambda r: r["budget"] or 0.0)
        _, colour, style = look(method)
        ends[method] = line[-1]["value"]
        if line[0]["budget"] is None:
            axes.axhline(line[0]["value"], color=colour, linestyle=style, linewidth=1.8)
            continue
        # side by side, so that no interval hides another
        x = [places[r["budget"]] + 0.0075 * (len(budgets) - 1) * (number - (len(names) - 1) / 2) for r in line]
        y = [r["value"] for r in line]
        spread = [[r["value"] - r["low"] for r in line], [r["high"] - r["value"] for r in line]]
        axes.plot(x, y, color=colour, linestyle=style, linewidth=1.7, marker="o", markersize=3.5)
        axes.errorbar(x, y, spread, color=colour, fmt="none", elinewidth=1, alpha=0.45)
    top = max([1.0, *(r["high"] for r in known)])
    end_labels(axes, ends, top, len(budgets) - 1)
    axes.set_ylim(0, 1.04 * top)
    _budget_axis(axes, budgets)
    axes.set_ylabel("score [points of 100]")
    return drawn(figure)


def score_by_bytes(
    rows: Sequence[Mapping[str, Any]], case: str, methods: Sequence[str] | None = None,
) -> Drawing:
    """Score of the methods (all without `methods`) over what a step of theirs reads of the cache's bytes (`bytes_share`
    of rows of metric `score`), a line a method through its budgets; full attention is the height to reach."""
    figure, axes = canvas()
    known = _scored(rows, case, methods)
    ends, shares = {}, []
    for method in dict.fromkeys(r["method"] for r in known):
        _, colour, style = look(method)
        line = sorted((r["bytes_share"], r["value"]) for r in known
                      if r["method"] == method and r.get("bytes_share") is not None)
        if method == "full":
            ends[method] = next(r["value"] for r in known if r["method"] == method)
            axes.axhline(ends[method], color=colour, linestyle=style, linewidth=1.8)
        elif line:
            ends[method] = line[-1][1]
            shares += [x for x, _ in line]
            x, y = zip(*line, strict=True)
            axes.plot(x, y, color=colour, linestyle=style, linewidth=1.7, marker="o", markersize=3.5)
    top = max([1.0, *(r["value"] for r in known)])
    end_labels(axes, ends, top, 1)
    axes.set_ylim(0, 1.04 * top)
    axes.set_xscale("log")
    low, high = min(shares, default=0.01), max(shares, default=1.0)
    axes.set_xlim(low / 1.15, high * 1.15)
    ticks = [x for x in (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if low / 1.15 <= x <= high * 1.15]
    axes.set_xticks(ticks, [percent(x) for x in ticks])
    axes.minorticks_off()
    axes.set_xlabel("bytes a step of a sparse layer reads, of its keys' and values'")
    axes.set_ylabel("score [points of 100]")
    return drawn(figure)


def mass_by_keys(fractions: Sequence[float], quartiles: Mapping[str, Sequence[float]]) -> Drawing:
    """Share of the mid region's attention mass in its best keys, for heads from peaked to diffuse."""
    figure, axes = canvas()
    for (name, shares), colour in zip(quartiles.items(), SHADES, strict=False):
        axes.plot(fractions, shares, color=colour, linewidth=1.8, label=name)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    ticks = [0.001, 0.01, 0.1, 1.0]
    axes.set_xticks(ticks, ["0.1 %", "1 %", "10 %", "100 %"])
    axes.minorticks_off()
    axes.set_xlabel("best keys of the mid region, as a share of it")
    axes.set_ylabel("share of the mid region's attention mass")
    legend(axes)
    return drawn(figure)


def training_curves(curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Drawing:
    """Loss against step, one panel a part. curves: name -> (steps, losses)."""
    figure, axes = canvas(len(curves))
    for panel, (name, (steps, losses)) in zip(axes if len(curves) > 1 else [axes], curves.items(), strict=True):
        panel.plot(steps, losses, color=SERIES[0], linewidth=1.6)
        panel.set_title(name, fontsize=10, color=INK)
        panel.set_xlabel("step")
        panel.set_ylabel("loss, mean over heads")
        panel.set_ylim(bottom=0)
    return drawn(figure)


def error_by_budget(budgets: Sequence[float], errors: Mapping[str, Sequence[float]]) -> Drawing:
    """Error by budget, a line a method (`topk+phi`)."""
    figure, axes = canvas()
    for method, line in errors.items():
        _, colour, style = look(method)
        axes.plot(_places(budgets), line, color=colour, linestyle=style, marker="o", markersize=3, linewidth=1.7)
    top = max(max(line) for line in errors.values())
    end_labels(axes, {method: line[-1] for method, line in errors.items()}, top, len(budgets) - 1)
    axes.set_ylim(0, 1.05 * top)
    _budget_axis(axes, budgets)
    axes.set_ylabel("relative error of the attention output")
    return drawn(figure)


def gain_by_quartile(budgets: Sequence[float], gains: Mapping[str, Sequence[float]]) -> Drawing:
    """Return what completion takes off the error, by budget, a line a quarter of the heads."""
    figure, axes = canvas()
    axes.axhline(0, color="#888888", linewidth=0.8)
    for (name, line), colour in zip(gains.items(), SHADES, strict=False):
        axes.plot(_places(budgets), line, color=colour, marker="o", markersize=3, linewidth=1.7, label=name)
    axes.set_yscale("symlog", linthresh=0.01)
    axes.yaxis.set_major_formatter(written)
    _budget_axis(axes, budgets)
    axes.set_ylabel("relative error taken off by φ")
    legend(axes)
    return drawn(figure)


def by_layer(
    layers: Sequence[int], lines: Mapping[str, Sequence[float]], what: str, *, log: bool = False,
    band: tuple[Sequence[float], Sequence[float]] | None = None,
) -> Drawing:
    """Something by layer, a line a name."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = canvas()
    if band is not None:
        axes.fill_between(layers, *band, color=SERIES[0], alpha=0.15, linewidth=0)
    for (name, line), colour in zip(lines.items(), SERIES * 3, strict=False):
        axes.plot(layers, line, color=colour, marker="o", markersize=3, linewidth=1.7, label=name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(written)
        axes.yaxis.set_minor_formatter(written if _decades(lines) < 1.5 else "")
    else:
        axes.set_ylim(0, max(1.02, *(max(line) for line in lines.values())))
    axes.set_xlabel("layer")
    axes.set_ylabel(what)
    legend(axes)
    return drawn(figure)


def _decades(lines: Mapping[str, Sequence[float]]) -> float:
    every = [x for line in lines.values() for x in line if x > 0]
    return math.log10(max(every) / min(every)) if every else 0.0


def kernel_scatter(pairs: Sequence[Sequence[float]]) -> Drawing:
    """Logits of the teacher against the student's, with the line where they agree."""
    figure, axes = canvas()
    teacher, student = zip(*pairs, strict=True)
    low = min(*teacher, *student)
    axes.plot([low, 0], [low, 0], color="#888888", linewidth=1)
    axes.scatter(teacher, student, s=7, color=SERIES[0], alpha=0.35, linewidths=0, rasterized=True)
    axes.set_xlabel("s, teacher [nats below the query's best]")
    axes.set_ylabel("ŝ, feature maps [nats]")
    return drawn(figure)


def histogram(edges: Sequence[float], counts: Sequence[int], what: str) -> Drawing:
    """Shares of a histogram."""
    figure, axes = canvas()
    total = max(sum(counts), 1)
    axes.stairs([c / total for c in counts], edges, color=SERIES[0], fill=True, alpha=0.6)
    axes.axvline(0, color="#888888", linewidth=1)
    axes.set_xlabel(what)
    axes.set_ylabel("share of the keys")
    return drawn(figure)


def needle_map(lengths: Sequence[int], depths: Sequence[float], panels: Mapping[str, Sequence[Sequence[float]]]
               ) -> Drawing:
    """Needles found by depth (down) and length (across), a panel a method; panels: name -> `[depth][length]` in 0..1,
    NaN where nothing was asked."""
    from matplotlib.colors import LinearSegmentedColormap

    # two hues that stay apart under the common colour-vision deficiencies, and in grey
    shades = LinearSegmentedColormap.from_list("found", ["#D55E00", "#f3d9a4", "#0072B2"])
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = canvas(columns, rows)
    flat = [axes] if len(panels) == 1 else list(axes.flat)
    for number, (panel, (name, grid)) in enumerate(zip(flat, panels.items(), strict=False)):
        panel.grid(False)
        image = panel.pcolormesh(grid, cmap=shades, vmin=0, vmax=1, edgecolors="#80808080", linewidth=0.6)
        panel.invert_yaxis()
        panel.set_xticks([i + 0.5 for i in range(len(lengths))], [str(n) for n in lengths], fontsize=8)
        panel.set_yticks([i + 0.5 for i in range(len(depths))], [f"{100 * x:.0f} %" for x in depths], fontsize=8)
        panel.set_title(name, fontsize=9, color=INK)
        if number % columns == 0:
            panel.set_ylabel("depth", fontsize=9)
        if number + columns >= len(panels):
            panel.set_xlabel("length [tokens]", fontsize=9)
    for panel in flat[len(panels):]:
        panel.set_axis_off()
    bar = figure.colorbar(image, ax=flat, ticks=[0, 0.5, 1], shrink=min(1.0, 1.6 / rows), aspect=25)
    bar.ax.set_yticklabels(["none found", "half", "all found"], fontsize=8)
    bar.ax.tick_params(colors=INK)
    bar.outline.set_visible(False)
    return drawn(figure)


def bars(groups: Sequence[str], values: Mapping[str, Sequence[float | None]], what: str, *, percent: bool = False
         ) -> Drawing:
    """A bar a group and name; None leaves a gap. percent: values are shares."""
    figure, axes = canvas()
    width = 0.8 / max(len(values), 2)
    left = -width * len(values) / 2
    for i, (name, heights) in enumerate(values.items()):
        method = row_of(name)
        colour = SERIES[i % len(SERIES)] if method is None else method.colour
        places = [g + left + (i + 0.5) * width for g in range(len(groups))]
        axes.bar(places, [h or 0.0 for h in heights], width * 0.92, color=colour, label=name)
    axes.set_xticks(range(len(groups)), [_wrapped(g) for g in groups], fontsize=8)
    if percent:
        axes.yaxis.set_major_formatter(lambda x, _: f"{100 * x:.6g} %")
    axes.set_ylabel(what)
    if len(values) > 1:
        legend(axes)
    return drawn(figure)


def _wrapped(name: str) -> str:
    """A long name in lines, broken at its underscores."""
    lines = [""]
    for part in name.split("_"):
        joined = f"{lines[-1]}_{part}" if lines[-1] else part
        if len(joined) <= LABEL or not lines[-1]:
            lines[-1] = joined
        else:
            lines.append(part)
    return "_\n".join(lines)


def _scored(rows: Sequence[Mapping[str, Any]], case: str, methods: Sequence[str] | None) -> list[Mapping[str, Any]]:
    """The rows with a score of the case, of those methods, or of all."""
    return [r for r in rows if r["case"] == case and r["metric"] == "score" and r["value"] is not None
            and (methods is None or r["method"] in methods)]


def _places(budgets: Sequence[float]) -> list[int]:
    """Budgets stand evenly: zero has no place on a logarithmic axis."""
    return list(range(len(budgets)))


def _budget_axis(axes: Any, budgets: Sequence[float]) -> None:
    axes.set_xticks(_places(budgets), ["sink + tail" if b == 0 else percent(b) for b in budgets])
    axes.set_xlabel("share of the context retrieved per query (sink and tail come on top)")
