"""What is left when a cache is cut, and what a prefix brings back, for every selector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import observed_model, prompt
from tiny_artifacts import artifacts

from sparsekv.core.selectors import SELECTORS
from sparsekv.runtime.hf.attach import attach

MEMORY = ("lfps", "random")
"""Selectors whose steps depend on the steps before them: on what those read, or on how many there were."""
SPARSE = sorted(set(SELECTORS) - {"dense"})
WAYS = [(name, planned) for name in SPARSE for planned in (False, True)[:1 + SELECTORS[name].replayable]]
"""Layer by layer, and by plans of all layers where there are some."""
PROMPT, BORDER = 100, 16


def options(name: str, completion: str) -> dict[str, Any]:
    router, phi = artifacts(observed_model())
    found: dict[str, Any] = {"selector": name, "token_budget": 12, "completion": completion, "decode_window": BORDER,
                             "dense_below": 0}
    return found | ({"phi": phi} if completion == "phi" else {}) | (
        {"router": router} if SELECTORS[name].is_trained() else {})


@torch.no_grad()
def decode(cache: Any, first: int, count: int, at: int = 0, planned: bool = False) -> torch.Tensor:
    """Logits of `count` tokens, those of a text from `at` or else `first` on, the cache being `first` long."""
    assert cache.get_seq_length() == first
    ids = prompt(400)
    torch.manual_seed(0)  # MagicPIG samples
    how = {"past_key_values": cache, "use_cache": True, "output_hidden_states": not planned}  # which no plan gives
    return torch.cat([observed_model()(ids[:, t:t + 1], **how).logits
                      for t in range(at or first, (at or first) + count)], 1)


@pytest.mark.parametrize("completion", ["none", "phi", "centroid"])
@pytest.mark.parametrize(("name", "planned"), WAYS)
def test_a_cache_cut_within_its_tail_never_went_further(name: str, planned: bool, completion: str) -> None:
    with attach(observed_model(), **options(name, completion)) as attachment:
        cache = attachment.prefill(prompt(400)[:, :PROMPT])
        decode(cache, PROMPT, 3 + 2 * BORDER, planned=planned)  # the mid region's border has moved
        before = cache.fork()
        decode(cache, PROMPT + 3 + 2 * BORDER, 5, at=300, planned=planned)
        cache.crop(-5)
        cut, never = (decode(c, PROMPT + 3 + 2 * BORDER, 4, planned=planned) for c in (cache, before))
        assert (attachment.report()["replayed_steps"] > 30) == planned
    assert cut.isfinite().all()
    if name not in MEMORY:
        apart = 1e-5 if planned and SELECTORS[name].scores_keys else 0.0  # scores of all that is stored, in float32
        torch.testing.assert_close(cut, never, rtol=0, atol=apart)


@pytest.mark.parametrize("completion", ["none", "phi", "centroid"])
@pytest.mark.parametrize("name", SPARSE)
def test_a_cache_cut_into_its_mid_region_begins_anew_like_a_prefix(name: str, completion: str, tmp_path: Path) -> None:
    """All that is left is the prompt then, for a prefix that is saved while decoding too."""
    with attach(observed_model(), **options(name, completion)) as attachment:
        cache = attachment.prefill(prompt(400)[:, :PROMPT])
        decode(cache, PROMPT, 2 * BORDER + 8)
        attachment.save_prefix(cache, tmp_path / "whole")
        whole, again = (attachment.load_prefix(tmp_path / "whole") for _ in range(2))
        cache.crop(PROMPT + 5)
        attachment.save_prefix(cache, tmp_path / "cut")
        loaded = attachment.load_prefix(tmp_path / "cut")
        torch.testing.assert_close(*(decode(c, PROMPT + 5, 4) for c in (cache, loaded)), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(*(decode(c, PROMPT + 2 * BORDER + 8, 4) for c in (whole, again)), rtol=0, atol=0)
