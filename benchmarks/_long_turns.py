"""What happens far behind the prompt: a sparse run writes thousands of tokens and full attention judges every one; a
second question after a long answer."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsekv.evaluation.methods import Method
from sparsekv.runtime.hf.attach import Attachment, attach
from sparsekv.util.disk import write_text

CHUNK = 128
"""Tokens that full attention judges at once."""
PARTS, BLOCK = 4, 32
"""Parts into which rows cut what was written; neighbouring positions whose mean is kept."""
DECODE_WINDOW = 1024
KEEPERS = ("lighthouse keeper", "ferryman", "miller", "clockmaker", "baker", "gardener", "piper", "cartographer")
NEEDLE = "\n\nThe secret number of the {keeper} is {number}. Remember it.\n\n"
FIRST, SECOND = "\n\nWhat the text above tells:", "\n\nThe secret number of the {keeper} is"
ANSWER_TOKENS = 10


def attached(model: Any, method: Method, artifacts: dict[str, Any]) -> Attachment:
    """As the evaluator attaches a method, for single steps."""
    options: dict[str, Any] = {"dense_below": 0, "decode_window": DECODE_WINDOW, **dict(method.options),
                               **{k: artifacts[k] for k in method.artifacts}}
    if method.budget is not None:
        options["token_budget"] = float(method.budget)
    return attach(model, selector="dense" if method.selector == "full" else method.selector,
                  completion=method.completion, **options)


def sampled(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """The next token of every row: logits `[B, 1, V]` -> `[B, 1]`; the likeliest at temperature 0."""
    if temperature == 0:
        return logits[:, -1].argmax(-1, keepdim=True)
    return torch.multinomial((logits[:, -1].float() / temperature).softmax(-1), 1, generator=generator)


@torch.inference_mode()
def written(
    model: Any, prompts: Tensor, method: Method, artifacts: dict[str, Any], *, tokens: int, temperature: float,
    seed: int,
) -> dict[str, Tensor]:
    """A method writes `tokens` tokens after prompts `[B, N]`, and full attention is given the same: by position `[B,
    tokens]`, `kl` of the method's distribution from full attention's [nats], whether both have the same likeliest token
    (`agrees`), and full attention's loss of what was written (`loss`) [nats]."""
    generator = torch.Generator(device=prompts.device).manual_seed(seed)
    length = prompts.shape[1]
    with attached(model, method, artifacts) as attachment:
        cache = attachment.prefill(prompts[:, :-1], cache=attachment.cache(length + tokens))
        token, kept, made = prompts[:, -1:], [], []
        for _ in range(tokens):
            logits = attachment.step(token, cache)
            kept.append(logits[:, -1].clone())
            token = sampled(logits, temperature, generator)
            made.append(token)
        attachment.check_in_force(method.name)
        del cache
    given = torch.cat([prompts[:, -1:], *made[:-1]], dim=1)
    following = torch.cat(made, dim=1)
    found: dict[str, list[Tensor]] = {"kl": [], "agrees": [], "loss": []}
    with attached(model, Method("full"), artifacts) as attachment:
        cache = attachment.prefill(prompts[:, :-1], cache=attachment.cache(length + tokens))
        for first in range(0, tokens, CHUNK):
            part = given[:, first:first + CHUNK]
            logits = model(input_ids=part, past_key_values=cache, use_cache=True).logits
            for i in range(part.shape[1]):
                right, mine = (x.float().log_softmax(-1) for x in (logits[:, i], kept[first + i]))
                found["kl"].append((right.exp() * (right - mine)).sum(-1))
                found["agrees"].append((right.argmax(-1) == mine.argmax(-1)).float())
                found["loss"].append(F.nll_loss(right, following[:, first + i], reduction="none"))
    return {name: torch.stack(values, dim=1).cpu() for name, values in found.items()}


