"""The table of trainings: KL of completed attention, what is collected and drawn."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent / "runtime"))

from tiny_artifacts import artifacts

from benchmarks import _phi_page, phi_training
from sparsekv.core import offline
from sparsekv.core.estimators import PhiEstimator
from sparsekv.core.step import merge
from sparsekv.trainers.calibrate import reader


@pytest.mark.parametrize("budget", (None, 0.1, 1.0))
def test_kl_is_of_the_weights_that_make_the_output(budget) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2))
    keys, values, queries = (torch.randn(h, 200, 8) for h in (2, 2, 4))
    window = offline.Window(keys, values, queries[:, 150:190], torch.arange(150, 190), 8**-0.5, 4, 16)
    request = offline.request(window, 180, 4)
    estimator = PhiEstimator(artifacts(model)[1].layer(1))
    estimator.build(request.prefill)
    selection = request.build(reader(budget), None)[0].select(request.view, request.queries)
    out, lse = request.view.attend(request.queries, selection)
    estimator.set_read_share(request.prefill, budget or 0.0)
    rest = estimator.partial(request.view, request.queries, selection)
    found = phi_training.attention_kl(request, selection, estimator, rest[1], lse)
    assert found.shape == (4, 4) and float(found.min()) > -1e-5
    if budget == 1.0:
        assert float(found.max()) < 1e-4
    else:
        assert float(found.mean()) > 1e-3
    weights = phi_training.completed_weights(request, selection, estimator, rest[1], lse).exp()
    torch.testing.assert_close(weights.sum(-1), torch.ones(4, 4))
    mine = torch.einsum("thgn,hnd->thgd", weights.unflatten(1, (2, 2)), request.view.values[0]).flatten(1, 2)
    whole = merge(torch.stack([out, rest[0]]), torch.stack([lse, rest[1]]))[0]
    torch.testing.assert_close(mine, whole, atol=1e-4, rtol=1e-4)


def test_rows_of_trainings_take_the_place_of_others(tmp_path) -> None:
    about = {"machine": "Card, torch 2", "command": "phi_training.py --model M", "commit": "abc", "quantisation": "Q4"}
    spent = {"case": "sparsekv train", "method": "phi", "metric": "seconds"}
    last = {"case": "training", "method": "phi", "metric": "seconds", "text": {"prose": 18, "made": 6},
            "length": 16_384, "steps": 22_000, "value": 200.0}
    before = [spent, last, {**last, "steps": 2500, "case": "prose@16384", "value": 0.5}]
    (tmp_path / "phi-training.json").write_text(json.dumps(before))
    for training in phi_training.TRAININGS[:2]:
        windows = sum(training.text.values())
        said = {**about, "text": training.text, "windows": windows, "length": 16_384, "steps": 2500, "layers": "4 10"}
        rows = [{"case": "training", "method": "phi", "metric": "seconds", "budget": None, "value": 20.0, **said}]
        for case in (*_phi_page.HELD, "entropy@16384"):
            for method in ("topk", "topk+phi"):
                more = {"quarter": 1, "entropy": 2.0} if case.startswith("entropy") else {}
                rows.append({"case": case, "method": method, "metric": "rel_err", "budget": 0.01,
                             "value": 0.2 if method == "topk" else 0.05, **more, **said})
        (tmp_path / f"rows-{training.name}.json").write_text(json.dumps(rows))
    phi_training.collected(tmp_path, tmp_path)
    rows = json.loads((tmp_path / "phi-training.json").read_text())
    assert rows[-2:] == [last, spent]  # a training that was not repeated stays, in the order of all
    assert {r["case"] for r in rows} == {"training", "entropy@16384", "sparsekv train", *_phi_page.HELD}
    assert 0.5 not in [r.get("value") for r in rows]
