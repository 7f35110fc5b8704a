"""The recipes' figures follow from the rows that were measured and from the store's own size."""

import json
from pathlib import Path

import pytest

from sparsekv.store.store import storage_bytes

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "recipes.md").read_text(encoding="utf-8")
STEPS_A_SECOND = 211
LAYERS = {"Llama": 32, "Qwen3": 36}


def measured(name: str, **wanted: str) -> float:
    rows = json.loads((DOCS / "results" / f"{name}.json").read_text(encoding="utf-8"))
    found, = (r["value"] for r in rows if all(r[k] == v for k, v in wanted.items()))
    return found


def stored(layers: int) -> int:
    """Bytes of a window."""
    return storage_bytes(num_documents=1, num_layers=layers, heads_kv=8, heads_q=32, length=131072, queries=256,
                         dim=128)


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_bytes(layers: int) -> None:
    size = stored(layers)
    assert f"| {size / 1e9:.1f} GB" in TEXT and f"{16 * size / 1e9:.0f} GB" in TEXT
    assert f"| {layers * 8 * 131072 * 128 * 4 / 1e9:.1f} GB" in TEXT


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_hours(layers: int) -> None:
    assert f"{STEPS_A_SECOND} steps a second" in (DOCS / "training.md").read_text(encoding="utf-8")
    window = measured("capture", case="llama8b 8 layers 131072", method="capture", metric="seconds") / 8 * layers
    router = measured("training", case="router-layer-128k", metric="seconds")
    phi = 20_000 / STEPS_A_SECOND
    one = [16 * window, layers * router, layers * phi]
    assert " + ".join(f"{x / 60:.1f}" for x in one) + f" min = **{sum(one) / 3600:.1f} h**" in TEXT
    disk = measured("capture", case="llama8b 8 layers 131072", method="disk", metric="gb_per_second")
    own = -(-layers // 8)
    eight = [max(2 * window, 16 * stored(layers) / 1e9 / disk), own * router, own * phi]
    assert " + ".join(f"{x / 60:.1f}" for x in eight) + f" min = **{sum(eight) / 60:.1f} min**" in TEXT


@pytest.mark.parametrize(("method", "metric", "said"), [
    ("router", "loop_ms", "{:.1f} ms a token with a router"), ("router_phi", "loop_ms", "{:.1f} with φ"),
    ("dense", "loop_ms", "takes {:.1f} and"), ("transformers", "loop_ms", "transformers {:.0f}"),
    ("transformers_compiled", "loop_ms", "({:.0f} compiled)"), ("dense", "prefill_s", "prefill takes {:.1f} s"),
    ("dense", "peak_gb", "{:.1f} GB with full"), ("router", "peak_gb", "{:.1f} with a router")])
def test_the_time_of_a_token(method: str, metric: str, said: str) -> None:
    flat = " ".join(TEXT.split())
    assert said.format(measured("generate", case="8b-128k-b1", method=method, metric=metric)) in flat