@torch.inference_mode()
def second_turn(
    model: Any, tokenizer: Any, prompts: Tensor, questions: Sequence[str], method: Method, artifacts: dict[str, Any], *,
    tokens: int, temperature: float, seed: int,
) -> list[str]:
    """The answers to a second question about prompts `[B, N]`, asked after a method has written `tokens` tokens about
    them; the question's own tokens are read one by one, so that all of it is sparse. Questions have one length."""
    generator = torch.Generator(device=prompts.device).manual_seed(seed)
    asked = torch.tensor(tokenizer(list(questions), add_special_tokens=False)["input_ids"], device=prompts.device)
    room = prompts.shape[1] + tokens + asked.shape[1] + ANSWER_TOKENS
    with attached(model, method, artifacts) as attachment:
        cache = attachment.prefill(prompts[:, :-1], cache=attachment.cache(room))
        token = prompts[:, -1:]
        for _ in range(tokens):
            token = sampled(attachment.step(token, cache), temperature, generator)
        for i in range(asked.shape[1]):
            attachment.step(token, cache)
            token = asked[:, i:i + 1]
        made = []
        for _ in range(ANSWER_TOKENS):
            token = attachment.step(token, cache).argmax(-1)
            made.append(token)
    return tokenizer.batch_decode(torch.cat(made, dim=1))


def needled(tokenizer: Any, text: Sequence[int], length: int, seed: int) -> tuple[list[int], dict[str, str]]:
    """A prompt of `length` tokens: a text in which every keeper's number is hidden, and what is asked first; with the
    numbers."""
    rng = random.Random(seed)
    numbers = {keeper: str(rng.randrange(1_000_000, 10_000_000)) for keeper in KEEPERS}
    hidden = [tokenizer(NEEDLE.format(keeper=k, number=n), add_special_tokens=False)["input_ids"]
              for k, n in numbers.items()]
    rng.shuffle(hidden)
    first = tokenizer(FIRST, add_special_tokens=False)["input_ids"]
    body = list(text[:length - sum(map(len, hidden)) - len(first)])
    for i, needle in reversed(list(enumerate(hidden))):
        at = round((i + 0.5) / len(hidden) * len(body))
        body[at:at] = needle
    return body + first, numbers


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """The finished measurements of a file, without a last line that an interruption cut off."""
    lines = path.read_text(encoding="utf-8").split("\n") if path.is_file() else []
    return [json.loads(line) for line in lines[:-1]]


class Lines:
    """Finished measurements, a line of JSON each, on disk at once."""

    def __init__(self, path: Path, origin: dict[str, Any]):
        self.path, self.origin = path, origin
        known = whole_lines(path)
        if known:  # without a last line that was cut off
            write_text(path, "".join(json.dumps(line) + "\n" for line in known))
        self.done = {json.dumps(line["key"]) for line in known}

    def open(self, key: list[Any]) -> bool:
        return json.dumps(key) not in self.done

    def add(self, key: list[Any], found: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, **found, "origin": self.origin}) + "\n")
        self.done.add(json.dumps(key))


def batches(items: Sequence[Any], size: int) -> Iterator[tuple[int, Sequence[Any]]]:
    for first in range(0, len(items), size):
        yield first, items[first:first + size]


def long_generation(
    model: Any, windows: Sequence[tuple[str, Sequence[int]]], methods: Sequence[Method], artifacts: dict[str, Any],
    lines: Lines, *, tokens: int, rows: int, stop: Callable[[], bool], temperature: float = 1.0,
) -> bool:
    """Every method after windows `(name, token ids)` of one length; whether all is done."""
    for method in methods:
        for first, part in batches(windows, rows):
            key = ["long", method.name, method.budget, tokens, [name for name, _ in part]]
            if not lines.open(key):
                continue
            if stop():
                return False
            prompts = torch.tensor([list(ids) for _, ids in part], device=model.device)
            found = written(model, prompts, method, artifacts, tokens=tokens, temperature=temperature, seed=first)
            means = {name: torch.stack([x.mean(1) for x in values.split(BLOCK, dim=1)], dim=1)
                     for name, values in found.items()}
            lines.add(key, {"kind": "long", "length": prompts.shape[1], "temperature": temperature, **{
                name: [[round(x, 6) for x in row] for row in values.tolist()] for name, values in means.items()}})
    return True


