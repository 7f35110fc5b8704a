"""What pages show of which rows: the table of specifications that `pages.py` draws. No result is typed here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.curves import EIGHT, FIFTH, METHODS, by_codes
from benchmarks.pages import MISSING, Cell, Grid, Page, Row, Table, Text, Where, subject
from sparsekv.evaluation.methods import percent

H200, H100 = "NVIDIA H200, torch 2.11.0+cu130", "NVIDIA H100 80GB HBM3, torch 2.11.0+cu130"
MODEL = "coder-1.5b"
NOW, LONG = "coder-1.5b-small", "coder-1.5b-long"
"""With what `sparsekv train` makes now, on windows of the prompts' length; rows of `MODEL` in `real` are older."""
WORDS: dict[Any, str] = {
    H200: "H200", H100: "H100", MODEL: "1.5B", "coder": "1.5B", "8b": "8B shape", "32b": "32B shape",
    "smollm2": "SmolLM2", "smollm2-long": "SmolLM2, tuned to 32k", "smollm2-32k": "SmolLM2, tuned to 32k",
    "coder-0.5b": "0.5B", NOW: "1.5B, as it ships", "made": "synthetic text", "code": "program text",
    "own": "the model's own text", "full": "full attention", "dense": "full attention", "topk": "exact top-k",
    "sketch+phi": "sketch + φ", "topk+phi": "exact top-k + φ",
    "sketch+centroid": "sketch + centroids", "sketch:fit=fixed+phi": "sketch of a fixed basis + φ",
    "sketch+phi, 2 %": "sketch + φ, 2 %", "sketch+phi at 1 %": "sketch + φ, 1 %",
    **{by_codes(m): f"{name}, a fifth of the codes" for m, (name, _) in METHODS.items() if m.startswith("sketch")},
    "sketch:fit=fixed:candidates=0.1+phi": "sketch of a fixed basis, codes of a tenth + φ",
    "topk+centroid": "exact top-k + centroids", "sketch+uniform": "sketch + uniform sample",
    "router+phi": "router + φ", "token_select": "TokenSelect",
    "lfps:alpha=0.1:fills=true": "LFPS", "quest": "Quest",
    "quest:page_size=8": "Quest, pages of 8", "magicpig": "MagicPIG", "pyramidkv:beta=2": "PyramidKV",
    "snapkv:observation_window=16:kernel_size=5:pooling=avg": "SnapKV", "streaming_llm": "StreamingLLM",
    "vllm_fa3": "vLLM", "vllm_sparsekv": "sparsekv", "attach": "attach"}
OURS = ("topk", "topk+phi", "sketch", "sketch+centroid", "sketch+phi")
RIVALS = ("token_select", "lfps:alpha=0.1:fills=true", "quest", "magicpig", "pyramidkv:beta=2",
          "snapkv:observation_window=16:kernel_size=5:pooling=avg", "streaming_llm")
FULL = {"metric": "difference", "against": "full"}
FEW = (0.01, 0.02, 0.05)


def by_budget(budgets: Sequence[float], **where: Any) -> list[Cell]:
    """Points with half the interval, a column a budget."""
    return [Cell(percent(b), {**where, "budget": b}, "{:+.1f}", spread="±") for b in budgets]


def samples(budget: float | None = 0.01, title: str = "prompts", **where: Any) -> Cell:
    return Cell(title, {**where, "budget": budget}, "{}", of="samples")


def share(budgets: Sequence[float], **where: Any) -> list[Cell]:
    return [Cell(f"bytes, {percent(b)}", {"metric": "score", **where, "budget": b}, "{:.1f} %", of="bytes_share",
                 scale=100) for b in budgets]


def real(case: str | tuple[str, ...], name: str = MODEL, machine: str = H200, **more: Any) -> dict[str, Any]:
    cases = f"{name}:{case}" if isinstance(case, str) else tuple(f"{name}:{c}" for c in case)
    return {"case": cases, "machine": machine, **more}


def ms(case: str, method: str, metric: str = "loop_ms", form: str = "{:.1f}", **more: Any) -> Cell:
    return Cell(rows="generate", where={"case": case, "method": method, "metric": metric}, form=form, **more)


def points(method: str, budget: float, against: str = "full", case: str = "ruler@16384", form: str = "{:+.1f}",
           spread: str = "±", name: str = NOW, machine: str = H200, of: str = "value") -> Cell:
    return Cell(rows="real", where=real(case, name, machine, method=method, budget=budget, against=against,
                                        metric="difference"), form=form, spread=spread, of=of)


BEFORE = "sketch:fit=fixed:candidates=0.1+phi"  # how the default of 490c9fa chose, with the maps of now
SMALL = "coder-0.5b", "smollm2-32k"
KINDS, KL_LENGTHS = (("text", "text"), ("RULER", "ruler")), (16_384, 32_768, 65_536, 131_072)
KL_METHODS = ("full", "topk", "topk+phi", "topk+centroid", "sketch", "sketch+phi", "sketch:fit=fixed+phi",
              BEFORE, "sketch+centroid", "token_select", "quest")


def kl_case(task: str, length: int, model: str = MODEL) -> str:
    return f"{model}:{task}@{length}"


def by_kind(form: str, spread: str = "±", model: str = MODEL, lengths: Sequence[int] = KL_LENGTHS) -> list[Cell]:
    """A column a kind of text and length."""
    return [Cell(f"{words}, {n // 1024}k", {"case": kl_case(task, n, model)}, form, spread=spread)
            for words, task in KINDS for n in lengths]


