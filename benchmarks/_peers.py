"""The rivals' settings, as methods of `sparsekv eval`; what else was tried of each, and its rows: docs/papers.md."""

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
