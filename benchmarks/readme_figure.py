"""README's picture, light and dark: how a step works; the distance to full attention against the time of a token.

    python benchmarks/readme_figure.py [--case text@16384] [--timed 8b-128k-b1]   # docs/results/readme-{light,dark}.svg

The left panel is a drawing. Points of the right one are rows: KL of the next token to full attention's (`real`, metric
`kl`), and the time of a token (`generate`, metric `loop_ms`), by method. A method that lacks either is left out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._rows import RESULTS, load

METHODS = {"sketch": ("sketch alone", "sketch"), "sketch+centroid": ("untrained", "sketch_centroid"),
           "sketch+phi": ("trained (φ)", "sketch_phi")}
"""Methods of `real`: their names here, and in `generate`."""
READ, REST = "#0072B2", "#D55E00"


def points(case: str, timed: str, budget: float = 0.01) -> dict[str, tuple[float, float]]:
    """KL [nats per token] and time of a token [ms], by name; full attention has a KL of 0. Raises SystemExit where no
    row is."""
    kl = {r["method"]: r["value"] for r in load("real")
          if r["case"].partition(":")[2] == case and r["metric"] == "kl" and r.get("budget") == budget}
    ms = {r["method"]: r["value"] for r in load("generate") if (r["case"], r["metric"]) == (timed, "loop_ms")}
    found = {name: (kl[m], ms[t]) for m, (name, t) in METHODS.items() if m in kl and t in ms}
    if not found or "dense" not in ms:
        raise SystemExit(f"no method has rows of both kl of {case!r} (found {sorted(kl)}) and loop_ms of {timed!r} "
                         f"(found {sorted(ms)}); measure them with benchmarks/real.py and benchmarks/generate.py")
    return {"full attention": (0.0, ms["dense"]), **found}


def step(axes: Any, ink: str) -> None:
    """A row of keys: sink, tail and chosen ones are read, a curve stands for the rest."""
    from matplotlib.patches import Rectangle

    chosen = {0, 1, 6, 11, 12, 18, 22, 23}
    for i in range(24):
        read = i in chosen
        axes.add_patch(Rectangle((i, 0), 0.85, 0.9, facecolor=READ if read else REST, alpha=1 if read else 0.25))
    axes.annotate("sketches choose\nwhat is read", (11.5, 1.05), (11.5, 2.2), color=READ, ha="center",
                  arrowprops={"arrowstyle": "-|>", "color": READ})
    axes.annotate("φ stands for the rest", (15.0, -0.05), (12.0, -1.2), color=REST, ha="center",
                  arrowprops={"arrowstyle": "-|>", "color": REST})
    axes.text(0.5, 1.2, "sink", color=ink, ha="center")
    axes.text(23.0, 1.2, "tail", color=ink, ha="center")
    axes.set(xlim=(-0.5, 24.5), ylim=(-1.8, 3.2), title="One step over all keys of the cache")
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
            right.scatter(ms, kl, color=ink if name == "full attention" else READ, zorder=3)
            right.annotate(f" {name}", (ms, kl), xytext=(4, 4), textcoords="offset points")
        right.set(xlabel="time of a token [ms]", ylabel="KL [nats/token]", title="Distance to full attention by time")
        right.spines[["top", "right"]].set_visible(False)
        right.margins(x=0.25, y=0.2)
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})
        pyplot.close(figure)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="text@16384", help="of the rows of KL, without the model's name")
    parser.add_argument("--timed", default="8b-128k-b1", help="case of the rows of times")
    parser.add_argument("--budget", type=float, default=0.01, help="share of the context that is retrieved")
    options = parser.parse_args()
    found = points(options.case, options.timed, options.budget)
    for name, ink in (("light", "#1d1d1e"), ("dark", "#e6e6e6")):
        print(drawn(found, ink, RESULTS / f"readme-{name}.svg"))


if __name__ == "__main__":
    main()
