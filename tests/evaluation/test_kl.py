"""The distance to full attention: as one computes it by hand, step by step, and its ratios and intervals."""

import math

import numpy as np
import pytest
import torch
from test_evaluator import TEXT, requests
from tiny import make_model
from tiny_artifacts import artifacts

from sparsekv import attach
from sparsekv.evaluation.cells import collect
from sparsekv.evaluation.evaluator import Evaluator
from sparsekv.evaluation.intervals import bootstrap_ratio
from sparsekv.evaluation.lead import distances
from sparsekv.evaluation.methods import parse_methods
from sparsekv.evaluation.own_tasks import continuations
from sparsekv.evaluation.scores import score_rows
from sparsekv.evaluation.tables import kl_tables
from sparsekv.util.errors import SparseKVError

LED = 5


def asked(tokenizer) -> list:
    """Prompts of two tasks, and two windows of text."""
    windows = [tokenizer((TEXT * 4)[i:])["input_ids"][:150] for i in (0, 9)]
    return requests() + continuations(windows, tail=8)


def measured(folder, tokenizer, names, *, kl="steps", some=None, **options) -> list[dict]:
    model = make_model()
    router, phi = artifacts(model, space="rot", scores="mean_key")
    Evaluator(model, tokenizer, some or asked(tokenizer), router=router, phi=phi, output=folder, kl=kl, led_tokens=LED,
              **options).run(parse_methods(names, [0.2, 1.0]))
    return collect(folder)


def by_prompt(cells, column="kl") -> dict:
    return {(c["case"], i, c["method"], c["budget"]): x for c in cells
            for i, x in zip(c["indices"], c[column], strict=True)}


@pytest.fixture(scope="module")
def cells(tmp_path_factory, tokenizer) -> list[dict]:
    return measured(tmp_path_factory.mktemp("kl"), tokenizer, ["full", "topk", "topk+phi", "sketch+phi"])


def test_it_is_what_steps_of_the_attached_model_compute(cells, tokenizer) -> None:
    model = make_model()
    _, phi = artifacts(model, space="rot", scores="mean_key")
    found, same = by_prompt(cells), by_prompt(cells, "kl_same")

    @torch.inference_mode()
    def steps(ids: list[int], along: list[int], **options) -> torch.Tensor:
        logs = []
        with attach(model, **options) as attachment:
            cache = attachment.prefill(torch.tensor(ids[:-1])[None])
            for token in [ids[-1], *along[:-1]]:
                out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
                logs.append(out.logits[0, -1].double().log_softmax(-1))
        return torch.stack(logs)

    seen = 0
    for r in asked(tokenizer):
        ids = r.tokens(tokenizer)
        if r.metric == "continuation":
            ids, along = ids[:-8], ids[-8:][:LED]
        else:
            with attach(model, selector="dense") as attachment:
                whole = torch.tensor(ids)[None]
                along = attachment.generate(whole, max_new_tokens=LED)[0, len(ids):].tolist()
        full = steps(ids, along, selector="dense")
        mine = steps(ids, along, selector="topk", completion="phi", phi=phi, token_budget=0.2, dense_below=0,
                     sink_size=4, window_size=16)
        key = r.case, r.index, "topk+phi", 0.2
        assert found[key] == pytest.approx(float((full.exp() * (full - mine)).sum(-1).mean()), rel=1e-3, abs=1e-6)
        assert same[key] == pytest.approx(float((full.argmax(-1) == mine.argmax(-1)).double().mean()))
        seen += found[key] > 1e-5
    assert seen > len(asked(tokenizer)) / 2  # so small a model is near to full attention on some


def test_full_attention_and_a_budget_of_everything_have_none(cells) -> None:
    for (_, _, method, budget), kl in by_prompt(cells).items():
        if method == "full" or (method == "topk" and budget == 1.0):
            assert abs(kl) < 1e-6, (method, budget)
    assert all(x == 1.0 for (_, _, m, _), x in by_prompt(cells, "kl_same").items() if m == "full")


def test_answers_and_losses_are_the_same_beside_it(cells, tmp_path, tokenizer) -> None:
    alone = measured(tmp_path, tokenizer, ["full", "topk", "topk+phi", "sketch+phi"], kl=None)
    assert not any("kl" in c for c in alone)
    for name in ("answers", "losses", "likeliest"):
        mine, other = (by_prompt([c for c in some if name in c], name) for some in (cells, alone))
        assert mine and mine == other


def test_every_prompt_runs_alone(cells) -> None:
    """In a batch a step of sketches would score fewer codes."""
    assert {len(c["indices"]) for c in cells} == {1}


def test_an_interrupted_run_goes_on_and_cells_without_it_are_measured_again(cells, tmp_path, tokenizer) -> None:
    measured(tmp_path, tokenizer, ["full", "topk"], kl=None)
    again = measured(tmp_path, tokenizer, ["full", "topk", "topk+phi"], resume=True)
    found, known = by_prompt([c for c in again if "kl" in c]), by_prompt(cells)
    assert found and {k for k in known if "sketch" not in k[2]} == set(found)
    for key, kl in found.items():
        assert kl == pytest.approx(known[key], rel=1e-3, abs=1e-6)
    size = len(collect(tmp_path))
    assert len(measured(tmp_path, tokenizer, ["full", "topk", "topk+phi"], resume=True)) == size


