"""The runtime inside transformers models: everything selected is the plain model; on exit nothing is left."""

import warnings

import pytest
import torch
from tiny import FAMILIES, attach, make_model, prompt
from tiny_artifacts import artifacts

from sparsekv.runtime.hf.attach import RunOptions
from sparsekv.util.errors import SparseKVError

LENGTH = 75
GREEDY = {"max_new_tokens": 9, "do_sample": False}


@pytest.mark.parametrize("name", FAMILIES)
def test_everything_selected_is_the_plain_model(name: str) -> None:
    model, ids = make_model(name), prompt(LENGTH)
    plain = model.generate(ids, **GREEDY)
    want = model(plain).logits
    router, phi = artifacts(model, space="pre")
    for options in ({"selector": "topk", "token_budget": 1.0}, {"router": router, "probes": 8},
                    {"router": router, "probes": 8, "phi": phi},
                    {"selector": "topk", "token_budget": 1.0, "per_query_head": True, "phi": phi}):
        with attach(model, dense_layers=(), **options) as attachment:
            assert torch.equal(model.generate(ids, **GREEDY), plain)
            cache = attachment.prefill(plain[:, :70])
            steps = [model(plain[:, t:t + 1], past_key_values=cache, use_cache=True).logits for t in range(70, 80)]
        torch.testing.assert_close(torch.cat(steps, 1), want[:, 70:80], rtol=1e-4, atol=1e-4)
        report = attachment.report()
        assert report["sparse_calls"] > 0 and report["selectivity"] == pytest.approx(1.0)


@pytest.mark.parametrize("space", ["rot", "pre"])
@pytest.mark.parametrize("scores", ["mlp", "mean_key"])
def test_sparse_chunks_equal_single_steps_and_forks_are_independent(space: str, scores: str) -> None:
    model, ids = make_model(), prompt(90)
    router, phi = artifacts(model, space=space, scores=scores)
    options = {"router": router, "phi": phi, "token_budget": 0.1}
    with attach(model, **options) as one:
        cache = one.prefill(ids[:, :80])
        first, second = cache.fork(), cache.fork()
        steps = [model(ids[:, t:t + 1], past_key_values=first, use_cache=True).logits for t in range(80, 90)]
        again = [model(ids[:, t:t + 1], past_key_values=second, use_cache=True).logits for t in range(80, 90)]
        torch.testing.assert_close(torch.cat(steps, 1), torch.cat(again, 1))
    with attach(model, run=RunOptions(sparse_chunks=True, compares=True), **options) as other:
        chunk = model(ids[:, 80:], past_key_values=cache.fork(), use_cache=True).logits
    torch.testing.assert_close(torch.cat(steps, 1), chunk, rtol=1e-4, atol=1e-4)
    assert one.report()["selectivity"] == pytest.approx(other.report()["selectivity"])
    assert 0 < other.report()["rel_err"] < 2 and cache.get_seq_length() == 80


@pytest.mark.parametrize("options", [
    {"selector": "topk", "token_budget": 1.0}, {"selector": "topk", "token_budget": 5},
    {"selector": "streaming"}, {"probes": 3}])
def test_padded_rows_decode_as_they_do_alone(options: dict) -> None:
    model, ids = make_model(), prompt(LENGTH, 3)
    router, _ = artifacts(model)
    if "selector" not in options:
        options = {**options, "router": router}
    mask = torch.ones_like(ids)
    mask[0, :11], mask[2, :40] = 0, 0
    with attach(model, **options):
        together = model.generate(ids, attention_mask=mask, **GREEDY)
        for row, pad in enumerate((11, 0, 40)):
            alone = model.generate(ids[row:row + 1, pad:], **GREEDY)
            assert together[row, ids.shape[1]:].tolist()[:alone.shape[1] - 75 + pad] == alone[0, 75 - pad:].tolist()


def test_both_doors_give_padded_rows_the_same_positions() -> None:
    model, ids = make_model(), prompt(LENGTH, 3)
    mask = torch.ones_like(ids)
    mask[0, :11], mask[2, :40] = 0, 0
    with attach(model, selector="topk", token_budget=5) as attachment:
        want = model.generate(ids, attention_mask=mask, max_new_tokens=30, min_new_tokens=30, do_sample=False)
        assert torch.equal(attachment.generate(ids, mask, max_new_tokens=30, eos_token_id=[]), want)


