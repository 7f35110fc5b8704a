"""Curves of rows: KL to full attention against the time of a token, tokens/s against GPU memory. README's picture has
one of them, light and dark, beside a drawing of a step.

    python benchmarks/curves.py      # docs/results/readme-{light,dark}.svg

A method is a line through its budgets. One that lacks rows of either axis is left out.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._rows import RESULTS, load
from benchmarks.pages import card, named

Lines = dict[str, list[tuple[float, float]]]
"""Points by the name of a method, in the order of its budgets."""
ONE, EIGHT, FIFTH = "coder-1.5b", "coder-1.5b-eight", ":candidates=0.2"
"""Models of `kl`: one request at a time, whose codes are all scored, and the codes that eight requests of more than
16k tokens score, which their methods name."""
TIMED = {16_384: "coder-16k-b8", 32_768: "coder-30k-b8", 65_536: "coder-64k-b8"}
"""Case of `generate` whose times stand for the prompts of a length in `kl`."""
SCORED = {16_384: (ONE, ""), 32_768: (EIGHT, FIFTH), 65_536: (EIGHT, FIFTH)}
"""The rows of `kl` that have what eight requests of a length score."""
METHODS = {"topk": ("exact top-k", "topk"), "topk+phi": ("exact top-k + φ", "topk_phi"), "quest": ("Quest", "quest"),
           "sketch": ("sketch", "sketch"), "sketch+centroid": ("sketch + centroids", "untrained"),
           "sketch+phi": ("sketch + φ", "sketch_phi")}
"""Methods of `kl`: their names on the page, and in `generate`."""
README = {"full attention": "full attention", "sketch + centroids": "untrained", "sketch + φ": "trained",
          "Quest": "Quest", "exact top-k": "exact top-k"}
"""Methods of README's picture, and their names there."""
FULL = "full attention"
HOST = {"host": ("ms", "ms per token, keys in CPU memory"), "bytes": ("bus_mb", "MB per token over the bus")}
KEPT = re.compile(r"(sketch|sketch_phi)-(\d+)%(@gpu)?")
"""A method of `offload`: what completes it, its budget, and where keys lie."""
LIGHT = {"ink": "#1d1d1e", "read": "#0072B2", "rest": "#D55E00", "paper": "#fbe3d0"}
DARK = {"ink": "#e6e6e6", "read": "#56B4E9", "rest": "#F2935C", "paper": "#6b3d1f"}


def by_codes(method: str, codes: str = FIFTH) -> str:
    """A method of `METHODS` as its sketches score these codes."""
    return method.replace("sketch", f"sketch{codes}")


def kl_lines(kind: str, length: int) -> Lines:
    """Time of a token [ms] and KL [nats per token] of prompts of a kind (`text`, `ruler`) and length [tokens]; full
    attention has a KL of 0. Empty where its time or every other method lacks rows."""
    model, codes = SCORED[length]
    timed, case = TIMED[length], f"{model}:{kind}@{length}"
    kl = {(r["method"], r["budget"]): r["value"] for r in load("kl") if (r["case"], r["metric"]) == (case, "kl")}
    ms = {(r["method"], r.get("budget")): r["value"] for r in load("generate")
          if (r["case"], r["metric"]) == (timed, "loop_ms")}
    found = {name: [(ms[t, b], value) for (method, b), value in sorted(kl.items(), key=str)
                    if method == by_codes(m, codes) and (t, b) in ms]
             for m, (name, t) in METHODS.items()}
    found = {name: points for name, points in found.items() if points}
    return {FULL: [(ms["dense", None], 0.0)], **found} if found and ("dense", None) in ms else {}


def memory_lines(case: str) -> Lines:
    """GPU memory [GB] and tokens/s of a case of `offload`."""
    rows = {(r["method"], r["metric"]): r["value"] for r in load("offload") if r["case"] == case}
    found: Lines = {}
    from benchmarks.specs import HELD

    for method in dict.fromkeys(m for m, _ in rows):
        if (method, "gpu_gb") not in rows or (method, "tokens_s") not in rows or method.endswith("@cold"):
            continue
        if kept := KEPT.fullmatch(method):
            kind, _, on_gpu = kept.groups()
            name = ("sketch + φ" if kind == "sketch_phi" else "sketch") + (", keys on the GPU" if on_gpu else "")
        else:
            name = HELD.get(method, method)
        found.setdefault(name, []).append((rows[method, "gpu_gb"], rows[method, "tokens_s"]))
    return found


def host_lines(case: str, metric: str) -> Lines:
    """A metric of a case of `offload`, keys in CPU memory, and KL of texts of 32k tokens."""
    across = {r["method"]: r["value"] for r in load("offload") if (r["case"], r["metric"]) == (case, metric)}
    model, codes = SCORED[32_768] if case.endswith("-b8") else (ONE, "")
    names = {kind: name for name, kind in METHODS.values()}
    found: Lines = {}
    for r in load("kl"):
        kind = r["method"].partition(", ")[0].replace(codes, "").replace("+", "_")
        there = f"{kind}-{100 * (r['budget'] or 0):g}%"
        if (r["case"], r["metric"]) == (f"{model}:text@32768", "kl") and codes in r["method"] and there in across:
            found.setdefault(names[kind], []).append((across[there], r["value"]))
    return {name: sorted(points) for name, points in found.items()}


