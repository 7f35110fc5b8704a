# ruff: noqa: E501
"""Forms of the query's side of a completed step, alone and in the step, and where in the step they run.

    python benchmarks/experiments/query_tune.py OUTPUT.jsonl

Processes that check and compile run at once; then one measures, some 90 seconds in all. A table comes last, and a line
of JSON a figure goes to the file. Microseconds are of a CUDA graph of 32 layers in turn, each with maps and sums of its
own, so that they exceed the L2 together; caches rotate too.

Forms: `whole`, one program a head; `split SLICE/WARPS`, the product's two launches, with SLICE units of a block and as
many warps a program. Places of a step, which chooses by sketches:
`none`        no completion
`given`       the query's side was made before the timing: what attention costs more
`edges`       the same, and an empty kernel beside the selection: what fork and join cost
`before`      one after the other in one stream
`beside`      on a second stream from the step's begin
`+logits`     on a second stream, asked for after the selection's first launch; `+prepare`, after its second
`scores>select` and the like: in one stream, block after the one launch of the selection, sums after the other, each
prepared while the launch ahead of it runs

Each form is first checked against the twin in float64 (numbers between lines of NaN, odd rows), and every graph's
output against a step one kernel after another. Under TRITON_INTERPRET=1 only the checks run, of tiny sizes in float16.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks import decode  # noqa: E402
from benchmarks.experiments import query_whole  # noqa: E402
from sparsekv.core.streams import beside  # noqa: E402
from sparsekv.kernels import CompletionQuery, KeyFeatures, PhiCache, PhiState, ScoreMoments, completion, sketch  # noqa: E402

CUDA = torch.cuda.is_available()
CASES = {  # query heads, KV heads, tokens, rows, caches
    "32x8 32k b1": (32, 8, 32_768, 1, 4), "32x8 128k b1": (32, 8, 131_072, 1, 3), "12x2 30k b1": (12, 2, 30_000, 1, 4),
    "32x8 32k b8": (32, 8, 32_768, 8, 3), "12x2 30k b24": (12, 2, 30_000, 24, 2)}
FORMS = ["whole", "split 64/8", "split 32/8", "split 32/4"]
IN_LINE = ["prepare>scores", "prepare>histogram", "scores>histogram", "scores>select"]
PLACES = ["before", "beside", "+logits", "+prepare"]
LAYERS, REPLAYS, TOTAL_S, LIMIT = 32, 9, 88, 5e-2
ROWS_OUT: list[dict[str, Any]] = []

AFTER: dict[str, list[Callable[[], None]]] = {}
"""What is called after a launch of the selection, once."""


def watch() -> None:
    """Let the selection's launches call what waits for them."""
    for name in ("logits", "prepare", "scores", "histogram", "select"):
        original = getattr(sketch, f"launch_{name}")

        def watched(*args: Any, name: str = name, original: Any = original, **more: Any) -> Any:
            made = original(*args, **more)
            for call in AFTER.pop(name, []):
                call()
            return made

        setattr(sketch, f"launch_{name}", watched)


@contextlib.contextmanager
def form_of(name: str) -> Iterator[None]:
    """The product's constants as a form has them."""
    before = completion.BLOCK_SLICE, completion.BLOCK_WARPS
    if name.startswith("split"):
        completion.BLOCK_SLICE, completion.BLOCK_WARPS = map(int, name.split()[1].split("/"))
    try:
        yield
    finally:
        completion.BLOCK_SLICE, completion.BLOCK_WARPS = before


def clone(x: Any) -> Any:
    """Every tensor of tuples anew."""
    if isinstance(x, tuple):
        return type(x)(*map(clone, x)) if hasattr(x, "_fields") else tuple(map(clone, x))
    return x.clone() if isinstance(x, Tensor) else x


