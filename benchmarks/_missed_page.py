"""The tables of speed of docs/results/missed.md: what decode.json and generate.json say of every target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks._first_page import card

Rows = Sequence[dict[str, Any]]
Values = dict[tuple[str, str], float]
"""Of one case, card and commit, by method and metric."""

PEERS = ("dense", "transformers", "transformers_compiled")
OURS = ("router", "sketch", "sketch_phi", "default")
CODES, ALL, PHI = ("../log/decode.md#coarser-grades-and-less-to-look-through", "../log/decode.md#scoring-all-codes",
                   "../log/decode.md#completion-without-kept-features")
OUTSIDE, INDEX = "../log/decode.md#a-step-outside-attention", "../log/requests.md#index"
MEMORY, FIRST_USE = "../log/requests.md#memory-of-maps", "../log/requests.md#pauses-and-first-use"
DENSE = "../log/decode.md#full-attention-with-few-kv-heads"


class Target(NamedTuple):
    """What was wanted of the cases of a page: `of` their values, at most (or at least) `bound`. tried: a section of the
    log."""

    what: str
    page: str
    cases: tuple[str, ...]
    bound: float
    of: Callable[[Values], float]
    form: str
    tried: str
    least: bool = False

    def missed(self, value: float) -> bool:
        """Rounded as the page shows it."""
        shown = float(self.form.format(value).partition(" ")[0])
        return shown < self.bound if self.least else shown > self.bound


def us(method: str, less: str = "") -> Callable[[Values], float]:
    """Microseconds of a step, or how many more than another's."""
    return lambda v: v[method, "us"] - (v[less, "us"] if less else 0.0)


def over(method: str, other: str, metric: str) -> Callable[[Values], float]:
    return lambda v: v[method, metric] / v[other, metric]


def faster(method: str) -> Callable[[Values], float]:
    """How much faster than the fastest full attention."""
    return lambda v: min(v[p, "loop_ms"] for p in PEERS if (p, "loop_ms") in v) / v[method, "loop_ms"]


def of_prompt(method: str, less: str = "") -> Callable[[Values], float]:
    """What is made after a prompt, in percent of the prompt's time."""
    return lambda v: 100 * (v[method, "index_s"] - (v[less, "index_s"] if less else 0.0)) / v["dense", "prefill_s"]


def pause(metric: str) -> Callable[[Values], float]:
    """The longest pause of all methods of ours [s]."""
    return lambda v: max(v[m, metric] for m in OURS if (m, metric) in v) / 1e3


def first_use(values: Values) -> float:
    """How much later a first token comes in a process's first answer than in its second [s]."""
    return max(values[m, "cold_first_token_s"] - values[m, "first_token_s"] for m in ("dense", *OURS)
               if (m, "cold_first_token_s") in values)


def peers_of(values: Values) -> float:
    return values["ours", "us"] / min(values[p, "us"] for p in ("sdpa_cudnn", "flashinfer") if (p, "us") in values)


STEP, PLUS = "sparse_sketch", "sparse_sketch_phi"
LONG = ("8b-128k-b1", "8b-128k-b4", "8b-512k-b1")
CODER = ("coder-30k-b1", "coder-30k-b8", "coder-30k-b24")
READ = (*CODER, "8b-16k-b16", "8b-32k-b16", "8b-32k-b1", LONG[0])
"""Cases whose prompts are read; caches of the others are drawn, so that they have no first token."""
WHOLE = (*READ, *LONG[1:])
MANY = (*CODER[1:], "coder-16k-b8", "coder-16k-b24", "coder-16k-b64", "coder-32k-b64")
STEPS = tuple((case, bound) for case, bound in (
    ("32x8-32k-b1", 24.0), ("32x8-64k-b1", 27.0), ("32x8-128k-b1", 33.0), ("32x8-512k-b1", 54.0), ("32x8-1M-b1", 80.0),
    ("32x8-128k-b8", 95.0)))
GAINS = (("coder-30k-b1", 1.05), ("coder-30k-b8", 1.2), ("coder-30k-b24", 1.6), ("8b-32k-b16", 1.7),
         ("8b-32k-b1", 1.04), ("8b-128k-b1", 1.47), ("8b-128k-b4", 2.7), ("8b-512k-b1", 2.8))
