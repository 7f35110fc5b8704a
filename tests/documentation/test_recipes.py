"""The recipes' figures are those that `python benchmarks/recipes.py` works out from the rows as they are now."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import recipes  # noqa: E402

TEXT = recipes.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", recipes.BLOCKS)
def test_the_page_is_drawn_from_the_rows(name: str) -> None:
    found, = re.findall(rf"<!-- {name} -->\n(.*)\n<!-- end of {name} -->", TEXT, re.DOTALL)
    assert found == recipes.BLOCKS[name](), "run `python benchmarks/recipes.py`"


def test_the_rate_of_the_maps_is_the_training_pages() -> None:
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    assert f"{recipes.STEPS_A_SECOND} steps a second" in " ".join(page.split())
    assert f"--max-steps {recipes.STEPS} " in TEXT and f"--num-documents {recipes.WINDOWS}" in TEXT


def test_a_window_of_the_smaller_model_by_hand() -> None:
    model = recipes.MODELS[0]
    keys_and_values = 32 * 8 * 131072 * 128 * 2 * 2 / 1e9
    assert model.cache == pytest.approx(keys_and_values) and keys_and_values < model.window < 1.05 * keys_and_values
    assert sum(recipes.one(model)) / 8 < sum(recipes.eight(model)) * 1.1
