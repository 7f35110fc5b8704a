"""A batch of chats goes on by turns that differ in length: every row is what it would be alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import COMMON, FAMILIES
from tiny_artifacts import artifacts

from sparsekv.runtime.hf.attach import RunOptions, attach
from sparsekv.util.errors import SparseKVError

ALL: dict[str, Any] = {"selector": "topk", "token_budget": 4096, "dense_below": 0, "dense_layers": ()}
TURNS = ((60, 44), (5, 17), (30, 9))
NEW = 7


def model_of(family: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    own = {k: v for k, v in {**COMMON, **FAMILIES[family]}.items() if v is not ...}
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**own, "initializer_range": 0.3, "max_position_embeddings": 512})
    return AutoModelForCausalLM.from_config(config).eval()


def turns() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and mask `[2, N]` of every turn, the shorter row padded on the left."""
    generator, found = torch.Generator().manual_seed(5), []
    for lengths in TURNS:
        ids = torch.randint(1, 97, (2, max(lengths)), generator=generator)
        mask = (torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]).long()
        found.append((ids * mask, mask))
    return found


def chat(model: Any, cache: Any, row: int | None = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """All answers of a batch of chats `[B, n]`, and their scores; row: of that row by itself, without padding."""
    rows = 2 if row is None else 1
    text, mask = torch.zeros(rows, 0, dtype=torch.long), torch.zeros(rows, 0, dtype=torch.long)
    said, scores = [], []
    for ids, real in turns():
        if row is not None:
            ids, real = (x[row:row + 1, real[row].bool()] for x in (ids, real))
        text, mask = torch.cat([text, ids], 1), torch.cat([mask, real], 1)
        out = model.generate(text, attention_mask=mask, past_key_values=cache, max_new_tokens=NEW, do_sample=False,
                             eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, output_scores=True)
        text, scores = out.sequences, [*scores, *out.scores]
        said.append(text[:, -NEW:])
        mask = torch.cat([mask, mask.new_ones(rows, NEW)], 1)
    return torch.cat(said, 1), scores


def error(found: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, right, strict=True))


@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_turns_of_other_lengths_are_answered_as_by_the_model(family: str, chunks: bool) -> None:
    """As to each row alone: in a batch a window of transformers' counts the padding that lies in it."""
    from transformers import DynamicCache

    model = model_of(family)
    alone = [chat(model, DynamicCache(config=model.config), row) for row in (0, 1)]
    with attach(model, **ALL, run=RunOptions(sparse_chunks=chunks)) as attachment:
        found, scores = chat(model, attachment.cache())
        assert attachment.report()["sparse_calls"] and attachment.report()["replayed_steps"]
    for row, (said, right) in enumerate(alone):
        assert torch.equal(found[row], said[0])
        assert error([x[row:row + 1] for x in scores], right) < 1e-4
    if family == "llama":
        said, right = chat(model, DynamicCache(config=model.config))
        assert torch.equal(found, said) and error(scores, right) < 1e-4


@pytest.mark.parametrize("options", [{}, {"placement": "cpu"}, {"run": RunOptions(replays=False)}])
def test_every_row_is_what_it_is_alone(options: dict[str, Any]) -> None:
    """By a router of keys without RoPE, of few tokens, in the attachment's own loop; tables move with their keys."""
    model = model_of("llama")
    router = artifacts(model, scores="mean_key", space="pre")[0]
    few = {"router": router, "token_budget": 12, "dense_below": 0, "dense_layers": (), "window_size": 4, **options}
    with attach(model, **few) as attachment:
        cache, mask, said = attachment.cache(), torch.zeros(2, 0, dtype=torch.long), []
        alone: list[Any] = [attachment.cache(), attachment.cache()]
        for ids, real in turns():
            mask = torch.cat([mask, real], 1)
            out = attachment.generate(ids, mask, cache=cache, max_new_tokens=NEW, eos_token_id=[], pad_token_id=0)
            said.append(out[:, ids.shape[1]:])
            mask = torch.cat([mask, mask.new_ones(2, NEW - 1)], 1)  # the last token is not in the cache
            for row in (0, 1):
                own = ids[row:row + 1, real[row].bool()]
                for layer in alone[row].layers:
                    layer.state = None  # an index is built anew where rows move
                one = attachment.generate(own, cache=alone[row], max_new_tokens=NEW, eos_token_id=[], pad_token_id=0)
                assert torch.equal(one[0, own.shape[1]:], said[-1][row]), f"row {row} of turn {len(said)}"
        assert attachment.report()["sparse_calls"]


def test_a_sparse_chunk_reads_as_many_more_last_tokens_as_a_row_has_padding() -> None:
    """A chunk has one border for all rows, by places: of a row that was moved, that of a longer window."""
    model = model_of("llama")
    few: dict[str, Any] = {"selector": "topk", "token_budget": 6, "dense_below": 0, "dense_layers": (),
                           "run": RunOptions(sparse_chunks=True)}
    (ids, mask), (more, real), _ = turns()

    def logits(row: int | None, window: int) -> torch.Tensor:
        with attach(model, **few, window_size=window) as attachment, torch.no_grad():
            kept = slice(None) if row is None else slice(row, row + 1)
            first, second = ((x[kept], y[kept]) for x, y in ((ids, mask), (more, real)))
            if row is not None:
                first, second = ((x[:, y[0].bool()], y[:, y[0].bool()]) for x, y in (first, second))
            cache = attachment.prefill(*first)
            whole = torch.cat([first[1], second[1]], 1)
            return model(second[0], attention_mask=whole, past_key_values=cache,
                         position_ids=(whole.cumsum(1) - 1).clamp(min=0)[:, -second[0].shape[1]:]).logits

    both, padding = logits(None, 4), int((real[0] == 0).sum())
    assert padding == 12 and not bool((real[1] == 0).any())
    torch.testing.assert_close(both[1:], logits(1, 4), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(both[:1, padding:], logits(0, 4 + padding), rtol=1e-4, atol=1e-4)
    assert float((both[:1, padding:] - logits(0, 4)).abs().max()) > 1e-2


def test_a_turn_in_chunks_is_read_as_in_one_piece() -> None:
    """Also where a chunk has nothing but a row's padding."""
    model = model_of("llama")
    (ids, mask), (more, real), _ = turns()
    whole = torch.cat([mask, real, real[:, -1:]], 1)
    with attach(model, **ALL) as attachment:
        right, found = (attachment.generate(
            more[:, -1:], whole, max_new_tokens=4, eos_token_id=[], pad_token_id=0, cache=attachment.prefill(
                more, whole[:, :-1], cache=attachment.prefill(ids, mask), chunk_size=size)) for size in (None, 4))
    assert torch.equal(found, right)


def test_padding_elsewhere_and_a_mask_that_is_missing_are_refused() -> None:
    model = model_of("llama")
    (ids, mask), (more, real), _ = turns()
    with attach(model, **ALL) as attachment:
        cache = attachment.prefill(ids, mask)
        with pytest.raises(SparseKVError, match="needs left padding, found padding after or between real tokens"):
            attachment.prefill(more, torch.cat([mask, real.flip(1)], 1), cache=cache)
        attachment.prefill(more, torch.cat([mask, real], 1), cache=cache)
        with pytest.raises(SparseKVError, match="rows of this cache have padding; give the attention_mask"):
            attachment.step(more[:, :1], cache)
        cache.reset()
        assert attachment.step(more[:, :1], cache) is not None
