r"""Multiple choice over long contexts, by budget: log-likelihoods of given answers by sparse steps (figure 6 of the
top-k paper).

    python benchmarks/choices.py --model MODEL --name coder-1.5b [--artifacts DIR] [--length 16384] [--samples 40] \
        [--shard 0/4] [--output DIR]
    python benchmarks/choices.py --collect DIR

Two tasks of four answers each, made of the presidents' addresses that the package ships. `year`: in which of the years
above a sentence was said. `next`: which sentence follows one that is quoted, by the log-likelihood a character. The
text is read once, densely, by all questions of it; a question's answers come from sparse steps. Shards are processes,
each with every n-th text.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._rows import RESULTS, add_rows, row
from sparsekv import capture
from sparsekv.artifacts.hub.models import load_model
from sparsekv.artifacts.phi import PhiArtifact
from sparsekv.artifacts.router import RouterArtifact
from sparsekv.evaluation.intervals import bootstrap
from sparsekv.evaluation.likelihoods import likelihoods
from sparsekv.evaluation.methods import Method, parse_methods
from sparsekv.runtime.config import SparseConfig
from sparsekv.runtime.hf.attach import attach
from sparsekv.runtime.hf.plan import RunOptions

ADDRESSES = "texts/addresses.jsonl.gz"
EACH, ANSWERS = 5, 4
"""Questions of a task on one text, and answers of a question."""
WORDS = (12, 40)
"""Of a sentence that is quoted."""
METHODS, BUDGETS = ("full", "topk", "sketch", "sketch+phi"), (0.005, 0.01, 0.02, 0.05, 0.1)


class Choice(NamedTuple):
    task: str
    question: str
    answers: list[str]
    right: int


def texts(tokenizer: Any, length: int, count: int) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """`count` texts of about `length` tokens, addresses one after another from a random one on, with their sentences
    and the year of each."""
    lines = gzip.decompress((Path(capture.__file__).parent / ADDRESSES).read_bytes()).decode().splitlines()
    documents = [(d["name"].rpartition("/")[2], d["text"]) for d in map(json.loads, lines)]
    rng = random.Random(0)
    for _ in range(count):
        at, parts, sentences, left = rng.randrange(len(documents)), [], [], length
        order = (documents[at:] + documents[:at]) * (1 + length // 50_000)
        for year, text in order:
            heading = f"\n\nAddress of {year}\n\n"
            ids = tokenizer(heading + text, add_special_tokens=False, return_offsets_mapping=True)
            cut = ids["offset_mapping"][:left][-1][1] - len(heading)
            kept = text[:max(cut, 0)]
            parts.append(heading + kept)
            sentences += [(year, s) for s in re.split(r"(?<=[a-z]{3}[.;]) ", kept)]
            left -= len(ids["input_ids"])
            if left <= 300:
                break
        yield "".join(parts), sentences


def choices(sentences: Sequence[tuple[str, str]], rng: random.Random) -> list[Choice]:
    """Questions on one text, of sentences that stand in it once; none of years where it has fewer than answers."""
    said = [s for _, s in sentences]
    good = [i for i, s in enumerate(said[:-1]) if WORDS[0] <= len(s.split()) <= WORDS[1] and said.count(s) == 1
            and len(said[i + 1].split()) >= WORDS[0] and sentences[i + 1][0] == sentences[i][0]]
    years = sorted({year for year, _ in sentences})
    made = []
    for i in rng.sample(good, min(EACH, len(good))) if len(years) >= ANSWERS else ():
        wrong = rng.sample([y for y in years if y != sentences[i][0]], ANSWERS - 1)
        made.append(_choice("year", f'In which year\'s address stands: "{said[i]}"', "In the address of",
                            f" {sentences[i][0]}", [f" {y}" for y in wrong], rng))
    for i in rng.sample(good, min(EACH, len(good))):
        wrong = rng.sample([j for j in good if j != i], ANSWERS - 1)
        right, *others = (" ".join(said[j + 1].split()[:WORDS[0]]) for j in (i, *wrong))
        made.append(_choice("next", f'In the addresses above, what follows directly after: "{said[i]}"',
                            "It is followed by:", f" {right}", [f" {x}" for x in others], rng))
    return made


def _choice(task: str, question: str, begun: str, right: str, wrong: list[str], rng: random.Random) -> Choice:
    answers = [right, *wrong]
    rng.shuffle(answers)
    return Choice(task, f"\n\nQuestion: {question}\nAnswer: {begun}", answers, answers.index(right))


def judged(model: Any, tokenizer: Any, read: Any, choice: Choice, method: Method, artifacts: dict[str, Any]) -> bool:
    """Whether the right answer is the likeliest. read: the cache of text and question without its last token."""
    last, answers = read[1], [tokenizer(a, add_special_tokens=False)["input_ids"] for a in choice.answers]
    options = method.config(SparseConfig(dense_below=0))
    given = {name: artifacts[name] for name in method.uses if name in artifacts}
    with attach(model, **given, **as_options(options), run=RunOptions(sparse_chunks=True)) as attachment:
        cache = read[0].fork()
        if method.selector != "full":  # so that copies share what is built
            attachment.runner.begin(cache, cache.get_seq_length())
        found = [x for x, _ in likelihoods(model, cache, last, answers)]
        if method.selector != "full":
            attachment.check_in_force("the method")
    if choice.task == "next":
        found = [x / len(a) for x, a in zip(found, choice.answers, strict=True)]
    return max(range(len(found)), key=found.__getitem__) == choice.right


def as_options(found: SparseConfig) -> dict[str, Any]:
    """Those that are not the defaults, as arguments of `attach`."""
    plain = SparseConfig()
    named = {n: v for n, v in vars(found).items() if n != "options" and v != getattr(plain, n)}
    return {**named, **dict(found.options)}


def work(options: argparse.Namespace) -> None:
    """Every answer is a line of the shard's file."""
    model, tokenizer = load_model(str(options.model), dtype=options.dtype, device="auto")
    artifacts = {}
    if options.artifacts is not None:
        kinds: tuple[tuple[str, Any], ...] = (("router", RouterArtifact), ("phi", PhiArtifact))
        artifacts = {name: kind.load(options.artifacts / name).to(model.device) for name, kind in kinds}
    methods = parse_methods(options.methods, options.budgets)
    shard, shards = options.shard
    options.output.mkdir(parents=True, exist_ok=True)
    until = time.perf_counter() + 60 * options.minutes
    with (options.output / f"choices-{shard}of{shards}.jsonl").open("w", encoding="utf-8") as file:
        for number, (text, sentences) in enumerate(texts(tokenizer, options.length, -(-options.samples // EACH))):
            if number % shards != shard or time.perf_counter() > until:
                continue
            with attach(model, selector="dense") as dense:
                held = dense.prefill(torch.tensor([tokenizer(text)["input_ids"]], device=model.device))
                asked = []
                for choice in choices(sentences, random.Random(number)):
                    ids = tokenizer(choice.question, add_special_tokens=False)["input_ids"]
                    asked.append((choice, (dense.prefill(torch.tensor([ids[:-1]], device=model.device),
                                                         cache=held.fork()), ids[-1])))
            for n, (choice, read) in enumerate(asked):
                for method in methods:
                    right = judged(model, tokenizer, read, choice, method, artifacts)
                    file.write(json.dumps({
                        "case": f"{options.name}:choices-{choice.task}@{options.length}", "question": f"{number}-{n}",
                        "method": method.name, "budget": method.budget, "right": right}) + "\n")
            file.flush()
            print(f"text {number}: {len(asked)} questions", flush=True)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Accuracy by case, method and budget, and what it is above full attention's on the same questions."""
    cells: dict[tuple[str, str, Any], dict[str, bool]] = {}
    for path in sorted(folder.glob("choices-*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            r = json.loads(line)
            cells.setdefault((r["case"], r["method"], r["budget"]), {})[r["question"]] = r["right"]
    rows = []
    for (case, method, budget), answers in cells.items():
        full = cells.get((case, "full", None), {})
        for metric, values in (("accuracy", [100.0 * x for x in answers.values()]), (
                "difference", [100.0 * (x - full[q]) for q, x in answers.items() if q in full])):
            if values and (metric == "accuracy" or method != "full"):
                low, high = bootstrap([values])
                rows.append(row(case, method, metric, round(sum(values) / len(values), 2), "points of 100",
                                budget=budget, low=round(low, 2), high=round(high, 2), samples=len(values),
                                **({"against": "full"} if metric == "difference" else {})))
    return rows


def pair(text: str) -> tuple[int, int]:
    first, _, second = text.partition("/")
    return int(first), int(second)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder, .gguf file or package:NAME")
    parser.add_argument("--name", default="coder-1.5b", help="of the model, before every case")
    parser.add_argument("--artifacts", type=Path, help="folder with router/ and phi/, for the methods that need them")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--budgets", nargs="+", type=float, default=list(BUDGETS))
    parser.add_argument("--length", type=int, default=16_384, help="of a text [tokens]")
    parser.add_argument("--samples", type=int, default=40, help="questions of each task")
    parser.add_argument("--minutes", type=float, default=8.0, help="begin no text after this time [minutes]")
    parser.add_argument("--shard", type=pair, default=(0, 1))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--output", type=Path, default=Path("choices"))
    parser.add_argument("--collect", type=Path, help="only put the rows of this output into docs/results")
    options = parser.parse_args()
    if options.collect is None:
        work(options)
    for r in (found := rows_of(options.collect or options.output)):
        print(r["case"], r["method"], r["budget"], r["metric"], r["value"], f"({r['low']} to {r['high']})")
    if options.collect is not None:
        print(add_rows("choices", found, RESULTS))


if __name__ == "__main__":
    main()
