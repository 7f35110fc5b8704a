"""Models of images: spans that see both ways (Gemma 3) and positions of three dimensions (Qwen2.5-VL). A budget of
everything gives the model's own logits."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from sparsekv.runtime.hf.attach import attach

TEXT: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.3, "pad_token_id": 0, "eos_token_id": None,
    "bos_token_id": None}
IMAGE, BEGIN, END = 90, 91, 92
ALL: dict[str, Any] = {"selector": "topk", "token_budget": 4096, "dense_below": 0, "dense_layers": ()}
NEW = 6
ANSWER: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True,
                          "output_scores": True}


def gemma3(**options: Any) -> Any:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    kinds = ["sliding_attention", "full_attention", "full_attention"]
    vision = {"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 1, "image_size": 16, "patch_size": 4}
    return _made(Gemma3ForConditionalGeneration, Gemma3Config(
        text_config={**TEXT, "num_hidden_layers": 3, "layer_types": kinds, "sliding_window": 16}, vision_config=vision,
        mm_tokens_per_image=4, image_token_id=IMAGE, boi_token_index=BEGIN, eoi_token_index=END, **options))


def qwen2_5_vl(**options: Any) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    rotary = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 1, "intermediate_size": 16, "out_hidden_size": 32,
              "patch_size": 4, "window_size": 16, "fullatt_block_indexes": [0]}
    return _made(Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLConfig(
        text_config={**TEXT, "num_hidden_layers": 2, "rope_parameters": rotary}, vision_config=vision,
        image_token_id=IMAGE, video_token_id=93, vision_start_token_id=BEGIN, vision_end_token_id=END, **options))


def _made(kind: Any, config: Any) -> Any:
    torch.manual_seed(0)
    model = kind._from_config(config).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def prompt(model: Any, rows: int = 1) -> dict[str, torch.Tensor]:
    """Text with an image of four tokens in every row; the second row is padded on the left."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 89, (rows, 40), generator=generator)
    ids[:, 9:15] = torch.tensor([BEGIN, *[IMAGE] * 4, END])
    mask = torch.ones_like(ids)
    mask[1:, :5], ids[1:, :5] = 0, 0
    kinds = (ids == IMAGE).long()
    if "Gemma" in type(model).__name__:
        return {"input_ids": ids, "attention_mask": mask, "token_type_ids": kinds,
                "pixel_values": torch.randn(rows, 3, 16, 16, generator=generator)}
    return {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": kinds,
            "pixel_values": torch.randn(16 * rows, 96, generator=generator),
            "image_grid_thw": torch.tensor([[1, 4, 4]] * rows)}


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found - right).norm() / right.norm())


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("make", [gemma3, qwen2_5_vl])
def test_an_answer_to_an_image_is_the_models(make: Any, attention: str, rows: int) -> None:
    model = make(attn_implementation=attention)
    given = prompt(model, rows)
    right = model.generate(**given, **ANSWER)
    with attach(model, **ALL) as attachment:
        found = model.generate(**given, **ANSWER)
        report = attachment.report()
    assert report["in_force"] and report["sparse_calls"] == 2 * (NEW - 1) and report["replayed_steps"] == NEW - 1
    assert max(map(error, found.scores, right.scores)) < 1e-4
    assert torch.equal(found.sequences, right.sequences)


@pytest.mark.parametrize("make", [gemma3, qwen2_5_vl])
def test_the_image_matters(make: Any) -> None:
    """Else the test above shows nothing: read causally, or without its positions, a prompt has other logits."""
    model = make()
    given = prompt(model)
    kinds = next(name for name in given if name.endswith("token_type_ids"))
    with torch.no_grad():
        seen, blind = (model(**x).logits[:, -1] for x in (given, {**given, kinds: torch.zeros_like(given[kinds])}))
    assert error(blind, seen) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("make", [gemma3, qwen2_5_vl])
def test_passes_of_ones_own_after_an_image_are_the_models(make: Any) -> None:
    """Which give no positions: Qwen2.5-VL counts them by itself, from those of the image on."""
    from transformers import DynamicCache

    model, more = make(), torch.tensor([[7], [8], [9]])
    given = prompt(model)
    plain = DynamicCache(config=model.config.get_text_config())
    model(**given, past_key_values=plain)
    right = [model(input_ids=one[None], past_key_values=plain).logits for one in more]
    with attach(model, **ALL) as attachment:
        cache = attachment.cache()
        model(**given, past_key_values=cache)
        found = [model(input_ids=one[None], past_key_values=cache).logits for one in more]
        assert attachment.report()["sparse_calls"] == 2 * len(more)
    assert max(map(error, found, right)) < 1e-4


@torch.no_grad()
def test_keys_of_an_image_come_back_without_rope(monkeypatch: pytest.MonkeyPatch) -> None:
    model = qwen2_5_vl()
    module: Any = sys.modules["transformers.models.qwen2_5_vl.modeling_qwen2_5_vl"]
    own, keys = module.apply_rotary_pos_emb, []

    def seen(q: torch.Tensor, k: torch.Tensor, *tables: Any, **options: Any) -> Any:
        keys.append(k)
        return own(q, k, *tables, **options)

    with attach(model, **ALL) as attachment:
        cache = attachment.cache()
        monkeypatch.setattr(module, "apply_rotary_pos_emb", seen)
        model(**prompt(model), past_key_values=cache)
        layer: Any = cache.layers[1]
        (table,) = cache.rope.values()
        back = table.unrotate(layer.keys, torch.arange(40))
    assert error(back, keys[-1]) < 1e-5 and error(layer.keys, keys[-1]) > 0.1
