"""README's picture, light and dark: how a step works; the distance to full attention against the time of a token.

    python benchmarks/readme_figure.py      # docs/results/readme-{light,dark}.svg

The left panel is a drawing. Points of the right one are rows of one model: KL of the next token to full attention's
(`kl`), and the time of a token of eight requests (`generate`, metric `loop_ms`), by method. A method that lacks either
is left out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._rows import RESULTS, load

METHODS = {"sketch+centroid": ("untrained", "untrained"), "sketch+phi": ("trained", "sketch_phi")}
"""Methods of `kl`: their names here, and in `generate`."""
READ, REST = "#0072B2", "#D55E00"


def points(case: str, timed: str, budget: float = 0.01) -> dict[str, tuple[float, float]]:
    """KL [nats per token] and time of a token [ms], by name; full attention has a KL of 0. Raises SystemExit where no
    row is."""
    kl = {r["method"]: r["value"] for r in load("kl")
          if r["case"].partition(":")[2] == case and r["metric"] == "kl" and r.get("budget") == budget}
    ms = {r["method"]: r["value"] for r in load("generate") if (r["case"], r["metric"]) == (timed, "loop_ms")}
    found = {name: (kl[m], ms[t]) for m, (name, t) in METHODS.items() if m in kl and t in ms}
    if not found or "dense" not in ms:
        raise SystemExit(f"no method has rows of both kl of {case!r} (found {sorted(kl)}) and loop_ms of {timed!r} "
                         f"(found {sorted(ms)}); measure them with benchmarks/real.py and benchmarks/generate.py")
    return {"full attention": (0.0, ms["dense"]), **found}


def step(axes: Any, ink: str) -> None:
    """A row of keys: sink, tail and chosen ones are read, one estimate stands for the rest."""
    from matplotlib.patches import Rectangle

    chosen = {0, 1, 5, 9, 10, 16, 22, 23}
    for i in range(24):
        read = i in chosen
        axes.add_patch(Rectangle((i, 0), 0.85, 1.0, facecolor=READ if read else REST, alpha=1 if read else 0.45))
    arrow = {"arrowstyle": "-|>", "shrinkA": 2, "shrinkB": 1}
    for place in (5.4, 9.9, 16.4):
        axes.annotate("", (place, 1.05), (11.5, 2.1), arrowprops={**arrow, "color": READ})
    axes.text(11.5, 2.2, "sketches choose 1 % of the keys, which are read exactly", color=READ, ha="center")
    for place in (3.4, 7.4, 13.4, 19.4):
        axes.annotate("", (place, -0.05), (11.5, -1.05), arrowprops={**arrow, "color": REST})
    axes.text(11.5, -1.65, "one estimate stands for all others", color=REST, ha="center")
    axes.text(0.9, 1.2, "sink", color=ink, ha="center")
    axes.text(22.9, 1.2, "tail", color=ink, ha="center")
    axes.set(xlim=(-0.5, 24.5), ylim=(-2.2, 3.0), title="A decode step over the KV cache")
    axes.axis("off")


def drawn(found: dict[str, tuple[float, float]], ink: str, path: Path) -> Path:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    colours = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color",
                             "axes.titlecolor"), ink)
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": "readme", "font.size": 10, **colours}):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
        step(left, ink)
        for name, (kl, ms) in found.items():
            right.scatter(ms, kl, s=60, clip_on=False, color=ink if name == "full attention" else READ, zorder=3)
            right.annotate(name, (ms, kl), xytext=(0, 9), textcoords="offset points", ha="center")
        right.margins(x=0.2, y=0.25)
        right.set(xlabel="ms per token, 8 requests of 30k tokens", ylabel="KL to full attention [nats/token]",
                  title="1.5B model, one H200, text of 32k tokens", xlim=(0, None), ylim=(0, None))
        right.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})
        pyplot.close(figure)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="text@32768", help="of the rows of KL, without the model's name")
    parser.add_argument("--timed", default="coder-30k-b8", help="case of the rows of times")
    parser.add_argument("--budget", type=float, default=0.01, help="share of the context that is retrieved")
    options = parser.parse_args()
    found = points(options.case, options.timed, options.budget)
    for name, ink in (("light", "#1d1d1e"), ("dark", "#e6e6e6")):
        print(drawn(found, ink, RESULTS / f"readme-{name}.svg"))


if __name__ == "__main__":
    main()
