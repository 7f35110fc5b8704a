"""The rivals with the settings that serve them best, as methods of `sparsekv eval`; chosen by `benchmarks/papers.py
--part sweep`, whose rows are in docs/results/papers.json."""

from __future__ import annotations

SWEEP = {
    "streaming_llm": ("streaming_llm",),
    "snapkv": ("snapkv", "snapkv:observation_window=16:kernel_size=5:pooling=avg",
               "snapkv:observation_window=64:kernel_size=7:pooling=max"),
    "pyramidkv": ("pyramidkv", "pyramidkv:observation_window=16:kernel_size=5:pooling=avg", "pyramidkv:beta=5",
                  "pyramidkv:beta=2"),
    "quest": ("quest", "quest:dense_first=2", "quest:page_size=8", "quest:page_size=8:dense_first=2"),
    "token_select": ("token_select", "token_select:scaled=true", "token_select:theta=2",
                     "token_select:scaled=true:theta=2"),
    "lfps": ("lfps", "lfps:fills=true", "lfps:alpha=0.1:fills=true", "lfps:fills=true:per_query_head=true"),
    "magicpig": ("magicpig:bits=10", "magicpig", "magicpig:tables=300"),
}
"""What is tried of every rival: the first is the selector's default, where it has one."""
