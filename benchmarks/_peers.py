"""The rivals' settings, as methods of `sparsekv eval`: what `benchmarks/quality.py --methods sweep` tries, and what
served best; the rows are in docs/results/papers.json."""

from __future__ import annotations

SWEEP = {
    "streaming_llm": ("streaming_llm",),
    "snapkv": ("snapkv", "snapkv:observation_window=16:kernel_size=5:pooling=avg",
               "snapkv:observation_window=64:kernel_size=7:pooling=max"),
    "pyramidkv": ("pyramidkv", "pyramidkv:observation_window=16:kernel_size=5:pooling=avg", "pyramidkv:beta=5",
                  "pyramidkv:beta=2"),
    "quest": ("quest", "quest:dense_first=2", "quest:page_size=8", "quest:page_size=8:dense_first=2"),
    "token_select": ("token_select", "token_select:scaled=true", "token_select:theta=0.9", "token_select:theta=2"),
    "lfps": ("lfps", "lfps:fills=true", "lfps:alpha=0.1:fills=true", "lfps:fills=true:per_query_head=true"),
    "magicpig": ("magicpig:bits=10", "magicpig", "magicpig:tables=300"),
}
"""What is tried of every rival: the first is the selector's default, where it has one."""

PEERS = {
    "streaming_llm": "streaming_llm",
    "snapkv": "snapkv:observation_window=16:kernel_size=5:pooling=avg",
    "pyramidkv": "pyramidkv:beta=2",
    "quest": "quest",
    "token_select": "token_select",
    "lfps": "lfps:alpha=0.1:fills=true",
    "magicpig": "magicpig",
}
"""What served each best: RULER's score, and where that does not tell agreement with full attention's answers, on the
long-context model. Pages of 8 serve Quest better and stand beside it: they read nearly twice as much to choose."""
