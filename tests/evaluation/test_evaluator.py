import copy
import json
import signal
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tiny import make_model
from tiny_artifacts import artifacts

from sparsekv import SparseConfig, attach
from sparsekv.core.prefill import SparsePrompts
from sparsekv.core.step import LayerState
from sparsekv.evaluation import requests as maker
from sparsekv.evaluation.batch import answer_batch, prefill_batch
from sparsekv.evaluation.cells import FORMAT, collect
from sparsekv.evaluation.evaluator import Evaluator
from sparsekv.evaluation.methods import Method, label, parse_methods
from sparsekv.evaluation.own_tasks import continuations, make_needles
from sparsekv.evaluation.requests import Question, load_requests, save_requests, score, task_names
from sparsekv.evaluation.scores import bootstrap, score_rows
from sparsekv.evaluation.tables import gains, table
from sparsekv.runtime.hf.attach import RunOptions
from sparsekv.util.errors import SparseKVError

TEXT = "The quick brown fox jumps over the lazy dog; 17 wise owls & 3 gnus (all grey) watched it go by. "


def request(task: str, index: int, size: int, *, length: int = 128, limit: int = 6) -> Question:
    text = (TEXT * 4)[index * 7:index * 7 + size]
    return Question(task, length, index, text, ["owl", "gnu"], "string_match_all", limit, [])


def requests() -> list[Question]:
    return [request("one", i, 90 + 5 * i) for i in range(3)] + [request("two", i, 120 - i, limit=9) for i in range(3)]


METHODS = ("full", "streaming", "topk+phi", "router", "router+phi", "token_select", "lfps", "quest", "snapkv",
           "topk+centroid")


@pytest.mark.parametrize("name", METHODS)
def test_a_batch_answers_as_its_prompts_do_alone(name: str, tokenizer) -> None:
    model = make_model()
    router, phi = artifacts(model, space="rot")
    prompts = [tokenizer(r.prompt)["input_ids"] for r in requests()]
    selector, _, completion = name.replace("full", "dense").partition("+")
    options = {"selector": selector, "completion": completion or "none", "dense_below": 0, "sink_size": 4,
               "window_size": 16, "router": router if selector == "router" else None,
               "phi": phi if completion == "phi" else None}
    if selector not in ("dense", "streaming"):
        options["token_budget"] = 0.2
    # no cosine near a threshold, no pages whose edges depend on padding, no plateaus of pooled votes with ties
    steady = {"token_select": {"theta": 2.0}, "quest": {"page_size": 1}, "snapkv": {"kernel_size": 1}}
    options |= steady.get(selector, {})
    limits = [6, 20, 5, 9, 20, 20]
    with attach(model, selector="dense") as dense:
        batch = prefill_batch(dense, prompts, room=24)
    answers = []
    for replays in (False, True):
        with attach(model, run=RunOptions(replays=replays), **options) as attachment:
            answers.append(answer_batch(attachment, batch, limits,
                                        lambda row, tokens: row in (0, 2) and len(tokens) >= 5))
            steady = selector not in ("token_select", "lfps")
            planned = max(limits) - 1  # decoding begins in a step that is not, which shows how the model rotates
            assert attachment.report()["replayed_steps"] == (planned if replays and steady else 0)
    assert batch.width == max(map(len, prompts)) - 1 and all(x.state is None for x in batch.cache.layers)
    assert batch.cache.plan is None
    for row, prompt in enumerate(prompts):
        ids = torch.tensor(prompt)[None]
        with attach(model, **options) as attachment:
            cache = attachment.prefill(ids[:, :-1])
            alone = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, do_sample=False,
                                   max_new_tokens=limits[row])
        for got in answers:
            assert got[row] == alone[0, len(prompt):].tolist()[:len(got[row])], row
            assert len(got[row]) >= min(limits[row], 5)


def run(tmp_path, tokenizer, methods, **options):
    model = make_model()
    router, phi = artifacts(model, space="rot")
    Evaluator(model, tokenizer, requests(), router=router, phi=phi, output=tmp_path, **options).run(methods)


