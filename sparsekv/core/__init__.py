"""The attention core: every idea of sparse decoding once, as functions and small classes on `[B, H, …]` tensors.

`regions` says what is always read and what a budget pays for. `buckets` clusters keys. `selectors` choose what is read
exactly, and `estimators` stand for the rest. `step` puts both under one normalisation. `offline` takes such steps on
captured tensors. Imports no stage: runtime, trainers, evaluation and benchmarks call it alike.
"""
