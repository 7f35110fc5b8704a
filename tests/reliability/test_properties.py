"""What holds for any record, header, option and number, by hypothesis, which shrinks what breaks it to its smallest
form; the seeded attacks of `attacks.py` try many more cases a second."""

import json
import struct
from pathlib import Path
from typing import Any

import attacks
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny import make_model, prompt
from tiny_artifacts import artifacts

from sparsekv.artifacts.checks import digest
from sparsekv.artifacts.format import TENSORS
from sparsekv.capture.store.manifest import sealed
from sparsekv.core.selectors import SELECTORS
from sparsekv.kernels import attend_tokens
from sparsekv.runtime.hf.attach import attach

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4), max_leaves=8)
QUICK = settings(max_examples=60, deadline=None, derandomize=True,
                 suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, attacks.Target]:
    return {t.name: t for t in attacks.targets(tmp_path_factory.mktemp("sound"))}


def sentence(work: Any) -> None:
    problem, _ = attacks.refused(work)
    assert problem is None, problem


@pytest.mark.parametrize("name", ["router config.json", "phi config.json", "settings", "store manifest"])
@QUICK
@given(data=st.data())
def test_any_value_in_any_field(name: str, targets: dict[str, attacks.Target], data: st.DataObject) -> None:
    target = targets[name]
    sound = target.file.read_text()
    record = {k: v for k, v in json.loads(sound).items() if k != "sha256"}
    record[data.draw(st.sampled_from(sorted(record)))] = data.draw(JSON)
    if "config" in name:
        record["sha256"] = digest(record, load_file(target.file.parent / TENSORS))
    elif name == "store manifest":
        record = sealed(record)
    try:
        target.file.write_text(json.dumps(record))
        sentence(target.read)
    finally:
        target.file.write_text(sound)


@pytest.mark.parametrize("name", ["router model.safetensors", "prefix"])
@QUICK
@given(length=st.integers(0, 2**64 - 1) | st.integers(0, 4000), header=st.binary(max_size=60) | JSON.map(
    lambda x: json.dumps(x).encode()), cut=st.integers(0, 400))
def test_any_header(name: str, targets: dict[str, attacks.Target], length: int, header: bytes, cut: int) -> None:
    file: Path = targets[name].file
    sound = file.read_bytes()
    try:
        file.write_bytes(struct.pack("<Q", length) + header + sound[cut:cut + 300])
        sentence(targets[name].read)
    finally:
        file.write_bytes(sound)


@QUICK
@given(data=st.data(), tokens=st.integers(1, 60))
def test_any_option_of_any_selector(data: st.DataObject, tokens: int) -> None:
    model = make_model()
    name = data.draw(st.sampled_from(sorted(SELECTORS)))
    options: dict[str, Any] = {"selector": name, "token_budget": 8, "dense_below": 0}
    if SELECTORS[name].is_trained():
        options["router"] = artifacts(model)[0]
    option = data.draw(st.sampled_from(sorted({*SELECTORS[name].option_names(), "sink_size", "window_size",
                                               "decode_window", "dense_layers", "dense_below", "completion"})))
    value = data.draw(JSON)
    options[option] = min(value, 10_000) if type(value) is int and value < 2**31 else value

    def generate() -> None:
        with attach(model, **options):
            model.generate(prompt(tokens), max_new_tokens=3, do_sample=False)

    sentence(generate)


@QUICK
@given(scores=st.lists(st.floats(-1e300, 1e300, allow_subnormal=False), min_size=4, max_size=24), at=st.integers(1, 4))
def test_attention_is_finite_and_within_its_values_for_any_scores(scores: list[float], at: int) -> None:
    keys = torch.tensor(scores, dtype=torch.float64)[None, None, :, None]
    count, values = len(scores), torch.linspace(-1, 1, len(scores), dtype=torch.float64)[None, None, :, None]
    tokens = torch.arange(1, count - 1)[None, None, ::at]
    out, lse = attend_tokens(
        torch.ones(1, 1, 1, dtype=torch.float64), keys, values, tokens, scale=1.0, starts=torch.tensor([0]),
        sink_size=1, tail_starts=torch.tensor([count - 1]), lengths=torch.tensor([count]))
    read = torch.cat([torch.tensor([0]), tokens[0, 0], torch.tensor([count - 1])])
    assert torch.isfinite(lse).all() and values[0, 0, read].min() - 1e-9 <= out <= values[0, 0, read].max() + 1e-9
    assert float(lse) >= float(keys[0, 0, read].max()) - 1e-6 * abs(float(keys[0, 0, read].max()))
