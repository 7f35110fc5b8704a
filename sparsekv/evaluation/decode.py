"""Decode the same prompts by several methods: needles found, perplexity, attention error, selectivity."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsekv.artifacts.phi import PhiArtifact
from sparsekv.artifacts.router import RouterArtifact
from sparsekv.evaluation.needle import Needle, found
from sparsekv.runtime.attach import Attachment, attach

HEADER = ["read exactly", "needles found", "perplexity", "attention error", "selectivity"]
ANSWER_TOKENS = 10


class Method(NamedTuple):
    """One row of the table: what is read exactly, at which share of the context, and whether φ completes it."""

    label: str
    case: str
    selector: str
    token_budget: float | None
    phi: bool


@dataclass
class Score:
    """What one method measured, a value a held-out window; needles are counted."""

    losses: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    hits: list[tuple[int, float, bool]] = field(default_factory=list)
    """Length, depth and whether it was found, of every needle."""
    found: int = 0
    asked: int = 0

    @property
    def rel_err(self) -> float:
        return sum(self.errors) / len(self.errors)

    def rows(self, method: Method) -> list[dict[str, Any]]:
        """One row a metric, in the project's schema."""
        values: dict[str, tuple[float, str]] = {}
        if self.losses:
            values = {"rel_err": (self.rel_err, "relative L2"),
                      "perplexity": (math.exp(sum(self.losses) / len(self.losses)), "per token"),
                      "selectivity": (sum(self.shares) / len(self.shares), "share of the context")}
        if self.asked:
            values["needles"] = (self.found, f"of {self.asked}")
        name = "phi" if method.phi else "none"
        cells: dict[tuple[int, float], list[bool]] = {}
        for length, depth, hit in self.hits:
            cells.setdefault((length, round(depth, 3)), []).append(hit)
        return [{"case": method.case, "method": name, "metric": metric, "value": value, "unit": unit}
                for metric, (value, unit) in values.items()] + [
            {"case": method.case, "method": name, "metric": "needle", "value": sum(hits) / len(hits), "unit": "share",
             "length": length, "depth": depth} for (length, depth), hits in cells.items()]


@torch.inference_mode()
def decode(
    model: Any, tokenizer: Any, methods: Sequence[Method], windows: Sequence[Tensor], needles: Sequence[Needle], *,
    router: RouterArtifact | None, phi: PhiArtifact | None, continuation: int, advance: Callable[..., None],
) -> dict[Method, Score]:
    """Every method on every window and needle; a prompt is prefilled once, densely, and forked for each method.

    windows: token ids `[N]`; the last `continuation` tokens are scored given all before. Dense layers count neither in
    the error nor in the selectivity.
    """
    scores = {method: Score() for method in methods}

    def attached(method: Method) -> Attachment:
        return attach(model, selector=method.selector, token_budget=method.token_budget, sparse_chunks=True,
                      dense_below=0, router=router if method.selector == "router" else None,
                      phi=phi if method.phi else None, diagnostics=method.selector != "dense")

    for window in windows:
        cache = None
        ids = window[None].to(model.device)
        start = ids.shape[1] - continuation - 1
        for method in methods:
            with attached(method) as attachment:
                cache = cache or attachment.prefill(ids[:, :start])
                logits = model(ids[:, start:-1], past_key_values=cache.fork(), use_cache=True).logits
                report = attachment.report()
            score = scores[method]
            score.losses.append(float(torch.nn.functional.cross_entropy(logits[0].float(), ids[0, start + 1:])))
            score.errors.append(report["rel_err"] or 0.0)
            share = report["selectivity_sparse"]
            score.shares.append(1.0 if share is None else share)
            advance()
    for needle in needles:
        cache = None
        ids = torch.tensor(needle.tokens, device=model.device)[None]
        for method in methods:
            with attached(method) as attachment:
                cache = cache or attachment.prefill(ids[:, :-1])
                answer = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache.fork(),
                                        max_new_tokens=ANSWER_TOKENS, do_sample=False)
            hit = found(needle, tokenizer.decode(answer[0, ids.shape[1]:]))
            scores[method].asked += 1
            scores[method].found += hit
            scores[method].hits.append((ids.shape[1], needle.depth, hit))
            advance()
    return scores


def table_rows(methods: Sequence[Method], rows: list[dict[str, Any]]) -> list[list[str]]:
    """The table's cells, one row a method, drawn from the result rows; "–" where nothing was measured."""
    known = {(r["case"], r["method"], r["metric"]): r for r in rows}
    lines = []
    for method in methods:
        key = (method.case, "phi" if method.phi else "none")

        def cell(metric: str, form: str, key: tuple[str, str] = key) -> str:
            row = known.get((*key, metric))
            return "–" if row is None else form.format(row["value"], row["unit"])

        lines.append([method.label, cell("needles", "{:.0f} {}"), cell("perplexity", "{:.2f}"),
                      cell("rel_err", "{:.3f}"), cell("selectivity", "{:.1%}")])
    return lines


def markdown_table(methods: Sequence[Method], rows: list[dict[str, Any]]) -> str:
    """The same as Markdown."""
    lines = [HEADER, ["---"] + ["---:"] * (len(HEADER) - 1), *table_rows(methods, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