def panels(name: str) -> tuple[list[tuple[str, Lines]], str, str]:
    """The panels of a picture that have rows, with their titles; what its axes say. name: `kl`, `offload`, or one of
    `HOST`."""
    if name == "kl":
        made = [(f"{words}, {length // 1024}k tokens", kl_lines(kind, length))
                for kind, words in (("text", "text"), ("ruler", "RULER")) for length in TIMED]
        return [p for p in made if p[1]], "ms per token, 8 requests to the 1.5B", "KL to full attention [nats/token]"
    from benchmarks.specs import OFFLOADED

    if name in HOST:
        made = [(named(case, {}), host_lines(case, HOST[name][0])) for case in OFFLOADED if case.startswith("coder")]
        return [p for p in made if p[1]], HOST[name][1], "KL to full attention [nats/token]"
    made = [(named(case, {}), memory_lines(case)) for case in OFFLOADED]
    return [p for p in made if len(p[1]) > 1], "GPU memory [GB]", "tokens/s"


def draw(axes: Any, lines: Lines, colours: Mapping[str, str]) -> None:
    """Lines through the points, in the colours of their names; full attention, whose KL is 0, is a line upwards."""
    for name, points in lines.items():
        if name == FULL:
            axes.axvline(points[0][0], linestyle="--", label=name, color=colours[name])
        else:
            axes.plot(*zip(*points, strict=True), "o-", markersize=7, label=name, zorder=3, color=colours[name])
    axes.margins(x=0.2, y=0.25)
    axes.set_yscale("log", subs=[])
    axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.spines[["top", "right"]].set_visible(False)


def picture(name: str) -> bytes | None:
    """A picture of the site as SVG, None where no rows are; two panels side by side, one legend."""
    import matplotlib

    from sparsekv.evaluation.canvas import SERIES

    shown, across, up = panels(name)
    if not shown:
        return None
    matplotlib.use("svg")
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        high, wide = -(-len(shown) // 2), min(len(shown), 2)
        figure, grid = pyplot.subplots(high, wide, figsize=(4.2 * wide + 1, 3.4 * high), layout="constrained",
                                       squeeze=False)
        names = dict.fromkeys(name for _, lines in shown for name in lines)
        colours = dict(zip(names, (LIGHT["ink"], *SERIES), strict=False))
        for axes, (title, lines) in zip(grid.flat, shown, strict=False):
            draw(axes, lines, colours)
            axes.set(title=title, xlabel=across, ylabel=up, xlim=(0, None))
        handles = {label: handle for axes in grid.flat for handle, label in zip(
            *axes.get_legend_handles_labels(), strict=True)}
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
        for axes in list(grid.flat)[len(shown):]:
            axes.axis("off")
        out = io.BytesIO()
        figure.savefig(out, format="svg", facecolor="white", metadata={"Date": None})
        pyplot.close(figure)
    return out.getvalue()


def step(axes: Any, look: Mapping[str, str]) -> None:
    """A row of keys: sink, tail and chosen ones are read, one estimate stands for the rest."""
    from matplotlib.patches import Rectangle

    chosen = {0, 1, 5, 9, 10, 16, 22, 23}
    for i in range(24):
        axes.add_patch(Rectangle((i, 0), 0.85, 1.0, facecolor=look["read" if i in chosen else "paper"]))
    arrow = {"arrowstyle": "-|>", "shrinkA": 2, "shrinkB": 1}
    for place in (5.4, 9.9, 16.4):
        axes.annotate("", (place, 1.05), (11.5, 2.1), arrowprops={**arrow, "color": look["read"]})
    axes.text(11.5, 2.2, "sketches choose 1 % of the keys, which are read exactly", color=look["read"], ha="center")
    for place in (3.4, 7.4, 13.4, 19.4):
        axes.annotate("", (place, -0.05), (11.5, -1.05), arrowprops={**arrow, "color": look["rest"]})
    axes.text(11.5, -1.65, "one estimate stands for all others", color=look["rest"], ha="center")
    axes.text(0.9, 1.2, "first", color=look["ink"], ha="center")
    axes.text(22.9, 1.2, "last", color=look["ink"], ha="center")
    axes.set(xlim=(-0.5, 24.5), ylim=(-2.2, 3.0), title="A decode step over the KV cache")
    axes.axis("off")


def readme(lines: Lines, where: str, look: Mapping[str, str], path: Path) -> Path:
    """Write README's picture: the drawing of a step, and these lines. where: the card that they are of.
    Raises SystemExit where there are no lines."""
    if not lines:
        raise SystemExit("no method has rows of both kl and loop_ms; measure them with real.py and generate.py")
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    colours = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color",
                             "axes.titlecolor"), look["ink"])
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": "readme", "font.size": 10, **colours}):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
        step(left, look)
        draw(right, lines, {name: look["ink" if name == FULL else "read"] for name in lines})
        for name, points in lines.items():
            before = points[-1][0] < lines[FULL][0][0]
            at, of = (0.05, "axes fraction") if name == FULL else (points[-1][1], "data")
            right.annotate(name, (points[-1][0], at), xytext=(-9 if before else 9, -4), textcoords="offset points",
                           xycoords=("data", of), ha="right" if before else "left")
        right.set(xlabel="ms per token, 8 requests of 30k tokens", ylabel="KL to full attention [nats/token]",
                  title=f"1.5B model, one {where}, text of 32k tokens",
                  xlim=(0, 1.3 * max(x for points in lines.values() for x, _ in points)))
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})
        pyplot.close(figure)
    return path


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    found = kl_lines("text", 32_768)
    lines = {said: found[name] for name, said in README.items() if name in found}
    found_on = next((r["machine"] for r in load("generate") if r["case"] == TIMED[32_768]), "")
    for name, look in (("light", LIGHT), ("dark", DARK)):
        print(readme(lines, card(found_on), look, RESULTS / f"readme-{name}.svg"))


if __name__ == "__main__":
    main()
