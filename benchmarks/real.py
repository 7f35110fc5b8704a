"""Real models, everything that is measured of one on one card, in the order of its importance, within a time.

    python3 benchmarks/real.py --model FOLDER --weights FILE --name coder-1.5b --artifacts DIR --trained "ON WHAT" \\
        --prompts FILE --output DIR [--minutes 12] [--processes 2] [--only main16 text16 ...] [--list]
    python3 benchmarks/real.py --collect DIR [DIR ...]

FILE of --prompts is of `quality.py --make-prompts --ruler-data ... --text prose=... --text code=...`. A stage is some
prompts under some methods; every cell is on disk when it is measured, so that the same command goes on where it
stopped. Cells of another card go to another folder: a table is of one card, full attention included. The rows say
which model, quantisation and file they are of, and what the artifacts were trained on. --collect writes what is there
into the subject `real`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._peers import PEERS
from benchmarks._rows import RESULTS, load, write_rows
from benchmarks.quality import pair
from sparsekv.artifacts.hub.models import load_model
from sparsekv.artifacts.phi import PhiArtifact
from sparsekv.artifacts.router import RouterArtifact
from sparsekv.core.selectors import SELECTORS
from sparsekv.evaluation.cells import collect
from sparsekv.evaluation.evaluator import Evaluator, digest_of_prompts
from sparsekv.evaluation.methods import Method, parse_methods
from sparsekv.evaluation.requests import Question, load_requests
from sparsekv.evaluation.scores import is_mean, score_rows
from sparsekv.evaluation.tables import every_method, kl_tables, table
from sparsekv.util.pages import markdown

TEXT = "perplexity_"
WORST = "worst"
"""The folder of cells whose budgets pay for sink, tail and φ's cache too, as if all were fetched for one token."""
KL = "kl"
"""The folder of cells with the distance to full attention."""
RIVALS_KL = ("sketch+phi", "topk+phi", "topk+centroid")
"""Methods whose KL the others' is divided by."""
CONTROL = "control"
"""The folder of cells whose router is untrained; its methods are called `untrained` in rows."""
TEXTS = 6
"""Windows of each text that are read sparsely."""
CELL_TOKENS = 350_000
"""Tokens of the prompts that a process holds at once: 10 GB of the 1.5B's keys and values."""
OURS = ("full", "topk", "topk+phi", "sketch", "sketch+phi", "sketch+centroid")
VOTES = ("token_select:vote=hard", "token_select:vote=topk", "token_select:scaled=true")
ALPHAS = tuple(f"lfps:alpha={a}" for a in (0.1, 0.2, 0.3, 0.4))
"""Of rivals, beside their settings in `PEERS`: how TokenSelect's heads vote, and LFPS's thresholds as they are (4 s a
prompt)."""
SAAP = ("router:scores=mlp", "router:scores=mean_key", "router:scores=mean_key:adapt=false")
"""Of a router that `train-router --preset saap` trained: its query model; the same buckets scored by the means of the
request's keys, moved to it or as they were trained. A query model knows no buckets that moved."""
BUCKETS = tuple(f"{how}:probes={n}" for how in SAAP[:2] for n in (8, 32)) + SAAP[:2]
"""Whole buckets of that router, as the paper reads them, beside the rule of its density."""
LONG = ("full", "topk", "sketch", "sketch+phi")
"""Past 32k tokens, by YaRN (`--rope-scaling yarn:FACTOR`)."""
COMPLETIONS = tuple(f"{s}+{c}" for c in ("centroid", "uniform") for s in ("topk", "sketch"))


@dataclass(frozen=True)
class Stage:
    """Prompts `first` to `last` of every task of a length, under methods and budgets. kind: ruler, text, control, worst
    (budgets that pay for all that is fetched), or kl (the distance to full attention, of each text on `TEXTS`
    windows)."""

    name: str
    kind: str
    length: int
    methods: tuple[str, ...]
    budgets: tuple[float, ...]
    first: int = 0
    last: int = 10**6

    def takes(self, r: Question) -> bool:
        text = r.task.startswith(TEXT)
        if self.kind == KL:
            return r.length == self.length and self.first <= r.index < (TEXTS if text else self.last)
        return r.length == self.length and self.first <= r.index < self.last and text == (self.kind == "text")


def other_fit() -> str:
    """The sketches' fit that is not the default."""
    default = SELECTORS["sketch"]().fit  # type: ignore[attr-defined]
    return "fixed" if default == "fitted" else "fitted"


