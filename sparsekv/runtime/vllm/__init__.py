"""Serving inside vLLM: an attention backend that decodes long requests sparsely (docs/serve.md).

`plugin` is what vLLM loads; it, `stock`, `metadata` and `backend` alone import vLLM. The others are plain torch:
`settings` (the file and what it names), `checks` (what of an engine is served), `index` (a layer's buckets and codes by
slot, indices of requests, the step), `seats` (which request sits where, known by its pages; on a CUDA device through
`seating` and `seating_triton`), `pages` (a page pool by slot).
"""
