"""Work out the figures of docs/recipes.md from the rows that were measured: `python benchmarks/recipes.py` writes them
between the page's markers. Nothing is run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from _pages import fill
from _rows import RESULTS
from tables import load, markdown

from sparsekv.store.store import storage_bytes

PAGE = RESULTS.parent / "recipes.md"
LENGTH, WINDOWS, GPUS, QUERIES = 131_072, 16, 8, 256
STEPS, STEPS_A_SECOND = 20_000, 211  # docs/training.md, one layer of 8 KV heads on an H200
CAPTURED_LAYERS = 8
CAPTURED = f"llama8b {CAPTURED_LAYERS} layers {LENGTH}"


@dataclass(frozen=True)
class Model:
    """weights: parameters in bfloat16 [GB]; 32 query and 8 KV heads of 128."""

    name: str
    layers: int
    weights: float

    @property
    def cache(self) -> float:
        """Keys and values of one context [GB]."""
        return self.layers * 8 * LENGTH * 128 * 4 / 1e9

    @property
    def window(self) -> float:
        """A window in the capture store [GB]."""
        return storage_bytes(num_documents=1, num_layers=self.layers, heads_kv=8, heads_q=32, length=LENGTH,
                             queries=QUERIES, dim=128) / 1e9

    @property
    def capturing(self) -> float:
        """Seconds of a window."""
        return measured("capture", case=CAPTURED, method="capture", metric="seconds") / CAPTURED_LAYERS * self.layers

    @property
    def own(self) -> int:
        """Layers of one GPU among eight."""
        return -(-self.layers // GPUS)


MODELS = (Model("Llama-3.1-8B-Instruct", 32, 16.1), Model("Qwen3-8B", 36, 16.4))


@cache
def measured(name: str, **wanted: str) -> float:
    found, = (r["value"] for r in load(name) if all(r.get(k) == v for k, v in wanted.items()))
    return found


def disk() -> float:
    """What the disk took while nothing else ran [GB/s]."""
    return measured("capture", case=CAPTURED, method="disk", metric="gb_per_second")


def router() -> float:
    return measured("training", case="router-layer-128k", metric="seconds")


def one(m: Model) -> list[float]:
    """Seconds of capture, router and φ on one GPU."""
    return [WINDOWS * m.capturing, m.layers * router(), m.layers * STEPS / STEPS_A_SECOND]


def eight(m: Model) -> list[float]:
    """The same on eight; of capture the GPUs' time or the disk's."""
    return [max(WINDOWS / GPUS * m.capturing, WINDOWS * m.window / disk()), m.own * router(),
            m.own * STEPS / STEPS_A_SECOND]


def minutes(seconds: list[float], whole: str) -> str:
    return " + ".join(f"{s / 60:.1f}" for s in seconds) + f" min = **{whole}**"


def sizes() -> str:
    def line(what: str, text: Any) -> list[str]:
        return [what, *(text(m) for m in MODELS)]

    return markdown(["", *(m.name for m in MODELS)], [
        line("layers, query / KV heads, head dimension", lambda m: f"{m.layers}, 32 / 8, 128"),
        line("weights in bfloat16", lambda m: f"{m.weights} GB"),
        line("keys and values of one context of 128k", lambda m: f"{m.cache:.1f} GB"),
        line(f"a window in the capture store ({QUERIES} queries)", lambda m: f"{m.window:.1f} GB"),
        line(f"{WINDOWS} windows", lambda m: f"{WINDOWS * m.window:.0f} GB"),
        line("**one H200**: capture + router + φ", lambda m: minutes(one(m), f"{sum(one(m)) / 3600:.1f} h")),
        line("**eight H200**", lambda m: minutes(eight(m), f"{sum(eight(m)) / 60:.1f} min"))])


def expected() -> str:
    def of(method: str, metric: str, digits: int = 1) -> str:
        return f"{measured('generate', case='8b-128k-b1', method=method, metric=metric):.{digits}f}"

    return (
        f"Of the time, from [generate.json](results/generate.json) (a Llama of this shape with random weights, one "
        f"H200, batch 1, 128k tokens): {of('router', 'loop_ms')} ms a token with a router and "
        f"{of('router_phi', 'loop_ms')} with φ, where full attention on the same path takes {of('dense', 'loop_ms')} "
        f"and transformers {of('transformers', 'loop_ms', 0)} ({of('transformers_compiled', 'loop_ms', 0)} compiled). "
        f"The prefill takes {of('dense', 'prefill_s')} s, as without sparsekv, and the index "
        f"{of('router', 'index_s')} s, {of('router_phi', 'index_s')} with φ. The first answer of a process pauses some "
        f"20 s longer while its layers are compiled. Memory at its highest: {of('dense', 'peak_gb')} GB with full "
        f"attention, {of('router', 'peak_gb')} with a router, {of('router_phi', 'peak_gb')} with φ, whose features of "
        "the keys are kept.")


def arithmetic() -> str:
    a, b = MODELS
    phi = STEPS / STEPS_A_SECOND
    return markdown(["", "measured", "gives"], [
        ["capture",
         f"{CAPTURED_LAYERS} layers of this shape, a window of 128k: {a.capturing / a.layers * CAPTURED_LAYERS:.2f} s "
         "([capture.json](results/capture.json))",
         f"/ {CAPTURED_LAYERS} × {a.layers} = {a.capturing:.1f} s a window, × {WINDOWS} = {one(a)[0]:.0f} s; "
         f"{b.layers} layers: {b.capturing:.1f} s, {one(b)[0]:.0f} s"],
        ["… on eight GPUs", f"the disk of that run took {disk():.1f} GB/s",
         "; ".join(f"{WINDOWS // GPUS} windows each, {WINDOWS / GPUS * m.capturing:.0f} s, and the disk "
                   f"{WINDOWS * m.window / disk():.0f} s" for m in MODELS) + ": the longer one counts"],
        ["router",
         f"at most {router():.1f} s a layer: that run had one window, and trained the paper's query model for 10 000 "
         "steps, which the default does not ([training.json](results/training.json))",
         "; ".join(f"× {m.layers} = {one(m)[1]:.0f} s, on eight GPUs {m.own} layers each, {eight(m)[1]:.0f} s"
                   for m in MODELS)],
        ["φ",
         f"{STEPS_A_SECOND} steps a second, one layer, with the options above "
         "([Training](training.md#what-was-measured))",
         f"{STEPS} / {STEPS_A_SECOND} = {phi:.1f} s a layer, " + "; ".join(
             f"× {m.layers} = {one(m)[2]:.0f} s, on eight GPUs {m.own} layers each, {eight(m)[2]:.0f} s"
             for m in MODELS)]]).replace("---:", "---")


BLOCKS = {"sizes": sizes, "expected": expected, "arithmetic": arithmetic}


if __name__ == "__main__":
    for name, draw in BLOCKS.items():
        fill(PAGE, [draw()], name)
