"""The loss on the output's error: its anchors are those of the runtime, and training with it lowers that error."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "capture"))

from test_families import captured, tiny

from sparsekv.artifacts.phi import PhiLayer
from sparsekv.core.estimators import PhiEstimator
from sparsekv.core.offline import relative_error, requests
from sparsekv.core.step import sparse_step
from sparsekv.trainers.anchors import anchor_attention
from sparsekv.trainers.calibrate import reader
from sparsekv.trainers.phi import PhiConfig, PhiRecipe, PhiTask, train_phi
from sparsekv.trainers.pool import Part, load_pool


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return captured(tiny("llama"), tmp_path_factory.mktemp("capture") / "s", num_documents=5, context_length=200,
                    queries_per_document=64)


def test_anchor_attention_is_that_of_sink_and_tail(store) -> None:
    pool = load_pool(store, [Part(layer, 0, 2) for layer in (0, 2)], [1, 3], device="cpu")
    pool = replace(pool, positions=pool.positions.clone())
    pool.positions[0, :4] = torch.tensor([0, 2, 5, 20])  # hardly a sink, a tail cut short
    out, lse = anchor_attention(pool, at_once=10)  # several pieces
    columns = torch.arange(200)
    for document in range(2):
        place = pool.positions[document][:, None]
        seen = (columns <= place) & ((columns < pool.sink_size) | (columns > place - pool.window_size))
        q = pool.queries[document].float().unflatten(0, (pool.heads_kv, -1))
        scores = torch.einsum("hgtd,hnd->hgtn", q, pool.keys[document].float()) * pool.scale
        scores = scores.masked_fill(~seen, float("-inf"))
        want = torch.einsum("hgtn,hnd->hgtd", scores.softmax(-1), pool.values[document].float()).flatten(0, 1)
        torch.testing.assert_close(out[document].float(), want, rtol=2e-2, atol=2e-3)
        torch.testing.assert_close(lse[document], scores.logsumexp(-1).flatten(0, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("centred", [False, True])
def test_the_trained_loss_is_the_measured_error(store, centred: bool) -> None:
    """All keys of a window in a step: the output term, without its second case, is the error of the product's own step
    on a request that ends at the query."""
    pool = load_pool(store, [Part(1, 0, 2)], [0], device="cpu")
    recipe = PhiRecipe(width=16, keys_per_step=4096, batch_size=6, centred=centred, turned=0.0)
    task = PhiTask(recipe, pool, pool, [Part(1, 0, 2)], 0)
    task.output = replace(task.output, read=0.0)
    request = next(requests(pool.window(0), 1, span=1, first=0.9))
    end = int(request.queries.lengths[0])
    # the request's local window ends with its prefill, that of training with the query
    request.view.regions = request.view.regions.moved(end - pool.window_size, end)
    estimator = PhiEstimator(PhiLayer(task.maps().map(torch.Tensor.detach), torch.zeros(1, 4)))
    estimator.build(request.view)
    if centred:
        task.centres[0, 0] = estimator.centre[0]
    at = int((pool.positions[0] == end - 1).nonzero()[0])
    every = torch.arange(pool.sink_size, 200 - pool.window_size)
    found = task.losses({"document": torch.tensor([0]), "query": torch.tensor([[at]]), "key": every[None],
                         "log_count": torch.zeros(1), "centre": torch.tensor([0])})["output"]
    step = sparse_step(request.view, request.queries, reader(None), estimator)
    want = relative_error(step.out[0].transpose(0, 1), request.full).mean(0).reshape(2, 2)
    torch.testing.assert_close(found, want, rtol=3e-2, atol=3e-3)  # anchors are kept in bfloat16


def test_training_on_the_output_lowers_its_error(store, tmp_path) -> None:
    options = {"capture": str(store.path), "batch_size": 16, "keys_per_step": 64, "width": 16, "max_steps": 80,
               "features": 0, "key_width": 64, "query_blocks": 1}
    errors = [train_phi(PhiConfig(output=str(tmp_path / str(weight)), output_weight=weight, **options))
              .config.quality["sink_tail + phi error"] for weight in (0.0, 3.0)]
    assert errors[1] < errors[0]
