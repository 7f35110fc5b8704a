import random

import pytest
import torch
from tiny import make_model
from tiny_artifacts import artifacts

from sparsekv.evaluation import requests as req
from sparsekv.util.errors import SparseKVError

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
    _, phi = artifacts(make_model(), space="rot", centred=False, capped=False)
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


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_bad_tasks_and_lengths_are_refused_before_work(tmp_path, tokenizer, monkeypatch, every: bool) -> None:
    """every: of all tasks of lm-eval, whose names take it some ten seconds to read; else of RULER's."""
    tokenizer.save_pretrained(tmp_path)
    if not every:
        monkeypatch.setattr(req, "_all_tasks", lambda _: req._task_manager(tmp_path, [4096], ["niah_single_1"]))
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

    def without_network(name, manager, *_):
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


BABI = {"input": "Mary went to the hall. Long filler. John took the apple.", "question": "Where is Mary?",
        "target": "hall "}
INFINITE = {"id": 0, "context": "The pass key is 71432. Remember it.", "input": "What is the pass key?",
            "answer": ["71432"], "options": []}
LONGBENCH = {"context": "A dog named Rex ate.", "question": "Who ate?", "input": "Who ate?", "answers": ["Rex the dog"]}


@pytest.fixture
def local_data(monkeypatch):
    """Three documents of every data set, as their hubs have them; returns what was asked for."""
    import datasets

    asked = []

    def load(path=None, name=None, split=None, **_):
        asked.append((path, name, split))
        document = BABI if "babilong" in path else INFINITE if "Infinite" in path else LONGBENCH
        made = datasets.Dataset.from_list([{**document, "index": i} for i in range(3)])
        splits = ("test", *(name.removeprefix("infinitebench_") for name in req.INFINITEBENCH))
        return made if split else dict.fromkeys(splits, made)

    monkeypatch.setattr(datasets, "load_dataset", load)
    return asked


def lm_evals_score(request: req.Question, answer: str) -> float:
    return req.score_answers([request], [answer])[0]


def test_babilong_becomes_requests_and_its_metric_is_lm_evals(tmp_path, tokenizer, local_data) -> None:
    from dataclasses import replace

    tokenizer.save_pretrained(tmp_path)
    made = req.make_requests(["babilong_qa1", "babilong_qa5"], tmp_path, [1024, 4096], 2)
    assert [r.case for r in made[::2]] == ["babilong_qa1@1024", "babilong_qa1@4096", "babilong_qa5@1024",
                                           "babilong_qa5@4096"]
    assert local_data == [("RMT-team/babilong-1k-samples", size, qa) for qa in ("qa1", "qa5") for size in ("1k", "4k")]
    prompt = made[0].prompt
    assert prompt.startswith("I will give you context") and prompt.count("Where is") == 3 and BABI["input"] in prompt
    assert made[0].targets == ["hall"] and made[0].doc is None and made[0].max_new_tokens == 16
    theirs = replace(made[0], metric="lm-eval", doc=BABI)
    for answer in ("The most recent location of Mary is HALL.", "the kitchen", "", "h\x07all hallway", " hal"):
        assert req.score(made[0], answer) == lm_evals_score(theirs, answer), answer


def test_other_tasks_are_scored_by_lm_eval_from_the_file_alone(tmp_path, tokenizer, local_data, monkeypatch) -> None:
    import datasets

    tokenizer.save_pretrained(tmp_path)
    names = ["infinitebench_passkey", "infinitebench_longbook_qa_en"]
    made = req.make_requests(names, tmp_path, [1024], 2)
    assert [r.case for r in made] == [names[0]] * 2 + [names[1]] * 2 and made[0].prompt.endswith(INFINITE["input"])
    assert {r.metric for r in made} == {"lm-eval"} and made[0].until == ["\n"]
    kept = req.load_requests(req.save_requests(tmp_path / "r.jsonl", made, {}))
    monkeypatch.setattr(datasets, "load_dataset", None)
    scores = req.score_answers(kept, ["It is 71432.", "714 32", "71432", "it was 71432"])
    assert scores == [1.0, 0.0, 1.0, pytest.approx(0.5)]  # the first number; F1 of the words