class Layer:
    """A cache, and maps and sums of a layer."""

    def __init__(self, b: decode.Buffers):
        self.b, first = b, b.completion()
        self.maps, self.offset = decode.random_maps(b.q.shape[1]), first.layer.offset.clone()
        self.state, self.key_map, self.bias = clone(first.state), clone(first.key_map), first.bias.clone()
        self.router = b.sketch_router()
        self.given: CompletionQuery | None = None

    def keys(self, query: CompletionQuery) -> CompletionQuery:
        maps = self.key_map
        return query._replace(keys=KeyFeatures(maps.w_in, self.bias, maps.w_out, maps.b_out, self.state.m))

    def blocks(self, apart: bool = False) -> Tensor:
        return completion.launch_blocks(self.b.q, self.maps, apart)

    def sums(self, parts: Tensor, apart: bool = False) -> CompletionQuery:
        return self.keys(completion.launch_sums(self.b.q, self.maps, parts, self.offset, self.state, apart=apart))

    def ask(self, form: str) -> CompletionQuery:
        if form == "whole":
            return self.keys(query_whole.launch_whole(self.b.q, self.maps, self.offset, self.state))
        return self.sums(self.blocks())

    def step(self, form: str, place: str) -> tuple[Tensor, Tensor]:
        """Output and log mass of a step."""
        b, found, device = self.b, [], self.b.q.device
        AFTER.clear()
        if place == "before":
            found.append(self.ask(form))
        elif place == "given":
            found.append(self.given)
        elif place in ("beside", "edges"):
            with beside(device) as join:
                found.append(self.ask(form) if place == "beside" else self.given)
                if place == "edges":
                    self.offset.add_(0.0)
        elif place.startswith("+"):
            joins = []

            def fork() -> None:
                with beside(device) as join:
                    found.append(self.ask(form))
                joins.append(join)

            AFTER[place[1:]] = [fork]
        elif place != "none":
            early, late = place.split(">")
            parts: list[Tensor] = []
            AFTER[early] = [lambda: parts.append(self.blocks(apart=True))]
            AFTER[late] = [lambda: found.append(self.sums(parts.pop(), apart=True))]
        selection = self.router.select(b.view, b.queries)
        if place in ("beside", "edges"):
            join()
        elif place.startswith("+"):
            joins[0]()
        return b.view.attend(b.queries, selection, *found)


def layers_of(case: str, layers: int = LAYERS) -> list[Layer]:
    heads_q, heads, length, rows, caches = CASES[case]
    sets = [decode.Buffers(heads_q, heads, length, rows, seed=i) for i in range(min(caches, layers))]
    return [Layer(sets[i % len(sets)]) for i in range(layers)]


def turn(layers: list[Layer]) -> None:
    """The queries of all layers with the other sign."""
    for b in {id(layer.b): layer.b for layer in layers}.values():
        b.q.neg_()