def test_an_interrupted_run_goes_on_and_is_the_same(tmp_path, tokenizer) -> None:
    methods = parse_methods(["full", "topk", "topk+phi"], [0.2, 0.5])
    run(tmp_path / "all", tokenizer, methods, batch_tokens=300)
    cells = tmp_path / "cut" / "cells.jsonl"
    run(tmp_path / "cut", tokenizer, methods[:2], batch_tokens=300)
    cells.write_text(cells.read_text() + '{"case": "one@128", "met')
    run(tmp_path / "cut", tokenizer, methods, batch_tokens=300, resume=True)

    def strip(folder):
        return {(c["case"], c["method"], c["budget"], tuple(c["indices"])): c["answers"] for c in collect(folder)}

    assert strip(tmp_path / "cut") == strip(tmp_path / "all") and len(strip(tmp_path / "all")) == 5 * 3
    before = cells.read_text()
    run(tmp_path / "cut", tokenizer, methods, batch_tokens=300, resume=True)
    assert cells.read_text() == before
    with pytest.raises(SparseKVError, match="--resume"):
        run(tmp_path / "cut", tokenizer, methods)
    with pytest.raises(SparseKVError, match="other accounting"):
        run(tmp_path / "cut", tokenizer, methods, resume=True, accounting="worst_case")