def all_stages() -> list[Stage]:
    """In the order of their importance."""
    few, one = (0.01, 0.02, 0.05), (0.02,)
    fit = other_fit()
    more = ("full", "router+phi", f"sketch:fit={fit}+phi", "topk:per_query_head=true", *COMPLETIONS)
    rivals = ("full", *PEERS.values())
    distance = ("full", *(s + c for s in ("topk", "sketch") for c in ("", "+phi", "+centroid")))
    return [
        Stage("kl16", KL, 16_384, distance, (0.01,), 0, 2),
        Stage("kl32", KL, 32_768, distance, (0.01,), 0, 2),
        Stage("kl64", KL, 65_536, distance, (0.01,), 0, 2),
        Stage("main16", "ruler", 16_384, OURS, few, 0, 4),
        Stage("text16", "text", 16_384, OURS, few, 0, 6),
        Stage("rest16", "ruler", 16_384, more, (0.01, 0.02), 0, 4),
        Stage("text-rest16", "text", 16_384, ("full", *COMPLETIONS, "router+phi", f"sketch:fit={fit}+phi"),
              (0.01, 0.02), 0, 6),
        Stage("rivals16", "ruler", 16_384, rivals, one, 0, 4),
        Stage("main32", "ruler", 32_768, OURS, (0.01, 0.02), 0, 3),
        Stage("rest32", "ruler", 32_768, ("full", *COMPLETIONS), (0.01, 0.02), 0, 3),
        Stage("all4", "ruler", 4096, (*OURS, *COMPLETIONS), (0.01, 0.02), 0, 4),
        Stage("text-all4", "text", 4096, (*OURS, *COMPLETIONS), (0.01, 0.02), 0, 6),
        Stage("worst4", "worst", 4096, ("full", "topk", "topk+phi"), (0.03, 0.04, 0.05, 0.1), 0, 4),
        Stage("worst8", "worst", 8192, ("full", "topk", "topk+phi"), (0.02, 0.03, 0.04, 0.05, 0.1), 0, 4),
        Stage("worst16", "worst", 16_384, ("full", "topk", "topk+phi"), (0.02, 0.03, 0.04, 0.05), 0, 4),
        Stage("control16", "control", 16_384, ("sketch:fit=fitted", "router"), one, 0, 4),
        Stage("next16", "ruler", 16_384, OURS, few, 4, 8),
        Stage("next-rest16", "ruler", 16_384, (*more, *rivals), one, 4, 8),
        Stage("text32", "text", 32_768, OURS, (0.01, 0.02), 0, 6),
        Stage("next32", "ruler", 32_768, OURS, (0.01, 0.02), 3, 8),
        Stage("last16", "ruler", 16_384, OURS, few, 8, 20),
        Stage("wide16", "ruler", 16_384, ("full", "topk", "sketch"), (0.1, 0.2), 0, 4),
        Stage("next-wide16", "ruler", 16_384, ("full", "topk", "sketch"), (0.1, 0.2), 4, 8),
        Stage("rivals-few", "ruler", 16_384, rivals, (0.01, 0.05), 0, 4),
        Stage("votes16", "ruler", 16_384, ("full", *VOTES), one, 0, 4),
        Stage("saap16", "ruler", 16_384, ("full", "topk", *SAAP), few, 0, 4),
        Stage("alphas16", "ruler", 16_384, ("full", *ALPHAS), one, 0, 2),
        Stage("next-rivals-few", "ruler", 16_384, rivals, (0.01, 0.05), 4, 8),
        Stage("last32", "ruler", 32_768, OURS, (0.01, 0.02), 8, 12),
        Stage("buckets16", "ruler", 16_384, ("full", "topk", *BUCKETS), few, 0, 4),
        Stage("main64", "ruler", 65_536, LONG, (0.01, 0.02), 0, 8),
        Stage("main128", "ruler", 131_072, (*LONG, "token_select"), (0.01, 0.02), 0, 4),
        Stage("rivals64", "ruler", 65_536, (*rivals, "quest:page_size=8"), one, 0, 8),
        Stage("kl128", KL, 131_072, ("full", *LONG[1:], "topk+phi"), (0.01,), 0, 1),
    ]


def untrained(router: RouterArtifact) -> RouterArtifact:
    """A router of the same sizes that has learned nothing: buckets begin at random, which a request then moves to its
    own keys (`fitted`), and score by their mean keys; of the sketches only the size of a code is left, so they must be
    fitted to the request too."""
    generator = torch.Generator().manual_seed(0)
    start = torch.nn.functional.normalize(torch.randn(router.centroids.shape, generator=generator), dim=-1)
    config = replace(router.config, scores="mean_key", provenance={"untrained": True}, quality={})
    return RouterArtifact(config, start.to(router.centroids), None, sketch=router.sketch)


