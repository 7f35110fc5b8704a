"""Runs one vLLM engine over a job and says what came of it: `python serve.py JOB.json RESULT.json`, one process an
engine. A job names a model folder, engine arguments and waves of requests, each wave served to its end. A request with
`after` goes on with the conversation of that number of the wave before."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def serve(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.v1.core.sched.scheduler import Scheduler

    from sparsekv.runtime.vllm import seats
    from sparsekv.runtime.vllm.index import LayerIndex
    from sparsekv.runtime.vllm.seats import Seats

    seen = {"sparse_rows": 0, "steps": 0, "built": 0, "moved": 0, "preemptions": 0, "mixed": 0, "short": 0, "pieces": 0}

    def counted(cls: Any, name: str, note: Any) -> None:
        """note: called with all but the first argument, which of methods is the object."""
        inner = getattr(cls, name)

        def outer(self: Any, *args: Any, **kwargs: Any) -> Any:
            note(*args)
            return inner(self, *args, **kwargs)

        setattr(cls, name, outer)

    def add(name: str, number: int = 1) -> None:
        seen[name] += number

    counted(LayerIndex, "step", lambda q, rows, *_: (add("steps"), add("sparse_rows", int(rows.sparse.sum()))))
    counted(LayerIndex, "read", lambda *_: add("pieces"))
    counted(seats, "build_seat", lambda *_: add("built"))
    counted(seats, "extend_seat", lambda *_: add("moved"))
    counted(Scheduler, "_preempt_request", lambda *_: add("preemptions"))
    counted(Seats, "follow", lambda batch: add("mixed", int(bool((batch.query_start_loc.diff() == 1).any())
                                                            and bool((batch.query_start_loc.diff() > 1).any()))))
    counted(Seats, "empty", lambda short: add("short", int(short)))
    llm = LLM(model=job["model"], skip_tokenizer_init=True, dtype=job["dtype"], enforce_eager=True, seed=0,
              **job["engine"])
    tokens, cached, gaps = [], [], []
    said: list[list[int]] = []
    for wave in job["waves"]:
        texts = [(said[r["after"]] if "after" in r else []) + r["prompt"] for r in wave]
        params = [SamplingParams(temperature=0, max_tokens=r["max_tokens"], detokenize=False, ignore_eos=True,
                                 logprobs=2 if job.get("gaps") else None) for r in wave]
        outs = llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)
        tokens.append([list(o.outputs[0].token_ids) for o in outs])
        said = [text + answer for text, answer in zip(texts, tokens[-1], strict=True)]
        cached.append([o.num_cached_tokens for o in outs])
        if job.get("gaps"):
            gaps.append([[gap(step) for step in o.outputs[0].logprobs] for o in outs])
    blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    return {"tokens": tokens, "cached": cached, "gaps": gaps, "seen": seen, "blocks": blocks}


def gap(step: dict[int, Any]) -> float:
    """By how much the best token's log-probability is above the next one's."""
    best = sorted((x.logprob for x in step.values()), reverse=True)
    return best[0] - best[1]


if __name__ == "__main__":
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
                   "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_KVCACHE_SPACE": "1"}
    job = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps(serve(job)))