def test_longbench_asks_for_its_packages_and_then_works(tmp_path, tokenizer, local_data, monkeypatch) -> None:
    import sys
    from types import ModuleType

    tokenizer.save_pretrained(tmp_path)
    for name in ("jieba", "fuzzywuzzy", "rouge"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SparseKVError, match=r"longbench_narrativeqa needs packages.*jieba.*--skip-missing"):
        req.make_requests(["longbench_narrativeqa"], tmp_path, [1024], 1)
    with pytest.raises(SparseKVError, match="none of the tasks"):
        req.make_requests(["longbench_narrativeqa"], tmp_path, [1024], 1, skip_missing=True)
    for name, attribute in (("jieba", "cut"), ("fuzzywuzzy", "fuzz"), ("rouge", "Rouge")):
        module = ModuleType(name)
        setattr(module, attribute, object)
        monkeypatch.setitem(sys.modules, name, module)
    made = req.make_requests(["longbench_narrativeqa"], tmp_path, [1024], 1)
    assert made[0].case == "longbench_narrativeqa" and "A dog named Rex" in made[0].prompt
    assert req.score_answers(made, ["Rex"]) == [pytest.approx(0.5 / 0.75)]
    every = req.make_requests(["longbench"], tmp_path, [1024], 1)
    assert len({r.task for r in every}) == len(every) >= 20 and {r.metric for r in every} == {"lm-eval"}


def test_what_cannot_be_fetched_is_named_once_and_skipped(tmp_path, tokenizer, local_data, monkeypatch) -> None:
    import datasets

    tokenizer.save_pretrained(tmp_path)
    asked, local = [], datasets.load_dataset

    def load(path=None, *rest, **options):
        asked.append(path)
        if "babilong" in path:
            return local(path, *rest, **options)
        raise ConnectionError(f"Couldn't reach {path!r}")

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setitem(req.DATA, "infinitebench_passkey", "what it is called")
    with pytest.raises(SparseKVError, match=r"passkey \(what it is called\) cannot be fetched.*--skip-missing"):
        req.make_requests(["infinitebench_passkey"], tmp_path, [1024], 1)
    monkeypatch.setitem(req.DATA, "infinitebench_passkey", req.DATA["infinitebench_code_run"])
    with pytest.raises(SparseKVError, match=r"task coqa \(EleutherAI/coqa\)"):
        req.make_requests(["coqa"], tmp_path, [1024], 1)
    asked.clear()
    names = ["infinitebench_passkey", "infinitebench_code_run", "babilong_qa2"]
    made = req.make_requests(names, tmp_path, [1024], 1, skip_missing=True)
    assert [r.case for r in made] == ["babilong_qa2@1024"] and len(asked) == 2


@pytest.mark.network
@pytest.mark.parametrize("task", ["babilong_qa1", "infinitebench_math_find"])
def test_downloaded_tasks_become_requests(tmp_path, tokenizer, task: str) -> None:
    tokenizer.save_pretrained(tmp_path)
    made = req.make_requests([task], tmp_path, [1024], 2)
    assert len(made) == 2 and all(r.prompt and r.max_new_tokens for r in made)
    if task.startswith("babilong"):
        assert made[0].case == "babilong_qa1@1024" and req.score(made[0], f"It is {made[0].targets[0]}.") == 1.0


