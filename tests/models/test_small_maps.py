"""The maps that are trained by default, one hidden layer for queries, 64 features, 32 + 32 units for keys: they load
and run as the same map with an idle block."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

from tiny import attach, make_model, prompt
from tiny_artifacts import artifacts

from sparsekv.artifacts.phi import PhiArtifact
from sparsekv.core.layer import Queries
from sparsekv.kernels import FeatureMapWeights
from sparsekv.models.feature_map import CentredMap, FeatureMap, FeatureMaps
from sparsekv.runtime.vllm.index import Room
from sparsekv.runtime.vllm.summaries import bytes_of, empty_request, seated
from sparsekv.trainers.options import DEFAULT
from sparsekv.trainers.phi import RECIPES

RECIPE = RECIPES[DEFAULT]


def with_idle_block(maps: FeatureMaps) -> FeatureMaps:
    """The same map of queries, with a block that adds nothing: the form that earlier versions loaded."""
    q = maps.query
    *heads, _, width = q.w_in.shape
    block = torch.randn(*heads, width, width)
    idle = q._replace(w_a=block, b_a=torch.randn(*heads, width), w_b=block.mT, alpha=torch.zeros(*heads, 1))
    return maps._replace(query=FeatureMapWeights(*idle))


def trained(model, blocks: int) -> PhiArtifact:
    """An artifact of the default's form, with random weights."""
    _, like = artifacts(model)
    layers, heads_q = like.gate.shape
    heads, dim = like.config.model["num_kv_heads"], like.config.model["head_dim"]
    torch.manual_seed(3)
    query = FeatureMap(layers * heads_q, dim, RECIPE.features, RECIPE.width, RECIPE.query_blocks)
    keys = CentredMap(layers * heads, dim, RECIPE.features, RECIPE.key_width, shared=RECIPE.shared)
    maps = FeatureMaps(query.weights(), keys.plain.weights(), keys.centred.weights())
    maps = maps.map(lambda w: w.detach().unflatten(0, (layers, -1)))
    config = replace(like.config, num_features=RECIPE.features, width=RECIPE.width, key_width=RECIPE.key_width,
                     query_blocks=blocks, shared=RECIPE.shared)
    return PhiArtifact(config, with_idle_block(maps) if blocks else maps, like.shift, like.gate)


@pytest.mark.parametrize("eight_bits", [False, True])
def test_it_loads_and_decodes_as_with_an_idle_block(tmp_path, eight_bits: bool) -> None:
    assert (RECIPE.query_blocks, RECIPE.width, RECIPE.features, RECIPE.key_width) == (0, 128, 64, 32)
    model, ids = make_model(), prompt(180, batch=2)
    router, _ = artifacts(model, space="rot", scores="mean_key")
    logits = []
    for blocks in (0, 1):
        trained(model, blocks).save(tmp_path / str(blocks), eight_bits=eight_bits)
        phi = PhiArtifact.load(tmp_path / str(blocks))
        assert phi.config.query_blocks == blocks and phi.maps.query.alpha.shape[-1] == blocks
        with attach(model, router=router, phi=phi, token_budget=0.1) as attachment, torch.inference_mode():
            cache = attachment.prefill(ids[:, :-4])
            steps = [model(ids[:, i:i + 1], past_key_values=cache).logits for i in range(176, 180)]
            assert attachment.report()["sparse_calls"] > 0
        logits.append(torch.cat(steps, 1))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_vllm_s_summaries_take_it() -> None:
    model = make_model()
    sizes, found = [], []
    heads, dim = 2, 16
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, dim, generator=generator)
    for blocks in (0, 1):
        layer = trained(model, blocks).layer(1)
        assert layer is not None
        whole = seated(empty_request(layer, (heads, 0, dim), torch.float32, torch.device("cpu")), Room(2, 64))
        sizes.append(bytes_of(layer, Room(2, 64), torch.float32)[0])
        queries = Queries(q[:, :, None], torch.tensor([1]), seats=torch.tensor([1]))
        found.append(whole.query(None, queries))  # type: ignore[arg-type]
    assert sizes[0] == sizes[1] - 4 * 4 * (2 * RECIPE.width**2 + RECIPE.width + 1)  # float32, four query heads
    torch.testing.assert_close(found[0].features, found[1].features)