TARGETS = (
    *(Target("a step of sketches at 1 %", "decode", (case,), bound, us(STEP), "{:.1f} µs",
             ALL if case == "32x8-32k-b1" else CODES) for case, bound in STEPS),
    Target("what φ adds to a step", "decode",
           ("32x8-8k-b1", "32x8-32k-b1", "32x8-64k-b1", "32x8-128k-b1", "12x2-30k-b1"), 4.0, us(PLUS, STEP),
           "{:.1f} µs", PHI),
    Target("a step with φ, to one without", "decode",
           ("32x8-512k-b1", "32x8-1M-b1", "32x8-32k-b8", "32x8-128k-b4", "32x8-128k-b8"), 1.2, over(PLUS, STEP, "us"),
           "{:.2f} ×", PHI),
    Target("a step with φ, to one without, many requests", "decode",
           ("12x2-30k-b8", "12x2-30k-b24", "12x2-16k-b8", "12x2-16k-b24", "12x2-16k-b64", "12x2-32k-b64"), 1.15,
           over(PLUS, STEP, "us"), "{:.2f} ×", PHI),
    Target("a step of full attention, to the faster of cuDNN and FlashInfer", "decode",
           tuple(f"dense-{heads}-30k-b{n}" for heads in ("12x2-d128", "14x2-d64", "4x1-d128") for n in (1, 8, 24)), 1.2,
           peers_of, "{:.2f} ×", DENSE),
    Target("a token with φ, to one without", "generate", MANY, 1.15, over("sketch_phi", "sketch", "loop_ms"),
           "{:.2f} ×", PHI),
    *(Target("a token of full attention, to one of sketch + φ", "generate", (case,), bound, faster("sketch_phi"),
             "{:.2f} ×", OUTSIDE, True) for case, bound in GAINS),
    Target("a token of full attention, to one of `attach` by itself", "generate", WHOLE, 0.97, faster("default"),
           "{:.2f} ×", OUTSIDE, True),
    Target("most memory with φ, to that without", "generate", LONG, 1.03, over("sketch_phi", "sketch", "peak_gb"),
           "{:.3f} ×", MEMORY),
    Target("the index, of the prompt's time", "generate", LONG[:1], 3.0, of_prompt("sketch"), "{:.1f} %", INDEX),
    Target("the index, of the prompt's time", "generate", CODER[:2], 5.0, of_prompt("sketch"), "{:.1f} %", INDEX),
    Target("index and summary, of the prompt's time", "generate", (*LONG[:1], *CODER[:2]), 8.0,
           of_prompt("sketch_phi"), "{:.1f} %", INDEX),
    Target("φ's summary, of the prompt's time", "generate", LONG[:1], 1.5, of_prompt("sketch_phi", "sketch"),
           "{:.1f} %", INDEX),
    Target("φ's summary, of the prompt's time", "generate", CODER, 3.0, of_prompt("sketch_phi", "sketch"), "{:.1f} %",
           INDEX),
    Target("the longest pause between two tokens", "generate", WHOLE, 0.3, pause("longest_gap_ms"), "{:.2f} s",
           FIRST_USE),
    Target("the longest pause in a process's first answer", "generate", WHOLE, 0.5, pause("cold_gap_ms"), "{:.2f} s",
           FIRST_USE),
    Target("how much later a process's first answer begins than its second", "generate", READ, 1.0, first_use,
           "{:.1f} s", FIRST_USE),
)


class Found(NamedTuple):
    """What the rows of one card and commit say of a case."""

    value: float
    machine: str
    commit: str

    @property
    def origin(self) -> str:
        return card({"machine": self.machine, "commit": self.commit}).removeprefix("one ").replace(", commit", "")


def runs_of(rows: Rows, case: str) -> dict[tuple[str, str], Values]:
    """The values of a case by card and commit."""
    runs: dict[tuple[str, str], Values] = {}
    for r in rows:
        if r["case"].partition(",")[0] == case:
            runs.setdefault((r["machine"], r["commit"]), {})[r["method"], r["metric"]] = r["value"]
    return runs


def found(rows: Rows, case: str, of: Callable[[Values], float]) -> list[Found]:
    """A value of a case, a card each, an H200 first: by the commit with most rows that has what is wanted."""
    best: dict[str, Found] = {}
    for (machine, commit), values in sorted(runs_of(rows, case).items(), key=lambda g: -len(g[1])):
        try:
            best.setdefault(machine, Found(of(values), machine, commit))
        except (KeyError, ValueError):
            continue
    return [best[name] for name in sorted(best, key=lambda n: "H200" not in n)]


def of_case(case: str) -> str:
    """`8b-128k-b4` or `32x8-128k-b4` in words."""
    *names, context, rows = case.removeprefix("dense-").split("-")
    name = names[0].replace("x", " / ") if "x" in names[0] else "-".join(names)
    return f"{name}, {context}, {rows[1:]} request{'' if rows == 'b1' else 's'}"


def wanted(target: Target) -> str:
    return f"{'≥' if target.least else '≤'} {target.bound:g} {target.form.partition(' ')[2]}"


def speed(decode: Rows, generate: Rows) -> tuple[list[str], list[str]]:
    """Tables of targets that were missed, and of those that no row tells of."""
    missed, unknown = [], []
    for target in TARGETS:
        rows, blank = decode if target.page == "decode" else generate, []
        for case in target.cases:
            values = found(rows, case, target.of)
            if not values:
                blank.append(of_case(case))
            elif target.missed(values[0].value):
                cells = "; ".join(f"{target.form.format(f.value)} ({f.origin})" for f in values)
                missed.append([target.what, of_case(case), wanted(target), f"[{cells}]({target.page}.md)",
                               f"[log]({target.tried})"])
        if blank:
            unknown.append([target.what, "; ".join(blank), wanted(target)])
    return table(["target", "of", "wanted", "found", "tried"], missed), table(["target", "of", "wanted"], unknown)


def table(header: list[str], lines: list[list[str]]) -> list[str]:
    """Lines of a page, all columns of words."""
    if not lines:
        return ["", "None.", ""]
    return ["", *(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *lines)), ""]
