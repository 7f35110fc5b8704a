"""What of a planned step runs by a kernel: taken where it gives the model's own, in every family."""

from __future__ import annotations

import copy
import importlib.util
import json
import time
from collections import Counter
from typing import Any

import pytest
import torch
from tiny import FAMILIES, attach, make_model, prompt
from torch import nn

from sparsekv.kernels import few_rows
from sparsekv.runtime import fused as door
from sparsekv.runtime import timing
from sparsekv.runtime.break_even import Shape
from sparsekv.runtime.fused import ROTATION, Fused, few_gated, few_products
from sparsekv.runtime.hf.attached import model_of
from sparsekv.runtime.warm import full_token

ROTATED = {"llama", "qwen2", "qwen3", "mistral", "phi3", "gemma3"}
"""Families whose rotation turns the halves of whole heads against each other."""

GATED = {"llama", "qwen2", "qwen3", "mistral"}
"""Families whose MLP has a gate of its own with a SiLU."""

JOINT = set(FAMILIES) - {"phi3"}
"""Families with a linear layer each for queries, keys and values."""


def changed(model: Any) -> list[str]:
    return [name for name, m in model.named_modules() if name and "forward" in m.__dict__]


def logits_of(model: Any, ids: torch.Tensor, used: bool, after: int = 50) -> tuple[torch.Tensor, Fused]:
    """Of the tokens from `after` on, one a step."""
    with torch.no_grad(), attach(model, selector="streaming") as attachment:
        fused = model_of(attachment).layers.fused
        fused.used = used
        cache = attachment.prefill(ids[:, :after])
        found = [attachment.step(ids[:, t:t + 1], cache).clone() for t in range(after, ids.shape[1])]
        assert attachment.report()["not_replayed"] is None and not changed(model)
    return torch.cat(found, 1), fused


@pytest.mark.parametrize(("family", "dtype"), [
    *((family, torch.bfloat16) for family in FAMILIES), ("llama", torch.float32), ("gemma3", torch.float32),
    *(pytest.param(family, torch.float32, marks=pytest.mark.slow) for family in FAMILIES
      if family not in ("llama", "gemma3"))], ids=str)
def test_a_step_with_fewer_launches_is_the_step(family: str, dtype: torch.dtype) -> None:
    model = make_model(family)
    if model.dtype != dtype:
        model = copy.deepcopy(model).to(dtype)
    (own, _), (found, fused) = (logits_of(model, prompt(54, 2), used) for used in (False, True))
    limit = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(found, own, rtol=limit, atol=limit)
    norms, gates = {type(m) for m in fused.norms}, {type(m) for m in fused.gates}
    taken = {key[0] for key, kernel in fused.known.items() if kernel is not None}
    assert norms and norms <= taken and gates <= taken and bool(gates) == (family in GATED)
    assert any(getattr(x, "__name__", "") == ROTATION for x in taken) == (family in ROTATED)
    half = dtype != torch.float32
    assert (few_products in taken) == half and (few_gated in taken) == (half and family in GATED)
    config, heads = model.config, model.config.head_dim
    outputs = (config.num_attention_heads * heads, *[config.num_key_value_heads * heads] * 2)
    sizes = {key[4] for key, kernel in fused.known.items() if key[0] is few_products and kernel is not None}
    assert (outputs in sizes) == (half and family in JOINT)
    assert not half or (config.vocab_size,) in sizes


def rounded() -> tuple[Any, torch.Tensor]:
    return copy.deepcopy(make_model("qwen2")).to(torch.bfloat16), prompt(54, 2)


def test_many_rows_and_replaced_layers_stay_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(nn.Linear):
        pass

    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(door, "few_rows", lambda x, weights, biases: (
        calls.append((len(weights), weights[0].shape[0])), few_rows(x, weights, biases))[1])
    model, _ = rounded()
    logits_of(model, prompt(55, 9), True)
    assert not calls
    _, fused = logits_of(model, prompt(55, 8), True)
    assert (3, 64) in calls
    before = len(fused.attentions)
    for layer in model.model.layers:
        attention, linear = layer.self_attn, layer.self_attn.k_proj
        attention.k_proj = Own(linear.in_features, linear.out_features).to(torch.bfloat16)
        attention.k_proj.load_state_dict(linear.state_dict())
        layer.mlp.down_proj.weight = nn.Parameter(layer.mlp.down_proj.weight.t().contiguous().t())
    calls.clear()
    (own, _), (found, fused) = (logits_of(model, prompt(55, 8), used) for used in (False, True))
    torch.testing.assert_close(found, own, rtol=0.1, atol=0.1)
    assert before == 3 and not fused.attentions and all(n == 1 for n, _ in calls)
    # in each of three layers queries, values and what follows attention; keys and what lies turned are not
    counts = Counter(n for _, n in calls)
    assert counts == {97: counts[97], 64: 6 * counts[97], 32: 3 * counts[97]} and counts[97] > 0


