"""Decode the same prompts by several methods: needles found, perplexity, attention error, selectivity."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsekv.artifacts.phi import PhiArtifact
from sparsekv.artifacts.router import RouterArtifact
from sparsekv.evaluation.needle import Needle, found
from sparsekv.evaluation.sweep import add_cell, check_artifacts, open_cells
from sparsekv.evaluation.tables import bootstrap
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
    found: int = 0
    asked: int = 0
    hits: list[tuple[int, float, bool]] = field(default_factory=list)
    """Length, depth and whether it was found, of every needle."""

    @property
    def rel_err(self) -> float:
        return sum(self.errors) / len(self.errors)

    def add(self, cell: Mapping[str, Any]) -> None:
        """One window (`loss`, `error`, `share`) or one needle (`length`, `depth`, `hit`)."""
        if "loss" in cell:
            self.losses.append(cell["loss"])
            self.errors.append(cell["error"])
            self.shares.append(cell["share"])
        else:
            self.asked += 1
            self.found += cell["hit"]
            self.hits.append((cell["length"], cell["depth"], cell["hit"]))

    def rows(self, method: Method, **extra: Any) -> list[dict[str, Any]]:
        """One row a metric, in the project's schema, with the interval of the mean over windows or needles (`low`,
        `high`: bootstrap, 95 %), and one a depth and length of the needles."""
        values: list[tuple[str, float, str, list[float], Callable[[float], float]]] = []
        if self.losses:
            values = [("rel_err", self.rel_err, "relative L2", self.errors, float),
                      ("perplexity", math.exp(sum(self.losses) / len(self.losses)), "per token", self.losses, math.exp),
                      ("selectivity", sum(self.shares) / len(self.shares), "share of the context", self.shares, float)]
        if self.asked:
            hits = [1.0] * self.found + [0.0] * (self.asked - self.found)
            values.append(("needles", self.found, f"of {self.asked}", hits, lambda x: x * self.asked))
        common = {"case": method.case, "method": "phi" if method.phi else "none"}
        extra = {"budget": method.token_budget, **extra}
        rows = []
        for metric, value, unit, samples, scale in values:
            low, high = bootstrap([samples])
            rows.append({**common, "metric": metric, "value": value, "unit": unit, "low": round(scale(low), 5),
                         "high": round(scale(high), 5), "samples": len(samples), **extra})
        cells: dict[tuple[int, float], list[bool]] = {}
        for length, depth, hit in self.hits:
            cells.setdefault((length, round(depth, 3)), []).append(hit)
        return rows + [{**common, "metric": "needle", "value": sum(hit) / len(hit), "unit": "share", "length": length,
                        "depth": depth, "samples": len(hit), **extra} for (length, depth), hit in cells.items()]


def prompts_digest(windows: Sequence[Tensor], needles: Sequence[Needle]) -> str:
    """A hash of all prompts: cells of other prompts are not mixed in."""
    tokens = [[w.tolist() for w in windows], [[n.tokens, n.number] for n in needles]]
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]


class Kept:
    """Finished cells of an interrupted run, one line a prompt and method of a file beside the results."""

    def __init__(self, path: Path, header: dict[str, Any], resume: bool, artifacts: dict[str, str]):
        self.path, self.artifacts = path, artifacts
        cells = open_cells(path, header, resume)
        check_artifacts(path, cells, artifacts)
        self.cells = {(c["prompt"], c["case"], c["completion"] == "phi"): c for c in cells}

    def get(self, prompt: int, method: Method) -> dict[str, Any] | None:
        return self.cells.get((prompt, method.case, method.phi))

    def put(self, prompt: int, method: Method, cell: dict[str, Any]) -> None:
        used = {"router": method.selector == "router", "phi": method.phi}
        add_cell(self.path, {"prompt": prompt, "case": method.case, "completion": "phi" if method.phi else "none",
                             **cell, **{k: v for k, v in self.artifacts.items() if used[k]}})


@torch.inference_mode()
def decode(
    model: Any, tokenizer: Any, methods: Sequence[Method], windows: Sequence[Tensor], needles: Sequence[Needle], *,
    router: RouterArtifact | None, phi: PhiArtifact | None, continuation: int, advance: Callable[..., None],
    kept: Kept | None = None,
) -> dict[Method, Score]:
    """Every method on every window and needle; a prompt is prefilled once, densely, and forked for each method.

    windows: token ids `[N]`; the last `continuation` tokens are scored given all before. Dense layers count neither in
    the error nor in the selectivity. kept: where cells are written when done, and read instead of measured again.
    """
    scores = {method: Score() for method in methods}

    def attached(method: Method) -> Attachment:
        return attach(model, selector=method.selector, token_budget=method.token_budget, sparse_chunks=True,
                      dense_below=0, router=router if method.selector == "router" else None,
                      phi=phi if method.phi else None, diagnostics=method.selector != "dense")

    prompts: list[Tensor | Needle] = [*windows, *needles]
    for number, prompt in enumerate(prompts):
        cache = None
        for method in methods:
            cell = None if kept is None else kept.get(number, method)
            if cell is None:
                with attached(method) as attachment:
                    if isinstance(prompt, Needle):
                        ids = torch.tensor(prompt.tokens, device=model.device)[None]
                        cache = cache or attachment.prefill(ids[:, :-1])
                        cell = _find(model, tokenizer, prompt, ids, cache)
                    else:
                        ids = prompt[None].to(model.device)
                        cache = cache or attachment.prefill(ids[:, :-continuation - 1])
                        cell = _continue(model, ids, cache, continuation, attachment)
                if kept is not None:
                    kept.put(number, method, cell)
            scores[method].add(cell)
            advance()
    return scores


def _continue(model: Any, ids: Tensor, cache: Any, continuation: int, attachment: Attachment) -> dict[str, Any]:
    """Loss of the last `continuation` tokens [nats], error of the attention's output, share of the context read."""
    asked = ids[:, -continuation - 1:]
    logits = model(asked[:, :-1], past_key_values=cache.fork(), use_cache=True).logits
    report = attachment.report()
    share = report["selectivity_sparse"]
    return {"loss": float(torch.nn.functional.cross_entropy(logits[0].float(), asked[0, 1:])),
            "error": report["rel_err"] or 0.0, "share": 1.0 if share is None else share}


def _find(model: Any, tokenizer: Any, needle: Needle, ids: Tensor, cache: Any) -> dict[str, Any]:
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache.fork(),
                            max_new_tokens=ANSWER_TOKENS, do_sample=False)
    hit = found(needle, tokenizer.decode(answer[0, ids.shape[1]:]))
    return {"length": ids.shape[1], "depth": needle.depth, "hit": hit}


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
