"""The driver of real models: its stages, what a process takes, rows."""

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

import sparsekv
from benchmarks import real
from benchmarks._rows import load
from sparsekv.evaluation.evaluator import Evaluator
from sparsekv.evaluation.methods import parse_methods
from sparsekv.evaluation.requests import Question


@pytest.fixture(scope="module")
def model():
    import transformers as t

    torch.manual_seed(0)
    return t.AutoModelForCausalLM.from_config(t.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, eos_token_id=None, bos_token_id=None, pad_token_id=0,
        initializer_range=0.3)).eval()


def test_stages_have_names_methods_and_prompts_of_their_own() -> None:
    stages = real.all_stages()
    assert len({s.name for s in stages}) == len(stages)
    assert all(parse_methods(s.methods, s.budgets) for s in stages)
    requests = [Question(t, 16_384, i, "", [], "string_match_all", 8, []) for t in ("a", "b", "perplexity_x")
                for i in range(20)]
    main = next(s for s in stages if s.name == "main16")
    assert {(r.task, r.index) for r in requests if main.takes(r)} == {(t, i) for t in "ab" for i in range(4)}
    text = next(s for s in stages if s.kind == "text")
    assert {r.task for r in requests if text.takes(r)} == {"perplexity_x"}
    distance = next(s for s in stages if s.name == "kl16")
    assert {(r.task, r.index) for r in requests if distance.takes(r)} == {
        *((t, i) for t in "ab" for i in range(2)), *(("perplexity_x", i) for i in range(6))}
    shares = [real.shard_of(requests, i, 3) for i in range(3)]
    assert sum(map(len, shares)) == len(requests) == len(set.union(*shares)) and max(map(len, shares)) <= 20


def test_a_router_that_has_learned_nothing_decodes(model) -> None:
    router, _ = artifacts(model)
    control = real.untrained(router)
    assert control.centroids.shape == router.centroids.shape and not torch.equal(control.centroids, router.centroids)
    ids = torch.randint(1, 97, (1, 150))
    with sparsekv.attach(model, selector="sketch", completion="none", token_budget=0.1, fit="fitted", dense_below=0,
                         router=control) as attachment:
        cache = attachment.prefill(ids[:, :-1])
        assert bool(attachment.step(ids[:, -1:], cache).isfinite().all())
        attachment.check_in_force("sketch")
    assert real.without_training("sketch:fit=fitted") == "sketch:untrained"


def test_commands_of_rows_have_no_places() -> None:
    given = ("real.py --model /a/b --weights /a/b.gguf --artifacts /x --prompts p.gz --output /o "
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


def test_processes_begin_with_batches_of_their_own() -> None:
    class Five:
        def batches(self, some=None):
            yield from "abcde"

        def run(self):
            return "".join(self.batches(None))

    assert [real.turned(Five, i / 4)().run() for i in range(4)] == ["abcde", "bcdea", "cdeab", "deabc"]
    assert inspect.signature(real.turned(Evaluator, 0.5).batches) == inspect.signature(Evaluator.batches)