QUALITY = Page(
    "Quality", "KL tells methods apart that points cannot: scores of a hundred prompts are known to a few points. "
    "Points are RULER's, of 100, minus full attention's on the same prompts. ± is half the 95 % bootstrap "
    "interval. A budget is the share of the context that a query retrieves. Prompts are read with full attention, and "
    "layer 0 keeps it. The model is Qwen2.5-Coder-1.5B-Instruct (1.5B), Q4_K_M, run in bfloat16; its router and maps "
    "are of `sparsekv train` on windows of speeches, a quarter of them synthetic. “–” was not measured. From “Rivals” "
    "on tables are of the default before (a fixed basis, candidates of a tenth, maps of 393 kB a query head) unless "
    "they name another.", [
        Table("KL to full attention", "kl", {"method": "method"}, by_kind("{:.4f}"),
              {"metric": "kl", "budget": (0.01, None), "method": KL_METHODS},
              "1 % is retrieved. KL(full ‖ method) of the next token [nats/token], along the text or full attention's "
              "answer to RULER's tasks; less is better. Router and maps are of windows of the prompts' length, "
              "sketches are fitted to the request unless another fit is named; 64k and 128k are by YaRN, with maps of "
              "windows of 64k. Two prompts of each of RULER's 13 tasks (one at 128k), 12 texts, 64 tokens of a text, "
              "at most 64 of an answer, one request at a time."),
        Table("KL of one method over another's", "kl", {"method": "method", "against": "over that of"},
              by_kind("{:.2f}", "to"),
              {"metric": "kl_ratio", "budget": (0.01, 0.02), "method": (
                  "topk+phi", "sketch+phi", "sketch+phi, 2 %", "sketch:fit=fixed+phi", "sketch+centroid", BEFORE),
               "against": ("topk+phi", "sketch+phi at 1 %", "sketch+centroid", BEFORE)},
              "1 % is retrieved where no other share is named. Ratios are paired by prompt, with 95 % intervals: below "
              "1 the method is nearer to full attention."),
        Table("KL of what eight requests score", "kl", {"method": "method"},
              by_kind("{:.4f}", model=EIGHT, lengths=(32_768, 65_536)),
              {"metric": "kl", "budget": (0.01, None), "method": ("full", *map(by_codes, METHODS), "sketch+phi")},
              "1 % is retrieved. Eight requests of more than 16k tokens score a fifth of the codes (`candidates=0.2`), "
              "one scores all. Prompts, units and training of the first table. Times of the picture are of eight "
              "requests: of 16k and 64k tokens on an H100 with random weights and drawn keys, of 30k on an H200.",
              curves="kl"),
        Table("The likeliest token is full attention's", "kl", {"method": "method"}, by_kind("{:.1f} %", ""),
              {"metric": "kl_same", "budget": 0.01, "method": KL_METHODS}, "1 % is retrieved."),
        *(Table(f"KL by budget{words}, 32k tokens", "kl", {"method": "method"}, [
            *(Cell(kind, {"case": kl_case(task, 32_768, model)}, "{:.4f}", spread="±") for kind, task in KINDS),
            *(Cell(f"{kind}, times that of sketch, 5 %", {"case": kl_case(task, 32_768, model), "metric": "kl_ratio",
                                                          "against": f"sketch{codes}, 5 %"}, "{:.2f}", spread="to")
              for kind, task in KINDS)], {"metric": "kl", "method": tuple(
                  f"sketch{codes}{c}{b}" for c in ("", "+phi") for b in ("", ", 2 %", ", 5 %"))},
                "Without a number 1 %; prompts, maps and units of the first table.",
                {f"sketch{codes}{c}{b}": f"sketch{said}{b}" for c, said in (("", ""), ("+phi", " + φ"))
                 for b in ("", ", 2 %", ", 5 %")})
          for words, model, codes in (("", MODEL, ""), (" of what eight requests score", EIGHT, FIFTH))),
        Table("KL of other models, 16k tokens", "kl", {"model": "model", "method": "method"}, [
            Cell(words + more, {"case": tuple(f"{m}:{task}@16384" for m in SMALL), **where}, form, spread=spread)
            for more, where, form, spread in (
                ("", {}, "{:.4f}", "±"),
                (", times sketch + centroids", {"metric": "kl_ratio", "against": "sketch+centroid"}, "{:.2f}", "to"))
            for words, task in KINDS], {"metric": "kl", "budget": 0.01, "model": SMALL, "method": KL_METHODS},
              "Nats per token, 1 % retrieved. The 0.5B is Qwen2.5-Coder-0.5B-Instruct."),
        Table("RULER", "real", {"length": "tokens", "method": "method"},
              [*by_budget(FEW, **FULL), samples(**FULL), *share((0.01, 0.02))],
              real(("ruler@16384", "ruler@32768"), NOW, method=OURS, task="ruler"),
              "Thirteen tasks. Bytes are those that a step of a sparse layer reads, of its keys and values."),
        Table("Completion, RULER", "real", {"length": "tokens", "method": "method", "against": "against"},
              [*(Cell(percent(b), {"budget": b}, "{:+.1f}", spread="to") for b in FEW), samples()],
              real(("ruler@16384", "ruler@32768"), NOW, metric="difference",
                   method=("topk+phi", "sketch+phi", "sketch+centroid"), against=("topk", "sketch", "sketch+centroid")),
              "Points of the prompts that both answered, with the 95 % interval; the methods of the table above."),
        Table("RULER at 64k and 128k tokens, with rivals", "real", {"length": "tokens", "method": "method"},
              [*by_budget(FEW[:2], **FULL), *(Cell(f"to sketch, {percent(b)}", {
                  "metric": "difference", "against": "sketch", "budget": b}, "{:+.1f}", spread="to")
                  for b in FEW[:2]), samples(0.02, **FULL), *share((0.01, 0.02))],
              real(("ruler@65536", "ruler@131072"), LONG, H100, method=(*OURS, *RIVALS, "quest:page_size=8")),
              "By YaRN, maps of windows of 64k."),
        Table("Rivals, RULER at 16k tokens", "real", {"method": "method"},
              [*by_budget(FEW, **FULL), samples(**FULL), *share(FEW)],
              real("ruler@16384", method=(*OURS, *RIVALS)), "All by the default before."),
        Table("Answers of 4,096 tokens after 16k", "real", {"budget": "sketch + φ"}, [
            Cell("KL [nats/token]", {"metric": "kl"}, "{:.4f}"), Cell("same likeliest token", {"metric": "agrees"},
                                                                     "{:.1f} %", scale=100),
            Cell("KL, 1st quarter", {"metric": "kl", "quarter": 1}, "{:.4f}"),
            Cell("KL, 4th quarter", {"metric": "kl", "quarter": 4}, "{:.4f}"),
            Cell("windows", {"metric": "kl"}, "{}", of="samples")],
              real("long@16128", machine=H100, method="sketch+phi", quarter=None, past_window=None,
                   budget=(0.01, 0.02)), "Full attention judges every token that the method wrote."),
        Table("A second question after an answer of 1,000 tokens", "real", {"method": "method"},
              [Cell(percent(b), {"budget": b}, spread="±") for b in (0.01, 0.02)],
              real("second_turn@16128", machine=H100, metric="score", method=("topk", "sketch", "sketch+phi")),
              "Points of 100; full attention has them all."),
        Table("Prompts read sparsely", "real", {"length": "tokens", "model": "model", "method": "prompt read by"}, [
            Cell("pairs", {**FULL, "against": "sketch+phi"}, "{:.0f} %", of="pairs", scale=100),
            Cell("points", {**FULL, "against": "sketch+phi"}, "{:+.1f}", spread="±"),
            Cell("prompts", {**FULL, "against": "sketch+phi"}, "{}", of="samples")],
              {"case": (f"{MODEL}:prefill@16384", f"{MODEL}:prefill@32768", "smollm2-long:prefill@32768"),
               "length": (16384, 32768), "model": (MODEL, "smollm2-long"),
               "method": tuple(f"{rule}:share={s}" for s in (0.1, 0.2, 0.3)
                                                          for rule in ("prompt", "xattention"))},
              "Points to prompts read with full attention, all decoded by sketch + φ at 2 %. `exact` is 128 at 16k; "
              "`least` and `shortest` are 0.",
              words={f"{rule}:share={s}": f"{name}share={s}`" for s in (0.1, 0.2, 0.3)
                     for rule, name in (("prompt", "`"), ("xattention", "XAttention's rule, pairs as of `"))}),
        Table("The yardstick model", "quality", {"length": "tokens", "method": "method"},
              [*by_budget(FEW, **FULL), samples(**FULL)],
              {"task": "ruler", "length": (4096, 16384, 32768), "method": (*OURS[:3], "sketch+phi", "router",
                                                                            "router+phi")},
              "SmolLM2-135M tuned to retrieve over 32k tokens; six of RULER's tasks."),
    ])

