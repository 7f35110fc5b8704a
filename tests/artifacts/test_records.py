"""JSON that a person can read: the same values, a key a line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "runtime"))

from tiny import make_model
from tiny_artifacts import artifacts

from sparsekv.artifacts.format import CONFIG, load_artifact
from sparsekv.artifacts.hub.named import find_artifacts
from sparsekv.artifacts.hub.shipped import TRAINED
from sparsekv.util.records import as_json, write_json

KEYS = st.text(max_size=10)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=40) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=60)


@given(content=st.dictionaries(KEYS, VALUES, max_size=5), sort_keys=st.booleans())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_every_value_and_the_order_of_keys_stay(content: dict[str, Any], sort_keys: bool) -> None:
    written = as_json(content, sort_keys=sort_keys)
    assert json.dumps(json.loads(written)) == json.dumps(content, sort_keys=sort_keys)
    assert written.isascii() and written.endswith("}\n")


def test_a_key_is_a_line() -> None:
    assert as_json({"pair": [[1, 2], [3, None]], "words": {"b": 'c, "d"', "a": "e\nf"}, 7: (8, 9)}).splitlines() == [
        "{", ' "pair": [[1, 2], [3, null]],', r' "words": {"b": "c, \"d\"", "a": "e\nf"},', ' "7": [8, 9]', "}"]


def test_an_artifact_reads_the_same_in_any_lines(tmp_path: Path) -> None:
    router, _ = artifacts(make_model())
    router.save(tmp_path)
    before, _ = load_artifact(tmp_path)
    lines = (tmp_path / CONFIG).read_text().splitlines()
    assert len(lines) == len(before) + 2
    (tmp_path / CONFIG).write_text(json.dumps(before, indent=1) + "\n")  # as earlier versions wrote it
    assert load_artifact(tmp_path)[0] == before
    write_json(tmp_path / CONFIG, before)
    assert (tmp_path / CONFIG).read_text().splitlines() == lines


@pytest.mark.parametrize("name", TRAINED)
def test_what_ships_is_written_so(name: str) -> None:
    folders = find_artifacts(name).values()
    for file in {*(f / CONFIG for f in folders), *(f.parent / "quality.json" for f in folders)}:
        written = file.read_text(encoding="utf-8")
        assert written == as_json(json.loads(written))