def turns(
    model: Any, tokenizer: Any, windows: Sequence[tuple[str, Sequence[int]]], methods: Sequence[Method],
    artifacts: dict[str, Any], lines: Lines, *, tokens: int, rows: int, stop: Callable[[], bool],
    temperature: float = 1.0,
) -> bool:
    """Every method's second turn over texts `(name, token ids)` in which numbers are hidden; whether all is done."""
    for method in methods:
        for first, part in batches(windows, rows):
            key = ["turns", method.name, method.budget, tokens, [name for name, _ in part]]
            if not lines.open(key):
                continue
            if stop():
                return False
            made = [needled(tokenizer, ids, len(ids), first + i) for i, (_, ids) in enumerate(part)]
            keeper = KEEPERS[(first // rows) % len(KEEPERS)]  # of one batch, so that questions have one length
            answers = second_turn(model, tokenizer, torch.tensor([ids for ids, _ in made], device=model.device),
                                  [SECOND.format(keeper=keeper)] * len(made), method, artifacts, tokens=tokens,
                                  temperature=temperature, seed=first)
            found = [float(numbers[keeper] in answer) for answer, (_, numbers) in zip(answers, made, strict=True)]
            lines.add(key, {"kind": "turns", "length": len(made[0][0]), "answers": answers, "found": found})
    return True


def long_rows(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of metric `kl`, `agrees` and `loss` by quarter of the positions (`quarter`), of all positions, and of those
    before and past the decode window (`past_window`); `low` and `high`: 95 % interval over prompts. Each line is judged
    by full attention of its own card, so that lines of several cards may be joined: such rows have `origins`, with the
    prompts of each card and commit (`samples`)."""
    from sparsekv.evaluation.rows import row
    from sparsekv.evaluation.scores import bootstrap

    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault((*line["key"][1:4], line["length"]), []).append(line)
    rows = []
    for (name, budget, tokens, length), found in groups.items():
        origins: dict[tuple[str, str], dict[str, Any]] = {}
        for line in found:
            here = line["origin"]
            origins.setdefault((here["machine"], here["commit"]), {**here, "samples": 0})["samples"] += len(line["kl"])
        joined = {"origins": list(origins.values())} if len(origins) > 1 else {}
        for metric, unit in (("kl", "nats a token"), ("agrees", "share"), ("loss", "nats a token")):
            table = torch.tensor([r for line in found for r in line[metric]], dtype=torch.float64)
            edge = min(DECODE_WINDOW, tokens) // BLOCK
            parts: list[tuple[dict[str, Any], Tensor]] = [({}, table)]
            parts += [({"quarter": i + 1}, p) for i, p in enumerate(table.tensor_split(PARTS, dim=1))]
            parts += [({"past_window": p > 0}, x) for p, x in enumerate((table[:, :edge], table[:, edge:]))]
            for said, part in ((s, p) for s, p in parts if p.shape[1]):
                each = part.mean(1).tolist()
                low, high = bootstrap([each])
                rows.append(row(f"long@{length}", name, metric, sum(each) / len(each), unit, budget=budget, low=low,
                                high=high, samples=len(each), generated_tokens=tokens, **said, **joined,
                                **found[0]["origin"]))
    return rows


def turn_rows(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of metric `score`: second questions that were answered, points of 100."""
    from sparsekv.evaluation.rows import row
    from sparsekv.evaluation.scores import bootstrap

    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault((*line["key"][1:4], line["length"]), []).append(line)
    rows = []
    for (name, budget, tokens, length), found in groups.items():
        each = [100 * x for line in found for x in line["found"]]
        low, high = bootstrap([each])
        rows.append(row(f"second_turn@{length}", name, "score", sum(each) / len(each), "points of 100", budget=budget,
                        low=low, high=high, samples=len(each), answer_tokens=tokens, **found[0]["origin"]))
    return rows