def test_rows_answered_in_parts_are_led_along_the_same(cells, tmp_path, tokenizer) -> None:
    model = make_model()
    router, phi = artifacts(model, space="rot", scores="mean_key")
    parts = Evaluator(model, tokenizer, asked(tokenizer), router=router, phi=phi, output=tmp_path, kl="steps",
                      led_tokens=LED)
    parts.splits["topk"] = 4
    parts.run(parse_methods(["topk+phi"], [0.2]))
    known = by_prompt(cells)
    for key, kl in by_prompt(collect(tmp_path)).items():
        assert kl == pytest.approx(known[key], rel=1e-3, abs=1e-6)


def test_a_chunk_of_a_text_has_the_distance_of_its_steps(cells, tmp_path, tokenizer) -> None:
    """Of as many tokens: the queries of a chunk each select for themselves."""
    texts = [t for t in asked(tokenizer) if t.metric == "continuation"]
    shorter = continuations([t.tokens(tokenizer)[:-8 + LED] for t in texts], tail=LED)
    chunk = by_prompt(measured(tmp_path, tokenizer, ["full", "topk", "topk+phi"], kl="chunk", some=shorter))
    steps = {k[1:]: x for k, x in by_prompt(cells).items() if k[0].startswith("perplexity")}
    assert len(chunk) == 2 * 5
    for (_, *rest), kl in chunk.items():
        assert kl == pytest.approx(steps[tuple(rest)], rel=0.02, abs=1e-6)


def test_distances_of_known_distributions() -> None:
    p, q = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]), torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]])
    kl, same = distances(p.log(), q.log())
    assert kl.tolist() == pytest.approx([0.25 * math.log(2), math.log(2)]) and same.tolist() == [False, True]


def test_ratio_and_interval_are_numpy_s() -> None:
    rng = np.random.default_rng(7)
    other = rng.gamma(2.0, 1.0, 30)
    mine = other * rng.uniform(0.3, 0.7, 30)
    value, low, high = bootstrap_ratio(list(mine), list(other), seed=5)
    assert value == pytest.approx(mine.mean() / other.mean())
    index = np.random.default_rng(5).integers(0, 30, (2000, 30))
    ratios = np.array([mine[i].sum() / other[i].sum() for i in index])
    assert (low, high) == pytest.approx(tuple(np.percentile(ratios, [2.5, 97.5])))
    assert bootstrap_ratio(list(other / 2), list(other)) == pytest.approx((0.5, 0.5, 0.5))
    assert bootstrap_ratio([1.0, 3.0])[0] == 2.0


def test_rows_are_of_tasks_and_of_all_their_prompts(cells) -> None:
    rows = [r for r in score_rows(cells, seed=3, against=("topk", "topk+phi")) if r["metric"].startswith("kl")]
    found, known = by_prompt(cells), {(r["case"], r["method"], r["budget"], r["metric"], r.get("against")): r
                                      for r in rows}
    assert {r["case"] for r in rows} == {"ruler@128", "one@128", "two@128", "perplexity@150"}
    mine, other = ([x for (case, _, m, b), x in found.items() if (m, b) == (name, 0.2) and "perp" not in case]
                   for name in ("sketch+phi", "topk+phi"))
    whole = known["ruler@128", "sketch+phi", 0.2, "kl", None]
    assert whole["value"] == pytest.approx(np.mean(mine)) and whole["samples"] == 6
    assert whole["low"] < whole["value"] < whole["high"]
    ratio = known["ruler@128", "sketch+phi", 0.2, "kl_ratio", "topk+phi"]
    assert (ratio["value"], ratio["low"], ratio["high"]) == bootstrap_ratio(mine, other, seed=3)
    assert {r["against"] for r in rows if r["metric"] == "kl_ratio"} == {"topk", "topk+phi"}
    assert not [r for r in rows if r["metric"] == "kl_ratio" and r["method"] == "full"]
    shown = kl_tables(score_rows(cells))
    assert [t.title.partition(".")[0] for t in shown] == ["ruler@128", "one@128", "two@128", "perplexity@150"]
    assert shown[0].header == ["method", "KL to full attention", "same token", "KL over exact top-k's", "points"]
    assert shown[0].rows[0][:3] == ["full attention", "0", "100.0 %"] and shown[3].header[-1] == "perplexity"
    assert all("NaN" not in str(r) and "Infinity" not in str(r) for r in rows)


def test_the_command_shows_it(tmp_path, saved_model) -> None:
    from sparsekv.evaluation.run import EvalConfig, run_eval

    options = {"model": str(saved_model), "tasks": "needle,perplexity", "methods": "topk,streaming", "lengths": "256",
               "samples": 2, "budgets": "0.2", "device": "cpu", "dtype": "float32"}
    with pytest.raises(SparseKVError, match="--against sketch is not measured"):
        run_eval(EvalConfig(**options, output=tmp_path / "a", metric="kl", against="sketch"))
    with pytest.raises(SparseKVError, match="metric"):
        run_eval(EvalConfig(**options, output=tmp_path / "a", metric="points"))
    made = run_eval(EvalConfig(**options, output=tmp_path / "a", metric="kl", against="streaming"))
    assert "Distance to full attention" in made.table and "KL over sink + tail" in made.table
    assert "Distance to full attention" in (tmp_path / "a" / "report.html").read_text()
    metrics = {r["metric"] for r in made.rows}
    assert {"kl", "kl_same", "kl_ratio", "score", "perplexity"} <= metrics
