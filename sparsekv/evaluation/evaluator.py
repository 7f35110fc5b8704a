"""The evaluator: every method at every budget on the same prompts, prefilled once; a finished cell is on disk."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sparsekv.artifacts.fingerprint import model_fingerprint
from sparsekv.core.estimators import CentroidEstimator, UniformEstimator
from sparsekv.core.estimators.centroid import equal_buckets
from sparsekv.core.regions import AMORTISE_OVER
from sparsekv.core.registry import FULL
from sparsekv.evaluation.batch import AnswerBatch, all_sparse, answer_batch, continue_text, prefill_batch
from sparsekv.evaluation.cells import add_cell, artifact_digest, open_cells
from sparsekv.evaluation.lead import TOKENS, Distance, Reference, distance, lead, reference
from sparsekv.evaluation.methods import Method
from sparsekv.evaluation.requests import Question, score
from sparsekv.evaluation.rows import origin
from sparsekv.runtime.config import SparseConfig
from sparsekv.runtime.hf.attach import Attachment, RunOptions, attach
from sparsekv.runtime.hf.cache import SparseCache

CPU_BYTES = 4 * 2**30
"""Keys and values of the prompts that are in memory at once, on a CPU; on a GPU half of what is free."""
UNTRAINED_TOKENS = 256.0
"""Size of an untrained completion where there is no φ whose bytes it could match [tokens]."""
SPLIT = 4
TIMED_STEPS = 8
"""Decode steps that are timed, and as many before them."""


class Evaluator:
    """Requests measured by methods, one line a finished (task, method, batch of prompts) in `<output>/cells*.jsonl`.

    accounting: `retrieved`, `worst_case` or `amortised` (completion paper, appendix D). part: the name of a shard.
    header: more keys of the header. batch_tokens: prompt tokens in memory at once. config: what all methods share. kl:
    measure the distance to full attention too (`lead.py`), in `steps` along at most `led_tokens` of its answer or of a
    text, or, of texts alone, in the `chunk` that has their losses. Raises SparseKVError for cells that exist without
    `resume`, or that something else was measured with.
    """

    def __init__(self, model: Any, tokenizer: Any, requests: Sequence[Question], *, output: Path, router: Any = None,
                 phi: Any = None, accounting: str = "retrieved", resume: bool = False, part: str = "",
                 header: dict[str, Any] | None = None, batch_tokens: int | None = None,
                 config: SparseConfig | None = None, kl: str | None = None, led_tokens: int = TOKENS):
        self.model, self.tokenizer, self.requests = model, tokenizer, list(requests)
        self.accounting, self.batch_tokens = accounting, batch_tokens
        self.artifacts = {k: a.to(model.device) for k, a in (("router", router), ("phi", phi)) if a is not None}
        self.digests = {k: artifact_digest(a) for k, a in self.artifacts.items()}
        config = SparseConfig() if config is None else config
        self.sink_size, self.window_size = config.sizes(*list(self.artifacts.values())[:1])
        # short contexts are measured sparsely too
        self.config = replace(config, dense_below=0, sink_size=self.sink_size, window_size=self.window_size)
        self.shape = model_fingerprint(model)
        self.splits: dict[str, int] = {}
        self.begun: tuple[Method, RunOptions | None, Attachment] | None = None
        """The method that was measured last, how its steps ran, and its attachment."""
        self.kl, self.led_tokens = kl, led_tokens
        self.along: Reference | None = None
        """What the methods of a batch are led along."""
        self._tokens: dict[int, list[int]] = {}
        self.path = output / f"cells{part}.jsonl"
        cells = open_cells(self.path, {
            "requests": digest_of_prompts(self.requests), "accounting": accounting,
            "weights": self.shape["weights"], "dtype": str(model.dtype).removeprefix("torch."),
            "decoding": {k: v for k, v in config.given().items()
                         if k not in ("completion", "candidates", "dense_below")},
            **(header or {}), "origin": origin()}, self.digests, resume)
        self.done = {(c["case"], i, c["method"], c["budget"]) for c in cells for i in c["indices"]
                     if kl is None or "kl" in c or c.get("infeasible")}

    def run(
        self, methods: Sequence[Method], advance: Callable[..., None] = lambda n=1: None, until: float = math.inf,
        some: Sequence[Question] | None = None,
    ) -> bool:
        """Fill the cells; whether all are full. `advance(n)` is called as requests are measured by methods. Past
        `until` (`time.perf_counter()`) nothing is begun. some: of the requests, those that are measured."""
        for requests in self.batches(some):
            todo = [m for m in methods if self._open(requests, m)]
            advance((len(methods) - len(todo)) * len(requests))
            if not todo:
                continue
            if time.perf_counter() >= until:
                return False
            prompts = [self._prompt(r) for r in requests]
            room = max(r.answer_tokens for r in requests) + 1
            with attach(self.model, selector="dense") as dense:
                batch = prefill_batch(dense, prompts, room=room)
                self.along = self._reference(dense, batch, requests[0]) if self.kl == "steps" else None
            if self.kl == "chunk":
                self.along = self._reference_chunk(batch, requests[0])
            for method, following in zip(todo, [*todo[1:], None], strict=True):
                if time.perf_counter() >= until:
                    return False
                self._measure(self._prefilled(prompts, batch, method, room), requests, method, method.alike(following))
                if self.model.device.type == "cuda":
                    torch.cuda.empty_cache()  # shards share the device: what a method built is another's room
                advance(len(requests))
            del batch
            self.along = None
        return True

    @torch.inference_mode()
    def speeds(self, methods: Sequence[Method], request: Question) -> dict[tuple[str, float | None], float]:
        """Time of a decode step after the request's prompt [ms], by name and budget: the median of `TIMED_STEPS`, after
        as many that warm up."""
        with attach(self.model, selector="dense") as dense:
            batch = prefill_batch(dense, [self._prompt(request)], room=2 * TIMED_STEPS + 1)
        width, found = batch.width, {}
        for method in methods:
            part, token, ends = batch.begin(), batch.last, [time.perf_counter()]
            try:
                with self._attached(method) as attachment:
                    for _ in range(2 * TIMED_STEPS):
                        token = attachment.step(token, part.cache)[:, -1].argmax(-1, keepdim=True)
                        token.tolist()  # waits for the device
                        ends.append(time.perf_counter())
            finally:
                batch.restore(width)
            steps = [1000 * (after - before) for before, after in itertools.pairwise(ends)]
            found[method.name, method.budget] = round(statistics.median(steps[TIMED_STEPS:]), 3)
        return found

    def _reference(self, dense: Attachment, batch: AnswerBatch, request: Question) -> Reference:
        """Full attention along a text, or along its own greedy answer up to its end."""
        if request.metric == "continuation":
            return reference(dense, batch, self._following(request)[:self.led_tokens])
        answer, = answer_batch(dense, batch, [min(request.answer_tokens, self.led_tokens)],
                               lambda _, tokens: self._ended(request, tokens))
        end = next((n for n in range(1, len(answer)) if self._ended(request, answer[:n])), len(answer))
        return reference(dense, batch, answer[:end])

    def _reference_chunk(self, batch: AnswerBatch, request: Question) -> Reference:
        following = self._following(request)
        # as sparse steps do, these leave the prompt's last queries in the cache
        with attach(self.model, selector="dense", run=RunOptions(sparse_chunks=True)) as dense:
            logits = continue_text(dense, batch, following).logits
        return Reference(following, logits.float().log_softmax(-1))

    def _following(self, request: Question) -> list[int]:
        """The last tokens of a text, which are scored."""
        return self._tokens_of(request)[-request.max_new_tokens:]

    def _prefilled(self, prompts: list[list[int]], batch: AnswerBatch, method: Method, room: int) -> AnswerBatch:
        """The prompts as a method reads and keeps them: densely on the device, or in its own way."""
        if method.selector == FULL or not (
                dict(method.options).get("prefill_chunk") or self.config.prompts() or self.config.away):
            return batch
        with self._attached(method) as attachment:
            return prefill_batch(attachment, prompts, room=room)

    def batches(self, some: Sequence[Question] | None = None) -> Iterator[list[Question]]:
        """Requests of one length, tasks kept together, as many as the memory takes with their padding; a text to be
        continued is alone, and so is every prompt of a model with sliding-window layers and every one whose distance to
        full attention is measured: how much a step scores depends on how many requests it has."""
        limit = self.batch_tokens or self._room() // self._token_bytes
        asked = self.requests if some is None else some
        sizes = {id(r): len(self._tokens_of(r)) for r in asked}
        tasks: dict[tuple[int, str], list[Question]] = {}
        for r in asked:
            tasks.setdefault((r.length, r.task), []).append(r)
        order = sorted(tasks, key=lambda key: (key[0], max(sizes[id(r)] for r in tasks[key])))
        with attach(self.model, selector="dense") as dense:
            alone = self.kl is not None or self.config.away or not all_sparse(dense.cache())
        batch: list[Question] = []
        longest = 0
        for r in (r for key in order for r in tasks[key]):
            longest = max(longest, sizes[id(r)])
            if batch and (alone or batch[0].length != r.length or longest * (len(batch) + 1) > limit
                          or "continuation" in (batch[0].metric, r.metric)):
                yield batch
                batch, longest = [], sizes[id(r)]
            batch.append(r)
        if batch:
            yield batch

    def _room(self) -> int:
        """Bytes for keys and values, and for what is kept beside them."""
        on_gpu = self.model.device.type == "cuda"
        return torch.cuda.mem_get_info(self.model.device)[0] // 2 if on_gpu else CPU_BYTES

    @property
    def _token_bytes(self) -> int:
        """Of a token's keys and values."""
        size = self.shape["num_layers"] * self.shape["num_kv_heads"] * self.shape["head_dim"]
        return int(2 * size * self.model.dtype.itemsize)

    def _tokens_of(self, request: Question) -> list[int]:
        """Its token ids, made once."""
        if id(request) not in self._tokens:
            self._tokens[id(request)] = request.tokens(self.tokenizer)
        return self._tokens[id(request)]

    def _prompt(self, request: Question) -> list[int]:
        tokens = self._tokens_of(request)
        return tokens[:-request.max_new_tokens] if request.metric == "continuation" else tokens

    def _open(self, requests: Sequence[Question], method: Method) -> bool:
        return any((r.case, r.index, method.name, method.budget) not in self.done for r in requests)

    def feasible(self, context: int, method: Method) -> bool:
        """Return whether the budget pays for sink, tail and the completion's cache, where the accounting has it pay for
        them: a prompt of `context` tokens and its last one, which joins the tail."""
        if self.accounting == "retrieved" or method.budget is None:
            return True
        spread = AMORTISE_OVER if self.accounting == "amortised" else 1
        always = self.sink_size + self.window_size + 1 + self._cache_tokens(method) / spread
        return method.budget * context >= always

    def _cache_tokens(self, method: Method) -> float:
        """What the completion's cache costs to fetch, in tokens; an untrained one is as large as φ's."""
        if method.completion == "none":
            return 0.0
        return self.artifacts["phi"].cache_tokens if "phi" in self.artifacts else UNTRAINED_TOKENS

    def _attached(self, method: Method, run: RunOptions | None = None) -> Attachment:
        config, completion = method.config(self.config), method.completion
        if method.budget is not None:
            config = replace(config, options={**config.options, "accounting": self.accounting})
        own: Any = completion
        if completion == "centroid":
            own = CentroidEstimator(equal_buckets(self._cache_tokens(method), self.shape["head_dim"]))
        elif completion == "uniform":
            own = UniformEstimator(max(1, round(self._cache_tokens(method))))
        trained: dict[str, Any] = {kind: self.artifacts.get(kind) for kind in method.uses}
        return attach(self.model, config=config, completion=own, run=run, **trained)

    def _measure(self, batch: AnswerBatch, requests: list[Question], method: Method, goes_on: bool) -> None:
        """Measure a batch and write one line a task; infeasible tasks are written as such. `goes_on`: with the next
        budget of the same method, for which what is built over the prompts stays."""
        began = time.perf_counter()
        lengths = batch.lengths.tolist()
        barred = {r.case for r, n in zip(requests, lengths, strict=True) if not self.feasible(n, method)}
        rows = [i for i, r in enumerate(requests) if r.case not in barred]
        found: dict[str, Any] = {}
        texts: dict[int, str] = {}
        led: list[Distance] = []
        if rows and requests[0].metric == "continuation":
            found = self._continue(batch, requests[0], method, goes_on)
        elif rows:
            texts, led, found = self._answer(batch, requests, method, rows, goes_on)
        if not goes_on:
            batch.restore(batch.width)
        seconds = time.perf_counter() - began
        for case in dict.fromkeys(r.case for r in requests):
            own = [i for i, r in enumerate(requests) if r.case == case]
            line: dict[str, Any] = {"case": case, "method": method.name, "budget": method.budget,
                                    "indices": [requests[i].index for i in own],
                                    **{k: self.digests[k] for k in method.uses if k in self.digests}}
            if case in barred:
                line["infeasible"] = True
            else:
                line |= {**found, "tokens": round(sum(lengths[i] for i in own) / len(own)),
                         "cache_tokens": self._cache_tokens(method),
                         "seconds": round(seconds * len(own) / len(requests), 3)}
            if case not in barred and texts:
                line |= {"scores": [_score(requests[i], texts[i]) for i in own], "answers": [texts[i] for i in own]}
                line |= _columns(led)
                if requests[own[0]].depth is not None:
                    line["depths"] = [requests[i].depth for i in own]
            add_cell(self.path, line)
            self.done |= {(case, i, method.name, method.budget) for i in line["indices"]}

    def _going(self, method: Method, run: RunOptions | None, cache: SparseCache) -> Attachment:
        """The attachment of a method: the last one, if another budget is all that changes."""
        if self.begun is None or not method.alike(self.begun[0]) or run != self.begun[1]:
            self.begun = method, run, self._attached(method, run)
        attachment = self.begun[2]
        if method.budget is not None:
            attachment.spend(method.budget, cache)
        return attachment

    def _continue(self, batch: AnswerBatch, request: Question, method: Method, goes_on: bool) -> dict[str, Any]:
        """Losses of a window's last tokens [nats] and their mean, the tokens that were likeliest, error of the
        attention's output, share of the context read, distance to full attention."""
        run = RunOptions(sparse_chunks=True, compares=method.selector != "full")
        with self._going(method, run, batch.cache) as attachment:
            found = continue_text(attachment, batch, self._following(request), keeps=goes_on and self.kl != "steps")
        attachment.check_in_force(f"method {method.name}")
        report, losses = attachment.report(), found.losses
        led: list[Distance] = []
        if self.along is not None and self.kl == "chunk":
            led = [distance(self.along.logs, found.logits.float().log_softmax(-1))]
        elif self.along is not None:
            with self._going(method, None, batch.cache) as attachment:
                led = [lead(attachment, batch, self.along)]
        return {"losses": [sum(losses) / len(losses)], "token_losses": [[round(x, 5) for x in losses]],
                "likeliest": [found.likeliest], "errors": [report["rel_err"] or 0.0], **_shares(report),
                **_columns(led)}

    def _answer(
        self, batch: AnswerBatch, requests: list[Question], method: Method, rows: list[int], goes_on: bool,
    ) -> tuple[dict[int, str], list[Distance], dict[str, float]]:
        """Answers by row, the distance of a prompt that is alone, and what a sparse layer read; in parts where the
        device's memory does not hold what the method builds for all rows."""
        splits = self.splits.get(method.selector, 1)
        if len(rows) < len(requests):
            batch.restore(batch.width)  # some rows' budget pays for nothing
        while True:
            try:
                attachment = self._going(method, None, batch.cache)
                found = self._answer_in_parts(attachment, batch, requests, rows, splits, goes_on)
                attachment.check_in_force(f"method {method.name}")
                return found
            except torch.OutOfMemoryError:
                batch.restore(batch.width)
                if splits >= len(rows):
                    raise
            splits = self.splits[method.selector] = min(splits * SPLIT, len(rows))
            torch.cuda.empty_cache()

    def _answer_in_parts(
        self, attachment: Attachment, batch: AnswerBatch, requests: list[Question], rows: list[int], splits: int,
        goes_on: bool,
    ) -> tuple[dict[int, str], list[Distance], dict[str, float]]:
        texts: dict[int, str] = {}
        led: list[Distance] = []
        size = -(-len(rows) // splits)
        with attachment:
            for first in range(0, len(rows), size):
                chosen = rows[first:first + size]
                part = batch
                if len(chosen) < len(requests):
                    part = batch.rows(torch.tensor(chosen, device=batch.last.device))

                def finished(row: int, tokens: list[int], chosen: list[int] = chosen) -> bool:
                    return self._finished(requests[chosen[row]], tokens)

                answers = answer_batch(attachment, part, [requests[i].answer_tokens for i in chosen], finished,
                                       keeps=goes_on or self.along is not None)
                texts |= {i: self._text(requests[i], a) for i, a in zip(chosen, answers, strict=True)}
                if self.along is not None:
                    led.append(lead(attachment, part, self.along, keeps=goes_on))
                del part
            shares = _shares(attachment.report())
        return texts, led, shares

    def _finished(self, request: Question, tokens: list[int]) -> bool:
        """Nothing that follows can change the score: the answer has ended, or all targets are there."""
        return self._ended(request, tokens) or (request.metric == "string_match_all" and score(
            request, self.tokenizer.decode(tokens, skip_special_tokens=True)) == 1.0)

    def _ended(self, request: Question, tokens: list[int]) -> bool:
        """The model's end or the task's stop string was written."""
        if set(tokens) & self._ends():
            return True
        text = self.tokenizer.decode(tokens, skip_special_tokens=True) if request.until else ""
        return any(stop in text for stop in request.until)

    def _text(self, request: Question, tokens: list[int]) -> str:
        """The answer up to the model's end or the task's stop string."""
        end = next((i for i, t in enumerate(tokens) if t in self._ends()), len(tokens))
        text = self.tokenizer.decode(tokens[:end], skip_special_tokens=True)
        return text[:min((text.index(s) for s in request.until if s in text), default=len(text))]

    def _ends(self) -> set[int]:
        given = self.model.generation_config.eos_token_id
        return set(given) if isinstance(given, list) else {given, self.tokenizer.eos_token_id}


def _shares(report: dict[str, Any]) -> dict[str, float]:
    """Shares of a sparse layer's tokens and bytes that a step reads; of full attention 1. And the share of the layers
    that are sparse."""
    found = {"read": report["selectivity_sparse"], "bytes": report["bytes_share"]}
    layers = report["layers"].values()
    sparse = sum(layer["sparse_calls"] > 0 for layer in layers) / max(len(layers), 1)
    return {**{name: 1.0 if share is None else share for name, share in found.items()}, "sparse_layers": sparse}


def _columns(led: Sequence[Distance]) -> dict[str, list[float]]:
    """Distances as a cell has them, prompt by prompt."""
    return {"kl": [d.kl for d in led], "kl_same": [d.same for d in led], "kl_tokens": [d.tokens for d in led]} if led \
        else {}


def _score(request: Question, text: str) -> float | None:
    return None if request.metric == "lm-eval" else score(request, text)


def digest_of_prompts(requests: Sequence[Question]) -> str:
    """A hash of all prompts: cells of other prompts are not mixed in."""
    text = json.dumps([[r.case, r.index, r.prompt, r.targets] for r in requests])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