OFFLOADED = ("coder-30k-b1", "coder-30k-b8", "8b-128k-b1", "8b-128k-b4", "8b-128k-b16", "8b-512k-b1")
HELD = {"full": "full attention, keys on the GPU", "full_most": "full attention of as many requests as fit on the GPU",
        "sketch_phi-1%@gpu": "sketch + φ, 1 %, keys on the GPU",
        **{f"sketch{phi}-{b}%": f"sketch{words}, {b} %" for b in (1, 2, 5)
           for phi, words in (("", ""), ("_phi", " + φ"))},
        "sketch_phi-1%@cold": "sketch + φ, 1 %, all rows fetched (`kv_memory=0`)",
        "full_host": "full attention, keys in CPU memory",
        "faiss": "exact top-k by a flat Faiss index in CPU memory, 1 %",
        "transformers_offloaded": "transformers' OffloadedCache"}
"""Methods of `offload`, in words."""
OFFLOAD = [Table(title, "offload", {"case": "model, requests", "method": "method"}, [
    Cell("ms per token", {"metric": "ms"}, "{:.1f}"), Cell("tokens/s", {"metric": "tokens_s"}, "{:,.0f}"),
    Cell("over the bus [MB/token]", {"metric": "bus_mb"}, "{:,.0f}"),
    Cell("rows found on the GPU", {"metric": "hit_rate"}, "{:.2f}"),
    Cell("GPU memory [GB]", {"metric": "gpu_gb"}), Cell("host memory [GB]", {"metric": "host_gb"})],
    {"case": OFFLOADED, "method": tuple(HELD), "machine": card},
    "The 8B shape's weights (16 GB) and keys are drawn, and so are its hits.", HELD, curves=picture)
    for title, card, picture in (("Keys in CPU memory", H200, "offload"),
                                 ("Keys in CPU memory, the 1.5B and several requests", H100, "host"))]
STEPS = ("32x8-8k-b1", "32x8-32k-b1", "32x8-64k-b1", "32x8-128k-b1", "32x8-512k-b1", "32x8-1M-b1", "32x8-128k-b4",
         "32x8-128k-b8", "12x2-30k-b1", "12x2-30k-b8", "12x2-30k-b24")
TOKENS = ("8b-32k-b1", "8b-128k-b1", "8b-512k-b1", "8b-128k-b4", "coder-30k-b1", "coder-30k-b8", "coder-30k-b24")
TIMED = (("full attention", "dense"), ("sketch", "sketch"), ("sketch + φ", "sketch_phi"))
SPEED = Page(
    "Speed", "By `attachment.generate`, full attention too. The budget is 1 % of the context; that of the default, "
    "without options, is 5 %. “8B shape” is Llama 3.1 8B's with random weights; “1.5B” is "
    "Qwen2.5-Coder-1.5B-Instruct. “4 × 128k” is four requests of 128k tokens. The "
    "default keeps full attention where it is faster.", [
        Table("Time of a token", "generate", {"case": "model, requests"}, [
            *(Cell(f"{title} [ms]", {"method": m}, "{:.2f}") for title, m in TIMED),
            Cell("sketch + φ, times as fast", {"method": "sketch_phi"}, "{:.2f} ×", under={"method": "dense"}),
            Cell("default [ms]", {"method": "default"}, "{:.2f}")], {"metric": "loop_ms", "case": TOKENS},
              chart="ms per token"),
        Table("Time of a token on a CPU", "generate", {"case": "model, requests"}, [
            *(Cell(f"{title} [ms]", {"method": m}, "{:.0f}") for title, m in (
                ("full attention", "dense"), ("sketch + φ", "sketch_phi"), ("default", "default"))),
            Cell("sketch + φ, times as fast", {"method": "sketch_phi"}, "{:.2f} ×", under={"method": "dense"})],
              {"metric": "loop_ms", "case": ("smollm2-8k-b1",)}, "Two cores."),
        Table("First token and memory", "generate", {"case": "model, requests"}, [
            *(Cell(f"first token, {title} [s]", {"method": m, "metric": "first_token_s"}, "{:.2f}")
              for title, m in TIMED[::2]),
            Cell("index and summary [s]", {"method": "sketch_phi", "metric": "index_s"}, "{:.2f}"),
            *(Cell(f"peak memory, {title} [GB]", {"method": m, "metric": "peak_gb"}) for title, m in TIMED[::2]),
            Cell("longest pause of a first answer [ms]", {"method": "sketch_phi", "metric": "cold_gap_ms"}, "{:.0f}"),
            Cell("sparse from [tokens]", {"method": "default", "metric": "sparse_from"}, "{:,.0f}")],
              {"case": TOKENS}),
        Table("A step of one layer", "decode", {"case": "query / KV heads, requests × tokens"}, [
            *(Cell(f"{title} [µs]", {"method": m}) for title, m in (
                ("full attention (cuDNN)", "sdpa_cudnn"), ("router, 2 %", "sparse"), ("router + φ", "sparse_phi"),
                ("sketch, 1 %", "sparse_sketch"), ("sketch, all codes", "sparse_sketch_all"),
                ("sketch + φ", "sparse_sketch_phi"))),
            Cell("sketch + φ, times as fast", {"method": "sparse_sketch_phi"}, "{:.2f} ×",
                 under={"method": "sdpa_cudnn"})],
              {"metric": "us", "machine": H200, "case": STEPS}, "Heads of dimension 128, bfloat16. Candidates "
              "are a fifth. What ships scores all codes of one request up to 64k tokens with 8 KV heads, up to 256k "
              "with 2 ([φ behind that](../log/decode.md#whose-kernels-get-the-processors)).",
              words={c: "{} / {}, {} × {}".format(*c.split("-")[0].split("x"), c.split("-b")[1], c.split("-")[1])
                     for c in STEPS}),
        Table("First token, prompts read sparsely", "prefill", {"case": "model, requests"}, [
            Cell(f"{title} [s]", {"method": m}, "{:.2f}") for title, m in (
                ("full attention", "dense"), ("share 0.3 (default)", "sparse@0.3"), ("0.2", "sparse@0.2"),
                ("0.1", "sparse@0.1"))],
              {"metric": "first_token_s", "case": ("8b-32k-b1", "8b-128k-b1", "coder-30k-b8"), "commit": "0690853"}),
        Table("First token, prompts read by TokenSelect", "prefill", {"case": "model, requests"}, [
            Cell(f"{title} [s]", {"method": m}, "{:.2f}") for title, m in (
                ("full attention", "dense"), ("TokenSelect", "token_select"))],
              {"metric": "first_token_s", "case": ("8b-128k-b1",), "commit": "872addc"}),
        Table("Seconds of a prompt of 512k tokens", "prefill", {"case": "model, requests"}, [
            Cell(f"{title} [s]", {"method": m}) for title, m in (
                ("full attention", "dense"), ("share 0.1", "sparse@0.1"), ("share 0.05", "sparse@0.05"))],
              {"metric": "prompt_s", "case": ("8b-quarter-512k-b1", "8b-512k-b1")},
              words={"8b-quarter-512k-b1": "eight layers of the 8B shape, 1 × 512k"}),
        *OFFLOAD,
        Grid("Rows that a step finds on the GPU", ["table, budget", *(f"{n} × a list" for n in (1, 2, 4, 8, 16))], [
            [f"{title}, {percent(b)}", *(Cell(rows="hot_rows", form="{:.2f}", where={
                "case": f"hits-{b:g}", "method": f"{name}-{n}"}) for n in (1, 2, 4, 8, 16))]
            for name, title in (("lru", "read last"), ("direct", "one slot a token"), ("ways2", "two slots a token"))
            for b in FEW], "Share of the listed rows; the 1.5B, 128 steps along a speech after 30,000 tokens of it."),
        Table("Prompts with keys in CPU memory", "long_prompts", {"case": "model, tokens", "method": "keys"}, [
            Cell("prompt [s]", {"metric": "prompt_s"}, "{:.2f}"), Cell("index [s]", {"metric": "index_s"}, "{:.2f}"),
            Cell("ms per token", {"metric": "ms"}), Cell("GPU memory [GB]", {"metric": "gpu_gb"})],
              words={"8b-128k": "8B shape, 128k", "8b-256k": "8B shape, 256k", "gpu": "on the GPU",
                     "offload": "in CPU memory", "offload@24": "in CPU memory, 24 GB of GPU"}),
        Table("A step of one layer on a CPU", "runtime", {"method": "selector"}, [
            Cell(f"{n} [ms]", {"case": f"cpu-{n}-8b", "metric": "us"}, "{:.2f}", scale=0.001)
            for n in ("8k", "32k", "128k")] + [Cell("128k, times SDPA", {"case": "cpu-128k-8b", "metric": "speedup"},
                                                    "{:.2f} ×"),
            Cell("index [s per 100k tokens]", {"case": "cpu-128k-8b", "metric": "build_seconds"}, "{:.2f}")],
              {"method": ("sdpa", "streaming", "topk", "faiss-flat", "faiss-ivf", "faiss-hnsw", "router", "sketch-1%",
                          "sketch", "token_select", "lfps-equal", "lfps", "quest", "magicpig", "snapkv")},
              words={"sdpa": "full attention (SDPA)", "sketch-1%": "sketch, 1 %", "lfps-equal": "lfps, budget filled"},
              note="Two cores, float32, 32 query and 8 KV heads of 128, a budget of 2 % where none is named."),
    ])

