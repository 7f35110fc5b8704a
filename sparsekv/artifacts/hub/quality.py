"""How good an artifact is, for its page: its quality card as a table and as a figure."""

from __future__ import annotations

import re
from typing import Any

from sparsekv.core.registry import GREY, SELECTOR_ROWS
from sparsekv.util.pages import canvas, drawn, legend, markdown

LABELS = {"mass_share": "router", "sketch_mass_share": "router and sketches",
          "oracle_mass_share": "oracle on its buckets", "error": "nothing else",
          "+ phi error": "φ for the rest"}
COLOURS = {"mass_share": SELECTOR_ROWS["router"].colour, "sketch_mass_share": SELECTOR_ROWS["sketch"].colour,
           "oracle_mass_share": GREY, "error": GREY, "+ phi error": SELECTOR_ROWS["router"].colour}
BANDS = ("mass_share", "error", "+ phi error")
"""Lines with their quartiles: the other ones of a router lie close to its own."""


def figure_caption(kind: str) -> str:
    """Return what the figure shows, in words."""
    if kind == "router":
        return "Attention that is read, by the share of the context read; bands are quartiles over heads"
    return "Error of a head's output, by what is read exactly; bands are quartiles over heads"


def _placed(name: str) -> bool:
    """Whether what stands after an entry's @ is a share."""
    share = name.removesuffix(" + phi error").removesuffix(" error").partition("@")[2]
    return not share or re.fullmatch(r"0?\.[0-9]+|[01](\.0+)?", share) is not None


def _columns(kind: str, quality: dict[str, Any]) -> tuple[list[str], dict[str, list[str]]]:
    """Places on the axis, and the card's entries at each of them by line; lines that are not complete are left out."""
    quality = {name: value for name, value in quality.items() if _placed(name)}
    if kind == "router":
        names = ("mass_share", "sketch_mass_share", "oracle_mass_share")
        budgets = [name.partition("@")[2] for name in quality if name.startswith("mass_share@")]
        places = [f"{float(b):.0%}" for b in budgets]
        lines = {name: [f"{name}@{b}" for b in budgets] for name in names}
    else:
        cases = [name.removesuffix(" + phi error") for name in quality if name.endswith(" + phi error")]
        places = ["sink + tail", *(f"top-k {float(c.partition('@')[2]):.0%}" for c in cases[1:])]
        lines = {name: [f"{case} {name}" for case in cases] for name in ("error", "+ phi error")}
    return places, {name: keys for name, keys in lines.items() if keys and all(k in quality for k in keys)}


def quality_table(kind: str, quality: dict[str, Any]) -> str:
    """The means in Markdown; empty where the artifact was not judged."""
    places, lines = _columns(kind, quality)
    if not lines:
        return ""
    first = "context read" if kind == "router" else "read exactly"
    return markdown([first, *(LABELS[name] for name in lines)], [
        [place, *(f"{quality[keys[i]]:.3f}" for keys in lines.values())] for i, place in enumerate(places)])


def quality_figure(kind: str, quality: dict[str, Any]) -> bytes | None:
    """Draw the quality as lines, with the quartiles over heads, as PNG; None where the artifact was not judged."""
    places, lines = _columns(kind, quality)
    heads = quality.get("per_head", {})
    if not lines or not all(key in heads for keys in lines.values() for key in keys):
        return None
    import numpy as np

    figure, axes = canvas(height=3.6)
    at = np.arange(len(places))
    for name, keys in lines.items():
        low, high = np.stack([np.quantile(np.concatenate([np.asarray(row, float) for row in heads[key]]), (0.25, 0.75))
                              for key in keys], axis=1)
        if name in BANDS:
            axes.fill_between(at, low, high, color=COLOURS[name], alpha=0.15, linewidth=0)
        axes.plot(at, [quality[key] for key in keys], color=COLOURS[name], marker="o", label=LABELS[name],
                  linestyle="-" if name in BANDS else "--", markersize=6 if name in BANDS else 3)
    axes.set_xticks(at, places)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("context read" if kind == "router" else "read exactly")
    axes.set_ylabel("attention read [share]" if kind == "router" else "error [relative L2]")
    legend(axes)
    return drawn(figure).png
