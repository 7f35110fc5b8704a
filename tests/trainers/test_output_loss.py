"""The loss on the output's error: its anchors are those of the runtime, and training with it lowers that error."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "capture"))

from test_families import captured, tiny

from sparsekv.core import offline
from sparsekv.core.rope import rotate
from sparsekv.models.feature_map import log_kernel, log_phi
from sparsekv.trainers import anchors
from sparsekv.trainers.phi import PhiConfig, PhiTask, train_phi
from sparsekv.trainers.pool import Part, load_pool


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return captured(tiny("llama"), tmp_path_factory.mktemp("capture") / "s", num_documents=5, context_length=200,
                    queries_per_document=64)


def test_anchor_attention_is_that_of_sink_and_tail(store, monkeypatch) -> None:
    monkeypatch.setattr(anchors, "ELEMENTS_AT_ONCE", 10_000)  # several pieces
    pool = load_pool(store, [0, 2], [1, 3], device="cpu", dtype=torch.float32)
    pool = replace(pool, positions=pool.positions.clone())
    pool.positions[0, :, :4] = torch.tensor([0, 2, 5, 20], dtype=torch.int32)  # hardly a sink, a tail cut short
    out, lse = anchors.anchor_attention(pool)
    for document in range(2):
        scene = offline.make_scene(pool.queries[document], pool.keys[document], pool.values[document],
                                   pool.positions[document], scale=pool.scale, sink_size=pool.sink_size,
                                   window_size=pool.window_size)
        torch.testing.assert_close(out[document], offline.output(scene))
        exact = scene.scores.masked_fill(~scene.anchors, offline.NEG_INF)
        torch.testing.assert_close(lse[document], exact.logsumexp(-1))


@pytest.mark.parametrize("centred", [False, True])
def test_the_trained_loss_is_the_measured_error(store, centred: bool) -> None:
    """All keys of a window in a step: the output term is the error that calibration measures."""
    pool = load_pool(store, [1], [0, 1, 2, 3], device="cpu", dtype=torch.float32)
    config = PhiConfig(capture="", output="", width=16, keys_per_step=0, batch_size=6, output_weight=1.0,
                       documents_per_step=2, centred=centred)
    task = PhiTask(config, pool, pool, [Part(1, 0, 2)])
    draw = {name: row[0] for name, row in task.draws(0, 1).items()}
    # stretches share their keys between the documents of a step; here every key of both
    every = torch.arange(pool.sink_size, 200 - pool.window_size)
    draw |= {"key": every.expand(2, -1), "log_count": torch.zeros(1)}
    found = task.losses(draw)["output"]
    want = torch.zeros_like(found)
    for row, document in enumerate(draw["document"].tolist()):
        at = draw["query"][row]
        queries, keys = pool.queries[document][:, at], pool.keys[document]
        scene = offline.make_scene(queries, keys, pool.values[document], pool.positions[document][:, at],
                                   scale=pool.scale, sink_size=pool.sink_size, window_size=pool.window_size)
        centre = task.centres[draw["centre"][row], document] if centred else None
        maps = task.maps()
        log_q, log_k = maps.log_phi_q(queries, centre, pool.scale), maps.log_phi_k(keys, centre)
        student = (log_q.reshape(2, 2, 3, 1, -1) + log_k.reshape(2, 1, 1, 200, -1)).logsumexp(-1).reshape(4, 3, 200)
        best = offline.best(scene.scores.masked_fill(~scene.mid, offline.NEG_INF),
                            torch.full((1, 3), round(0.02 * len(every))))
        for read in (None, best):
            error = offline.relative_error(scene, offline.output(scene, read, student))
            want += error.reshape(2, 2) / 2
    torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-4)


def test_training_on_the_output_lowers_its_error(store, tmp_path) -> None:
    options = {"capture": str(store.path), "batch_size": 16, "keys_per_step": 64, "width": 16, "max_steps": 80,
               "calibrate": False, "random_windows": 0.3}
    errors = [train_phi(PhiConfig(output=str(tmp_path / str(weight)), output_weight=weight, **options))
              .config.quality["sink_tail + phi error"] for weight in (0.0, 3.0)]
    assert errors[1] < errors[0]


def test_moving_all_positions_moves_the_vectors_and_leaves_attention(store) -> None:
    pool = load_pool(store, [0, 2], [1, 3], device="cpu", dtype=torch.float32, space="pre")
    shift = torch.tensor([7.0, -3.0])
    queries, keys = (x.transpose(0, 1) for x in (pool.queries, pool.keys))
    moved_q, moved_k = pool.moved(queries, shift), pool.moved(keys, shift)
    item = store.read(2, 1)
    want = rotate(item.keys_pre[:, :-7].float(), item.cos[7:], item.sin[7:], item.layout)
    torch.testing.assert_close(moved_k[2:, 0, :-7], want, rtol=1e-3, atol=1e-4)
    scores, before = (q.unflatten(0, (-1, 2)).flatten(2, 3) @ k.flatten(1, 2).mT[:, None]
                      for q, k in ((moved_q[:, :1], moved_k[:, :1]), (queries[:, :1], keys[:, :1])))
    torch.testing.assert_close(scores, before, rtol=1e-3, atol=1e-3)
    assert (moved_k[:, 1] - keys[:, 1]).abs().max() > 0.1


def test_a_centred_half_adds_what_the_keys_share_exactly(store) -> None:
    """`φ_q φ_k` of the centred half is the map's of `q` and `k − k̄`, times `exp(scale · q·k̄)`; a request's mean key is
    that of keys before the query."""
    pool = load_pool(store, [1], [0, 1, 2, 3], device="cpu", dtype=torch.float32)
    maps = PhiTask(PhiConfig(capture="", output="", width=16), pool, pool, [Part(1, 0, 2)]).maps()
    assert maps.centred is not None
    queries, keys, half = pool.queries[0], pool.keys[0], maps.query.b_out.shape[-1] // 2
    context = torch.full((1, queries.shape[1]), 110)
    found = maps.surrogate(queries, keys, context, scale=0.3, sink_size=4, steps=2)
    centre = keys[:, 4:100].mean(1)
    moved = log_phi(keys - centre[:, None], maps.centred)
    log_q = log_phi(queries, maps.query)
    share = torch.einsum("htd,hd->ht", queries, centre.repeat_interleave(2, 0)) * 0.3
    want = torch.logaddexp(log_kernel(log_q[..., :half].reshape(2, -1, half), log_phi(keys, maps.key)),
                           log_kernel(log_q[..., half:].reshape(2, -1, half), moved) + share.reshape(2, -1, 1))
    torch.testing.assert_close(found, want.reshape(found.shape))
    later = keys.clone()
    later[:, 101:] += 3.0
    torch.testing.assert_close(maps.surrogate(queries, later, context, scale=0.3, sink_size=4, steps=2)[..., :101],
                               found[..., :101])
