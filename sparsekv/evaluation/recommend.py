"""`sparsekv eval recommend`: the cheapest budgets and gates that keep a chosen quality on held-out text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sparsekv.core.registry import SELECTOR_ROWS, diagnosed
from sparsekv.evaluation.diagnostics import Diagnostics
from sparsekv.runtime.settings import FORMAT, LayerSetting, Settings
from sparsekv.util.config import option
from sparsekv.util.errors import SparseKVError
from sparsekv.util.output import read_marker

SHOWN_HEADS = 8


@dataclass(frozen=True)
class RecommendConfig:
    diagnostics: Path = option(help="diagnostics.json of `sparsekv eval diagnostics`, made on held-out text with the "
                                    "artifacts that will be used.")
    output: Path = option(help="Settings file to write (JSON), for sparsekv.attach(model, settings=FILE).")
    max_error: float | None = option(None, help="Quality to keep: mean relative error of the attention output over "
                                                "layers and heads, at most this (layers of full attention count as 0).",
                                     min=0)
    min_mass: float | None = option(None, help="Quality to keep: mean share of the attention that is read exactly over "
                                               "layers and heads, at least this (layers of full attention count as 1).",
                                    min=0, max=1)
    selector: str | None = option(None, help=lambda: (
        f"Selector: {' or '.join(diagnosed())} (topk reads every key to choose); without it a trained one if the "
        "diagnostics have it."))
    dense_layers: str = option("0", help="Layers that keep full attention whatever they cost, separated by commas.")
    overwrite: bool = option(False, help="Replace an existing settings file.")


class Choice(NamedTuple):
    """One way to run a layer. cost: share of the context read, the completion's cache included; error and mass: means
    over heads; budget None is full attention."""

    cost: float
    error: float
    mass: float
    budget: float | None = None
    gate: list[float] | None = None


class RecommendResult(NamedTuple):
    """The settings, a table of them and where they were written."""

    settings: Settings
    table: str
    path: Path

    def summary(self) -> str:
        return f"\n{self.table}\n\nsettings: {self.path}"


def run_recommend(config: RecommendConfig) -> RecommendResult:
    """Choose, write and describe. Raises SparseKVError for bad options or diagnostics, and for an existing output."""
    if (config.max_error is None) == (config.min_mass is None):
        raise SparseKVError("expected exactly one of --max-error and --min-mass")
    if config.output.exists() and not config.overwrite:
        raise SparseKVError(f"the output {str(config.output)!r} already exists; add --overwrite to replace it")
    if config.output.exists() and read_marker(config.output).get("format") != FORMAT:
        raise SparseKVError(f"the output {str(config.output)!r} is something else than a settings file; choose another "
                            "--output")
    try:
        dense = [int(x) for x in config.dense_layers.split(",") if x.strip()]
    except ValueError as error:
        raise SparseKVError(f"dense layers {config.dense_layers!r} not understood; expected numbers such as 0,1"
                            ) from error
    diagnostics = Diagnostics.load(config.diagnostics)
    settings = recommend(diagnostics, selector=config.selector, max_error=config.max_error, min_mass=config.min_mass,
                         dense_layers=dense)
    return RecommendResult(settings, describe_settings(settings, diagnostics), settings.save(config.output))


def recommend(
    d: Diagnostics, *, selector: str | None = None, max_error: float | None = None, min_mass: float | None = None,
    dense_layers: list[int] | None = None,
) -> Settings:
    """The settings of least cost whose mean over layers keeps the goal: a budget for every layer, a completion gate
    for every head (open where φ lowered its error), full attention where nothing cheaper does.

    Budgets go where they buy most: from the cheapest choice of every layer on, the upgrade with the largest gain per
    token, on the convex hull of its choices, until the goal is met. Raises SparseKVError for an unknown selector.
    """
    have = [name for name in diagnosed() if name in d.errors]
    selector = selector or max(have, key=lambda name: bool(SELECTOR_ROWS[name].needs))
    if selector not in have:
        raise SparseKVError(f"the diagnostics have no selector {selector!r}; they have {', '.join(have)}")
    menu = {layer: choices(d, row, selector) for row, layer in enumerate(d.layers)
            if layer not in (dense_layers or [])}
    picked = pick_choices(menu, max_error=max_error, min_mass=min_mass)
    layers = {layer: LayerSetting(c.budget, c.gate) for layer, c in picked.items() if c.budget is not None}
    completed = any(s.gate is not None for s in layers.values())
    count = max(len(picked), 1)
    measured: dict[str, Any] = {
        "error": sum(c.error for c in picked.values()) / count, "mass": sum(c.mass for c in picked.values()) / count,
        "read": sum(c.cost for c in picked.values()) / count, "context_length": d.context_length,
        "layers": {str(layer): {"error": c.error, "mass": c.mass, "read": c.cost} for layer, c in picked.items()}}
    goal = {"max_error": max_error} if max_error is not None else {"min_mass": min_mass}
    return Settings(d.model, selector, "phi" if completed else "none", d.sink_size, d.window_size, layers,
                    d.router if SELECTOR_ROWS[selector].needs else None, d.phi if completed else None, goal,
                    _rounded(measured))


def choices(d: Diagnostics, row: int, selector: str) -> list[Choice]:
    """All ways to run a layer: every budget with and without gates, and full attention."""
    made = [Choice(1.0, 0.0, 1.0)]
    alone, mass, read = d.errors[selector][row], d.mass[selector][row], d.read[selector][row]
    completed = d.errors.get(f"{selector}+phi")
    if torch.isnan(alone).any():
        return made  # the router has no such layer
    cache = d.cache_tokens / d.context_length
    for i, budget in enumerate(d.budgets):
        cost, share = float(read[:, i].mean()), float(mass[:, i].mean())
        made.append(Choice(cost, float(alone[:, i].mean()), share, budget))
        if completed is not None and not torch.isnan(completed[row]).any():
            gate = completed[row, :, i] < alone[:, i]
            if gate.any():
                error = torch.where(gate, completed[row, :, i], alone[:, i]).mean()
                made.append(Choice(cost + cache, float(error), share, budget, gate.float().tolist()))
    return made


def pick_choices(
    menu: dict[int, list[Choice]], *, max_error: float | None = None, min_mass: float | None = None,
) -> dict[int, Choice]:
    """One choice a layer: greedy on the hull of every layer's choices, which is the optimum up to the last step."""
    def loss(c: Choice) -> float:
        return c.error if max_error is not None else 1.0 - c.mass

    goal = max_error if max_error is not None else 1.0 - float(min_mass or 0.0)
    hulls = {layer: _hull(options, loss) for layer, options in menu.items()}
    at = dict.fromkeys(menu, 0)
    total = sum(loss(h[0]) for h in hulls.values())
    while total > goal * len(menu) + 1e-12:
        steps = [((loss(h[i]) - loss(h[i + 1])) / (h[i + 1].cost - h[i].cost), layer)
                 for layer, h in hulls.items() if (i := at[layer]) + 1 < len(h)]
        if not steps:
            break
        layer = max(steps)[1]
        total += loss(hulls[layer][at[layer] + 1]) - loss(hulls[layer][at[layer]])
        at[layer] += 1
    picked = {layer: hulls[layer][i] for layer, i in at.items()}
    # the last step may overshoot: take back what is not needed, dearest first, within each layer's whole menu
    for layer in sorted(picked, key=lambda x: -picked[x].cost):
        slack = goal * len(menu) - sum(loss(c) for c in picked.values())
        fits = [c for c in menu[layer] if loss(c) <= loss(picked[layer]) + slack + 1e-12]
        picked[layer] = min([*fits, picked[layer]], key=lambda c: (c.cost, loss(c)))
    if min_mass is not None:
        # completion reads no key: where it lowers the error it joins, at the price of its cache
        picked = {layer: min((c for c in menu[layer] if c.budget == p.budget), key=lambda c: c.error)
                  for layer, p in picked.items()}
    return picked


