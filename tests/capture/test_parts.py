"""Parts of a capture: some layers, heads, keys; what is refused and what is skipped, and why."""

import pytest
import torch
from test_families import captured, tiny
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

from sparsekv.capture.tap import probe
from sparsekv.errors import SparseKVError
from sparsekv.kernels.dense import lerp_rows


def test_fewer_layers_heads_and_keys_hold_the_same_numbers(tmp_path) -> None:
    model = tiny("llama")
    whole = captured(model, tmp_path / "whole").read(2, 0)
    store = captured(model, tmp_path / "part", layers="2", kv_heads="1", key_fraction=0.25, chunk_size=50)
    part = store.read(2, 0)
    assert (store.layers, store.num_kv_heads, store.num_query_heads) == ([2], 1, 2)
    assert part.key_positions is not None and len(part.key_positions) == 30
    close = {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(part.keys_pre, whole.keys_pre[1:, part.key_positions], **close)
    torch.testing.assert_close(part.keys_rot(), whole.keys_rot()[1:, part.key_positions], **close)
    torch.testing.assert_close(part.values, whole.values[1:, part.key_positions], **close)
    torch.testing.assert_close(part.queries_pre, whole.queries_pre[2:], **close)
    torch.testing.assert_close(part.statistics["lse"], whole.statistics["lse"][2:], **close)
    with pytest.raises(SparseKVError, match="holds only a part of the heads or keys"):
        store.require_whole("training")


def test_sliding_layers_are_named_with_the_reason(tmp_path, capsys) -> None:
    store = captured(tiny("gemma3"), tmp_path / "s")
    assert "layers 0 are skipped: sliding-window attention over 16 tokens" in capsys.readouterr().err
    assert store.manifest["skipped_layers"] == {"0": "sliding-window attention over 16 tokens"}


def test_latent_attention_is_refused_by_name() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(DeepseekV3Config(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
        first_k_dense_replace=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)).eval()
    with pytest.raises(SparseKVError, match="DeepseekV3ForCausalLM is not supported: multi-head latent attention"):
        probe(model)


def test_rotation_that_cannot_be_undone_is_refused(monkeypatch) -> None:
    import transformers.models.llama.modeling_llama as file

    model, original = tiny("llama"), file.apply_rotary_pos_emb
    monkeypatch.setattr(file, "apply_rotary_pos_emb", lambda q, k, cos, sin, **_: original(q, k, cos, sin * 0.5 + 0.1))
    with pytest.raises(SparseKVError, match=r"LlamaForCausalLM .* layer 0 does not survive the round-trip check"):
        probe(model)
    monkeypatch.undo()
    assert sorted(probe(model)[0]) == [0, 1, 2] and file.apply_rotary_pos_emb is original


def test_length_dependent_rotation_is_prefilled_in_one_piece(tmp_path, capsys) -> None:
    model = tiny("phi3-partial-longrope")
    a = captured(model, tmp_path / "a").read(1, 0)
    b = captured(model, tmp_path / "b", chunk_size=33).read(1, 0)
    assert "longrope RoPE past 64 tokens depends on the length" in capsys.readouterr().err
    assert torch.equal(a.cos, b.cos) and torch.equal(a.keys_pre, b.keys_pre)


def test_two_partial_attentions_merge_into_the_whole() -> None:
    torch.manual_seed(0)
    scores, values = 2 * torch.randn(1, 3, 5000, 40), torch.randn(1, 3, 40, 8)
    near, far = (scores[..., a].softmax(-1) @ values[:, :, a] for a in (slice(25, 40), slice(0, 25)))
    share = torch.sigmoid(scores[..., :25].logsumexp(-1) - scores[..., 25:].logsumexp(-1))
    torch.testing.assert_close(lerp_rows(near, far, share), scores.softmax(-1) @ values)
