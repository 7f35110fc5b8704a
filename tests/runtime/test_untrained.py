"""Decoding without an artifact: sketches and bucket means are fitted to the request."""

import pytest
import torch
from tiny import make_model

import sparsekv
from sparsekv.core.estimators import CentroidEstimator
from sparsekv.core.index import Untrained


@pytest.mark.parametrize("placement", ["gpu", "cpu"])
def test_a_budget_alone_decodes_by_what_the_request_has(placement: str) -> None:
    model, ids = make_model("llama"), torch.randint(3, 90, (2, 60))
    with sparsekv.attach(model, token_budget=8, dense_below=0, placement=placement) as attachment:
        model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        report, decoding = attachment.report(), attachment.decoding
    assert report["sparse_calls"] > 0
    assert decoding.selector.name == "sketch" and decoding.completion == "centroid"


def test_a_budget_of_everything_gives_the_models_tokens() -> None:
    model, ids = make_model("llama"), torch.randint(3, 90, (1, 50))
    how = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    plain = model.generate(ids, **how)
    with sparsekv.attach(model, token_budget=1.0, dense_below=0) as attachment:
        assert torch.equal(model.generate(ids, **how), plain)
        assert attachment.report()["sparse_calls"] > 0


@pytest.mark.parametrize("limit", [None, 10])
def test_buckets_and_codes_agree_where_all_are_candidates(limit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the break-even length buckets of the request's own keys give the candidates."""
    import sparsekv.core.selectors.sketch as sketches

    if limit is not None:
        monkeypatch.setattr(sketches, "ALL_CODES_ALONE", limit)
        monkeypatch.setattr(sketches, "most_by_codes", lambda *_: 0)
    model, ids = make_model("llama"), torch.randint(3, 90, (1, 70))
    with sparsekv.attach(model, token_budget=6, dense_below=0) as attachment:
        first = model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False, use_cache=True,
                               return_dict_in_generate=True)
        layer = first.past_key_values.layers[1]
        assert attachment.report()["sparse_calls"] > 0
    state = layer.state
    assert isinstance(state.selector.trained, Untrained) and isinstance(state.estimator, CentroidEstimator)
    assert (state.selector.buckets is None) == (limit is None)