def test_rows_answered_in_parts_are_the_same(tmp_path, tokenizer) -> None:
    methods = [Method("topk", "none", 0.2)]
    run(tmp_path / "a", tokenizer, methods)
    parts = Evaluator(make_model(), tokenizer, requests(), output=tmp_path / "b")
    parts.splits["topk"] = 4
    parts.run(methods)
    assert [c["answers"] for c in collect(tmp_path / "a")] == [c["answers"] for c in collect(tmp_path / "b")]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As many numbers as layers were built."""
    built: list[int] = []
    monkeypatch.setattr(LayerState, "__init__", lambda self, *args, own=LayerState.__init__, **kwargs: (
        built.append(1), own(self, *args, **kwargs))[1])
    return built


@pytest.mark.parametrize("name", ["topk+phi", "router", "sketch+phi", "sketch:fit=fixed", "quest", "lfps", "snapkv",
                                  "token_select", "streaming_llm", "topk+centroid"])
def test_a_method_with_other_budgets_builds_once_and_answers_the_same(
    tmp_path, tokenizer, begun: list[int], name: str,
) -> None:
    budgets = [0.1, 0.5, 0.2]
    run(tmp_path / "together", tokenizer, parse_methods([name], budgets))
    for budget in budgets:
        run(tmp_path / str(budget), tokenizer, parse_methods([name], [budget]))

    def strip(cells, about=lambda x: x):
        return {(c["case"], c["budget"], tuple(c["indices"])): (c["answers"], c["read"], about(c["bytes"]))
                for c in cells}

    def nearly(share: float):
        """What chooses and completes is counted when a step is planned, once for some hundred steps."""
        return pytest.approx(share, rel=5e-3)

    alone = [c for budget in budgets for c in collect(tmp_path / str(budget))]
    assert strip(collect(tmp_path / "together")) == strip(alone, nearly) and len(alone) == 2 * len(budgets)
    begun.clear()
    run(tmp_path / "counted", tokenizer, parse_methods([name], budgets))
    once = name in ("topk+phi", "topk+centroid", "router", "sketch+phi", "sketch:fit=fixed", "quest")
    assert len(begun) == (make_model().config.num_hidden_layers - 1) * (1 if once else len(budgets))


@pytest.mark.parametrize("name", ["topk+phi", "router", "sketch+phi", "snapkv"])
def test_a_text_is_continued_at_other_budgets_by_what_was_built_once(
    tmp_path, tokenizer, begun: list[int], name: str,
) -> None:
    model, budgets = make_model(), [0.1, 0.5, 0.2]
    router, phi = artifacts(model, space="rot")
    text = tokenizer(TEXT * 6)["input_ids"]
    asked = continuations([text[:200], text[50:250]])

    def cells(folder, budgets, some=None):
        made = Evaluator(model, tokenizer, asked, router=router, phi=phi, output=tmp_path / folder)
        made.run(parse_methods([name], budgets), some=some)
        return {(c["budget"], tuple(c["indices"])): (c["losses"], c["errors"], c["read"], c["bytes"])
                for c in collect(tmp_path / folder)}

    together = cells("together", budgets)
    assert len(begun) == len(asked) * (model.config.num_hidden_layers - 1) * (len(budgets) if name == "snapkv" else 1)
    assert together == {k: v for b in budgets for k, v in cells(f"at {b}", [b]).items()}
    assert cells("some", budgets, asked[1:]) == {k: v for k, v in together.items() if k[1] == (1,)}


def test_a_budget_changes_between_steps(tokenizer) -> None:
    model = make_model()
    with attach(model, selector="topk", token_budget=0.2, dense_below=0) as attachment:
        cache = attachment.prefill(torch.arange(1, 60)[None])
        attachment.step(torch.tensor([[5]]), cache)
        before = attachment.report()["bytes_share"]
        attachment.spend(0.9, cache)
        attachment.step(torch.tensor([[5]]), cache)
        assert attachment.report()["bytes_share"] > before
        with pytest.raises(SparseKVError, match="share of the context"):
            attachment.spend(1.5, cache)
        assert attachment.decoding.selector.token_budget == 0.9


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_texts_are_continued_and_needles_found_as_without_an_evaluator(tmp_path, tokenizer, family: str) -> None:
    model = make_model(family)
    _, phi = artifacts(model, space="rot")
    text = tokenizer(TEXT * 6)["input_ids"]
    asked = [*continuations([text[:200], text[50:250]]), *make_needles(tokenizer, text, length=220, count=2)]
    made = Evaluator(model, tokenizer, asked, phi=phi, output=tmp_path)
    made.run(parse_methods(["full", "topk+phi"], [0.3]))
    found = {(c["case"], c["method"], i): c for c in collect(tmp_path) for i in c["indices"]}
    for r in asked:
        ids = torch.tensor(r.prompt)[None]
        options = {"selector": "topk", "phi": phi, "token_budget": 0.3, "dense_below": 0, "sink_size": made.sink_size,
                   "window_size": made.window_size}
        run = RunOptions(sparse_chunks=True, compares=True)
        with attach(model, run=run, **options) as attachment, torch.inference_mode():
            full, sparse = (found[r.case, m, r.index] for m in ("full", "topk+phi"))
            at = sparse["indices"].index(r.index)
            if r.task == "needle":
                cache = attachment.prefill(ids[:, :-1])
                answer = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache,
                                        do_sample=False, max_new_tokens=r.max_new_tokens)[0, ids.shape[1]:]
                assert sparse["answers"][at] == tokenizer.decode(answer, skip_special_tokens=True)
                assert sparse["depths"][at] == r.depth
                continue
            loss = torch.nn.functional.cross_entropy
            logits = model(ids).logits[0, -65:-1]
            assert full["losses"] == [pytest.approx(float(loss(logits, ids[0, -64:])), rel=1e-4)]
            logits = model(ids[:, -65:-1], past_key_values=attachment.prefill(ids[:, :-65])).logits[0]
            assert sparse["losses"] == [pytest.approx(float(loss(logits, ids[0, -64:])), rel=1e-4)]
            report = attachment.report()
            assert sparse["errors"] == [pytest.approx(report["rel_err"], rel=1e-4)] and full["errors"] == [0.0]
            assert sparse["read"] == pytest.approx(report["selectivity_sparse"]) and full["read"] == 1.0
    rows = {(r["case"], r["method"], r["metric"]): r for r in score_rows(collect(tmp_path))}
    assert rows["perplexity@200", "full", "rel_err"]["samples"] == 2
    assert not [r for r in rows if r[0].startswith("ruler")]


def test_a_method_that_reads_prompts_in_chunks_prefills_them_itself(tmp_path, tokenizer) -> None:
    (method,) = parse_methods(["token_select:prefill_chunk=24:theta=2"], [0.1])
    run(tmp_path, tokenizer, [method])
    answers = {(c["case"], i): a for c in collect(tmp_path) for i, a in zip(c["indices"], c["answers"], strict=True)}
    model = make_model()
    for r in requests():
        ids = torch.tensor(tokenizer(r.prompt)["input_ids"])[None]
        with attach(model, selector="token_select", token_budget=0.1, prefill_chunk=24, theta=2.0, dense_below=0,
                    sink_size=4, window_size=16) as attachment:
            cache = attachment.prefill(ids[:, :-1])
            alone = attachment.generate(ids[:, -1:], torch.ones_like(ids), cache=cache, max_new_tokens=6)
        text = tokenizer.decode(alone[0, 1:], skip_special_tokens=True)
        assert text.startswith(answers[r.case, r.index][:5]) and answers[r.case, r.index][:5], r.case


def test_infeasible_cells_are_dashes(tmp_path, tokenizer) -> None:
    # anchors 4 + 16 + 1, φ cache 12·(16 + 2)/32 = 6.75 tokens: 0.22 of 89 pays for neither, of 119 for the anchors
    methods = parse_methods(["full", "topk", "topk+phi"], [0.2, 0.25, 0.5])
    run(tmp_path, tokenizer, methods, accounting="worst_case")
    rows = score_rows(collect(tmp_path))
    header, lines = table(rows, "one@128", ["topk", "topk+phi"])
    cells = {line[0]: line[1:] for line in lines}
    assert header == ["method", "20 %", "25 %", "50 %"]
    assert [c == "–" for c in cells["topk"]] == [True, False, False]
    assert [c == "–" for c in cells["topk+phi"]] == [True, True, False]
    assert "–" not in cells["full"]
    mean = {(r["method"], r["budget"]): r for r in rows if r["case"] == "ruler@128"}
    assert mean["topk", 0.2]["value"] is None and mean["topk", 0.2]["infeasible"]
    spent = mean["topk+phi", 0.5]["read_worst"]
    assert spent > mean["topk+phi", 0.5]["read"] and spent == pytest.approx(0.5, abs=0.06)


def test_agreement_is_what_stands_before_the_first_difference() -> None:
    right = ["a b c d", "12", "", "xyz", "same until cut"]
    mine = ["a b x d", "12", "", "", "same unt"]
    cells = [{"case": case, "method": method, "budget": budget, "indices": list(range(5)), "scores": [0.0] * 5,
              "answers": answers, "read": 0.1, "tokens": 9, "seconds": 1.0}
             for case in ("one@8", "two@8") for method, budget, answers in (("full", None, right), ("topk", 0.1, mine))]
    rows = score_rows(cells)
    (found,) = [r for r in rows if r["metric"] == "agreement"]
    assert found["case"] == "ruler@8" and found["method"] == "topk" and found["samples"] == 10
    assert found["value"] == pytest.approx(100 * (4 / 7 + 1 + 1 + 0 + 1) / 5, abs=0.01)
    assert not [r for r in score_rows([c for c in cells if c["method"] != "full"]) if r["metric"] == "agreement"]


def test_means_are_taken_within_a_benchmark_and_rows_say_how_to_repeat_them(tmp_path, tokenizer) -> None:
    methods = parse_methods(["full", "router", "topk+phi"], [0.5])
    run(tmp_path, tokenizer, methods)
    cells = collect(tmp_path)
    qa = [{**c, "case": c["case"].replace("one", "babilong_qa1").replace("two", "babilong_qa2")} for c in cells]
    rows = score_rows([*cells, *qa], seed=3)
    assert {r["case"] for r in rows} == {"one@128", "two@128", "ruler@128", "babilong_qa1@128", "babilong_qa2@128",
                                         "babilong@128"}
    for r in rows:
        assert {"task", "length", "budget", "seed", "low", "high", "samples", "machine", "command", "commit",
                "accounting", "weights", "dtype", "requests", "read", "context_tokens"} <= set(r), r
        assert r["length"] == 128 and r["seed"] == 3 and r["case"] == f"{r['task']}@128"
        assert ("router" in r) == (r["method"] == "router") and ("phi" in r) == (r["method"] == "topk+phi")
    model = make_model()
    other, phi = artifacts(model, space="pre")
    with pytest.raises(SparseKVError, match="another router artifact"):
        Evaluator(model, tokenizer, requests(), router=other, phi=phi, output=tmp_path, resume=True)
    changed = copy.deepcopy(model)
    changed.model.norm.weight.data += 1
    with pytest.raises(SparseKVError, match="other weights"):
        Evaluator(changed, tokenizer, requests(), output=tmp_path, resume=True)


CHILD = """
import os, signal
from sparsekv.evaluation import evaluator
from sparsekv.evaluation.run import EvalConfig, run_eval
left, write = {cells}, evaluator.add_cell
def add(path, cell):
    global left
    left -= 1
    if left < 0:
        with path.open("a") as file:
            file.write('{{"case": "cut o')
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, cell)
evaluator.add_cell = add
run_eval(EvalConfig(**{options!r}))
"""


def test_a_killed_run_goes_on_where_it_was(forks, tmp_path, saved_model) -> None:
    from sparsekv.evaluation.run import EvalConfig, run_eval

    (tmp_path / "text.txt").write_text(TEXT * 40)
    options = {"model": str(saved_model), "methods": "topk", "budgets": "0.2,0.5", "device": "cpu",
               "output": str(tmp_path / "out"), "corpus": str(tmp_path / "text.txt"), "lengths": "256", "samples": 2,
               "split": "all"}
    (tmp_path / "child.py").write_text(CHILD.format(cells=4, options=options))
    assert forks.start(tmp_path / "child.py").wait() == -signal.SIGKILL
    with pytest.raises(SparseKVError, match="--resume"):
        run_eval(EvalConfig(**options))
    before = (tmp_path / "out" / "cells.jsonl").read_text().rpartition("\n")[0].splitlines()
    resumed = run_eval(EvalConfig(**options, resume=True))
    after = (tmp_path / "out" / "cells.jsonl").read_text().splitlines()
    assert after[:len(before)] == before and len(after) - len(before) == 9 - 4
    fresh = run_eval(EvalConfig(**{**options, "output": str(tmp_path / "fresh")}))

    def values(rows):
        return [{k: v for k, v in r.items() if k not in ("command", "seconds")} for r in rows]

    assert values(resumed.rows) == values(fresh.rows)
    with pytest.raises(SparseKVError, match=r"other requests .*or --overwrite without --resume"):
        run_eval(EvalConfig(**{**options, "seed": 1}, resume=True))
    with pytest.raises(SparseKVError, match="give one of them"):
        run_eval(EvalConfig(**options, resume=True, overwrite=True))
    assert all({"seed", "budget", "samples", "corpus", "task", "length", "machine", "commit"} <= set(r)
               for r in fresh.rows)
    found = {(r["case"], r["metric"]) for r in fresh.rows if r["method"] == "topk"}
    assert found == {("needle@256", "score"), ("needle@256", "needle"),
                     *(("perplexity@256", m) for m in ("perplexity", "rel_err", "selectivity", "perplexity_ratio",
                                                       "same_tokens"))}
    assert "exact top-k, 20 %" in fresh.table and "of 2" in fresh.table


def test_differences_are_of_the_same_samples() -> None:
    scores = {("full", None): [0.5, 0.7], ("topk", 0.05): [0.6, 0.5], ("topk+phi", 0.05): [0.6, 0.5],
              ("router+phi", 0.05): [0.5, 0.67], ("streaming", None): [0.0, 0.0], ("quest", 0.05): [0.67, 0.5]}
    cells = [{"case": case, "method": m, "budget": b, "indices": [0, 1], "scores": s, "read": 0.05, "tokens": 9,
              "seconds": 1.0} for case in ("one@1", "two@1") for (m, b), s in scores.items()]
    cells.append({"case": "one@1", "method": "quest", "budget": 0.01, "infeasible": True})
    rows = score_rows(cells)
    differences = {(r["method"], r["against"]): r["value"] for r in rows
                   if (r["case"], r["metric"]) == ("ruler@1", "difference")}
    assert differences["topk+phi", "topk"] == 0 and differences["router+phi", "full"] == -1.5
    assert differences["router+phi", "streaming"] == 58.5 and differences["router+phi", "quest"] == 0
    header, (line,) = gains(rows, "ruler@1")
    assert header == ["gain of", "5 %"] and line == ["topk+phi", "+0.0 ± 0.0"]  # no router alone to compare with
    found = {r["against"]: r for r in rows if r["metric"] == "difference" and r["method"] == "router+phi"}
    assert set(found) == {"full", "streaming", "quest"} and found["full"]["samples"] == 4
    assert found["full"]["low"] == -3.0 and found["full"]["high"] == 0.0  # of two pairs: -3 and 0 points, not -20 to 17


def test_older_and_foreign_results_are_refused(tmp_path) -> None:
    path = tmp_path / "cells.jsonl"
    path.write_text(json.dumps({"format": FORMAT, "format_version": 0}) + "\n")
    with pytest.raises(SparseKVError, match="format 0"):
        collect(tmp_path)
    path.write_text("[1]\n")
    with pytest.raises(SparseKVError, match="holds no cells"):
        collect(tmp_path)
    with pytest.raises(SparseKVError, match=r"no cells\.jsonl"):
        collect(tmp_path / "none")
    with pytest.raises(SparseKVError, match="unknown selector 'best'"):
        parse_methods(["best"], [0.1])
    with pytest.raises(SparseKVError, match="unknown completion 'magic'"):
        parse_methods(["topk+magic"], [0.1])
    for wrong in ("lfps:beta=1", "lfps:alpha", "topk:token_budget=3", "full:alpha=1"):
        with pytest.raises(SparseKVError, match="is no option of selector"):
            parse_methods([wrong], [0.1])


def test_methods_may_have_options_of_their_selector(tmp_path, tokenizer) -> None:
    methods = parse_methods(["full", "random", "random:seed=5", "random:seed=5+centroid"], [0.2])
    assert [m.name for m in methods] == ["full", "random", "random:seed=5", "random:seed=5+centroid"]
    assert methods[2].options == (("seed", 5),)
    assert parse_methods(["router:scores=mlp"], [0.1])[0].options == (("scores", "mlp"),)
    assert label("random:seed=5+phi", 0.05) == "random, seed=5, 5 % + φ" and label("streaming") == "sink + tail"
    assert Method("router", "phi").artifacts == ["router", "phi"] and Method("topk").artifacts == []
    run(tmp_path, tokenizer, methods)
    answers = {c["method"]: c["answers"] for c in collect(tmp_path)}
    assert answers["random"] != answers["random:seed=5"]
    rows = score_rows(collect(tmp_path))
    _, lines = table(rows, "one@128", ["random"])
    assert [line[0] for line in lines] == ["full", "random", "random:seed=5"]
    assert {(r["method"], r["against"]) for r in rows if r["metric"] == "difference"} == {
        ("random:seed=5+centroid", "random:seed=5"), *((m.name, "full") for m in methods[1:])}
    cells = [{"case": case, "method": m, "budget": 0.1, "indices": [0], "scores": [s], "read": 0.1, "tokens": 9,
              "seconds": 1.0} for case in ("one@1", "two@1") for m, s in (
                  ("lfps", 0.1), ("lfps:alpha=0.03", 0.5), ("router+phi", 0.4))]
    above = {r["against"]: r["value"] for r in score_rows(cells)
             if (r["case"], r["metric"], r["method"]) == ("ruler@1", "difference", "router+phi")}
    assert above["lfps"] == pytest.approx(30) and above["lfps:alpha=0.03"] == pytest.approx(-10)


def test_bootstrap_covers_the_mean_and_narrows_with_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    hits = 0
    for seed in range(60):
        sample = (torch.rand(100, generator=generator) < 0.3).double().tolist()
        low, high = bootstrap([sample], seed=seed)
        hits += low <= 0.3 <= high
    assert 52 <= hits <= 60
    small, large = (bootstrap([[0.0, 1.0] * n]) for n in (10, 1000))
    assert large[1] - large[0] < 0.2 * (small[1] - small[0])
    two = bootstrap([[0.0] * 5, [1.0] * 5])
    assert two == (0.5, 0.5)


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz"])
def test_requests_come_back_from_their_file(tmp_path, name: str) -> None:
    made = [*requests(), Question("lb", 0, 3, "a\nb", [], "lm-eval", 5, ["\n"], {"q": 1})]
    path = save_requests(tmp_path / name, made, {"tasks": ["one"]})
    assert load_requests(path) == made
    with pytest.raises(SparseKVError, match="no requests at"):
        load_requests(tmp_path / "none")
    for text, message in (("x\n", "damaged"), ("{}\n", "no file of requests"),
                          ('{"format": "sparsekv-requests", "format_version": 99}\n', "format 99"),
                          ('{"format": "sparsekv-requests", "format_version": 1}\n', "holds no requests")):
        (tmp_path / "bad.jsonl").write_text(text)
        with pytest.raises(SparseKVError, match=message):
            load_requests(tmp_path / "bad.jsonl")


def test_scores_are_rulers() -> None:
    base = request("t", 0, 10)
    assert score(base, "an OWL\x07and") == 0.5 and score(base, "gnus, owls") == 1.0 and score(base, "") == 0.0
    part = Question("t", 0, 0, "", ["a b", "c"], "string_match_part", 1, [])
    assert score(part, "C!") == 1.0 and score(part, "d") == 0.0
    found = Question("needle", 9, 0, [1], ["1234567"], "first_number", 1, [])
    assert score(found, " 1234567. The") == 1.0 and score(found, " 91234567") == score(found, "no 1 1234567") == 0.0
    assert score(found, "none") == 0.0
    with pytest.raises(SparseKVError, match="scored by lm-eval"):
        score(Question("t", 0, 0, "", [], "lm-eval", 1, []), "x")
    assert task_names("ruler-offline, needle")[-1] == "needle" and len(task_names("ruler")) == 13


def test_prompts_of_ruler_are_made_beside_modules_without_a_name(monkeypatch) -> None:
    """Extension types enter `sys.modules` as objects that have no `__name__`."""
    module = ModuleType("lm_eval.tasks.ruler.vt_utils")
    vars(module).update(tqdm=iter, get_vt_dataset=lambda **_: list(vars(module)["tqdm"](range(500))))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "nameless", object())
    entry = SimpleNamespace(cfg={"custom_dataset": "vt_utils.get_vt_dataset"})
    made = maker._fewer("ruler_vt", SimpleNamespace(task_index={"ruler_vt": entry}), 3, None)
    assert made["task"][0]["custom_dataset"]() == [0, 1, 2] and vars(module)["tqdm"] is iter


def test_eval_answers_a_file_of_requests_without_lm_eval(tmp_path, saved_model) -> None:
    from sparsekv.evaluation.run import EvalConfig, run_eval

    path = save_requests(tmp_path / "r.jsonl.gz", requests(), {})
    options = {"model": str(saved_model), "output": tmp_path / "out", "requests": path, "device": "cpu",
               "methods": "topk,topk+centroid,streaming,streaming+centroid", "budgets": "0.2,0.5"}
    result = run_eval(EvalConfig(**options))
    assert {r["method"] for r in result.rows} == {"full", "topk", "topk+centroid", "streaming", "streaming+centroid"}
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<svg") == 3 and "Selectivity by task" in page and "score by bytes" in page
    assert "Lane A" in page and "ruler@128" in result.table
    assert all(r["machine"] and r["commit"] for r in result.rows)
    again = run_eval(EvalConfig(**options, resume=True))
    assert [r["value"] for r in again.rows] == [r["value"] for r in result.rows]
    for wrong, message in (({"methods": "topk+magic"}, "unknown completion"), ({"methods": "topk+phi"}, "add --phi"),
                           ({"methods": "router"}, "needs a router artifact"),
                           ({"methods": "best"}, "unknown selector"),
                           ({"accounting": "free"}, "unknown accounting"), ({"lengths": "4k"}, "lengths '4k'"),
                           ({"output": tmp_path / "o", "tasks": "other"}, "no requests of other"),
                           ({}, "--resume")):
        with pytest.raises(SparseKVError, match=message):
            run_eval(EvalConfig(**{**options, "overwrite": bool(wrong), **wrong}))


def test_answers_wait_for_lm_eval_where_there_is_none(tmp_path, saved_model, monkeypatch) -> None:
    from sparsekv.evaluation.run import EvalConfig, run_eval

    asked = [Question("theirs", 0, i, TEXT, [], "lm-eval", 4, [], {"answer": "x"}) for i in range(2)]
    options = {"model": str(saved_model), "output": tmp_path / "out", "device": "cpu", "methods": "topk",
               "budgets": "0.5", "requests": save_requests(tmp_path / "r.jsonl", [*requests()[:1], *asked], {})}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    first = run_eval(EvalConfig(**options))
    assert "No scores yet of theirs" in first.table and "with --resume" in first.table
    monkeypatch.undo()
    monkeypatch.setattr("sparsekv.evaluation.run.score_answers", lambda requests, answers: [0.25 for _ in answers])
    again = run_eval(EvalConfig(**options, resume=True))
    assert "No scores yet" not in again.table
    assert {r["value"] for r in again.rows if r["case"] == "theirs"} == {25.0}


def test_help_names_every_task_and_the_units(cli, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    text = " ".join(cli("eval", "--help").out.replace("│", " ").split())
    for word in ("needle", "perplexity", "ruler-offline", "babilong", "infinitebench", "longbench", "[tokens]",
                 "[prompts]", "--skip-missing", "--needle-depths", "--resume", "Methods", "Prompts", "Running",
                 "Sparse decoding", "--completion", "--placement", "--prefill", "--candidates"):
        assert word in text, word
    from sparsekv.evaluation.run import EvalConfig

    assert len(vars(EvalConfig)["__annotations__"]) <= 28


def test_past_its_time_nothing_is_begun_and_what_is_there_is_kept(tmp_path, tokenizer) -> None:
    methods = parse_methods(["full", "topk"], [0.2])
    made = Evaluator(make_model(), tokenizer, requests(), output=tmp_path)
    assert not made.run(methods, until=0.0) and not made.done
    assert made.run(methods[:1]) and not made.run(methods, until=0.0)
    again = Evaluator(make_model(), tokenizer, requests(), output=tmp_path, resume=True)
    assert {method for _, _, method, _ in again.done} == {"full"} and again.run(methods)
    assert again.run(methods, until=0.0)  # nothing is open


def test_scores_are_drawn_over_bytes() -> None:
    from sparsekv.evaluation.figures import score_by_bytes

    rows = [{"case": "ruler@1", "metric": "score", "method": m, "budget": b, "value": 50.0 + i, "bytes_share": share}
            for i, (m, b, share) in enumerate((("full", None, 1.0), ("sketch+phi", 0.01, 0.02),
                                               ("sketch+phi", 0.05, 0.06), ("topk", 0.01, None)))]
    drawn = score_by_bytes(rows, "ruler@1")
    assert "sketch + φ" in drawn and "full attention" in drawn and "exact top-k" not in drawn and drawn.png


def test_options_that_methods_share(tmp_path, tokenizer) -> None:
    """Placement and prompts of a run reach the methods that are no full attention, and are in the header."""
    model = make_model()
    router, phi = artifacts(model, space="rot")
    base = SparseConfig(completion="phi", candidates=0.5, sink_size=2, window_size=8, placement="cpu",
                        prefill=SparsePrompts(shortest=10**6))
    methods = parse_methods(["full", "sketch", "topk+none"], [0.3], base)
    assert [m.name for m in methods] == ["full", "sketch:candidates=0.5+phi", "topk"]
    text = tokenizer(TEXT * 6)["input_ids"]
    asked = [*continuations([text[:200]]), *make_needles(tokenizer, text, length=220, count=2)]
    made = {}
    for name, config in (("gpu", replace(base, placement="gpu", prefill="dense")), ("cpu", base)):
        Evaluator(model, tokenizer, asked, router=router, phi=phi, output=tmp_path / name, config=config).run(methods)
        made[name] = {(c["case"], c["method"], i): ((c.get("answers") or c["likeliest"])[at], c["read"])
                      for c in collect(tmp_path / name) for at, i in enumerate(c["indices"])}
    assert len(made["gpu"]) == 9 and made["gpu"] == made["cpu"]
    header = json.loads((tmp_path / "cpu" / "cells.jsonl").read_text().split("\n")[0])
    assert header["decoding"]["placement"] == "cpu" and header["decoding"]["sink_size"] == 2
    with pytest.raises(SparseKVError, match="measured with other decoding"):
        Evaluator(model, tokenizer, asked, router=router, phi=phi, output=tmp_path / "cpu", resume=True)