def _hull(options: list[Choice], loss: Any) -> list[Choice]:
    """The choices on the lower convex hull of (cost, loss), cheapest first."""
    hull: list[Choice] = []
    for c in sorted(options, key=lambda c: (c.cost, loss(c))):
        if hull and loss(c) >= loss(hull[-1]):
            continue
        while len(hull) > 1 and ((loss(hull[-2]) - loss(hull[-1])) * (c.cost - hull[-2].cost)
                                 <= (loss(hull[-2]) - loss(c)) * (hull[-1].cost - hull[-2].cost)):
            hull.pop()
        hull.append(c)
    return hull


def describe_settings(settings: Settings, d: Diagnostics) -> str:
    """A line a layer, the whole, and the heads that stay worst."""
    measured, promised = settings.measured, settings.selectivity(d.context_length)
    lines = ["| layer | budget | read | error | mass read | completion |", "|" + " ---: |" * 6]
    for layer in d.layers:
        about = measured["layers"].get(str(layer))
        if about is None or layer not in settings.layers:
            lines.append(f"| {layer} | full attention | 100 % | 0 | 1 | – |")
            continue
        own = settings.layers[layer]
        heads = "–" if own.gate is None else f"{sum(g > 0 for g in own.gate)} of {len(own.gate)} heads"
        lines.append(f"| {layer} | {100 * own.budget:g} % | {100 * promised[layer]:.1f} % | {about['error']:.3f} | "
                     f"{about['mass']:.3f} | {heads} |")
    goal = " ".join(f"{k.replace('_', ' ')} {v:g}" for k, v in settings.goal.items())
    count = int(d.model["num_layers"])
    lines.append(f"\n{settings.selector}, goal {goal}: error {measured['error']:.3f}, mass read exactly "
                 f"{measured['mass']:.3f}, {100 * measured['read']:.1f} % of {d.context_length} tokens read in "
                 f"the layers free to choose (completion's cache included); {count - len(settings.layers)} of {count} "
                 "layers keep full attention")
    worst = worst_heads(settings, d)
    if worst:
        lines.append("heads served worst (layer.head error): " + ", ".join(
            f"{layer}.{head} {error:.2f}" for error, layer, head in worst))
    return "\n".join(lines)


def worst_heads(settings: Settings, d: Diagnostics) -> list[tuple[float, int, int]]:
    """(error, layer, query head) of the heads with the largest error under the settings, worst first."""
    found = []
    for row, layer in enumerate(d.layers):
        own = settings.layers.get(layer)
        if own is None:
            continue
        i = d.budgets.index(own.budget)
        error = d.errors[settings.selector][row, :, i]
        if own.gate is not None:
            error = torch.where(torch.tensor(own.gate) > 0, d.errors[f"{settings.selector}+phi"][row, :, i], error)
        found += [(float(e), layer, head) for head, e in enumerate(error)]
    return sorted(found, reverse=True)[:SHOWN_HEADS]


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return round(value, 5) if isinstance(value, float) else value
