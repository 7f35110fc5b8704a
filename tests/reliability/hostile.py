"""Model files drawn by a seed that say what no model is: configurations and GGUF headers."""

from __future__ import annotations

import copy
import json
import random
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsekv.artifacts.hub.models import attention_sizes, load_config, load_model
from sparsekv.util.errors import SparseKVError

SECONDS, BYTES = 5.0, 1 << 30
"""What a file may cost until it is refused."""
SIZES = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size",
         "intermediate_size", "vocab_size", "max_position_embeddings", "num_labels")
OTHERS = ("eos_token_id", "rope_parameters", "rope_scaling", "model_type", "architectures", "hidden_act", "dtype",
          "rms_norm_eps", "tie_word_embeddings", "attention_bias", "rope_theta", "quantization_config", "layer_types",
          "text_config", "id2label", "auto_map", "_attn_implementation", "pad_token_id", "initializer_range")
VALUES: tuple[Any, ...] = (
    0, -1, 1, 3, 10**9, 2**63, 10**30, 1.5, -0.0, float("nan"), float("inf"), "x", "", "\x1b[2J", None, True, [], [0],
    [10**9], list(range(2000)), {}, {"rope_type": "longrope"}, {"rope_type": "yarn", "factor": 10**30}, {"": None},
    [[[]]], "../../etc/passwd", {"rope_type": "x"}, ["LlamaForCausalLM"] * 3)


def config_file(sound: Path, folder: Path, rng: random.Random) -> Path:
    """A copy of a model's folder whose config.json says something else in one to three places."""
    shutil.copytree(sound, folder)
    raw = json.loads((folder / "config.json").read_text())
    for _ in range(rng.choice((1, 1, 2, 3))):
        name = rng.choice(SIZES if rng.random() < 0.7 else OTHERS)
        raw[name] = copy.deepcopy(rng.choice(VALUES))
    text = json.dumps(raw)
    if rng.random() < 0.1:
        text = text[:rng.randrange(len(text))]
    (folder / "config.json").write_text(text)
    return folder


def gguf_file(file: Path, rng: random.Random | None = None) -> Path:
    """A tiny Llama in GGUF; with rng one in which a size, a count or some bytes of the header are others."""
    import gguf

    sizes = {"head_count": 4, "head_count_kv": 2, "block_count": 1, "embedding_length": 32, "feed_forward_length": 48,
             "context_length": 256}
    if rng is not None and rng.random() < 0.6:
        sizes[rng.choice(list(sizes))] = rng.choice((0, 3, 2**31, 2**32 - 1, 10**9))
    writer = gguf.GGUFWriter(file, "llama")
    for name, value in sizes.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["t", "1", "t1", "t11", *(f"w{i}" for i in range(60))])
    writer.add_token_types([1] * 64)
    writer.add_token_merges(["t 1", "t1 1"])
    torch.manual_seed(0)
    shapes = {"token_embd.weight": (64, 32), "output_norm.weight": (32,), "output.weight": (64, 32),
              "blk.0.attn_norm.weight": (32,), "blk.0.ffn_norm.weight": (32,), "blk.0.attn_q.weight": (32, 32),
              "blk.0.attn_k.weight": (16, 32), "blk.0.attn_v.weight": (16, 32), "blk.0.attn_output.weight": (32, 32),
              "blk.0.ffn_gate.weight": (48, 32), "blk.0.ffn_up.weight": (48, 32), "blk.0.ffn_down.weight": (32, 48)}
    for name, shape in shapes.items():
        writer.add_tensor(name, np.random.default_rng(0).standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if rng is not None and rng.random() < 0.6:
        data = bytearray(file.read_bytes())
        kind = rng.randrange(3)
        if kind == 0:
            data = data[:rng.randrange(1200)]
        elif kind == 1:
            at = rng.choice((8, 16))
            data[at:at + 8] = rng.choice((0, 1, 10**6, 2**40, 2**64 - 1)).to_bytes(8, "little")
        else:
            for _ in range(8):
                data[rng.randrange(1200)] = rng.randrange(256)
        file.write_bytes(data)
    return file


def sound_model(folder: Path) -> Path:
    """A tiny model that loads, and has been loaded once."""
    from tiny import make_tokenizer
    from ways import fresh_model

    fresh_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    load_model(str(folder), device="cpu")
    return folder


def loads(path: Path) -> bool:
    """Whether it loads, and a model of it answers or refuses; whatever else happens comes out."""
    began, before = time.process_time(), _peak()
    try:
        attention_sizes(load_config(str(path)))
        model, _ = load_model(str(path), device="cpu")
    except SparseKVError as refusal:
        assert "\n" not in str(refusal) and len(str(refusal)) < 1000
        return False
    finally:
        assert time.process_time() - began < SECONDS and _peak() - before < BYTES
    return model is not None


def drawn(sound: Path, folder: Path, count: int, first: int = 0) -> list[str]:
    """A word for every drawn file that is neither a model nor refused in a sentence."""
    failed = []
    for seed in range(first, first + count):
        rng = random.Random(seed)
        path = (gguf_file(folder / f"{seed}.gguf", rng) if seed % 3 == 0 else
                config_file(sound, folder / str(seed), rng))
        try:
            loads(path)
        except (Exception, AssertionError) as error:
            failed.append(f"{seed}: {type(error).__name__}: {str(error)[:200]}")
    return failed


def _peak() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
