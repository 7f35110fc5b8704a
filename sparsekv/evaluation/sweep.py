"""Sweeps: every method at every budget on the same prompts, prefilled once; finished cells are on disk at once."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sparsekv.errors import SparseKVError
from sparsekv.evaluation.accounting import retrieved_tokens
from sparsekv.evaluation.requests import Request, score
from sparsekv.evaluation.rows import origin

FORMAT, FORMAT_VERSION = "sparsekv-sweep", 1
TOKENS_NEEDED = {"niah_single_1": 24, "niah_multikey_2": 24, "niah_multikey_3": 48, "ruler_vt": 30, "ruler_cwe": 64,
                 "ruler_fwe": 40}
"""Tokens in which RULER's tasks can be answered; lm-eval allows up to 128, which changes no correct answer."""
SPENDING = ("router", "magicpig")
"""Selectors that can do without a budget and obey one."""
BATCH_TOKENS = 2_500_000
UNTRAINED_TOKENS = 256.0
"""Size of an untrained completion where there is no φ whose bytes it could match [tokens]."""
SPLIT = 4
SAID = ("accounting", "weights", "dtype", "requests")
"""What a header says that belongs to every row."""


@dataclass(frozen=True)
class SweepMethod:
    """A selector, what completes it (none, phi, centroid, …) and the share of the context it may retrieve. options: the
    selector's own that are not its defaults."""

    selector: str
    completion: str = "none"
    budget: float | None = None
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """As in tables: `full`, `topk`, `topk+phi`, `lfps:alpha=0.03`."""
        shown = "full" if self.selector == "dense" else self.selector
        shown += "".join(f":{name}={value if isinstance(value, str) else json.dumps(value)}"
                         for name, value in self.options)
        return shown if self.completion == "none" else f"{shown}+{self.completion}"


def parse_methods(names: Sequence[str], budgets: Sequence[float]) -> list[SweepMethod]:
    """`topk+phi`, or with options of the selector `magicpig:bits=8:tables=100`, at every budget; methods without a
    budget (`full`, `streaming`) once. Raises SparseKVError."""
    from sparsekv.core.selectors import SELECTORS, Selector
    from sparsekv.runtime.plan import COMPLETIONS

    shared = Selector.option_names()  # the sweep's own: budget and accounting
    methods: list[SweepMethod] = []
    for name in names:
        words, _, completion = name.partition("+")
        selector, *given = words.split(":")
        selector = "dense" if selector == "full" else selector
        if selector not in SELECTORS:
            raise SparseKVError(f"unknown selector {selector!r}: expected full or some of {', '.join(SELECTORS)}")
        if (completion or "none") not in COMPLETIONS:
            raise SparseKVError(f"unknown completion {completion!r} in {name!r}: expected one of "
                                f"{', '.join(COMPLETIONS)}")
        spends = SELECTORS[selector].needs_budget or selector in SPENDING
        own = [n for n in SELECTORS[selector].option_names() if n not in shared]
        options = tuple(_option(word, selector, own) for word in given)
        methods += [SweepMethod(selector, completion or "none", b, options) for b in (budgets if spends else (None,))]
    return methods