SERVED = ("8b-8k-b1", "8b-32k-b1", "8b-128k-b1", "8b-512k-b1", "8b-128k-b3", "8b-128k-b4", "8b-128k-b4-fp8",
          "8b-32k-b12", "tp2-8b-128k-b1", "tp2-32b-128k-b1")
LOADS = ("8b-load-0.08", "8b-load-0.15", "8b-load-0.3", "8b-load-0.6")
BOTH = (("vLLM", "vllm_fa3"), ("sparsekv", "vllm_sparsekv"))
SERVING = Page(
    "Serving", "vLLM 0.26 with its own attention (FlashAttention 3) and with sparsekv, sketch + φ at 1 %. Models named "
    "by a shape have random weights. “4 × 128k” is four requests of 128k tokens. Requests that are too short to gain "
    "run vLLM's own attention.", [
        Table("Time of a token", "serving", {"case": "model, requests"}, [
            *(Cell(f"{title} [ms]", {"method": m}, "{:.2f}") for title, m in BOTH),
            Cell("times as fast", {"method": "vllm_sparsekv"}, "{:.2f} ×", under={"method": "vllm_fa3"})],
              {"metric": "token_ms", "case": SERVED}, chart="ms per token"),
        Table("First token of the last request", "serving", {"case": "model, requests", "commit": "commit"}, [
            *(Cell(f"{title} [s]", {"method": m, "metric": "first_s"}, "{:.2f}") for title, m in BOTH),
            Cell("a request's index [s]", {"method": "vllm_sparsekv", "metric": "index_s"}, "{:.2f}"),
            Cell('`"prefill": "sparse"` [s]', {"method": "vllm_sparse_prompts", "metric": "first_s"}, "{:.2f}"),
            Cell("`shortest` 8192, `share` 0.1 [s]", {"method": "vllm_sparse_prompts_tenth", "metric": "first_s"},
                 "{:.2f}")], {"case": SERVED}, "Prompts are read in pieces of 8,192 tokens."),
        Table("Under load", "serving", {"case": "rate", "method": "served by"}, [
            Cell("tokens/s", {"metric": "tokens_per_second"}, "{:.0f}"),
            *(Cell(title, {"metric": metric}, form) for title, metric, form in (
                ("between tokens, median [ms]", "between_p50_ms", "{:.1f}"), ("99th percentile [ms]", "between_p99_ms",
                                                                          "{:.0f}"),
                ("first token, median [s]", "first_p50_s", "{:.1f}"),
                ("99th percentile [s]", "first_p99_s", "{:.1f}")))],
              {"case": LOADS, "method": ("vllm_fa3", "vllm_sparsekv")},
              "Poisson arrivals, 16 requests a rate, prompts of 16k to 128k tokens, answers of 512 to 4,096.",
              words={c: f"{c.rpartition('-')[2]} requests/s" for c in LOADS}),
        Table("Scores of the 1.5B", "served_quality", {"case": "RULER", "machine": "card", "budget": "budget"}, [
            Cell("vLLM, score", {"method": "vllm_fa3", "metric": "score", "budget": None}),
            Cell("sparsekv, score", {"method": "vllm_sparsekv", "metric": "score"}),
            Cell("difference", {"method": "vllm_sparsekv", "metric": "above_vllm_fa3"}, "{:+.1f}", spread="to"),
            Cell("to `attach`", {"method": "vllm_sparsekv", "metric": "above_attach"}, "{:+.1f}", spread="to"),
            Cell("vLLM [ms/token]", {"method": "vllm_fa3", "metric": "token_ms", "budget": None}, "{:.2f}"),
            Cell("sparsekv [ms/token]", {"method": "vllm_sparsekv", "metric": "token_ms"}, "{:.2f}")],
              {"case": (f"{MODEL}:ruler@16384", f"{MODEL}:ruler@30000"), "budget": (0.01, 0.02)},
              "One request at a time, all decoded sparsely, also where full attention is faster. Differences are of "
              "the prompts that both answered.", words={f"{MODEL}:ruler@16384": "16k", f"{MODEL}:ruler@30000": "30k"}),
    ])

TRAINED = {"text": "text", "windows": "windows", "length": "tokens", "steps": "steps"}
BOUGHT = (("nothing", "", "sketch"), ("a uniform sample", "", "sketch+uniform"),
          ("bucket means, untrained", "", "sketch+centroid"),
          *((f"φ, {n:,} steps", f"-steps{n}", "sketch+phi") for n in (250, 500, 1000)),
          *((f"φ, {n} windows", f"-windows{n}", "sketch+phi") for n in (4, 8, 16)),
          ("φ, program text", "-code", "sketch+phi"), ("φ, codes of a fixed basis", "", "sketch:fit=fixed+phi"))
