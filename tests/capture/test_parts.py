"""Parts of a capture: some layers; what is refused and what is skipped, and why."""

import re

import pytest
import tokenizers
import torch
import transformers
from test_families import SIZES, Words, captured, compare_with_the_cache, tiny
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

from sparsekv.artifacts.hub.models import load_config, load_model
from sparsekv.capture.corpus import Document, make_windows
from sparsekv.capture.run import CaptureConfig, run_capture
from sparsekv.capture.store.store import storage_bytes
from sparsekv.capture.tap import probe
from sparsekv.kernels.dense import add_attention_reference
from sparsekv.util.errors import SparseKVError


def test_a_layer_alone_holds_the_same_numbers(tmp_path) -> None:
    model = tiny("llama")
    every = captured(model, tmp_path / "every").read(2, 0)
    store = captured(model, tmp_path / "one", layers="2")
    alone = store.read(2, 0)
    assert store.layers == [2]
    for name in ("keys_pre", "values", "queries_pre", "query_positions"):
        assert torch.equal(getattr(alone, name), getattr(every, name))
    assert torch.equal(alone.statistics["lse"], every.statistics["lse"])


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


@pytest.mark.parametrize("name", ["phi3-partial-longrope", "llama-dynamic", "gemma3-dynamic"])
def test_chunks_are_rotated_as_the_whole_window_is(name: str, tmp_path) -> None:
    """Past the trained length the tables of these types depend on how long the text is."""
    model = tiny(name)
    rotary = model.get_decoder().rotary_emb
    a = captured(model, tmp_path / "a").read(1, 0)
    b = captured(model, tmp_path / "b", chunk_size=33).read(1, 0)
    assert torch.equal(a.cos, b.cos) and torch.equal(a.sin, b.sin)
    torch.testing.assert_close(a.keys_pre, b.keys_pre, rtol=1e-4, atol=1e-5)
    assert "forward" not in vars(rotary)
    short = captured(model, tmp_path / "short", context_length=64).read(1, 0)
    assert not torch.allclose(short.cos, a.cos[:64])


def test_two_partial_attentions_merge_into_the_whole() -> None:
    torch.manual_seed(0)
    scores, values = 2 * torch.randn(1, 3, 5000, 40), torch.randn(1, 3, 40, 8)
    parts = [(scores[..., a].softmax(-1) @ values[:, :, a], scores[..., a].logsumexp(-1))
             for a in (slice(25, 40), slice(0, 25))]
    out, lse = add_attention_reference(*parts[0], *parts[1])
    torch.testing.assert_close(out, scores.softmax(-1) @ values)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


@pytest.mark.parametrize(("name", "skipped", "reason"), [
    ("SmolLM3Config", [3], "no rotary position embedding")])
def test_layers_of_other_kinds_are_skipped_and_the_rest_is_right(
    name: str, skipped: list[int], reason: str, tmp_path, capsys,
) -> None:
    extra = {"SmolLM3Config": {"no_rope_layers": [1, 1, 1, 0]}}[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, name)(
        **{**SIZES, "num_hidden_layers": 4, **extra})).eval()
    store = captured(model, tmp_path / "s", chunk_size=50)
    assert store.layers == [i for i in range(4) if i not in skipped]
    line = f"layers {', '.join(map(str, skipped))} are skipped: "
    assert line in (err := capsys.readouterr().err) and reason in err.partition(line)[2]
    compare_with_the_cache(model, store)


def test_a_model_from_disk_past_its_trained_length(tmp_path, capsys) -> None:
    """The whole way of the command: a folder, a tokenizer, RoPE scaling, an estimate that holds."""
    model = tiny("llama")
    model.save_pretrained(tmp_path / "model")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({chr(32 + i): i for i in range(96)} | {"?": 96}, "?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "model")
    scaling = '{"rope_type": "yarn", "factor": 4.0}'
    store = run_capture(CaptureConfig(
        model=str(tmp_path / "model"), corpus="embedded", output=str(tmp_path / "s"), context_length=1000,
        num_documents=2, queries_per_document=50, chunk_size=300, rope_scaling=scaling, device="cpu",
        dtype="float32"))
    said = re.search(r"the store takes ([0-9.]+) GB", capsys.readouterr().err)
    needed = storage_bytes(num_documents=2, num_layers=3, heads_kv=2, heads_q=4, length=1000, queries=50, dim=16)
    stored = sum(about["bytes"] for about in store.manifest["shards"].values())
    assert said and float(said[1]) == round(needed / 1e9, 2) and abs(needed - stored) < 0.05 * stored
    scaled, _ = load_model(str(tmp_path / "model"), dtype="float32", device="cpu", rope_scaling=scaling)
    cos, sin = scaled.model.rotary_emb(torch.zeros(1), torch.arange(1000)[None])
    item = store.read(1, 0)
    torch.testing.assert_close(item.cos, cos[0])
    torch.testing.assert_close(item.sin, sin[0])
    assert item.keys_pre.dtype == torch.bfloat16 and not torch.allclose(cos.square() + sin.square(), torch.ones(1))
    assert load_config(str(tmp_path / "model")).num_hidden_layers == 3
    with pytest.raises(SparseKVError, match="no model at"):
        load_config(str(tmp_path / "nothing" / "here"))


def test_a_model_spread_by_accelerate_is_captured_and_one_put_off_is_refused(tmp_path) -> None:
    """`--device balanced`: accelerate's hooks around the layers; weights outside the GPUs are not captured."""
    import accelerate

    alone, spread = (captured(model, tmp_path / name, chunk_size=50) for name, model in (
        ("alone", tiny("llama")),
        ("spread", accelerate.dispatch_model(tiny("llama"), device_map={"model": "cpu", "lm_head": "cpu"},
                                             main_device="cpu", force_hooks=True))))
    assert spread.manifest == alone.manifest
    with pytest.raises(SparseKVError, match=r"does not fit on the devices: .* --device balanced"):
        captured(accelerate.cpu_offload(tiny("llama"), execution_device=torch.device("cpu")), tmp_path / "off")
    assert not (tmp_path / "off").exists()
    with pytest.raises(SparseKVError, match="cannot be joined with --devices"):
        captured(tiny("llama"), tmp_path / "off", device="balanced", devices=2)


def test_documents_are_wrapped_in_the_chat_template() -> None:
    class Chat(Words):
        def apply_chat_template(self, messages: list[dict], tokenize: bool) -> str:
            assert not tokenize
            return f"<{messages[0]['role']}>{messages[0]['content']}"

    documents = [Document("a", "x" * 100)]
    window = make_windows(iter(documents), Chat(), length=60, count=1, chat_template=True)[0]
    assert window.tokens == Words()("<user>" + "x" * 54)["input_ids"]