def _option(word: str, selector: str, names: Sequence[str]) -> tuple[str, Any]:
    """`alpha=0.03` as name and value, one of the names."""
    name, equals, value = word.partition("=")
    if not equals or name not in names:
        raise SparseKVError(f"{word!r} is no option of selector {selector} in a sweep: expected name=value with one of "
                            f"{', '.join(names) or 'none'}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


@dataclass
class SweepOptions:
    """How a sweep decodes and accounts.

    accounting: `retrieved`, `worst_case` or `amortised` (METHODS, budget accounting); batch_tokens: prompt tokens held
    at once; time_limit: seconds after which no new method is begun; max_new_tokens: overrides the tasks' own.
    """

    accounting: str = "retrieved"
    amortise_over: int = 256
    batch_tokens: int = BATCH_TOKENS
    time_limit: float | None = None
    max_new_tokens: int | None = None
    seed: int = 0
    attach: dict[str, Any] = field(default_factory=dict)


class Sweep:
    """Answers requests by methods, keeping one line a finished (batch, task, method) in `<output>/cells*.jsonl`."""

    def __init__(self, model: Any, tokenizer: Any, requests: Sequence[Request], *, router: Any = None, phi: Any = None,
                 output: Path, options: SweepOptions, resume: bool = False, part: str = ""):
        self.model, self.tokenizer, self.requests = model, tokenizer, list(requests)
        self.router, self.phi, self.options = router, phi, options
        self.path = output / f"cells{part}.jsonl"
        self.header = {"format": FORMAT, "format_version": FORMAT_VERSION, "requests": _digest(self.requests),
                       "accounting": options.accounting, "max_new_tokens": options.max_new_tokens,
                       **identity(model), "origin": origin()}
        self.artifacts = {k: artifact_digest(a) for k, a in (("router", router), ("phi", phi)) if a is not None}
        self.splits: dict[str, int] = {}
        cells = open_cells(self.path, self.header, resume)
        check_artifacts(self.path, cells, self.artifacts)
        self.done = {(c["case"], i, c["method"], c["budget"]) for c in cells for i in c["indices"]}

    def run(self, methods: Sequence[SweepMethod], advance: Callable[..., None] = lambda: None) -> bool:
        """Fill the cells; False if the time limit came first. `advance` is called once a batch and method."""
        from sparsekv.evaluation.batch import prefill_batch
        from sparsekv.runtime.attach import attach

        began = time.perf_counter()
        for batch_requests in self.batches():
            todo = [m for m in methods if self._open(batch_requests, m)]
            for _ in range(len(methods) - len(todo)):
                advance()
            batch = None
            for method in todo:
                if self.options.time_limit is not None and time.perf_counter() - began > self.options.time_limit:
                    return False
                if batch is None:
                    prompts = [self.tokenizer(r.prompt)["input_ids"] for r in batch_requests]
                    room = max(self._limit(r) for r in batch_requests) + 1
                    with attach(self.model, selector="dense") as dense:
                        batch = prefill_batch(dense, prompts, room=room)
                self._answer(batch, batch_requests, method)
                advance()
            del batch
        return True

    def batches(self) -> Iterator[list[Request]]:
        """Requests of one length, tasks kept together, at most `batch_tokens` prompt tokens, padding included."""
        sizes = {id(r): len(self.tokenizer(r.prompt)["input_ids"]) for r in self.requests}
        tasks: dict[tuple[int, str], list[Request]] = {}
        for r in self.requests:
            tasks.setdefault((r.length, r.task), []).append(r)
        order = sorted(tasks, key=lambda key: (key[0], max(sizes[id(r)] for r in tasks[key])))
        held: list[Request] = []
        longest = 0
        for key in order:
            for r in tasks[key]:
                longest = max(longest, sizes[id(r)])
                if held and (held[0].length != r.length or longest * (len(held) + 1) > self.options.batch_tokens):
                    yield held
                    held, longest = [], sizes[id(r)]
                held.append(r)
        if held:
            yield held

    def _limit(self, request: Request) -> int:
        own = min(request.max_new_tokens, TOKENS_NEEDED.get(request.task, request.max_new_tokens))
        return own if self.options.max_new_tokens is None else self.options.max_new_tokens

    def _open(self, requests: Sequence[Request], method: SweepMethod) -> bool:
        return any((r.case, r.index, method.name, method.budget) not in self.done for r in requests)

    def feasible(self, request_tokens: int, method: SweepMethod) -> bool:
        """Whether the budget pays for the anchors and the completion's cache."""
        if self.options.accounting == "retrieved" or method.budget is None or method.selector == "streaming":
            return True
        spread = self.options.amortise_over if self.options.accounting == "amortised" else 1
        anchors = self._anchors()
        return retrieved_tokens(method.budget, request_tokens, anchors, generated_tokens=spread,
                                completion_tokens=self._cache_tokens(method)) is not None

    def _anchors(self) -> int:
        from sparsekv.runtime.plan import SINK_SIZE, WINDOW_SIZE

        chosen = self.options.attach
        held = next((a.config for a in (self.router, self.phi) if a is not None), None)
        sink = chosen.get("sink_size", getattr(held, "sink_size", SINK_SIZE))
        # the first query is decoded too: the last prompt token joins the window
        return int(sink + chosen.get("window_size", getattr(held, "window_size", WINDOW_SIZE)) + 1)

    def _answer(self, batch: Any, requests: list[Request], method: SweepMethod) -> None:
        """Answer, score and write one line a task; infeasible tasks are written as such."""
        import torch

        began = time.perf_counter()
        lengths = batch.lengths.tolist()
        barred = {r.case for r, n in zip(requests, lengths, strict=True) if not self.feasible(n, method)}
        rows = [i for i, r in enumerate(requests) if r.case not in barred]
        texts: dict[int, str] = {}
        read = None
        splits = self.splits.get(method.selector, 1)
        while rows and not texts:
            try:
                texts, read = self._decode(batch, requests, method, rows, splits)
                continue
            except torch.OutOfMemoryError:
                if splits >= len(rows):
                    raise
            splits = self.splits[method.selector] = min(splits * SPLIT, len(rows))
            torch.cuda.empty_cache()
        seconds = time.perf_counter() - began
        for case in dict.fromkeys(r.case for r in requests):
            own = [i for i, r in enumerate(requests) if r.case == case]
            line: dict[str, Any] = {"case": case, "method": method.name, "budget": method.budget,
                                    "indices": [requests[i].index for i in own], **self._used(method)}
            if case in barred:
                line["infeasible"] = True
            else:
                line |= {"scores": [_score(requests[i], texts[i]) for i in own], "read": read,
                         "tokens": round(sum(lengths[i] for i in own) / len(own)),
                         "cache_tokens": self._cache_tokens(method),
                         "seconds": round(seconds * len(own) / len(requests), 3),
                         "answers": [texts[i] for i in own]}
            add_cell(self.path, line)
            self.done |= {(case, i, method.name, method.budget) for i in line["indices"]}

    def _used(self, method: SweepMethod) -> dict[str, str]:
        names = {"router": method.selector == "router", "phi": method.completion == "phi"}
        return {k: digest for k, digest in self.artifacts.items() if names[k]}

    def _cache_tokens(self, method: SweepMethod) -> float:
        if method.completion == "none":
            return 0.0
        if self.phi is None:
            return UNTRAINED_TOKENS
        return self.phi.cache_tokens

    def _decode(
        self, batch: Any, requests: list[Request], method: SweepMethod, rows: list[int], splits: int,
    ) -> tuple[dict[int, str], float | None]:
        """Answers by row, and the share of the context a sparse layer read."""
        import torch

        from sparsekv.evaluation.batch import answer_batch
        from sparsekv.runtime.attach import attach

        # short contexts are measured sparsely too
        options = {"dense_below": 0, **self.options.attach, **dict(method.options)}
        if method.budget is not None:
            options |= {"token_budget": float(method.budget), "accounting": self.options.accounting,
                        "amortise_over": self.options.amortise_over}
        texts: dict[int, str] = {}
        with attach(self.model, selector=method.selector, completion=method.completion,
                    router=self.router if method.selector == "router" else None,
                    phi=self.phi if method.completion == "phi" else None,
                    completion_tokens=None if method.completion in ("none", "phi") else self._cache_tokens(method),
                    **options) as attachment:
            size = -(-len(rows) // splits)
            for first in range(0, len(rows), size):
                chosen = rows[first:first + size]
                part = batch
                if len(chosen) < len(requests):
                    part = batch.rows(torch.tensor(chosen, device=batch.last.device))

                def finished(row: int, tokens: list[int], chosen: list[int] = chosen) -> bool:
                    return self._finished(requests[chosen[row]], tokens)

                answers = answer_batch(attachment, part, [self._limit(requests[i]) for i in chosen], finished)
                texts |= {i: self._text(requests[i], a) for i, a in zip(chosen, answers, strict=True)}
                del part
            read = attachment.report()["selectivity_sparse"]
        return texts, 1.0 if read is None else round(read, 5)

    def _finished(self, request: Request, tokens: list[int]) -> bool:
        """Nothing that follows can change the score: the end was written, or all targets are there."""
        if set(tokens) & self._ends():
            return True
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        if any(stop in text for stop in request.until):
            return True
        return request.metric == "string_match_all" and score(request, text) == 1.0

    def _text(self, request: Request, tokens: list[int]) -> str:
        """The answer up to the model's end or the task's stop string."""
        end = next((i for i, t in enumerate(tokens) if t in self._ends()), len(tokens))
        text = self.tokenizer.decode(tokens[:end], skip_special_tokens=True)
        return text[:min((text.index(s) for s in request.until if s in text), default=len(text))]

    def _ends(self) -> set[int]:
        given = self.model.generation_config.eos_token_id
        return set(given) if isinstance(given, list) else {given, self.tokenizer.eos_token_id}


def identity(model: Any) -> dict[str, Any]:
    """What was measured: a hash of the model's weights, and the arithmetic."""
    from sparsekv.artifacts.fingerprint import model_fingerprint

    return {"weights": model_fingerprint(model)["weights"], "dtype": str(model.dtype).removeprefix("torch.")}


def artifact_digest(artifact: Any) -> str:
    """A hash of the artifact's config, which says from which capture it was trained and how, and how good it became."""
    return hashlib.sha256(json.dumps(asdict(artifact.config), sort_keys=True, default=str).encode()).hexdigest()[:12]


def check_artifacts(path: Path, cells: Sequence[dict[str, Any]], artifacts: dict[str, str]) -> None:
    """Raises SparseKVError where a finished cell comes from another router or other feature maps."""
    for kind, digest in artifacts.items():
        others = {c[kind] for c in cells if kind in c} - {digest}
        if others:
            raise SparseKVError(f"{str(path)!r} was measured with another {kind} artifact ({others.pop()}, this one is "
                                f"{digest}); choose another --output")


def _score(request: Request, text: str) -> float | None:
    return None if request.metric == "lm-eval" else score(request, text)


def _digest(requests: Sequence[Request]) -> str:
    """A hash of all prompts: cells of other prompts are not mixed in."""
    text = json.dumps([[r.case, r.index, r.prompt, r.targets] for r in requests])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def open_cells(path: Path, header: dict[str, Any], resume: bool) -> list[dict[str, Any]]:
    """Begin a file of cells, or read what an interrupted run finished.

    Raises SparseKVError where there is a file and `resume` is off, and where it was measured with another header (a key
    that the file does not have is not compared).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size:
        if not resume:
            raise SparseKVError(f"{str(path)!r} holds cells already; add --resume to go on, or choose another --output")
        held, cells = read_cells(path)
        differ = [k for k in header if k != "origin" and held.get(k, header[k]) != header[k]]
        if differ:
            raise SparseKVError(f"{str(path)!r} was measured with other {', '.join(differ)} "
                                f"({', '.join(str(held[k]) for k in differ)}); choose another --output")
        write_cells(path, held, cells)  # without a last line that was cut off
        return cells
    path.write_text(json.dumps(header) + "\n", encoding="utf-8")
    return []


def add_cell(path: Path, cell: dict[str, Any]) -> None:
    """One more line, on disk when this returns."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(cell) + "\n")


def write_cells(path: Path, header: dict[str, Any], cells: Sequence[dict[str, Any]]) -> None:
    """The whole file anew, or not at all."""
    new = path.with_suffix(".new")
    new.write_text("".join(json.dumps(x) + "\n" for x in (header, *cells)), encoding="utf-8")
    new.replace(path)


def read_cells(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Header and finished cells; a last line cut off by an interruption is passed over.

    Raises SparseKVError for a file of another kind or version.
    """
    lines = path.read_text(encoding="utf-8").split("\n")
    try:
        header = json.loads(lines[0])
        if header.get("format") != FORMAT:
            raise ValueError("no header")
    except (ValueError, AttributeError) as error:
        raise SparseKVError(f"{str(path)!r} is no sweep's result; expected the cells.jsonl of `sparsekv eval`"
                            ) from error
    if header.get("format_version") != FORMAT_VERSION:
        raise SparseKVError(f"{str(path)!r} has format {header.get('format_version')}, this version reads "
                            f"{FORMAT_VERSION}; measure again into another --output")
    cells = []
    for number, line in enumerate(lines[1:], start=2):
        if not line:
            continue
        try:
            cells.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                raise SparseKVError(f"line {number} of {str(path)!r} is damaged; remove it and resume") from error
    return header, cells


def collect(folder: Path) -> list[dict[str, Any]]:
    """All cells of a folder, those of shards included, each with its `origin`: machine, command, commit, and what the
    header says of model and accounting. Raises SparseKVError without any."""
    files = sorted(folder.glob("cells*.jsonl"))
    if not files:
        raise SparseKVError(f"no cells.jsonl in {str(folder)!r}; expected the output of a sweep")
    found = [read_cells(path) for path in files]
    return [{**cell, "origin": {**header["origin"], **{k: header[k] for k in SAID if k in header}}}
            for header, cells in found for cell in cells]