def test_what_is_replaced_while_attached_is_the_models_own() -> None:
    class Doubled(nn.Module):
        def __init__(self, own: Any):
            super().__init__()
            self.own = own

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * self.own(x)

    model, ids = rounded()
    found = []
    for used in (False, True):
        with torch.no_grad(), attach(model, selector="streaming") as attachment:
            model_of(attachment).layers.fused.used = used
            cache = attachment.prefill(ids[:, :50])
            steps = [attachment.step(ids[:, 50:51], cache).clone()]
            projections = [(layer.self_attn, layer.self_attn.k_proj) for layer in model.model.layers]
            for attention, own in projections:
                attention.k_proj = Doubled(own)
            steps += [attachment.step(ids[:, t:t + 1], cache).clone() for t in (51, 52)]
            for attention, own in projections:
                attention.k_proj = own
            steps.append(attachment.step(ids[:, 53:54], cache).clone())
            found.append(torch.cat(steps, 1))
            assert attachment.report()["not_replayed"] is None and not changed(model)
    torch.testing.assert_close(found[1], found[0], rtol=0.1, atol=0.1)


def test_keys_of_other_rows_than_the_queries_are_their_own() -> None:
    model, _ = rounded()
    attention = model.model.layers[0].self_attn
    fused = Fused(model, attention)
    fused.used = True
    x, y = torch.randn(2, 1, 1, 64, dtype=torch.bfloat16)
    own = [p(z) for p, z in ((attention.q_proj, x), (attention.k_proj, y), (attention.v_proj, x))]
    for _ in range(2):  # decided, and then taken
        fused.put()
        found = [p(z) for p, z in ((attention.q_proj, x), (attention.k_proj, y), (attention.v_proj, x))]
        fused.restore()
        assert all(torch.equal(a, b) for a, b in zip(found, own, strict=True)) and not fused._held


def test_a_hook_keeps_a_linear_layer_out_of_plans() -> None:
    model, ids = rounded()
    seen = []
    handle = model.model.layers[1].self_attn.k_proj.register_forward_hook(lambda *args: seen.append(1))
    with torch.no_grad(), attach(model, selector="streaming") as attachment:
        model_of(attachment).layers.fused.used = True
        cache = attachment.prefill(ids[:, :50])
        seen.clear()
        for t in range(50, 53):
            attachment.step(ids[:, t:t + 1], cache)
        assert "hook" in attachment.report()["not_replayed"] and len(seen) == 3
    handle.remove()


def test_the_kernels_of_products_are_loaded_once_for_a_number_of_rows() -> None:
    model, _ = rounded()
    fused = Fused(model, model.model.layers[0].self_attn)
    assert not fused.loads(2)
    fused.used = True
    loads = fused.loads(2)
    products = {(key[0], key[4]) for key in loads if key[0] in (few_products, few_gated)}
    assert products == {
        (few_products, (64, 32, 32)), (few_products, (64,)), (few_products, (97,)), (few_gated, (96, 96))}
    between = {key[0] for key in loads} - {few_products, few_gated}
    assert between == {type(model.model.norm), type(model.model.layers[0].mlp)}  # of any number of rows
    for load in loads.values():
        load()
    assert not fused.loads(2) and len(fused.loads(8)) == len(loads) == 7
    assert {key[0] for key in fused.loads(9)} == between


def test_what_a_full_token_takes_is_loaded_from_its_shapes() -> None:
    full_token(Shape(2, 4, 2, 16, torch.float32, torch.device("cpu")))