"""What completes the default's selection: in words, the model's name in rows, the method."""
TRAINING = Page(
    "Training", "What training φ and the sketch gives, and what it takes. The model is Qwen2.5-Coder-1.5B-Instruct "
    "where no other is named. The error is the relative L2 distance of a head's output to full attention's. By "
    "RULER's points φ and untrained centroids do not differ significantly; by KL φ is nearer to full attention "
    "([quality](quality.md)).", [
        Table("Error of exact top-k 1 % + φ by training", "phi-training", TRAINED, [
            *(Cell(title, {"case": case, "metric": "rel_err", "method": "topk+phi", "budget": 0.01}, "{:.3f}")
              for title, case in (("prose, 16k", "prose@16384"), ("program text, 16k", "code@16384"),
                                  ("prose, 32k", "prose@32768"))),
            Cell("seconds", {"case": "training", "method": "phi", "metric": "seconds"}, "{:.0f}")],
              note="Four layers, two held-out windows of each text, one seed.", chart="relative error"),
        Table("Heads by entropy of their attention", "phi-training", {"quarter": "quarter of the heads, least first"}, [
            Cell("without φ", {"method": "topk"}, "{:.3f}"), Cell("with φ", {"method": "topk+phi"}, "{:.3f}")],
              {"case": "entropy@16384", "metric": "rel_err", "budget": 0.01, "windows": 24, "length": 16384,
               "steps": 2500, "text": {"prose": 18, "made": 6}, "quarter": (1, 2, 3, 4)}, "Error of exact top-k 1 %."),
        Grid("KL by training, 16k tokens", ["completed by", "text, times the default's",
             "RULER, times the default's", "prompts, text", "prompts, RULER"], [
            [said, *(Cell(rows="kl", where={"case": f"{MODEL}{name}:{task}@16384", "method": method, "budget": 0.01,
                                            "metric": "kl_ratio", "against": "the default"}, form=form, **how)
                     for form, how in (("{:.2f}", {"spread": "to"}), ("{}", {"of": "samples"})) for _, task in KINDS)]
            for said, name, method in BOUGHT],
             "The default: φ of 2,500 steps on 24 windows of 16k tokens of speeches, a quarter of them synthetic, "
             "behind sketches, 1 % retrieved. Ratios are paired by prompt; see "
             "[quality](quality.md#kl-to-full-attention)."),
        Table("Mass that codes keep", "sketch", {"model": "model", "text": "text", "method": "codes"},
              [Cell(percent(b), {"metric": f"mass_share@{b}"}, "{:.3f}") for b in FEW],
              {"model": ("SmolLM2-135M tuned to 32k", "Qwen2.5-Coder-1.5B-Instruct"), "text": ("sotu", "embedded"),
               "method": ("router", "fixed, 10%", "fixed, all", "fitted, 10%", "fitted, all")},
              "Share of exact top-k's attention that the choice reads: buckets, or codes of a tenth of the context or "
              "of all, in the artifact's basis (fixed) or the request's (fitted).",
              words={"router": "buckets alone", "sotu": "prose", "embedded": "reference text"}),
        Table("Against other estimates", "training", {"case": "selection"}, [
            Cell(title, {"method": m}, "{:.4f}") for title, m in (
                ("nothing", "none"), ("centroids", "centroid"), ("φ", "phi"), ("φ, gated", "phi_gated"))],
              {"metric": "rel_err", "case": tuple(f"{d}{s}@{b}" for d in ("", "ood:") for s in (
                  "topk", "router", "sketch") for b in (0.01, 0.05))},
              "Error by what stands for the tokens not read, the tuned SmolLM2. `ood` is text unlike the training's."),
        Table("A whole `sparsekv train`", "phi-training", {"method": "stage"}, [
            Cell("seconds", {"metric": "seconds"}, "{:.0f}"), Cell("rate", {"metric": "rate"}, "{:,.1f}"),
            Cell("unit", {"metric": "rate"}, "{}", of="unit")], {"case": "sparsekv train"},
              "16 windows of 32k tokens."),
        Table("Capture", "capture", {"case": "case", "machine": "machine"}, [
            Cell("prefill in chunks [s]", {"method": "prefill_chunked", "metric": "seconds"}, "{:.2f}"),
            Cell("capture [s]", {"method": "capture", "metric": "seconds"}, "{:.2f}"),
            Cell("ratio", {"method": "capture", "metric": "ratio_to_prefill_chunked"}, "{:.2f}"),
            Cell("peak memory [GB]", {"method": "capture", "metric": "peak_gb"}),
            Cell("stored [GB]", {"method": "capture", "metric": "stored_gb"}, "{:.2f}")], note="Seconds per window.",
              words={"x86_64 CPU, 2 threads, torch 2.13.0+cpu": "CPU, 2 threads"}),
    ])



@dataclass(frozen=True)
class Kept(Cell):
    """A method's score in percent of full attention's on the same prompts, from its score and its difference."""

    form: str = "{:.1f} %"

    def drawn(self, rows: Sequence[Row], where: Where, used: list[Row] | None = None) -> str:
        where, rows = {**where, **self.where}, subject(self.rows) if self.rows else rows
        score = self.found(rows, {**where, "metric": "score", "against": None}, used)
        off = self.found(rows, {**where, "metric": "difference", "against": "full"}, used)
        if score is None or off is None:
            return MISSING
        return self.written(100 * score["value"] / (score["value"] - off["value"]))


def kept(case: str, budget: float, machine: str = H200, name: str = MODEL) -> Kept:
    return Kept(rows="real", where=real(case, name, machine, method="topk", budget=budget))


def micros(method: str) -> Cell:
    return Cell(rows="decode", where={"case": "4x1-171k-b1", "method": method, "metric": "us", "machine": H100})


SAAP = "saap, long-model, 8192 tokens"
SAAP_TASKS = Table(
    "Saap on tasks, 16k tokens", "real", {"method": "chosen by"},
    [*by_budget(FEW[:2], **FULL), *(Cell(f"read, {percent(b)}", {"metric": "score", "budget": b}, "{:.1f} %", of="read",
                                         scale=100) for b in FEW[:2]), *share(FEW[:2]), samples(**FULL)],
    real("ruler@16384", "coder-1.5b-saap", H100),
    "Points of the 1.5B; sink 1, window 2,047 tokens; buckets by probability per token, the last one in part. "
    "40,000 steps on 5.2 M tokens.",
    {"router:scores=mlp": "the query model", "router:scores=mean_key": "its control: mean keys, moved to the request",
     "router:scores=mean_key:adapt=false": "mean keys as trained"})
SAAP_LINES = (
    ("exact top-k", "exact top-k", "coder-1.5b-saap", "topk"),
    ("the query model", "query model", "coder-1.5b-saap", "router:scores=mlp"),
    ("its control: mean keys, moved to the request", "mean keys, moved to the request", "coder-1.5b-saap",
     "router:scores=mean_key"),
    ("mean keys as trained", "mean keys as trained", "coder-1.5b-saap", "router:scores=mean_key:adapt=false"),
    ("untrained buckets, moved", "untrained buckets, moved", "coder-1.5b-saap-untrained", "router:scores=mean_key"))
