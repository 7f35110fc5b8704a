"""`--rope-scaling` means the same in every command that loads a model."""

import math

import pytest
import torch

from sparsekv.artifacts.hub.models import load_model
from sparsekv.evaluation.requests import load_requests
from sparsekv.evaluation.run import EvalConfig, run_eval
from sparsekv.runtime.hf.generate import GenerateConfig, generate
from sparsekv.trainers.pipeline import TrainConfig, TrainingPlan, _capture_config
from sparsekv.util.errors import SparseKVError

SCALED = '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}'
MACHINE = {"device": "cpu", "dtype": "float32"}


def test_commands_load_the_scaled_model(saved_model, tmp_path, capsys) -> None:
    model, tokenizer = load_model(str(saved_model), rope_scaling=SCALED, **MACHINE)
    rows = run_eval(EvalConfig(model=str(saved_model), output=tmp_path / "eval", tasks="perplexity", methods="quest",
                               lengths="600", samples=1, rope_scaling=SCALED, save_requests=tmp_path / "r.jsonl",
                               **MACHINE)).rows
    assert rows == []
    given = {"requests": tmp_path / "r.jsonl", "methods": "streaming", **MACHINE}
    (request,) = load_requests(tmp_path / "r.jsonl")
    ids = torch.tensor(request.prompt)[None]
    losses = {}
    for name, scaling in (("scaled", SCALED), ("plain", None)):
        made = run_eval(EvalConfig(model=str(saved_model), output=tmp_path / name, rope_scaling=scaling, **given))
        losses[name] = next(r["value"] for r in made.rows if (r["method"], r["metric"]) == ("full", "perplexity"))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(ids).logits[0, -65:-1], ids[0, -64:])
    assert losses["scaled"] == pytest.approx(math.exp(float(loss)), rel=1e-3) and losses["plain"] != losses["scaled"]

    prompt = tokenizer.decode(request.prompt[:400])
    capsys.readouterr()
    generate(GenerateConfig(model=str(saved_model), prompt=prompt, max_new_tokens=12, rope_scaling=SCALED, **MACHINE))
    written = capsys.readouterr().out
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    out = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1]:]
    assert written.strip() == tokenizer.decode(out, skip_special_tokens=True).strip()


def test_training_captures_with_it(tmp_path) -> None:
    plan = TrainingPlan(2, 0, 600, 20, 0, {}, {})
    made = _capture_config(TrainConfig("m", "c", str(tmp_path), rope_scaling=SCALED), plan, tmp_path)
    assert made.rope_scaling == SCALED


@pytest.mark.parametrize(("scaling", "said"), [
    ("yarn", "is not JSON"), ("{}", "changes nothing"), ('{"rope_type": "other"}', "unknown rope_type 'other'"),
    ('{"rope_type": "yarn"}', "needs 'factor' too"), ('{"factor": 2.0}', "no rope_type")])
def test_what_is_no_scaling_is_refused(saved_model, scaling, said) -> None:
    with pytest.raises(SparseKVError, match=said):
        generate(GenerateConfig(model=str(saved_model), prompt="hi", rope_scaling=scaling, **MACHINE))