def model_record(options: argparse.Namespace) -> dict[str, str]:
    """What the rows say of the model: its name, its quantisation and the hash of its file, read from it."""
    path = options.weights or next(Path(options.model).glob("*.safetensors"))
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 24):
            sha.update(block)
    kind = options.quantisation
    if kind is None:
        kind = "none"
        if path.suffix == ".gguf":
            import gguf

            number = gguf.GGUFReader(path).fields["general.file_type"].contents()
            kind = gguf.LlamaFileType(number).name.removeprefix("MOSTLY_")
    trained = {} if options.trained is None else {"trained": options.trained}
    return {"model": options.name, "quantisation": kind, "weights_sha256": sha.hexdigest(), **trained}


def card() -> str:
    """The card as a folder's name."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")


def shard_of(requests: Sequence[Question], shard: int, shards: int) -> set[int]:
    """The prompts of a process: of every task and length every n-th, of one task the others than of the next."""
    tasks = list(dict.fromkeys(r.case for r in requests))
    return {id(r) for r in requests if (r.index + tasks.index(r.case)) % shards == shard}


def turned(kind: type[Evaluator], part: float) -> type[Evaluator]:
    """An evaluator that begins with another batch, and so with other tasks, by the share `part` of them: where
    processes are cut short, each lacks other tasks."""
    class Turned(kind):  # type: ignore[valid-type, misc]
        def batches(self, some: Sequence[Question] | None = None) -> Iterator[list[Question]]:
            found = list(super().batches(some))
            at = int(part * len(found))
            yield from found[at:] + found[:at]

    return Turned


def work(options: argparse.Namespace) -> None:
    """One process: all stages, its prompts."""
    shard, shards = options.shard
    until = time.perf_counter() + 60 * options.minutes
    torch.set_float32_matmul_precision("high")
    model, tokenizer = load_model(str(options.model), dtype=options.dtype, device=options.device,
                                  rope_scaling=options.rope_scaling)
    router, phi = (kind.load(place) if place and place.exists() else None for kind, place in (
        (RouterArtifact, options.router or (options.artifacts and options.artifacts / "router")),
        (PhiArtifact, options.phi or (options.artifacts and options.artifacts / "phi"))))
    every = load_requests(options.prompts)
    own, said = shard_of(every, shard, shards), {"requests": digest_of_prompts(every)}
    folder = options.output / card()

    def measure(stage: Stage, requests: list[Question], methods: list[Method]) -> bool:
        """Whether all of it is measured."""
        control = stage.kind == "control"
        place = folder / {"control": CONTROL, "worst": WORST, KL: KL}.get(stage.kind, "")
        place.mkdir(parents=True, exist_ok=True)
        evaluator = turned(Evaluator, shard / shards)(
            model, tokenizer, requests, output=place, router=untrained(router) if control else router, phi=phi,
            accounting="worst_case" if stage.kind == "worst" else "retrieved", resume=True,
            part=f"-{shard}of{shards}", batch_tokens=options.batch_tokens, header=said,
            kl="steps" if stage.kind == KL else None)
        return evaluator.run(methods, until=until)

    for stage in stages_of(options):
        requests = [r for r in every if id(r) in own and stage.takes(r)]
        methods = parse_methods(stage.methods, stage.budgets)
        began, done = time.perf_counter(), True
        if not requests or began >= until:
            continue
        # one that fails must not take the others with it: then each is tried alone
        for some in (methods, *([m] for m in methods)):
            try:
                done = measure(stage, requests, list(some)) and done
                if some is methods:
                    break
            except Exception:
                done = False
                traceback.print_exc()
                torch.cuda.empty_cache()
        print(f"{stage.name}: {len(requests)} prompts, {len(methods)} settings, {time.perf_counter() - began:.0f} s"
              f"{'' if done else ', not all'}", flush=True)


def stages_of(options: argparse.Namespace) -> list[Stage]:
    """The stages that are asked for, in the order in which they are named."""
    stages = {s.name: s for s in all_stages()}
    unknown = [n for n in options.only or () if n not in stages]
    if unknown:
        raise SystemExit(f"no stage {', '.join(unknown)}; expected some of {', '.join(stages)}")
    chosen = [stages[n] for n in options.only or stages]
    if options.methods:
        chosen = [replace(s, methods=tuple(options.methods if s.kind == KL else (
            m for m in s.methods if m in options.methods))) for s in chosen]
    given = {"length": options.length, "budgets": options.budgets and tuple(options.budgets)}
    return [replace(s, **{name: v for name, v in given.items() if v}) for s in chosen]


def lead(options: argparse.Namespace) -> None:
    """Begin the processes, collect and print."""
    began = time.monotonic()
    folder = options.output / card()
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / "model.json"
    if not record.is_file():
        record.write_text(json.dumps(model_record(options)) + "\n", encoding="utf-8")
    threads = max(1, (os.cpu_count() or 1) // options.processes)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    workers, logs = [], []
    for i in range(options.processes):
        logs.append((options.output / f"log-{i}.txt").open("a", encoding="utf-8"))
        left = options.minutes - (time.monotonic() - began) / 60
        words = [sys.executable, *sys.argv, "--shard", f"{i}/{options.processes}", "--minutes", f"{left:.2f}"]
        placed = {"CUDA_VISIBLE_DEVICES": devices[i % len(devices)]} if devices else {}
        workers.append(subprocess.Popen(words, env=environment | placed, stdout=logs[-1], stderr=subprocess.STDOUT))
    end = began + 60 * (options.minutes + options.grace)
    try:
        while any(w.poll() is None for w in workers) and time.monotonic() < end:
            time.sleep(1)
    finally:
        for w in workers:
            if w.poll() is None:
                w.terminate()
        for w in workers:
            w.wait()
        for i, file in enumerate(logs):
            file.close()
            print(f"process {i}: {workers[i].returncode}\n" + (options.output / f"log-{i}.txt").read_text()[-1500:])
    rows = rows_of(options.output, options.against)
    write_rows("real", rows, options.output)
    show(rows)
    print(f"{time.monotonic() - began:.0f} s")


def rows_of(output: Path, against: Sequence[str] = RIVALS_KL) -> list[dict[str, Any]]:
    """All rows of an output folder, every card's; their cases begin with the model's name. against: as `score_rows`
    takes it."""
    rows = []
    for record in sorted(output.glob("*/model.json")):
        said = json.loads(record.read_text(encoding="utf-8"))
        folder, cells = record.parent, []
        for place, control in ((folder, False), (folder / CONTROL, True)):
            found = collect(place) if any(place.glob("cells*.jsonl")) else []
            cells += [{**c, "method": without_training(c["method"]) if control else c["method"]} for c in found]
        made = score_rows(even(cells))
        if any((folder / WORST).glob("cells*.jsonl")):
            made += [{**r, "case": r["case"].replace("ruler@", "worst@")}
                     for r in score_rows(even(collect(folder / WORST))) if is_mean(r["case"])]
        if any((folder / KL).glob("cells*.jsonl")):
            made += [r for r in score_rows(collect(folder / KL), against=against) if r["metric"].startswith("kl")]
        for r in made:
            joined = [{**o, "command": without_places(o["command"])} for o in r.get("origins", ())]
            rows.append({**r, "case": f"{said['model']}:{r['case']}", "command": without_places(r["command"]),
                         **({"origins": joined} if joined else {}), **said})
    return rows


def with_prompts(cells: Sequence[dict[str, Any]], chosen: Mapping[str, set[int]]) -> list[dict[str, Any]]:
    """Of every cell its prompts among the chosen ones of its case; texts as they are."""
    kept = []
    for c in cells:
        if c["case"].startswith(TEXT):
            kept.append(c)
        elif inside := [i for i, n in enumerate(c["indices"]) if n in chosen[c["case"]]]:
            kept.append({**c, **{n: [c[n][i] for i in inside] for n in ("indices", "scores", "answers") if n in c}})
    return kept


def even(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cells of as many prompts of every task: of a RULER length, method and budget each task keeps as many as the
    task with the fewest has, of those that full attention answered too. A stage that was cut short has more prompts of
    some tasks than of others: a task of one prompt would seem certain."""
    held: dict[tuple[str, Any, str], dict[str, set[int]]] = {}
    for c in cells:
        if not c["case"].startswith(TEXT):
            key = c["method"], c["budget"], c["case"].rpartition("@")[2]
            held.setdefault(key, {}).setdefault(c["case"], set()).update(c["indices"])
    cases = {length: {t for (_, _, n), of in held.items() if n == length for t in of} for _, _, length in held}
    chosen: dict[tuple[str, Any, str], dict[str, set[int]]] = {}
    for key, of in held.items():
        full = held.get(("full", None, key[2]), of)
        both = {case: sorted(of.get(case, set()) & full.get(case, set())) for case in cases[key[2]]}
        fewest = min(map(len, both.values()))
        chosen[key] = {case: set(found[:fewest]) for case, found in both.items()}
    return [k for c in cells for k in with_prompts(
        [c], chosen.get((c["method"], c["budget"], c["case"].rpartition("@")[2]), {}))]