LFPS_TASKS = Table(
    "", "real", {"method": "read by"}, [*by_budget(FEW, **FULL), *share(FEW), samples(0.02, **FULL)],
    real("ruler@16384", method=("topk", RIVALS[1], "quest", "magicpig")))
REUSE = Table(
    "TokenSelect: steps that reuse the selection", "runtime", {"method": "cosine"}, [
        Cell("share of the steps", {"metric": "hit_rate"}, "{:.0f} %", scale=100)],
    {"case": "reuse, SmolLM2-135M, 4096 tokens"},
    "SmolLM2, 64 tokens after 4,096 of text read with full attention, a budget of 2 %, mean over layers.",
    words={f"theta={x:g}": f"{x:g}" + (" (the default)" if x == 0.98 else "") for x in (0.8, 0.9, 0.95, 0.98)})
ONE_CORE = Table(
    "LFPS: a step on one core", "runtime", {"method": "selector"}, [
        Cell("a step [ms]", {"metric": "us"}, "{:.1f}", scale=0.001),
        Cell("times as fast as full attention", {"metric": "speedup"}, "{:.1f} ×"),
        Cell("read", {"metric": "selectivity"}, "{:.1f} %", scale=100)],
    {"case": "cpu-128k-8b-1core", "method": ("sdpa", "topk", "quest", "lfps", "lfps-equal")},
    "One layer of the 8B shape at 128k tokens, random keys, float32, a budget of 2 %.",
    words={"sdpa": "full attention (SDPA)", "lfps": "LFPS, α = 0.3", "lfps-equal": "LFPS, budget filled"})
PAPERS = Page(
    "The papers' settings", "What the papers' methods give here. What each paper prints, and what differs, is on "
    "[the page of the papers](../papers.md). “The tuned SmolLM2” is SmolLM2-135M tuned to retrieve over 32k tokens.", [
        Table("Saap: mass that is read", "papers", {"method": "chosen by"},
              [Cell(percent(b), {"metric": f"mass_share@{b}"}, "{:.2f}") for b in (*FEW, 0.1)],
              {"case": SAAP, "method": ("topk", *(f"{m}, C = 1024, {rope} RoPE" for rope in ("without", "with")
                                                 for m in (
                  "oracle", "mean_key", "centroids", "hashing")), "as published", "with RoPE")},
              "Share of the mid region's attention, three layers of the tuned SmolLM2 at 8,192 tokens.",
              words={"as published": "query model as published", "with RoPE": "query model, keys with RoPE"}),
        Table("Completion: maps as published, error", "papers", {"method": "maps"}, [
            Cell(title, {"case": f"completion, long-model, 8192 tokens, heldout, {case}"}, "{:.3f}")
            for title, case in (("sink + tail", "sink + tail"), *((percent(b), f"topk@{b}") for b in (*FEW, 0.1)))],
              {"metric": "rel_err", "method": ("none", "phi_paper", "phi")}, "Exact top-k of the tuned SmolLM2.",
              words={"none": "none", "phi_paper": "as published", "phi": "the default recipe's"}),
        Table("Completion: maps as published, RULER at 16k", "real", {"method": "method"},
              [*by_budget(FEW, **FULL), samples(**FULL)], real("ruler@16384", "coder-1.5b-completion", H100),
              "Points of the 1.5B, 22,000 steps on 24 windows of 16k tokens."),
        Table("TokenSelect: votes", "real", {"method": "vote"},
              [*by_budget((0.02,), **FULL), Cell("equal answers", {"metric": "same_answers", "budget": 0.02},
                                                 spread="±"), samples(0.02, **FULL)],
              {"case": (f"{MODEL}:ruler@16384", "coder-1.5b-votes:ruler@16384"), "machine": H200,
               "method": ("token_select", "token_select:scaled=true", "token_select:vote=hard",
                          "token_select:vote=topk")},
              "Points of the 1.5B at 16k tokens, prompts read with full attention.",
              words={"token_select": "sum of the heads' softmax (equation 10, the default)",
                     "token_select:scaled=true": "the same with 1/√d", "token_select:vote=topk":
                     "sum of raw scores (equation 8)", "token_select:vote=hard":
                     "heads that have the token in their own top-k (equation 9)"}),
        Table("TokenSelect: a chunk of 512 tokens", "papers", {"case": "case"}, [
            Cell("full attention [ms]", {"method": "dense"}, "{:.2f}"),
            Cell("TokenSelect [ms]", {"method": "token_select"}, "{:.2f}"),
            Cell("times as fast", {"method": "token_select"}, "{:.2f} ×", under={"method": "dense"})],
              {"metric": "ms", "case": tuple(f"chunk of 512 after {n} tokens, 32/8 heads of 128"
                                             for n in (32768, 131072, 1048576))}),
        REUSE,
        Table("LFPS: thresholds, RULER at 16k", "real", {"method": "method"}, [
            *by_budget((0.02,), **FULL), Cell("read", {"metric": "score", "budget": 0.02}, "{:.1f} %", of="read",
                                              scale=100), samples(0.02, **FULL)],
              real("ruler@16384", "coder-1.5b-alphas"), "Points of the 1.5B, a list per group of heads."),
        Table("Vector databases on a GPU", "indices", {"case": "keys", "method": "selector"}, [
            Cell("a step [ms]", {"metric": "us"}, "{:.2f}", scale=0.001),
            Cell("built in [s]", {"metric": "build_s"}, "{:.2f}"),
            Cell("of exact top-k's list", {"metric": "found"}, "{:.0f} %", scale=100),
            Cell("k-means of 262,144 keys at most [s]", {"metric": "seconds"}, "{:.2f}")], {},
              "One layer of the 8B shape, random keys, no CUDA graphs. A step reads 1,310 tokens a KV head; `faiss` "
              "joins lists of a group's heads, exact top-k lists for a group.", words={
                  "indices-128k": "131,072", "indices-1024k": "1,048,576", "sdpa": "full attention",
                  "faiss-flat-gpu": "faiss, flat", "faiss-ivf-gpu": "faiss, inverted lists",
                  "spherical_kmeans": "k-means", "faiss-kmeans": "k-means by faiss"}),
        Grid("Saap: mass of held-out windows and KL", ["chosen by", *(f"mass, {percent(b)}" for b in FEW), *(
            f"KL, {words}, {how}" for words, _ in KINDS for how in ("1 %", "32 whole buckets"))], [
            [said, *(Cell(rows="partition", where={"method": mass, "metric": "mass", "budget": b}, form="{:.2f}")
                     for b in FEW), *(
                Cell(rows="kl", where={"case": f"{model}:{task}@16384", "method": name + more, "metric": "kl",
                                       "budget": None if more else 0.01}, form="{:.4f}", spread="±")
                for _, task in KINDS for more in ("", ":probes=32"))]
            for said, mass, model, name in SAAP_LINES],
             "Mass: the share of the mid region's attention that is read, layers 4, 10, 16 and 22, four windows of 32k "
             "tokens. KL [nats/token]: all layers, prompts of 16k tokens, sink 1, window 2,047 tokens."),
        Table("Multiple choice over 16k tokens", "choices", {"case": "task", "method": "method"}, [
            *by_budget((0.005, 0.01, 0.02, 0.05, 0.1), **FULL), samples(**FULL)],
              {"case": tuple(f"{MODEL}:choices-{task}@16384" for task in ("year", "next"))},
              "Points to full attention, four answers a question; `benchmarks/choices.py` says which questions.",
              words={f"{MODEL}:choices-year@16384": "the year of a sentence",
                     f"{MODEL}:choices-next@16384": "the next sentence"}),
        Table("A prefix that is asked again", "prefix", {"case": "prefix", "method": "method"}, [
            *(Cell(title, {"metric": f"first_token_{how}_s"}, "{:.3f}") for title, how in (
                ("first token, held [s]", "held"), ("from a file [s]", "loaded"), ("read anew [s]", "read"))),
            Cell("file [GB]", {"metric": "file_gb"}, "{:.2f}")], {}),
    ])