def process() -> Any:
    """`timing` as another process has it: it knows nothing yet."""
    spec = importlib.util.find_spec(timing.__name__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_faster_one_is_known_from_its_first_time_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ran: list[str] = []
    device = torch.device("cpu")

    def fast() -> None:
        ran.append("fast")

    def slow() -> None:
        ran.append("slow")
        time.sleep(0.002)

    def none() -> None:
        raise torch.OutOfMemoryError

    ask = process().quicker
    assert ask("one", fast, slow, device) and not ask("two", slow, fast, device)
    timed = len(ran)
    assert timed and ask("one", slow, fast, device) and len(ran) == timed  # of this process
    again = process()
    assert again.quicker("one", slow, fast, device) and not again.quicker("two", fast, slow, device)
    assert len(ran) == timed  # of an earlier one
    file = again.PRODUCTS.file()
    kept = json.loads(file.read_text())
    assert set(kept) == {"one", "two"} and kept["one"][0] < kept["one"][1] and kept["two"][0] > kept["two"][1]
    for damage in ("no json", "[]", json.dumps({**kept, "one": 3}), json.dumps({**kept, "one": ["x", None]})):
        file.write_text(damage)
        ran.clear()
        assert process().quicker("one", fast, slow, device) and set(ran) == {"fast", "slow"}
    assert not ask("three", none, slow, device) and "three" not in json.loads(file.read_text())


@pytest.mark.parametrize("slower", ["few_products", "few_gated", "both"])
def test_what_is_slower_or_does_not_fit_the_device_is_not_taken(slower: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from triton.runtime.errors import OutOfResources

    def too_large(*args: Any) -> Any:
        raise OutOfResources(200_000, 100_000, "shared memory")

    for name in ("few_rows", "few_rows_gated"):
        if slower in ("both", name.replace("few_rows_gated", "few_gated").replace("few_rows", "few_products")):
            monkeypatch.setattr(door, name, too_large)
    model, ids = rounded()
    (own, _), (found, fused) = (logits_of(model, ids, used) for used in (False, True))
    torch.testing.assert_close(found, own, rtol=0.1, atol=0.1)
    taken = {key[0] for key, kernel in fused.known.items() if kernel is not None}
    assert (few_products in taken) == (slower == "few_gated") and (few_gated in taken) == (slower == "few_products")


@pytest.mark.gpu
@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_step_with_products_of_few_rows_is_as_near_to_float32_as_the_models_own(
    family: str, rows: int, timed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Any,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(timing.PRODUCTS, "known", {})
    if not timed:
        monkeypatch.setattr(door, "quicker", lambda *args: True)
    shape = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "head_dim": 64}
    model = copy.deepcopy(make_model(family, **shape, initializer_range=0.05)).to("cuda", torch.bfloat16)
    ids = prompt(64, rows).cuda()
    (own, _), (found, fused) = (logits_of(model, ids, used) for used in (False, True))
    exact, _ = logits_of(copy.deepcopy(model).float(), ids, False)
    apart, allowed = (float((x - exact).norm() / exact.norm()) for x in (found, own))
    decided = {key: kernel is not None for key, kernel in fused.known.items() if key[0] in (few_products, few_gated)}
    for key, taken in decided.items():
        print(f"{family}, {rows} rows: {door._words(key)}: {'the kernel' if taken else 'its own code'}")
    print(f"{family}, {rows} rows: {apart:.1e} from float32, its own code {allowed:.1e}")
    assert apart <= 1.5 * allowed + 2**-9
    assert {(key[0], key[4]) for key in decided} == {
        (few_products, (512, 128, 128)), (few_products, (512,)), (few_products, (97,)), (few_gated, (1408, 1408))}
    if timed:
        kept = json.loads(timing.PRODUCTS.file().read_text())
        assert len(kept) == len(decided)
        for key, taken in decided.items():
            (ours, theirs), = (times for words, times in kept.items() if words.endswith(door._words(key)))
            assert min(ours, theirs) > 0 and taken == (ours < theirs)
    else:
        assert all(decided.values()), "within a rounding step of the model's own"


def test_what_gives_something_else_stays_the_models_own() -> None:
    class OddRMSNorm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x / x.abs().mean(-1, keepdim=True)

    norm, x = OddRMSNorm(), torch.randn(3, 8)
    model = torch.nn.Sequential(norm)
    fused = Fused(model, norm)
    fused.used = True
    for rows in (x[:0], x, x, x):
        fused.put()
        assert torch.equal(model(rows), norm.weight * rows / rows.abs().mean(-1, keepdim=True))
        fused.restore()
        assert bool(fused.known) == bool(rows.shape[0])
    assert list(fused.known.values()) == [None] and "forward" not in norm.__dict__