def graphed(run: Callable[[Layer], Any], layers: list[Layer], turned: bool = False) -> tuple[float, list[Any]]:
    """Microseconds a layer, the best of some replays, and what the last of them wrote, `turned` with the other queries
    than those before it, so that what it read too early shows."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for layer in layers[:2]:
            run(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = [run(layer) for layer in layers]
    for _ in range(2):
        graph.replay()
    best = float("inf")
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) * 1000 / len(layers))
    if turned:
        turn(layers)
        graph.replay()
    made = [clone(x) for x in made]
    if turned:
        turn(layers)
    return round(best, 2), made


def gap(found: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor]) -> float:
    """Of outputs, relative; infinite for what is no number."""
    error = float((found[0].double() - truth[0].double()).norm() / truth[0].double().norm())
    error = max(error, float((found[1].double() - truth[1].double()).abs().max()))
    return error if error == error else float("inf")


def runs_of() -> list[tuple[str, str]]:
    """Forms and places of whole steps."""
    return ([("whole", "none"), ("whole", "given"), ("whole", "edges")]
            + [(form, place) for form in FORMS for place in PLACES]
            + [(form, place) for form in FORMS[1:3] for place in IN_LINE])


def warm(case: str, forms: list[str]) -> None:
    """Compile all that measuring runs."""
    began, layer = time.time(), layers_of(case, 1)[0]
    layer.given = layer.ask("whole")
    for form, place in runs_of():
        if form in forms:
            with form_of(form):
                layer.step(form, place)
    torch.cuda.synchronize()
    print(f"{case} {', '.join(forms)}: compiled in {time.time() - began:.0f} s", flush=True)


def say(output: str, case: str, form: str, what: str, us: float, **more: Any) -> None:
    row = {"case": case, "form": form, "what": what, "us": us, **more}
    ROWS_OUT.append(row)
    with Path(output).open("a") as f:
        f.write(json.dumps(row) + "\n")


def measure(output: str, cases: list[str], until: float) -> None:
    name = torch.cuda.get_device_name()
    for case in cases:
        if time.time() > until:
            print(f"{case}: no time left", flush=True)
            continue
        layers = layers_of(case)
        for layer in layers:
            layer.given = layer.ask("whole")
        for form in FORMS:
            with form_of(form):
                say(output, case, form, "alone", graphed(lambda x, form=form: x.ask(form), layers)[0], device=name)
                if form != "whole":
                    parts = layers[0].blocks()
                    say(output, case, form, "blocks", graphed(lambda x: x.blocks(), layers)[0])
                    say(output, case, form, "sums", graphed(lambda x, parts=parts: x.sums(parts), layers)[0])
        turn(layers)
        truths = {place: [layer.step("whole", place) for layer in layers] for place in ("before", "none", "given")}
        turn(layers)
        for form, place in runs_of():
            if time.time() > until:
                print(f"{case}: stopped, no time left", flush=True)
                break
            with form_of(form):
                us, made = graphed(lambda x, form=form, place=place: x.step(form, place), layers, True)
            truth = truths.get({"edges": "given"}.get(place, place), truths["before"])
            error = max(gap(a, b) for a, b in zip(made, truth, strict=True))
            say(output, case, form, place, us, error=error, device=name)
            if not error < LIMIT:
                print(f"{case} {form} {place}: WRONG, {error:.1e}", flush=True)
        print(f"{case} measured", flush=True)
        del layers, truths
        torch.cuda.empty_cache()


GUARD = 64
GUARDED: list[Tensor] = []


def guarded(*shape: Any, **how: Any) -> Tensor:
    """`torch.empty` of numbers that are none, between others."""
    size = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    dtype = how.get("dtype") or torch.float32
    if not dtype.is_floating_point:
        return MADE(*shape, **how)
    count = 1
    for n in size:
        count *= n
    room = torch.full((count + 2 * GUARD,), float("nan"), dtype=dtype, device=how.get("device"))
    GUARDED.append(room)
    return room[GUARD:GUARD + count].view(*size)


MADE = torch.empty


def between_nan(x: Any) -> Any:
    """Every tensor of numbers in named tuples, between lines of NaN."""
    if isinstance(x, tuple):
        return type(x)(*map(between_nan, x))
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    room = torch.full((x.numel() + 2 * GUARD,), float("nan"), dtype=x.dtype, device=x.device)
    room[GUARD:GUARD + x.numel()] = x.flatten()
    return room[GUARD:GUARD + x.numel()].view(x.shape)


def random_state(rows: int, heads: int, features: int, dim: int, full: bool) -> PhiState:
    def random(*size: int) -> Tensor:
        return torch.randn(*size, device=decode.DEVICE)

    cache = PhiCache(random(rows, heads, features), random(rows, heads, features).abs() * 9,
                     random(rows, heads, features, dim))
    if not full:
        return PhiState(*cache)
    bound = torch.tensor([1.5, float("inf")], device=decode.DEVICE).repeat(rows)[:rows]
    moments = ScoreMoments(random(rows, heads, dim) * dim**-0.5, random(rows, heads, 5, dim) * 0.1,
                           random(rows, heads, dim).abs() / dim, random(rows).abs() * 50, bound)
    return PhiState(*cache, centre=random(rows, heads, dim) * dim**-0.5, moments=moments)


def check(form: str) -> bool:
    """A form against the twin in float64: rows 1, 3 and 24, centred and capped or not, with seats, both shapes."""
    everything, worst = [(True, False), (False, False), (True, True)], 0.0
    if CUDA:
        shapes = [(32, 8, 1, everything), (32, 8, 3, everything), (32, 8, 24, everything), (12, 2, 1, everything[:1]),
                  (12, 2, 24, everything[:1])]
    else:
        shapes = [(4, 2, 1, everything[:1]), (3, 1, 3, everything), (2, 2, 18, everything[2:])]
    dim, features = decode.DIM, decode.FEATURES
    for heads_q, heads, rows, kinds in shapes:
        maps = between_nan(decode.random_maps(heads_q))
        for full, seated in kinds:
            torch.manual_seed(rows)
            state = between_nan(random_state(2 if seated else rows, heads, features, dim, full))
            seats = torch.arange(rows, device=decode.DEVICE) % 2 if seated else None
            q = between_nan(torch.randn(rows, heads_q, dim, device=decode.DEVICE).to(decode.DTYPE))
            offset = between_nan(torch.randn(*((2, heads_q) if seated else (heads_q,)), device=decode.DEVICE))
            launch = query_whole.launch_whole if form == "whole" else completion.launch_query
            GUARDED.clear()
            torch.empty = guarded
            try:
                with form_of(form):
                    found = launch(q, maps, offset, state, seats)
            finally:
                torch.empty = MADE
            truth = completion.phi_query_reference(
                q.double(), decode.double(maps), offset.double(), decode.double(state), seats)
            worst = max(worst, distance(found, truth))
            for room in GUARDED:
                if not bool(room[:GUARD].isnan().all() and room[-GUARD:].isnan().all()):
                    worst = float("inf")
    print(f"check {form}: {'ok' if worst < LIMIT else 'WRONG'}, {worst:.1e}", flush=True)
    return worst < LIMIT


def distance(found: CompletionQuery, truth: CompletionQuery) -> float:
    """The largest relative difference of what a query's side says; infinite for what is no number."""
    scales = [x.log_scale.double().exp() for x in (found, truth)]
    errors = []
    for name in ("features", "numerator", "mass"):
        a, b = (getattr(x, name).double() * (s if name == "mass" else s[..., None])
                for x, s in zip((found, truth), scales, strict=True))
        errors.append(float((a - b).norm() / b.norm()))
    if truth.cap is not None and found.cap is not None:
        there = torch.isfinite(truth.cap)
        same = torch.equal(torch.isfinite(found.cap), there)
        errors.append(float((found.cap.double() - truth.cap)[there].abs().max()) if same else float("inf"))
    return max(e if e == e else float("inf") for e in errors)