MISSED = Page(
    "What was missed", "What a user may expect and does not get. Points are of the 1.5B on RULER, to full attention "
    "unless another method is named. The other targets that were not reached are in [the log](../log/missed.md).", [
        Grid("", ["expected", "found"], [
            ["φ above untrained centroids in points of RULER, 1 %, 16k tokens", points(
                "sketch+phi", 0.01, "sketch+centroid")],
            ["φ above TokenSelect, 1 %, 16k tokens (older maps)", points("sketch+phi", 0.01, "token_select",
                                                                       name=MODEL)],
            ["sketch + φ as near as exact top-k + φ by KL, RULER at 64k", Cell(
                rows="kl", where={"case": kl_case("ruler", 65_536), "method": "sketch+phi", "metric": "kl_ratio",
                                  "against": "topk+phi"}, form="{:.2f} times", spread="to")],
            ["one request of 512k tokens with keys in CPU memory, 16 ms per token", Cell(
                rows="offload", where={"case": "8b-512k-b1", "method": "sketch_phi-1%", "metric": "ms"},
                form="{:.1f} ms")],
            ["one request of 30k tokens to the 1.5B faster than full attention",
             ms("coder-30k-b1", "sketch_phi", form="{:.2f} × as fast", under={"method": "dense"})],
            ["a prompt of 128k tokens 1.8 × as fast with `prefill=\"sparse\"`", Cell(
                rows="prefill", where={"case": "8b-128k-b1", "metric": "first_token_s", "method": "sparse@0.3",
                                       "commit": "0690853"},
                form="{:.2f} ×", under={"method": "dense"})],
            ["prompts read sparsely lose at most 1.5 points at `share=0.1`, 16k tokens", Cell(
                rows="real", where=real("prefill@16384", method="prompt:share=0.1", metric="difference",
                                        against="sketch+phi"), form="{:+.1f}", spread="±")],
            ["two GPUs 1.2 × as fast as vLLM, 32B shape, 128k tokens", Cell(
                rows="serving", where={"case": "tp2-32b-128k-b1", "metric": "token_ms", "method": "vllm_sparsekv"},
                form="{:.2f} ×", under={"method": "vllm_fa3"})],
            ["the 1.5B at 16k tokens in vLLM not slower, all requests sparse, 1 %", Cell(
                rows="served_quality", where={"case": f"{MODEL}:ruler@16384", "metric": "token_ms", "machine": H200,
                                              "method": "vllm_sparsekv", "budget": 0.01}, form="{:.2f} × as fast",
                under={"method": "vllm_fa3", "budget": None})],
            ["answers of an 8B model", "not measured"],
            ["speed and quality of an 8B model in one configuration", "not measured"],
            ["prompts read sparsely beyond 32k tokens, by answers", "not measured"],
        ])])
PAGES = {"quality": QUALITY, "speed": SPEED, "serving": SERVING, "training": TRAINING, "papers": PAPERS,
         "missed": MISSED}
"""Pages of docs/results/."""

LENGTHS = (("32k", "8b-32k-b1"), ("128k", "8b-128k-b1"), ("4 × 128k", "8b-128k-b4"), ("512k", "8b-512k-b1"))
SUMMARY = Grid("", ["", "full attention", "sparsekv, untrained", "sparsekv, trained"], [
    *([f"ms per token, {name}, 8B shape", *(ms(case, m) for m in ("dense", "untrained", "sketch_phi"))]
      for name, case in LENGTHS),
    *([words, *(ms("8b-128k-b1", m, metric) for m in ("dense", "untrained", "sketch_phi"))] for words, metric in (
        ("first token, 128k, 8B shape [s]", "first_token_s"), ("GPU memory, 128k, 8B shape [GB]", "peak_gb"))),
    *([f"KL to full attention, {words}, 32k, 1.5B [nats/token]", "0", *(Cell(
        rows="kl", where={"case": f"{MODEL}:{kind}@32768", "method": m, "metric": "kl"}, form="{:.4f}")
        for m in ("sketch+centroid", "sketch+phi"))] for words, kind in (("RULER", "ruler"), ("text", "text"))),
    *([f"RULER, {words}, 1.5B [points]", "0", *(points(m, 0.01, **of) for m in ("sketch+centroid", "sketch+phi"))]
      for words, of in (("16k", {}), ("128k", {"case": "ruler@131072", "name": LONG, "machine": H100}))),
], origin=False)
FIRST = Text(
    "One H200, {} of the context retrieved. An 8B-shaped model takes **{} ms per token** after 128k tokens; full "
    "attention takes {} ms.\nWith the same setting a 1.5B model loses **{} points** of RULER at 16k tokens "
    "({} prompts).",
    (Cell(rows="generate", where={"case": "8b-128k-b1", "method": "sketch_phi", "metric": "loop_ms"}, form="{:g} %",
          of="budget", scale=100),
     ms("8b-128k-b1", "sketch_phi"), ms("8b-128k-b1", "dense"),
     replace(points("sketch+phi", 0.01, form="{:.1f}", spread=""), scale=-1),
     replace(points("sketch+phi", 0.01, form="{}", spread=""), of="samples")))