def test_the_model_is_left_as_it_was() -> None:
    model, ids = make_model(), prompt(LENGTH)
    before, plain = model.config._attn_implementation, model.generate(ids, **GREEDY)
    hooks = sum(len(m._forward_pre_hooks) for m in model.modules())
    with pytest.raises(ZeroDivisionError), attach(model, selector="streaming"):
        _ = 1 // 0
    attachment = attach(model, selector="streaming")
    with attachment:
        with attach(model, selector="topk", token_budget=1.0, dense_layers=()) as inner:
            assert torch.equal(model.generate(ids, **GREEDY), plain)
        assert inner.report()["sparse_calls"] > 0
        with pytest.raises(SparseKVError, match="in use already"):
            attachment.__enter__()
        model.generate(ids, **GREEDY)
        assert attachment.report()["sparse_calls"] > 0
    assert model.config._attn_implementation == before and "generate" not in model.__dict__
    assert sum(len(m._forward_pre_hooks) for m in model.modules()) == hooks
    assert torch.equal(model.generate(ids, **GREEDY), plain)
    with attachment:
        model.generate(ids, **GREEDY)


def test_an_attachment_that_is_never_entered_says_so() -> None:
    model = make_model("llama")
    with pytest.warns(UserWarning, match="never entered, so nothing decoded sparsely; write `with sparsekv.attach"):
        attach(model, selector="topk", token_budget=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with attach(model, selector="topk", token_budget=4):
            pass
        with pytest.raises(SparseKVError):
            attach(model, selector="nobody")


def test_beams_and_several_sequences_run() -> None:
    model, ids = make_model(), prompt(LENGTH)
    for options in ({"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}):
        plain = model.generate(ids, max_new_tokens=6, **{"do_sample": False, **options}, generation_config=None) \
            if "num_beams" in options else None
        with attach(model, selector="topk", token_budget=1.0, dense_layers=()):
            out = model.generate(ids, max_new_tokens=6, **{"do_sample": False, **options})
        assert plain is None or torch.equal(out, plain)
        assert out.shape[0] == options.get("num_return_sequences", 1)


def test_long_generation_moves_tokens_into_the_index() -> None:
    model, ids = make_model(), prompt(LENGTH)
    router, phi = artifacts(model)
    with attach(model, router=router, phi=phi, probes=2, decode_window=16) as attachment:
        out = model.generate(ids, max_new_tokens=120, min_new_tokens=120, do_sample=False)
    assert out.shape[1] == 195 and attachment.report()["selectivity"] < 0.9
    with attach(model, router=router, probes=8, decode_window=16, dense_layers=()):
        all_read = model.generate(ids, max_new_tokens=60, min_new_tokens=60, do_sample=False)
    assert torch.equal(all_read, model.generate(ids, max_new_tokens=60, min_new_tokens=60, do_sample=False))


@pytest.mark.parametrize("placement", ["gpu", "cpu"])
def test_short_caches_are_decoded_densely_until_they_are_long(placement: str) -> None:
    model, ids = make_model(), prompt(LENGTH)
    router, phi = artifacts(model)
    options = {"router": router, "phi": phi, "probes": 2, "placement": placement}
    plain = model.generate(ids, **GREEDY)
    with attach(model, dense_below=1000, **options) as attachment:
        assert torch.equal(model.generate(ids, **GREEDY), plain)
        assert attachment.report()["sparse_calls"] == 0 and attachment.report()["selectivity"] == 1.0
    with attach(model, dense_below=80, **options) as attachment:
        model.generate(ids, **{**GREEDY, "min_new_tokens": 9})
    # 8 steps over caches of 76 to 83 tokens, in two layers; layer 0 is dense
    assert attachment.report()["sparse_calls"] == 4 * 2 and attachment.report()["dense_calls"] == 4 * 2 + 8


BAD = [
    ({"selector": "nope", "token_budget": 1}, "unknown selector"),
    ({"selector": "router"}, "router"),
    ({"selector": "topk"}, "needs a token budget"),
    ({"selector": "topk", "token_budget": 1.5}, "share of the context"),
    ({"selector": "topk", "token_budget": 2**63}, "at most 2147483647 tokens"),
    ({"selector": "topk", "token_budget": -3}, "from 0 on, found -3"),
    ({"selector": "streaming", "completion": "phi"}, "needs trained feature maps"),
    ({"selector": "streaming", "completion": "magic"}, "unknown completion"),
    ({"selector": "streaming", "probes": 3}, "no option 'probes'"),
    ({"selector": "streaming", "sink_size": -1}, "must be a whole number from 0"),
    ({"selector": "streaming", "dense_below": -1}, "must be a whole number from 0"),
    ({"selector": "streaming", "decode_window": 0}, "must be a whole number from 1"),
    ({"selector": "streaming", "dense_layers": [7]}, "names layer 7"),
    ({"selector": "streaming", "placement": "disk"}, "unknown placement"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_options_are_refused_with_a_sentence(options: dict, message: str) -> None:
    with pytest.raises(SparseKVError, match=message):
        attach(make_model(), **options)


def test_bad_artifacts_models_and_caches_are_refused() -> None:
    from transformers import StaticCache, T5Config, T5ForConditionalGeneration

    model, ids = make_model(), prompt(LENGTH)
    router, phi = artifacts(model)
    for probes in (0, 9):
        with pytest.raises(SparseKVError, match=r"from 1 to .*, found 0|between 1 and the router's 8"):
            attach(model, router=router, probes=probes)
    for kind, foreign in (("router", phi), ("phi", router), ("phi", 3)):
        with pytest.raises(SparseKVError, match=f"{kind} must be a name or a .*Artifact, found"):
            attach(model, **{kind: foreign})
    other = make_model(num_hidden_layers=2)
    for trained in ({"router": router}, {"phi": phi, "selector": "streaming"}):
        with pytest.raises(SparseKVError, match=r"num_layers 3.*num_layers 2"):
            attach(other, **trained)
    t5 = T5ForConditionalGeneration(T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=20))
    with pytest.raises(SparseKVError, match="encoder-decoder"):
        attach(t5, selector="streaming")
    with pytest.raises(SparseKVError, match=r"torch\.compile"):
        attach(torch.compile(model), selector="streaming")
    with attach(model, selector="streaming"):
        with pytest.raises(SparseKVError, match="StaticCache"):
            model.generate(ids, past_key_values=StaticCache(config=model.config, max_cache_len=100), **GREEDY)
        with pytest.raises(SparseKVError, match="cache_implementation"):
            model.generate(ids, cache_implementation="static", **GREEDY)


def test_calls_that_cannot_be_served_are_sentences() -> None:
    from transformers import GenerationConfig

    model, ids = make_model(), prompt(LENGTH)
    with attach(model, selector="topk", token_budget=8, run=RunOptions(sparse_chunks=True)) as attachment:
        with pytest.raises(SparseKVError, match="remove use_cache=False"):
            model.generate(ids, GenerationConfig(use_cache=False, max_new_tokens=3))
        with pytest.raises(SparseKVError, match="no sparse index"):
            model.generate(ids, GenerationConfig(cache_implementation="static", max_new_tokens=3))
        for empty in (ids[:, :0], ids[:0]):
            with pytest.raises(SparseKVError, match="the prompt is empty"):
                model(empty, use_cache=True)
        cache = attachment.prefill(ids)
        parameter = model.model.layers[0].mlp.up_proj.weight
        asked = parameter.requires_grad
        parameter.requires_grad_(True)
        try:
            with pytest.raises(SparseKVError, match="has no gradient"):
                model(ids[:, :3], past_key_values=cache).logits.sum().backward()
        finally:
            parameter.requires_grad_(asked)
            model.zero_grad()
    other = make_model("qwen2")
    with attach(other, selector="topk", token_budget=8), pytest.raises(SparseKVError, match="another model"):
        other(ids[:, :1], past_key_values=cache)


def test_contiguous_positions_of_all_keys_are_the_plain_model() -> None:
    model, ids = make_model(), prompt(LENGTH)
    plain = model.generate(ids, **GREEDY)
    how = {"selector": "token_select", "extrapolate": True, "token_budget": 1.0, "dense_layers": ()}
    with attach(model, **how) as attachment:
        assert torch.equal(model.generate(ids, **GREEDY), plain)
    assert attachment.report()["sparse_calls"] > 0


@pytest.mark.parametrize("replays", [False, True])
def test_shares_are_means_over_rows(replays: bool) -> None:
    """Two equal rows read what one does."""
    model, ids, shares = make_model(), prompt(90), []
    for rows in (1, 2):
        with attach(model, selector="topk", token_budget=8, dense_below=0,
                    run=RunOptions(replays=replays)) as attachment:
            attachment.generate(ids.expand(rows, -1), max_new_tokens=6)
            report = attachment.report()
            shares.append((report["selectivity"], report["bytes_share"]))
    assert shares[1] == pytest.approx(shares[0]) and 0 < shares[0][0] < 1
