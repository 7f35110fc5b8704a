import random

import pytest
from tiny import make_model
from tiny_artifacts import artifacts

from sparsekv.errors import SparseKVError
from sparsekv.evaluation import requests as req

pytest.importorskip("lm_eval")


@pytest.fixture(scope="module")
def prompts():
    from lm_eval.api.instance import Instance

    rng = random.Random(0)
    texts = ["".join(chr(rng.randrange(33, 125)) for _ in range(size)) for size in (70, 120, 95, 33)]
    options = {"until": ["Q", "\n"], "max_gen_toks": 12, "do_sample": False, "temperature": 0.0}
    return [Instance("generate_until", {}, (text, options), i) for i, text in enumerate(texts)]


def answers(kind: str, tokenizer, prompts, **options):
    from lm_eval.api.registry import get_model

    import sparsekv.evaluation.lm_eval_model  # noqa: F401

    lm = get_model(kind)(pretrained=make_model(), tokenizer=tokenizer, device="cpu", batch_size=3, **options)
    return lm, lm.generate_until(prompts, disable_tqdm=True)


def test_dense_gives_the_answers_of_lm_evals_own_class(tokenizer, prompts) -> None:
    _, expected = answers("hf", tokenizer, prompts)
    lm, got = answers("sparsekv", tokenizer, prompts, selector="dense")
    assert got == expected and len(set(got)) == 4 and any(len(x) >= 8 for x in got)
    assert lm.last_report["sparse_calls"] == 0
    from lm_eval.api.instance import Instance

    pairs = [Instance("loglikelihood", {}, (p.args[0], " next"), i) for i, p in enumerate(prompts)]
    hf, _ = answers("hf", tokenizer, [])
    assert [round(x, 4) for x, _ in lm.loglikelihood(pairs)] == [round(x, 4) for x, _ in hf.loglikelihood(pairs)]


def test_sparse_answers_read_what_they_may(tokenizer, prompts) -> None:
    _, phi = artifacts(make_model(), space="rot")
    _, dense = answers("sparsekv", tokenizer, prompts)
    lm, got = answers("sparsekv", tokenizer, prompts, selector="topk", token_budget=8, phi=phi, dense_layers="0+1")
    report = lm.last_report
    assert report["sparse_calls"] > 0 and set(report["layers"]) == {0, 1, 2}
    assert report["layers"][1]["dense_calls"] and not report["layers"][2]["dense_calls"]
    assert got != dense
    everything = answers("sparsekv", tokenizer, prompts, selector="topk", token_budget=1.0)[1]
    assert everything == dense


def test_unknown_arguments_and_sampling_are_refused(tokenizer, prompts) -> None:
    with pytest.raises(SparseKVError, match="unknown model argument 'selektor'"):
        answers("sparsekv", tokenizer, prompts, selektor="topk")
    with pytest.raises(SparseKVError, match="unknown selector 'best'"):
        answers("sparsekv", tokenizer, prompts, selector="best")
    sampled = [type(p)("generate_until", {}, (p.args[0], {**p.args[1], "do_sample": True}), 0) for p in prompts]
    with pytest.raises(SparseKVError, match="asks for sampling"):
        answers("sparsekv", tokenizer, sampled)


def test_bad_tasks_and_lengths_are_refused_before_work(tmp_path, tokenizer) -> None:
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(SparseKVError, match="unknown tasks nia"):
        req.make_requests(["nia"], tmp_path, [4096], 1)
    with pytest.raises(SparseKVError, match="do not fit into 512"):
        req.make_requests(["niah_single_1"], tmp_path, [512], 1)


def test_babilong_and_infinitebench_are_suites_of_lm_eval(tmp_path, tokenizer, monkeypatch) -> None:
    assert req.task_names("babilong") == [f"babilong_qa{i}" for i in range(1, 6)]
    req.check_names([*req.BABILONG, *req.INFINITEBENCH])
    with pytest.raises(SparseKVError, match="BABILong comes in lengths 1024, 2048"):
        req.make_requests(["babilong_qa1"], tmp_path, [5000], 1)
    asked = []

    def without_network(name, manager, samples, seed):
        asked.append((name, manager.metadata["max_seq_lengths"]))
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(req, "_requests_of", without_network)
    for task, data in (("babilong_qa1", "RMT-team/babilong-1k-samples"),
                       ("infinitebench_passkey", "xinrongzhang2022/InfiniteBench")):
        with pytest.raises(SparseKVError, match=f"{data}.*--skip-missing"):
            req.make_requests([task], tmp_path, [4096], 1)
        with pytest.raises(SparseKVError, match="can be fetched here"):
            req.make_requests([task], tmp_path, [4096], 1, skip_missing=True)
    assert asked[0] == ("babilong_qa1", "4k") and asked[2] == ("infinitebench_passkey", [4096])


@pytest.mark.network
@pytest.mark.parametrize("task", ["babilong_qa1", "infinitebench_math_find"])
def test_downloaded_tasks_become_requests(tmp_path, tokenizer, task: str) -> None:
    tokenizer.save_pretrained(tmp_path)
    made = req.make_requests([task], tmp_path, [1024], 2)
    assert len(made) == 2 and all(r.prompt and r.max_new_tokens for r in made)
    if task.startswith("babilong"):
        assert made[0].case == "babilong_qa1@1024" and req.score(made[0], f"It is {made[0].targets[0]}.") == 1.0