HERE = ["claim", "printed", "here", "of"]
GATHERED = "8B shape, H200; a chunk at a time, rows gathered, not as it ships"
BY_LENGTH = ["claim", "printed", "16k", "32k", "64k", "128k"]
TWICE = (("H100", H100, (MODEL, "coder-1.5b-32k", LONG, LONG)), ("H200", H200, (MODEL, "coder-1.5b-32k-more")))
SHIPPED = ((16_384, NOW, H200), (32_768, NOW, H200), (65_536, LONG, H100), (131_072, LONG, H100))
PAPER_PAGE: dict[str, Any] = {
    "topk": Grid("", BY_LENGTH, [
        [f"score kept at {percent(b)} of the tokens, {card}", "95 %" if machine == H100 else "", *(
            kept(f"ruler@{16_384 << i}", b, machine, name) for i, name in enumerate(names)),
         *[MISSING] * (4 - len(names))] for b in (0.02, 0.01) for card, machine, names in TWICE]),
    "completion": Grid("", BY_LENGTH, [
        *([words, printed, *(points(method, 0.01, against, f"ruler@{n}", form, spread, name, machine, of)
                             for n, name, machine in SHIPPED)]
          for said, first, method, against in (
              ("points gained at the same k, 1 %", "+2.9 (1B), −0.1 (1.7B)", "topk+phi", "topk"),
              ("… behind sketches, the default", "", "sketch+phi", "sketch"))
          for words, printed, form, spread, of in ((said, first, "{:+.1f}", "±", "value"),
                                                   ("… prompts", "", "{}", "", "samples"))),
        ["points at equal worst-case budgets, 2 %", "+1.4, +0.1", points("topk+phi", 0.02, "topk", "worst@16384",
                                                                         name=MODEL), *[MISSING] * 3],
        *([f"KL at 1 %, {words}, {said}", "", Cell(rows="kl", where={
            "case": f"coder-1.5b-completion:{kind}@16384", "method": method, "metric": "kl", "budget": 0.01},
            form="{:.4f}", spread="±"), *[MISSING] * 3]
          for words, kind in (("RULER", "ruler"), ("text", "text"))
          for said, method in (("maps as published", "topk+phi"), ("no maps", "topk"))),
    ]),
    "saap": replace(SAAP_TASKS, title=""),
    "kernel": Grid("", HERE, [
        ["one head, 171k tokens, 32 whole buckets [µs]", "18", micros("sparse_probes"),
         "four query heads of one KV head, H100"],
        ["… by FlashAttention [µs]", "50", micros("sdpa_flash"), "the same"],
        ["… by cuDNN [µs]", "", micros("sdpa_cudnn"), "the same"],
        ["… by sketches, the default here [µs]", "", micros("sparse_sketch"), "the same"],
        ["training", "25 min a head", Cell(rows="training", form="{:.0f} s", where={
            "case": "router-layer-128k", "metric": "seconds"}),
         "eight KV heads, 10,000 of 40,000 steps, 128k made-up keys, H200"],
    ]),
    "lfps": LFPS_TASKS,
    "one-core": replace(ONE_CORE, title=""),
    "token_select": Grid("", HERE, [
        ["a chunk of 512 over 1M tokens, times as fast as full attention", "23.84 ×", Cell(
            rows="papers", form="{:.2f} ×", under={"method": "dense"}, where={
                "method": "token_select", "metric": "ms",
                "case": "chunk of 512 after 1048576 tokens, 32/8 heads of 128"}), GATHERED],
        ["… over 128k tokens", "", Cell(rows="papers", form="{:.2f} ×", under={"method": "dense"}, where={
            "method": "token_select", "metric": "ms", "case": "chunk of 512 after 131072 tokens, 32/8 heads of 128"}),
         GATHERED],
        ["first token of a prompt of 128k tokens, times as fast", "", Cell(rows="prefill", form="{:.2f} ×", where={
            "case": "8b-128k-b1", "method": "token_select", "metric": "first_token_speedup"}),
         "8B shape, H200; rows read in place"],
        *([f"points at 2 %, {n}k tokens", "", points("token_select", 0.02, case=f"ruler@{n * 1024}", name=name,
                                                    machine=machine), f"1.5B, RULER, {prompts} prompts"]
          for n, name, machine, prompts in ((16, MODEL, H200, 52), (64, LONG, H100, 104), (128, LONG, H100, 52))),
        ["score past the trained length, contiguous positions", "65.4", Cell(rows="papers", where={
            "case": "extrapolate, SmolLM2-135M-Instruct, 16384 tokens", "method": "token_select, contiguous",
            "metric": "score"}), "SmolLM2, 12 prompts of six tasks, 16k, trained on 8k; full attention 0"],
    ]),
}
"""What docs/papers.md shows of each paper."""
PLACES: dict[str, dict[str, Any]] = {
    "docs/papers.md": PAPER_PAGE,
    "README.md": {"figures": FIRST, "summary": SUMMARY}, "docs/start.md": {"demo": Table(
        "", "demo", {"method": "what a step reads", "budget": "budget"}, [
            *(Cell(title, {"case": "perplexity@2048", "metric": metric}, form, of=of, scale=scale)
              for title, metric, form, of, scale in (
                ("tokens", "perplexity", "{:.1f} %", "read", 100),
                ("bytes", "perplexity", "{:.1f} %", "bytes_share", 100),
                ("perplexity", "perplexity", "{:.2f}", "value", 1), ("error", "rel_err", "{:.3f}", "value", 1))),
            Cell("numbers found [%]", {"case": "needle@2048", "metric": "score"}, "{:.0f}")],
        {"method": ("full", "streaming", "streaming+phi", "topk", "topk+phi", "router", "router+phi", "sketch",
                    "sketch+phi")}, made_by={"metric": "perplexity", "samples": 4},
        words={"streaming": "sink + tail", "streaming+phi": "sink + tail + φ"})},
    "docs/budget.md": {"points": Table(
        "", "real", {"method": "method"}, [*by_budget(FEW, **FULL), *share(FEW)],
        real("ruler@16384", NOW, method=("sketch", "sketch+phi"))),
        "choice": Grid("", ["1.5B, sketch + φ", "1 %", "2 %"], [
            *([f"points of RULER, {n // 1024}k, {prompts} prompts", *(
                points("sketch+phi", b, case=f"ruler@{n}", name=name, machine=machine) for b in FEW[:2])]
              for (n, name, machine), prompts in zip(SHIPPED, (260, 156, 104, 52), strict=True)),
            *([f"KL to that of 1 %, {words}, 32k", "1", Cell(rows="kl", where={
                "case": kl_case(task, 32_768), "method": "sketch+phi, 2 %", "metric": "kl_ratio",
                "against": "sketch+phi at 1 %"}, form="{:.2f}", spread="to")]
              for words, task in (("RULER's answers", "ruler"), ("text", "text")))])},
    "docs/train.md": {"kl": Grid("", ["KL of φ over that of untrained bucket means", "16k", "32k", "64k", "128k"], [
        [words, *(Cell(rows="kl", where={"case": kl_case(task, n), "method": "sketch+phi", "metric": "kl_ratio",
                                         "against": "sketch+centroid"}, form="{:.2f}", spread="to")
                  for n in KL_LENGTHS)] for words, task in (("text", "text"), ("RULER's answers", "ruler"))])},
    "docs/prompts.md": {"times": Table(
        "", "prefill", {"method": "prompt read by"}, [
            Cell("first token [s]"), Cell("times as fast", {}, "{:.2f} ×", under={"method": "dense"})],
        {"case": "8b-128k-b1", "metric": "first_token_s", "commit": "0690853",
         "method": ("dense", "sparse@0.3", "sparse@0.2", "sparse@0.1")},
        words={f"sparse@{s}": f"`share={s}`" for s in (0.1, 0.2, 0.3)})},
    "docs/small-card.md": {"offload": replace(OFFLOAD[1], title="", curves="offload", where={
        **OFFLOAD[1].where, "method": ("full", "full_most", *(f"sketch{phi}-{b}%" for b in (1, 5) for phi in (
            "", "_phi")), "full_host", "transformers_offloaded")})},
    "docs/reliability.md": {"attacks": Table("", "reliability", {"case": "attack"}, [
        Cell("cases", {"method": "attacked"}, "{:,}"), Cell("passed", {"method": "passed"}, "{:,}")])},
}
"""Other pages, and what is drawn between their markers."""