def places_agree() -> None:
    """Off the device: every place of every form gives what one kernel after another does."""
    layers = layers_of(next(iter(CASES)), 1)
    for layer in layers:
        layer.given = layer.ask("whole")
        truth, bare = layer.step("whole", "before"), layer.step("whole", "none")
        for form, place in runs_of():
            with form_of(form):
                began, error = time.time(), gap(layer.step(form, place), bare if place == "none" else truth)
            print(f"{form} {place}: {error:.1e}, {time.time() - began:.1f} s", flush=True)
            if not error < LIMIT:
                raise SystemExit(f"{form} {place}: {error:.1e}")
    print("places agree", flush=True)


def tiny() -> None:
    """Sizes that the interpreter can run."""
    from sparsekv.kernels import attend

    decode.DEVICE, decode.DTYPE = "cpu", torch.float16
    decode.DIM, decode.FEATURES, decode.MAP_WIDTH, decode.KEY_UNITS = 16, 12, 40, 16
    decode.BUCKETS, decode.PROBES, decode.TAIL, decode.HIDDEN = 16, 4, 15, 16
    decode.SKETCH_BYTES, decode.SKETCH_WIDE, decode.SKETCH_BUDGET = 8, 4, 0.2
    decode.CANDIDATES = 0.5
    CASES.clear()
    CASES["tiny"] = (4, 2, 120, 1, 1)
    FORMS[1:] = ["split 32/8", "split 16/8"]
    attend.PLAIN, attend.COMPLETED = (x._replace(programs=4) for x in (attend.PLAIN, attend.COMPLETED))
    for module in (attend, sketch, completion):
        module.on_device = lambda _: True
    sketch.routable = lambda *_: True


def start(*more: str) -> tuple[bool, str]:
    """A process of this script: whether it ended well, and what it said."""
    try:
        done = subprocess.run([sys.executable, __file__, *more], capture_output=True, text=True, timeout=TOTAL_S - 15)
    except subprocess.TimeoutExpired:
        return False, f"{' '.join(more[1:])}: stopped"
    why = done.stderr.strip().splitlines()[-12:] if done.returncode else []
    return done.returncode == 0, done.stdout + "\n".join(why)


def table() -> None:
    cases = list(CASES)
    print(f"{'form':12}{'what':20}" + "".join(f"{case:>15}" for case in cases))
    keys = list(dict.fromkeys((r["form"], r["what"]) for r in ROWS_OUT))
    found = {(r["form"], r["what"], r["case"]): r["us"] if r.get("error", 0.0) < LIMIT else float("nan") for r in ROWS_OUT}
    for form, what in keys:
        cells = (found.get((form, what, case)) for case in cases)
        print(f"{'' if what in ('none', 'given', 'edges') else form:12}{what:20}" + "".join(f"{'' if us is None else f'{us:.2f}':>15}" for us in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output")
    parser.add_argument("--check", help="check one form, time nothing")
    parser.add_argument("--warm", help="compile for one case, time nothing")
    parser.add_argument("--forms", nargs="+", default=FORMS)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    options = parser.parse_args()
    watch()
    if not CUDA:
        tiny()
        if not all([check(form) for form in FORMS]):
            raise SystemExit(1)
        places_agree()
        return
    if options.check:
        raise SystemExit(0 if check(options.check) else 1)
    if options.warm:
        warm(options.warm, options.forms)
        return
    began = time.time()
    Path(options.output).parent.mkdir(parents=True, exist_ok=True)
    jobs = [["--warm", case, "--forms", *forms] for case in options.cases for forms in (FORMS[:2], FORMS[2:])]
    jobs += [["--check", form] for form in FORMS]
    with ThreadPoolExecutor(len(jobs)) as pool:
        said = list(pool.map(lambda job: start(options.output, *job), jobs))
    for _, text in said:
        print(text.rstrip(), flush=True)
    print(f"compiled and checked: {time.time() - began:.0f} s", flush=True)
    try:
        measure(options.output, options.cases, began + TOTAL_S - 4)
    finally:
        table()
        for job, (well, _) in zip(jobs, said, strict=True):
            if not well:
                print(f"NOT WELL: {' '.join(job)}")
        print(f"all: {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