def without_places(command: str) -> str:
    """A process's command as it can be given elsewhere: folders and files by what they are (`--model MODEL`), without
    the process's share and the minutes that it had left."""
    command = re.sub(r" --shard \S+", "", command)
    command = re.sub(r"( --minutes) (\S+)(.*) --minutes \S+", r"\1 \2\3", command)
    return re.sub(r" --(model|weights|artifacts|router|phi|prompts|output) \S+",
                  lambda found: f" --{found[1]} {found[1].upper()}", command)


def without_training(method: str) -> str:
    """What rows call a method whose router is untrained: `sketch:untrained`."""
    return method.partition(":")[0].partition("+")[0] + ":untrained"


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Short tables: every mean, perplexities, distances to full attention."""
    plain = [{**r, "case": r["case"].partition(":")[2], "model": r["case"].partition(":")[0]} for r in rows]
    for name in dict.fromkeys(r["model"] for r in plain):
        mine = [r for r in plain if r["model"] == name]
        for case in dict.fromkeys(r["case"] for r in mine):
            if case.startswith("ruler@"):
                for metric in ("score", "difference", "same_answers"):
                    shown = [r for r in mine if r["metric"] == metric and r.get("against", "full") == "full"]
                    print(f"\n{name} {case}, {metric}\n" + markdown(*table(shown, case, every_method(shown), metric)))
            elif case.startswith(TEXT):
                for metric in ("perplexity", "perplexity_ratio", "rel_err"):
                    shown = [r for r in mine if r["metric"] == metric]
                    print(f"\n{name} {case}, {metric}\n" + markdown(*table(shown, case, every_method(shown), metric)))
        for made in kl_tables([r for r in mine if r["metric"].startswith("kl") and "task" in r]):
            print(f"\n{name} {made.title}\n{made.text()}")


def put(folders: Sequence[Path], results: Path = RESULTS) -> None:
    """The rows of output folders into the subject `real`, in place of those of the same model, card and case."""
    new = [r for folder in folders for r in rows_of(folder)]
    there = {(r["case"], r["machine"]) for r in new}
    kept = [r for r in load("real", results) if (r["case"], r["machine"]) not in there]
    print(f"{len(new)} rows: {write_rows('real', [*kept, *new], results)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of the model")
    parser.add_argument("--weights", type=Path, help="the file that the folder was made of, whose hash rows have")
    parser.add_argument("--quantisation", help="without it what a .gguf file says")
    parser.add_argument("--name", default="coder-1.5b", help="of the model, before every case")
    parser.add_argument("--artifacts", type=Path, help="folder with router/ and phi/; without one of them, methods "
                                                       "that need it are left out")
    parser.add_argument("--trained", help="what the artifacts were trained on, in words: for the rows")
    parser.add_argument("--router", type=Path)
    parser.add_argument("--phi", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--minutes", type=float, default=12.0, help="begin nothing after this time [minutes]")
    parser.add_argument("--grace", type=float, default=1.0, help="after which processes are stopped [minutes]")
    parser.add_argument("--processes", type=int, default=2, help="that share the devices, one after the other")
    parser.add_argument("--only", nargs="+", help="these stages, in this order")
    parser.add_argument("--methods", nargs="+", help="of every stage's methods only these; of kl these, whatever they "
                                                      "are")
    parser.add_argument("--budgets", type=float, nargs="+", help="in place of every stage's own")
    parser.add_argument("--against", nargs="+", default=RIVALS_KL, help="methods whose KL the others' is divided by")
    parser.add_argument("--rope-scaling", help="as of sparsekv capture")
    parser.add_argument("--list", action="store_true", help="only say which stages there are")
    parser.add_argument("--length", type=int, help="of the prompts, in place of every stage's own: to try the command "
                                                   "on a small machine [tokens]")
    parser.add_argument("--batch-tokens", type=int, default=CELL_TOKENS, help="prompt tokens in memory at once, each "
                                                                              "process")
    parser.add_argument("--shard", type=pair, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--collect", type=Path, nargs="+", help="only put the rows of these outputs into docs/results")
    options = parser.parse_args()
    if options.collect:
        return put(options.collect)
    if options.list:
        for s in all_stages():
            print(f"{s.name}: {s.kind}@{s.length}, prompts {s.first} to {s.last - 1} of a task: {' '.join(s.methods)} "
                  f"at {s.budgets}")
        return None
    return work(options) if options.shard else lead(options)


if __name__ == "__main__":
    main()
