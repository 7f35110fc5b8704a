"""The driver of real models: its stages, what a process takes, long generation, second turns, rows."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "runtime"))

from tiny_artifacts import artifacts

from benchmarks import real
from benchmarks._long_turns import (
    BLOCK,
    KEEPERS,
    Lines,
    long_generation,
    long_rows,
    needled,
    second_turn,
    turn_rows,
    written,
)
from benchmarks._prompts import (
    DENSE,
    PromptEvaluator,
    XAttention,
    pairs_read,
    parse_readings,
    prompt_rows,
    read_blocks,
)
from benchmarks._rows import load
from sparsekv.core.prefill import SparsePrompts
from sparsekv.evaluation.cells import collect
from sparsekv.evaluation.evaluator import Evaluator
from sparsekv.evaluation.methods import Method, parse_methods
from sparsekv.evaluation.requests import Question
from sparsekv.kernels.block_attention import block_lists, block_scores


def make_model(layers: int):
    import transformers as t

    torch.manual_seed(0)
    return t.AutoModelForCausalLM.from_config(t.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, eos_token_id=None, bos_token_id=None, pad_token_id=0,
        initializer_range=0.3)).eval()


@pytest.fixture(scope="module")
def model():
    return make_model(2)


class Letters:
    """A tokenizer of characters."""

    def __call__(self, text, **_):
        def ids(x):
            return [1 + ord(c) % 95 for c in x]

        return {"input_ids": ids(text) if isinstance(text, str) else [ids(x) for x in text]}

    eos_token_id = None

    def decode(self, row, **_):
        return "".join(map(chr, row))

    def batch_decode(self, rows):
        return [self.decode(row) for row in rows.tolist()]


def test_stages_have_names_methods_and_prompts_of_their_own() -> None:
    stages = real.all_stages()
    assert len({s.name for s in stages}) == len(stages)
    assert all((parse_readings if s.kind == "prefill" else parse_methods)(s.methods, s.budgets)
               for s in stages)
    requests = [Question(t, 16_384, i, "", [], "string_match_all", 8, []) for t in ("a", "b", "perplexity_x")
                for i in range(20)]
    main = next(s for s in stages if s.name == "main16")
    assert {(r.task, r.index) for r in requests if main.takes(r)} == {(t, i) for t in "ab" for i in range(4)}
    text = next(s for s in stages if s.kind == "text")
    assert {r.task for r in requests if text.takes(r)} == {"perplexity_x"}
    prompts = next(s for s in stages if s.name == "prefill16")
    assert {(r.task, r.index) for r in requests if prompts.takes(r)} == {
        *((t, i) for t in "ab" for i in range(4)), *(("perplexity_x", i) for i in range(6))}
    distance = next(s for s in stages if s.name == "kl16")
    assert {(r.task, r.index) for r in requests if distance.takes(r)} == {
        *((t, i) for t in "ab" for i in range(2)), *(("perplexity_x", i) for i in range(6))}
    shares = [real.shard_of(requests, i, 3) for i in range(3)]
    assert sum(map(len, shares)) == len(requests) == len(set.union(*shares)) and max(map(len, shares)) <= 20


def test_full_attention_judges_itself_the_same(model) -> None:
    router, phi = artifacts(model)
    placed = {"router": router, "phi": phi}
    prompts = torch.randint(1, 97, (2, 150))
    given = {"tokens": 2 * BLOCK, "temperature": 0.8, "seed": 1}
    full = written(model, prompts, Method("full"), placed, **given)
    assert float(full["kl"].abs().max()) < 1e-5 and bool((full["agrees"] == 1).all())
    found = written(model, prompts, Method("topk", "phi", 0.05), placed, **given)
    assert found["kl"].shape == (2, 2 * BLOCK) and float(found["kl"].mean()) > 1e-4
    assert float(found["kl"].min()) > -1e-5
    everything = written(model, prompts, Method("topk", "none", 1.0), placed, **given)
    assert float(everything["kl"].abs().max()) < 1e-4 and torch.allclose(everything["loss"], full["loss"], atol=1e-3)


def test_what_was_written_is_not_written_again(model, tmp_path) -> None:
    router, phi = artifacts(model)
    windows = [(str(i), torch.randint(1, 97, (90,)).tolist()) for i in range(3)]
    methods = [Method("topk", "none", 0.1), Method("sketch", "phi", 0.1)]
    given = {"tokens": 2 * BLOCK, "rows": 2}

    def run(stop) -> tuple[bool, list[dict]]:
        path = tmp_path / "lines-0.jsonl"
        lines = Lines(path, {"machine": "m", "command": "c", "commit": "x"})
        done = long_generation(model, windows, methods, {"router": router, "phi": phi}, lines, stop=stop, **given)
        return done, [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []

    left = [False, False, False, True]
    assert not run(lambda: left.pop(0))[0]
    with (tmp_path / "lines-0.jsonl").open("a") as file:
        file.write('{"key": [')  # cut off
    done, kept = run(lambda: False)[0], list(real.read_lines(tmp_path))
    assert done and len(kept) == 4
    rows = long_rows(kept)
    quarters = [r for r in rows if r["method"] == "topk" and r["metric"] == "kl" and "quarter" in r]
    whole = next(r for r in rows if r["method"] == "topk" and r["metric"] == "kl"
                 and not {"quarter", "past_window"} & set(r))
    assert len(quarters) == 2 and whole["samples"] == 3
    assert whole["low"] <= whole["value"] <= whole["high"] and "origins" not in whole
    other = {**kept[0], "origin": {"machine": "n, torch 2", "command": "d", "commit": "y"}}
    joined = long_rows([*kept, other])
    whole = next(r for r in joined if r["method"] == "topk" and r["metric"] == "kl"
                 and not {"quarter", "past_window"} & set(r))
    assert whole["samples"] == 5 and [(o["commit"], o["samples"]) for o in whole["origins"]] == [("x", 3), ("y", 2)]


def test_a_second_question_after_an_answer(model) -> None:
    router, phi = artifacts(model)
    prompt, numbers = needled(Letters(), [5] * 2000, 1500, 0)
    assert len(prompt) == 1500 and set(numbers) == set(KEEPERS)
    given = {"tokens": 5, "temperature": 0.0, "seed": 0}
    answers = [second_turn(model, Letters(), torch.tensor([prompt, prompt]), ["who?", "who?"], method,
                           {"router": router, "phi": phi}, **given)
               for method in (Method("full"), Method("topk", "none", 1.0), Method("sketch", "phi", 0.02))]
    assert answers[0] == answers[1] and all(len(a) == 10 for rows in answers for a in rows)
    line = {"key": ["turns", "topk", 0.1, 5, ["a"]], "length": 1500, "found": [1.0, 0.0], "origin": {"machine": "m"}}
    assert turn_rows([line])[0]["value"] == 50.0


def test_a_router_that_has_learned_nothing_decodes(model) -> None:
    router, phi = artifacts(model)
    control = real.untrained(router)
    assert control.centroids.shape == router.centroids.shape and not torch.equal(control.centroids, router.centroids)
    found = written(model, torch.randint(1, 97, (1, 150)), Method("sketch", "none", 0.1, (("fit", "fitted"),)),
                    {"router": control, "phi": phi}, tokens=BLOCK, temperature=0.0, seed=0)
    assert bool(found["kl"].isfinite().all())
    assert real.without_training("sketch:fit=fitted") == "sketch:untrained"


def test_commands_of_rows_have_no_places() -> None:
    given = ("real.py --model /a/b --weights /a/b.gguf --artifacts /x --prompts p.gz --output /o --back /r "
             "--minutes 8.0 --processes 2 --only main16 --shard 0/2 --minutes 7.80")
    assert real.without_places(given) == (
        "real.py --model MODEL --weights WEIGHTS --artifacts ARTIFACTS --prompts PROMPTS --output OUTPUT --minutes 8.0 "
        "--processes 2 --only main16")
    assert real.without_places("real.py --model M --minutes 8.0") == "real.py --model MODEL --minutes 8.0"


def test_rows_are_put_once_and_say_what_was_reached(tmp_path) -> None:
    said = {"machine": "Card One, torch 2", "command": "c", "commit": "abc"}
    cells = []
    for task in ("a", "b"):
        for method, budget, right in (("full", None, 1.0), ("sketch+phi", 0.02, 1.0), ("quest", 0.02, 0.0)):
            cells.append({"case": f"{task}@16384", "method": method, "budget": budget, "indices": [0, 1],
                          "scores": [right] * 2, "answers": ["yes"] * 2, "read": 0.02, "bytes": 0.05, "tokens": 16_000,
                          "sparse_layers": 0.5, "seconds": 1.0, "origin": said})
    for c in cells[2::3]:  # the rival has one prompt less of every task
        c["indices"] = c["indices"][:1]
    cells.append({"case": "perplexity_x@16384", "method": "full", "budget": None, "indices": [0], "losses": [1.0],
                  "errors": [0.0], "read": 1.0, "bytes": 1.0, "tokens": 16_000, "seconds": 1.0, "origin": said})
    folder = tmp_path / "Card-One"
    folder.mkdir()
    head = {"format": "sparsekv-sweep", "format_version": 1, "origin": said}
    (folder / "cells-0of1.jsonl").write_text("".join(json.dumps(x) + "\n" for x in (head, *cells)))
    (folder / "model.json").write_text(json.dumps({"model": "m", "quantisation": "Q4_K_M", "weights_sha256": "0" * 64}))
    real.put([tmp_path], tmp_path)
    real.put([tmp_path], tmp_path)
    rows = load("real", tmp_path)
    mean = next(r for r in rows if r["case"] == "m:ruler@16384" and r["method"] == "quest" and r["metric"] == "score")
    assert mean["value"] == 0.0 and mean["bytes_share_model"] == pytest.approx(0.525)
    assert sum(r["case"] == "m:ruler@16384" and r["metric"] == "score" for r in rows) == 3


def test_a_stage_that_was_cut_short_weighs_no_task_more_than_another() -> None:
    def cells(task: str, method: str, prompts: Sequence[int]) -> list[dict[str, Any]]:
        runs = [list(prompts[i:i + 3]) for i in range(0, len(prompts), 3)]
        return [{"case": f"{task}@16384", "method": method, "budget": None if method == "full" else 0.01,
                 "indices": run, "scores": [float(n) for n in run], "answers": [str(n) for n in run]} for run in runs]

    def kept(*of: dict[str, Any]) -> dict[tuple[str, str], list[int]]:
        found: dict[tuple[str, str], list[int]] = {}
        for c in real.even(of):
            assert c["scores"] == [float(i) for i in c["indices"]] and c["indices"]
            found.setdefault((c["method"], c["case"].partition("@")[0]), []).extend(c["indices"])
        return found

    text = {"case": "perplexity_prose@16384", "method": "topk", "budget": 0.01, "indices": [11], "scores": [11.0]}
    # prompts of a cut stage have gaps: each process lacks its own
    found = kept(*cells("niah", "full", range(12)), *cells("vt", "full", [*range(8), 9, 11]), text,
                 *cells("niah", "topk", [0, 1, 3, 4, 6, 7, 9]), *cells("vt", "topk", [0, 2, 3, 5, 8, 9]),
                 *cells("niah", "quest", range(4)))
    assert found == {("full", "niah"): list(range(10)), ("full", "vt"): [*range(8), 9, 11],
                     ("topk", "niah"): [0, 1, 3, 4, 6], ("topk", "vt"): [0, 2, 3, 5, 9],
                     ("topk", "perplexity_prose"): [11]}  # nothing of what some task lacks
    assert kept(*cells("niah", "topk", range(5)), *cells("vt", "topk", [3])) == {
        ("topk", "niah"): [0], ("topk", "vt"): [3]}


def test_prompts_read_in_several_ways_are_the_same() -> None:
    def cell(task: str, method: str, prompts: list[int]) -> dict[str, Any]:
        return {"case": f"{task}@32768", "method": method, "budget": 0.02, "indices": prompts,
                "scores": [float(n) for n in prompts], "answers": [str(n) for n in prompts]}

    text = {"case": "perplexity_prose@32768", "method": "a", "budget": 0.02, "indices": [5], "scores": [5.0]}
    found = real.shared([cell("niah", "a", [0, 1]), cell("niah", "a", [2, 3]), cell("niah", "b", [3, 1]),
                         cell("vt", "a", [0]), cell("vt", "b", [1]), text])
    assert [(c["method"], c["case"], c["indices"]) for c in found] == [
        ("a", "niah@32768", [1]), ("a", "niah@32768", [3]), ("b", "niah@32768", [3, 1]),
        ("a", "perplexity_prose@32768", [5])]
    assert all(c["scores"] == [float(i) for i in c["indices"]] for c in found)


def test_processes_begin_with_batches_of_their_own() -> None:
    class Five:
        def batches(self, some=None):
            yield from "abcde"

        def run(self):
            return "".join(self.batches(None))

    assert [real.turned(Five, i / 4)().run() for i in range(4)] == ["abcde", "bcdea", "cdeab", "deabc"]
    assert inspect.signature(real.turned(Evaluator, 0.5).batches) == inspect.signature(Evaluator.batches)


def test_prompts_that_read_everything_are_dense_ones(tmp_path) -> None:
    model = make_model(3)  # layer 0 is dense: what layer 1 reads shows in the keys of layer 2
    router, phi = artifacts(model)
    generator = torch.Generator().manual_seed(0)
    requests = [Question(task, 1024, i, torch.randint(1, 97, (900 + 3 * i,), generator=generator).tolist(), ["x"],
                         "continuation" if task.startswith("perplexity") else "string_match_all", 8, [])
                for task in ("niah_single_1", "ruler_vt", "perplexity_x") for i in range(2)]
    readings = parse_readings([DENSE, "prompt:share=1.0:exact=20", "xattention:share=1.0:exact=20",
                               "prompt:share=0.1:exact=20", "xattention:share=0.1:exact=20"], [0.1])

    def run() -> bool:
        return PromptEvaluator(model, Letters(), requests, output=tmp_path, router=router, phi=phi,
                               resume=True).run(readings)

    assert run()
    size = (tmp_path / "cells.jsonl").stat().st_size
    assert run() and (tmp_path / "cells.jsonl").stat().st_size == size
    cells = collect(tmp_path)
    losses = {r.name: [x for c in cells if c["method"] == r.name for x in c.get("prompt_losses", ())] for r in readings}
    answers = {r.name: [x for c in cells if c["method"] == r.name for x in c.get("answers", ())] for r in readings}
    full, every, blocks, few, few_blocks = (losses[r.name] for r in readings)
    assert full == pytest.approx(every, abs=1e-4) and full == pytest.approx(blocks, abs=1e-4)
    assert max(abs(a - b) for a, b in zip(full, few, strict=True)) > 1e-3
    assert max(abs(a - b) for a, b in zip(full, few_blocks, strict=True)) > 1e-3
    assert answers[readings[0].name] == answers[readings[1].name] == answers[readings[2].name]
    rows = prompt_rows(cells)
    mean = next(r for r in rows if r["case"] == "prefill@1024" and r["metric"] == "difference"
                and r["method"] == readings[1].name)
    assert mean["value"] == 0.0 and mean["against"] == DENSE and mean["pairs"] == 1.0
    ratio = next(r for r in rows if r["case"] == "prefill_prompt_x@1024" and r["metric"] == "perplexity_ratio"
                 and r["method"] == readings[3].name)
    after = next(r for r in rows if r["case"] == "prefill_perplexity_x@1024" and r["metric"] == "perplexity_ratio"
                 and r["method"] == readings[3].name)
    assert after["value"] != 1.0
    assert ratio["samples"] == 2 and ratio["value"] != 1.0 and 0.5 < ratio["pairs"] < 0.9


def test_a_rival_reads_as_many_pairs() -> None:
    prompts = SparsePrompts(share=0.1, least=0, exact=256)
    torch.manual_seed(0)
    q, k = (torch.randn(4, 4000, 16) for _ in range(2))
    q *= torch.linspace(1, 8, 4)[:, None, None]
    kept = XAttention(prompts, 2).blocks(q, k, 0.25)
    assert bool(kept[:, :, 0].all()) and bool(kept.diagonal(dim1=1, dim2=2).all())
    rows = read_blocks(prompts, 4000)
    assert int(kept.sum()) == 4 * sum(rows) and rows[:4] == [1, 2, 2, 2] and rows[28:] == [5, 30, 31, 32]
    lists = block_lists(block_scores(q[None, :, :3712], k[None, :, :3712], scale=0.25), 0.1, 0)
    assert int(lists.counts.sum()) == 4 * sum(rows[:29])
    tokens = kept.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :4000, :4000].tril()
    share = float(tokens.sum() / 4 / (4000 * 4001 / 2))
    assert share == pytest.approx(pairs_read(prompts, 4000), rel=0.02)


def test_a_rival_reads_what_holds_one_share_of_the_sums() -> None:
    """The second head looks at one block of keys alone: the others have what it does not need."""
    torch.manual_seed(0)
    q, k = (torch.randn(3, 2048, 16) for _ in range(2))
    k[1, 256:384] += 3
    q[1] += 5
    kept = XAttention(SparsePrompts(share=0.2, least=0, exact=0), 2).blocks(q, k, 0.25)
    assert kept[1, 5:].nonzero()[:, 1].unique(return_counts=True)[1].tolist()[:3] == [11, 11, 1]
    assert int(kept[1].sum()) <= 3 * 16 < int(kept[0].sum())