@pytest.mark.parametrize(("options", "message"), [
    ({"tasks": "niah_single_9"}, "unknown tasks niah_single_9: expected needle, perplexity, ruler"),
    ({"tasks": "infinitebench_passkey"}, r"infinitebench_passkey \(xinrongzhang2022/InfiniteBench\).*--skip-missing"),
    ({"tasks": "coqa", "save-requests": "r.jsonl"}, r"coqa \(EleutherAI/coqa\) cannot be fetched.*--skip-missing"),
    ({"tasks": "infinitebench", "skip-missing": None}, "none of the tasks .* has data that can be fetched"),
    ({"requests": "gone.jsonl"}, "no requests at 'gone.jsonl'; make them with `sparsekv eval --save-requests"),
    ({"requests": "r.jsonl", "output": "old", "resume": None}, "cells.jsonl' has format 0, this version reads 1"),
    ({"tasks": "needle", "output": "old"}, "already exists; add --overwrite to replace it, or --resume"),
    ({"tasks": "needle", "needle-depths": "2"}, "depths of needles '2' not understood; expected shares of the text"),
])
def test_what_is_wrong_is_one_sentence(
    tmp_path, saved_model, monkeypatch, capsys, options: dict, message: str,
) -> None:
    import re
    import sys

    import datasets

    from sparsekv.cli import main

    def load(path=None, *_, **__):
        raise ConnectionError(f"Couldn't reach {path!r}")

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.chdir(tmp_path)
    req.save_requests("r.jsonl", [req.Question("one", 64, 0, "Some text to answer. " * 4, ["x"], "string_match_all", 2,
                                              [])], {})
    path = tmp_path / "old" / "cells.jsonl"
    path.parent.mkdir()
    path.write_text('{"format": "sparsekv-sweep", "format_version": 0}\n')
    words = [w for k, v in {"model": str(saved_model), "output": "new", "device": "cpu", **options}.items()
             for w in ([f"--{k}"] if v is None else [f"--{k}", v])]
    monkeypatch.setattr(sys, "argv", ["sparsekv", "eval", *words])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main()
    progress = re.compile(r"(sparsekv eval|requests|load \S+): .*\b\d+ s\b")
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip() and not progress.match(line)]
    assert ended.value.code == 1 and len(lines) == 1, lines
    assert re.search(f"^error: .*{message}", lines[0]), lines[0]


def test_only_the_prompts_that_are_used_are_made(tmp_path, tokenizer, monkeypatch) -> None:
    tokenizer.save_pretrained(tmp_path)
    made = req.make_requests(["niah_single_1"], tmp_path, [1024], 3)
    from lm_eval.tasks.ruler import prepare_niah

    shown = []
    plain = prepare_niah.tqdm
    monkeypatch.setattr(prepare_niah, "tqdm",
                        lambda every, **words: shown.append(len(every)) or plain(every[:9], **words))
    monkeypatch.setattr(req, "_fewer", lambda name, *_: name)
    assert req.make_requests(["niah_single_1"], tmp_path, [1024], 3) == made and shown == [500] and len(made) == 3


def test_multiple_choice_is_scored_by_sparse_steps(tokenizer, prompts) -> None:
    """Answers of one token and of several: full attention's where everything is read, and what the steps of a
    generation say, one token after the other, where little is."""
    from lm_eval.api.instance import Instance

    import sparsekv

    contexts = [p.args[0] for p in prompts]
    pairs = [Instance("loglikelihood", {}, (text, answer), i)
             for i, text in enumerate(contexts) for answer in ("A", "xyz!", "0 of 7")]

    def likelihoods(kind: str, **options):
        lm, _ = answers(kind, tokenizer, [], **options)
        return lm, lm.loglikelihood(pairs, disable_tqdm=True)

    _, expected = likelihoods("hf")
    _, everything = likelihoods("sparsekv", selector="topk", token_budget=1.0)
    assert [x for x, _ in everything] == pytest.approx([x for x, _ in expected], abs=1e-3)
    assert [same for _, same in everything] == [same for _, same in expected]
    lm, sparse = likelihoods("sparsekv", selector="topk", token_budget=4)
    assert lm.last_report["sparse_calls"]
    assert [x for x, _ in sparse] != pytest.approx([x for x, _ in expected], abs=1e-3)
    context, answer = contexts[1], "xyz!"
    read, wanted = (torch.tensor([tokenizer.encode(text)]) for text in (context, answer))
    with torch.inference_mode(), sparsekv.attach(
            lm.model, selector="topk", token_budget=4, dense_below=0) as attachment:
        cache, total, token = attachment.prefill(read[:, :-1]), 0.0, read[:, -1:]
        for place in range(wanted.shape[1]):
            total += float(lm.model(token, past_key_values=cache).logits[0, -1].log_softmax(-1)[wanted[0, place]])
            token = wanted[:, place:place + 1]
    assert sparse[4][0] == pytest.approx(total, abs=1e-3)
    rolling = [Instance("loglikelihood_rolling", {}, (context,), 0)]
    assert lm.loglikelihood_rolling(rolling, disable_tqdm=True) == pytest.approx(
        answers("hf", tokenizer, [])[0].loglikelihood_rolling(rolling, disable_tqdm=True), abs=1e-3)
