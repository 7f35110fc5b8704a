"""Rivals by kvpress's own code (NVIDIA/kvpress, a package on PyPI): the same prompts, the same scores, the same cells.
Its presses throw keys away at the end of a prefill: all but what our budget and anchors come to. Layer 0 stays whole,
as in every sparse row here."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sparsekv.artifacts.hub.models import attention_modules
from sparsekv.evaluation.cells import add_cell, open_cells
from sparsekv.evaluation.requests import Question, score
from sparsekv.evaluation.rows import origin

ANCHORS = 20
"""Tokens of sink and local window that a sparse row reads beside its budget."""
PRESSES = {"kvpress_snapkv": "snapkv_press:SnapKVPress",
           "kvpress_expected_attention": "expected_attention_press:ExpectedAttentionPress"}


def press_of(name: str, ratio: float) -> Any:
    """A press that throws away the share `ratio`. The package's own `__init__` is not run: it asks for what only its
    other presses need."""
    if "kvpress" not in sys.modules:
        found = importlib.util.find_spec("kvpress")
        if found is None or found.submodule_search_locations is None:
            raise ModuleNotFoundError("kvpress is not installed; expected `pip install --no-deps kvpress`")
        for package, folder in (("kvpress", ""), ("kvpress.presses", "presses")):
            made = types.ModuleType(package)
            made.__path__ = [str(Path(p) / folder) for p in found.submodule_search_locations]
            sys.modules[package] = made
    module, _, kind = PRESSES[name].partition(":")
    return getattr(importlib.import_module(f"kvpress.presses.{module}"), kind)(compression_ratio=ratio)


@contextmanager
def pressed(model: Any, press: Any) -> Iterator[None]:
    """A prefill inside compresses the cache of every layer but the first, by the press's own hook."""
    press.post_init_from_model(model)
    rotary, handles = model.model.rotary_emb, []

    def hook(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        places = torch.arange(kwargs["hidden_states"].shape[1], device=output[0].device)
        return press.forward_hook(module, list(args), {"cache_position": places, **kwargs}, output)

    modules = [m for i, m in attention_modules(model).items() if i > 0]
    before = [m.__dict__.get("rotary_emb") for m in modules]
    try:
        for module in modules:
            module.__dict__["rotary_emb"] = rotary
            handles.append(module.register_forward_hook(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
        for module, own in zip(modules, before, strict=True):
            module.__dict__.pop("rotary_emb", None)
            if own is not None:
                module.__dict__["rotary_emb"] = own


@torch.inference_mode()
def answer(model: Any, tokenizer: Any, request: Question, name: str, budget: float) -> tuple[str, int]:
    """The greedy answer, and how many tokens there were before it."""
    from transformers import DynamicCache

    ids = torch.tensor([request.tokens(tokenizer)], device=model.device)
    length = ids.shape[1] - 1
    kept = min(1.0, (budget * length + ANCHORS + 0.5) / length)  # a press rounds down
    cache = DynamicCache()
    with pressed(model, press_of(name, 1 - kept)):
        model.model(input_ids=ids[:, :-1], past_key_values=cache, use_cache=True)
    token, made = ids[:, -1:], []
    for step in range(request.answer_tokens):
        place = torch.tensor([[length + step]], device=model.device)
        logits = model(input_ids=token, past_key_values=cache, position_ids=place, use_cache=True).logits
        token = logits[:, -1:].argmax(-1)
        made.append(int(token))
        text = tokenizer.decode(made, skip_special_tokens=True)
        if made[-1] == tokenizer.eos_token_id or any(s in text for s in request.until) or (
                request.metric == "string_match_all" and score(request, text) == 1.0):
            break
    return text[:min((text.index(s) for s in request.until if s in text), default=len(text))], length


def measure_presses(
    model: Any, tokenizer: Any, requests: Sequence[Question], path: Path, budgets: Sequence[float],
    said: dict[str, Any],
    stop: Callable[[], bool],
) -> bool:
    """A cell a prompt, press and budget; whether all are measured."""
    cells = open_cells(path, {**said, "dtype": str(model.dtype).removeprefix("torch."), "origin": origin()}, {}, True)
    done = {(c["case"], c["indices"][0], c["method"], c["budget"]) for c in cells}
    layers = len(attention_modules(model))
    for name in PRESSES:
        for budget in budgets:
            for r in requests:
                if (r.case, r.index, name, budget) in done:
                    continue
                if stop():
                    return False
                began = time.perf_counter()
                text, length = answer(model, tokenizer, r, name, budget)
                read = min(1.0, budget + ANCHORS / length)
                add_cell(path, {
                    "case": r.case, "method": name, "budget": budget, "indices": [r.index], "scores": [score(r, text)],
                    "answers": [text], "read": read, "bytes": read, "sparse_layers": (layers - 1) / layers,
                    "tokens": length, "seconds": round(time.perf_counter() - began, 3)})
    return True
