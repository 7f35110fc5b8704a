"""Prompts read sparsely, then decoded alike: the same prompts, scores and cells, beside a prompt read densely.

A reading is named as a method is: `sketch+phi`, the prompt read densely; `prompt:share=0.1`, read by
`SparsePrompts(share=0.1)` with the sizes of `SIZES`; `xattention:share=0.1`, by the rule of XAttention (arXiv
2503.16428) at as many pairs of query and key. All decode by `sketch+phi` at the stage's budget. Layer 0 and the last
`exact` tokens are read densely by all.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

import sparsekv
from sparsekv.artifacts.hub.models import attention_modules, decoder
from sparsekv.core.prefill import SparsePrompts
from sparsekv.evaluation.batch import AnswerBatch, prefill_batch
from sparsekv.evaluation.evaluator import Evaluator
from sparsekv.evaluation.methods import Method
from sparsekv.evaluation.requests import Question
from sparsekv.evaluation.scores import is_mean, score_rows
from sparsekv.kernels import dense_attention
from sparsekv.kernels.block_attention import BLOCK, share_bits, wanted_blocks

FOLDER = "prompts"
"""The folder of cells whose prompts were read in other ways."""
DENSE = "sketch+phi"
SIZES = {"least": 0, "exact": 128, "shortest": 0}
"""No least list, and a quarter of the default's last tokens: with the defaults a prompt of 16k tokens reads half of the
pairs, one of 128k 31 %."""
LOGITS_AT_ONCE = 1024
"""Tokens whose logits are in memory at once."""


@dataclass(frozen=True)
class Reading(Method):
    """A method that decodes, and how it reads prompts: `full`, `prompt` or `xattention`."""

    rule: str = "full"
    prompts: SparsePrompts = SparsePrompts()
    said: str = DENSE

    @property
    def name(self) -> str:
        return self.said


def parse_readings(names: Sequence[str], budgets: Sequence[float]) -> list[Reading]:
    """The readings of these names, decoded at every budget."""
    found = []
    for name in names:
        rule, *given = name.split(":")
        if name != DENSE and rule not in ("prompt", "xattention"):
            raise ValueError(f"{name!r} is no reading of a prompt; expected {DENSE}, prompt:share=… or xattention:…")
        sizes = {k: json.loads(v) for k, _, v in (word.partition("=") for word in given)}
        found += [Reading("sketch", "phi", budget, (), "full" if name == DENSE else rule,
                          SparsePrompts(**{**SIZES, **sizes}), name) for budget in budgets]
    return found


def sizes_of(method: str) -> tuple[str, dict[str, Any]]:
    """A method of `prefill.py` and its fields of `SparsePrompts`: `sparse@0.1:least=8192`."""
    kind, _, sizes = method.partition("@")
    share, *rest = sizes.split(":")
    words = {"share": share} if share else {}
    words |= dict(word.split("=", 1) for word in rest)
    return kind, {name: json.loads(value) for name, value in words.items()}


class PromptEvaluator(Evaluator):
    """Cells of readings; a continued text's have the mean loss of its prompt too."""

    prompt_loss = 0.0

    def _prefilled(self, prompts: list[list[int]], batch: AnswerBatch, method: Any, room: int) -> AnswerBatch:
        if method.rule == "full" and len(prompts) > 1:
            return batch
        how: dict[str, Any] = {"dense_layers": (0,), "sink_size": self.sink_size, "window_size": self.window_size}
        if method.rule == "prompt":
            how["prefill"] = method.prompts
        layers = len(attention_modules(self.model))
        rule: Any = XAttention(method.prompts, layers) if method.rule == "xattention" else dense_attention
        with (patch("sparsekv.runtime.hf.runner.dense_attention", rule), hidden_states(self.model) as kept,
              sparsekv.attach(self.model, selector="dense", **how) as attachment):
            found = prefill_batch(attachment, prompts, room=room)
        if len(prompts) == 1:
            self.prompt_loss = loss_of(self.model, kept[0], prompts[0])
        return found

    def _continue(self, batch: AnswerBatch, request: Question, method: Method, goes_on: bool) -> dict[str, Any]:
        return super()._continue(batch, request, method, goes_on) | {"prompt_losses": [self.prompt_loss]}


