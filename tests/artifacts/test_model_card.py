"""The page of an artifact, as the hub reads it."""

from __future__ import annotations

import pytest
from huggingface_hub import ModelCard

from sparsekv.artifacts.hub.modelcard import card_files

MODEL = {"architecture": "LlamaForCausalLM", "num_layers": 4, "num_query_heads": 2, "num_kv_heads": 1, "head_dim": 8,
         "weights": "0123456789abcdef"}
SHARES = (0.01, 0.02, 0.05, 0.1)


def router(**changed: object) -> dict[str, object]:
    names = [f"{line}@{share}" for share in SHARES for line in ("mass_share", "oracle_mass_share")]
    origin = {"sparsekv": "1.2", "model": "ann/model", "corpus": "/home/ann/texts/book.txt", "split": "train",
              "context_length": 512, "train_documents": ["a", "b"], "validation_documents": ["c"],
              "disjoint_by": "window", "options": {"scores": "mean_key", "num_buckets": 64, "max_steps": 3000}}
    quality = {**dict.fromkeys(names, 0.5), "per_head": {n: [[0.4, 0.6], [0.5, 0.5]] for n in names}}
    return {"model": MODEL, "layers": [1, 3], "sink_size": 4, "window_size": 16, "provenance": origin,
            "quality": quality, **changed}


def page(configs: dict[str, dict[str, object]], **options: object) -> str:
    return card_files(configs, **options)["README.md"].decode()


def test_the_hub_can_read_it() -> None:
    text = page({"router": router()}, name="ann/router")
    data = ModelCard(text).data.to_dict()
    assert data["library_name"] == "sparsekv" and data["base_model"] == "ann/model"
    assert {"router", "kv-cache"} <= set(data["tags"]) and "license" not in data
    assert 'sparsekv.attach(model, "ann/router"' in text and "PATH" not in text
    assert "2 windows of 512 tokens of `book.txt` (train), judged on 1 other, disjoint by window" in text
    assert "2 of 4 layers" in text and "| 5% | 0.500 | 0.500 |" in text and "/home" not in text
    assert "max_steps" not in text  # mean_key scores are not trained


@pytest.mark.parametrize("name", ["/data/models/llama", "package:some_model", "./llama", "a/b/c"])
def test_only_a_name_on_the_hub_is_a_base_model(name: str) -> None:
    config = router()
    config["provenance"] = {**config["provenance"], "model": name}
    text = page({"router": config})
    assert "base_model" not in ModelCard(text).data.to_dict() and "/data" not in text
    assert f"Router for {name.rpartition('/')[2]}" in text


def test_what_was_not_judged_has_no_table_and_no_figure() -> None:
    files = card_files({"phi": router(provenance={}, quality={})})
    assert list(files) == ["README.md"] and b"How it was trained is not recorded" in files["README.md"]
    assert b"Feature maps for LlamaForCausalLM" in files["README.md"]


def test_of_a_training_figures_lie_with_their_artifacts() -> None:
    files = card_files({"router": router(), "phi": router(quality={})}, nested=True)
    assert sorted(files) == ["README.md", "router/quality.png"] and b"](router/quality.png)" in files["README.md"]
    again = card_files({"router": router(), "phi": router(quality={})}, nested=True)
    assert again == files
