"""A planned step = the same step layer by layer, to the bit, for every selector with every estimator that can be
planned: in float64, with left padding and a border that moves, keys beside the queries and in CPU memory."""

from __future__ import annotations

import pytest
import torch
from steps import CASES, COMPLETIONS, PADS, PROMPT, SIZES, tiny, trained

import sparsekv
from sparsekv.core.selectors import SELECTORS
from sparsekv.runtime.hf.attach import RunOptions

STEPS = 24
PLANNED = {case: given for case, given in CASES.items() if SELECTORS[given[0]].replayable}


@torch.inference_mode()
def logits_of(case: str, completion: str, placement: str, *, planned: bool, cold: bool = False) -> torch.Tensor:
    """Logits `[B, STEPS, V]` of a text, one token a step. cold: no row that was read stays on the device."""
    name, options = PLANNED[case]
    model = tiny(3, 10, torch.float64)
    router, phi = trained(model)
    ids = torch.randint(1, 61, (len(PADS), PROMPT + STEPS), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    for row, pad in enumerate(PADS):
        mask[row, :pad] = 0
    with sparsekv.attach(
            model, selector=name, completion=completion, phi=phi, dense_below=0, placement=placement, **SIZES,
            kv_memory=0 if cold else None,
            run=RunOptions(replays=planned), **({"router": router} if SELECTORS[name].is_trained() else {}),
            **options) as attachment:
        cache = attachment.prefill(ids[:, :PROMPT], mask[:, :PROMPT], cache=attachment.cache(PROMPT + STEPS))
        found = [model(ids[:, t:t + 1], attention_mask=mask[:, :t + 1], past_key_values=cache).logits
                 for t in range(PROMPT, PROMPT + STEPS)]
        report = attachment.report()
    assert report["replayed_steps"] == (STEPS if planned else 0), report["not_replayed"]
    assert cache.layers[1].state.view.regions.tail_starts[0] > PROMPT, "the border has not moved"
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("placement", ["gpu", "offload"])
@pytest.mark.parametrize("completion", [name for name in COMPLETIONS if name != "uniform"])
@pytest.mark.parametrize("case", PLANNED)
def test_a_planned_step_is_the_same_layer_by_layer(case: str, completion: str, placement: str) -> None:
    if placement == "offload" and (SELECTORS[PLANNED[case][0]].scores_keys or "probes" in case):
        pytest.skip("keys in CPU memory are not scored, and whole buckets are counted on the host")
    by_plan, by_layer = (logits_of(case, completion, placement, planned=planned) for planned in (True, False))
    if SELECTORS[PLANNED[case][0]].scores_keys:  # over the whole storage: sums of another order on some machines
        torch.testing.assert_close(by_plan, by_layer, rtol=0, atol=1e-12)
    else:
        assert torch.equal(by_plan, by_layer)
    if placement == "offload":
        assert torch.equal(by_plan, logits_of(case, completion, placement, planned=True, cold=True))