@contextmanager
def hidden_states(model: Any) -> Iterator[list[Tensor]]:
    """What the last layer makes of the last prompt that is read inside, after the norm: one tensor `[1, N, D]`."""
    kept: list[Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        kept[:] = [output[0]]

    handle = decoder(model).register_forward_hook(keep)
    try:
        yield kept
    finally:
        handle.remove()


@torch.inference_mode()
def loss_of(model: Any, hidden: Tensor, prompt: Sequence[int]) -> float:
    """The mean loss of a prompt's tokens [nats], of which `hidden [1, N, D]` is all but the last's."""
    right = torch.tensor(prompt[1:], device=hidden.device)
    head = model.get_output_embeddings()
    total = 0.0
    for a in range(0, len(right), LOGITS_AT_ONCE):
        logits = head(hidden[0, a:a + LOGITS_AT_ONCE]).float()
        total += float(F.cross_entropy(logits, right[a:a + LOGITS_AT_ONCE], reduction="sum"))
    return total / len(right)


class XAttention:
    """Dense attention's place is taken by blocks of 128 × 128 pairs, chosen by sums of the antidiagonals of stride 8
    after a softmax over them (XAttention §2.1). Of a head and block of queries as many are read as hold a share τ of
    the sums (§2.2). The paper's τ is 0.9; here a layer has the one with which it reads as many pairs as `SparsePrompts`
    does. Sink and diagonal are read too. It is called once a layer, in order. For quality: it masks, and is no
    faster."""

    stride = 8

    def __init__(self, prompts: SparsePrompts, layers: int):
        self.prompts, self.layers, self.calls = prompts, layers, 0

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, **rest: Any) -> Tensor:
        layer, self.calls = self.calls % self.layers, self.calls + 1
        if not layer or query.shape[2] != key.shape[2] or query.shape[0] > 1:
            return dense_attention(query, key, value, scale=scale, **rest)
        count, group = query.shape[2], query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        kept = self.blocks(query[0], key[0], scale)
        out, rows, at_once = torch.empty_like(query), torch.arange(count, device=query.device), 8 * BLOCK
        for first in range(0, count, at_once):
            last = min(first + at_once, count)
            columns = kept[:, first // BLOCK:-(-last // BLOCK)].repeat_interleave(BLOCK, 1)
            mask = columns[:, :last - first].repeat_interleave(BLOCK, 2)[:, :, :last]
            mask = mask & (rows[:last] <= rows[first:last, None])
            out[:, :, first:last] = F.scaled_dot_product_attention(
                query[:, :, first:last], key[:, :, :last], value[:, :, :last], attn_mask=mask[None], scale=scale)
        return out

    def blocks(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """The blocks that are read, q, k `[H, N, d]` -> `[H, n, n]`, blocks of queries by blocks of keys."""
        count = q.shape[1]
        q, k = (F.pad(x, (0, 0, 0, -count % BLOCK)).unflatten(1, (-1, self.stride)) for x in (q, k))
        places = torch.arange(q.shape[1], device=q.device)
        scores = (q.flip(2).flatten(2) @ k.flatten(2).mT).float() * (scale / self.stride)
        shares = scores.masked_fill_(places > places[:, None], -torch.inf).softmax(-1)
        own = BLOCK // self.stride
        mass = shares.unflatten(2, (-1, own)).sum(3).unflatten(1, (-1, own)).sum(2)
        heads, number, _ = mass.shape
        at = torch.arange(number, device=q.device)
        always = (at == 0) | (at == at[:, None])
        rank = mass.masked_fill(always, torch.inf).argsort(dim=-1, descending=True)
        sizes = mass.gather(-1, rank)
        before = torch.empty_like(mass).scatter_(-1, rank, sizes.cumsum(-1) - sizes)
        before = before.masked_fill(always, -1.0).masked_fill(at > at[:, None], torch.inf)
        rows = torch.tensor(read_blocks(self.prompts, count), device=q.device)
        sparse = int((rows < at + 1).nonzero().max()) + 1 if bool((rows < at + 1).any()) else 0
        total = heads * int(rows[:sparse].sum())
        limit = before[:, :sparse].flatten().kthvalue(total).values if sparse else torch.inf
        return torch.where((at < sparse)[:, None], before <= limit, at <= at[:, None])


@functools.cache
def read_blocks(prompts: SparsePrompts, count: int) -> list[int]:
    """Blocks of keys that each block of queries of a prompt reads, in the mean of the heads."""
    border, own = max(0, count - prompts.exact) // BLOCK, torch.arange(-(-count // BLOCK))
    wanted = wanted_blocks(own, share_bits(prompts.share), -(-prompts.least // BLOCK))
    return torch.where(own < border, torch.minimum(own + 1, wanted), own + 1).tolist()


def pairs_read(prompts: SparsePrompts, count: int) -> float:
    """The share of full attention's pairs that a prompt of `count` tokens reads."""
    found = 0.0
    for own, read in enumerate(read_blocks(prompts, count)):
        rows = min(BLOCK, count - own * BLOCK)
        found += rows * (read - 1) * BLOCK + rows * (rows + 1) / 2
    return found / (count * (count + 1) / 2)


def prompt_rows(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of cells of readings: `prefill@L` the mean of RULER, `prefill_TASK@L`, `prefill_perplexity_TEXT@L` what
    follows a text, `prefill_prompt_TEXT@L` the text itself. Differences and ratios are to the prompt read densely. A
    row has `pairs`, the share of pairs that were read."""
    texts = [{**c, "case": c["case"].replace("perplexity_", "perplexity_prompt_", 1), "losses": c["prompt_losses"],
              "likeliest": []} for c in cells if "prompt_losses" in c]
    dense = {"method": "full", "budget": None}
    budgets = {c["budget"] for c in cells}
    rows = score_rows([{**c, **dense} if c["method"] == DENSE else c for c in (*cells, *texts)])
    found = []
    for r in (r for r in rows if r["metric"] not in ("rel_err", "selectivity")):
        task, _, length = r["case"].partition("@")
        case = f"prefill@{length}" if is_mean(r["case"]) else (
            f"prefill_{task.replace('perplexity_prompt_', 'prompt_')}@{length}")
        is_dense = r["method"] == "full"
        reading = parse_readings([DENSE if is_dense else r["method"]], [0.0])[0]
        pairs = 1.0 if is_dense else pairs_read(reading.prompts, int(length))
        found.append({**r, "case": case, "pairs": round(pairs, 4),
                      **({"method": DENSE, "budget": min(budgets)} if is_dense else {}),
                      **({"against": DENSE} if r.get("against") == "full" else {})})
    return found
