"""A config, a settings file and arguments are the same options; a bad file is refused in one sentence."""

from __future__ import annotations

import json

import pytest
from tiny import attach, make_model
from tiny_artifacts import artifacts

import sparsekv
from sparsekv.util.errors import SparseKVError


def test_a_config_a_file_and_arguments_are_the_same_options(tmp_path) -> None:
    model = make_model()
    artifacts(model)[0].save(tmp_path / "router")
    given = {"selector": "router", "token_budget": 0.1, "sink_size": 2, "dense_layers": [0, -1], "dense_below": 7,
             "prefill": {"share": 0.5}, "options": {"adapt": False}}
    (tmp_path / "c.json").write_text(json.dumps({"router": "router", **given}))
    router = str(tmp_path / "router")
    config = sparsekv.SparseConfig(router=router, **given)
    for options in ({"config": tmp_path / "c.json"}, {"config": config}, {"config": config, "sink_size": 2},
                    {"router": router, **{k: v for k, v in given.items() if k != "options"}, "adapt": False}):
        with sparsekv.attach(model, **options) as attachment:
            found = attachment.decoding
        assert found.selector.token_budget == 0.1 and found.selector.adapt is False and found.prompts.share == 0.5
        assert (found.sink_size, found.window_size, found.dense_below, found.dense_layers) == (2, 16, 7, {0, 2})
    with sparsekv.attach(model, config=config, sink_size=9) as attachment:
        assert attachment.decoding.sink_size == 9
    assert sparsekv.SparseConfig.of(config).given() == {"router": router, **given}


@pytest.mark.parametrize(("content", "message"), [
    ({"sinks": 3}, "has an entry 'sinks'; expected some of artifacts, router, "),
    ({"sink_size": "many"}, "sink_size must be a whole number from 0 to 2147483647, found 'many'"),
    ({"dense_layers": [0, "last"]}, r"dense_layers must be whole numbers such as \[0, 1\], found"),
    ({"placement": "disk"}, "unknown placement 'disk': expected one of gpu, offload, cpu"),
    ({"memory_share": 0.1}, "has an entry 'memory_share'"), 
    ({"format": "sparsekv-settings", "layers": {}}, "budgets and gates by layer, .* give one token_budget")])
def test_a_bad_config_file_is_refused_in_one_sentence(tmp_path, content: dict, message: str) -> None:
    (tmp_path / "c.json").write_text(json.dumps(content))
    with pytest.raises(SparseKVError, match=message) as error:
        attach(make_model(), config=tmp_path / "c.json")
    assert str(tmp_path / "c.json") in str(error.value)


def test_what_is_no_config_is_refused() -> None:
    for wrong in (3, {"sink_size": 4}):
        with pytest.raises(SparseKVError, match="config is a SparseConfig or the path of a settings file, found"):
            attach(make_model(), config=wrong)
