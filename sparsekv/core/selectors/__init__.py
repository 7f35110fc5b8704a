"""Every selector by name. A new one is a file here and a line below."""

from __future__ import annotations

from sparsekv.core.selectors.base import Selector
from sparsekv.core.selectors.dense import Dense
from sparsekv.core.selectors.faiss import FaissTopK
from sparsekv.core.selectors.lfps import LFPS
from sparsekv.core.selectors.magicpig import MagicPIG
from sparsekv.core.selectors.pyramidkv import PyramidKV
from sparsekv.core.selectors.quest import Quest
from sparsekv.core.selectors.random import Random
from sparsekv.core.selectors.router import Router
from sparsekv.core.selectors.sketch import SketchRouter
from sparsekv.core.selectors.snapkv import SnapKV
from sparsekv.core.selectors.streaming import Streaming
from sparsekv.core.selectors.streaming_llm import StreamingLLM
from sparsekv.core.selectors.token_select import TokenSelect
from sparsekv.core.selectors.topk import TopK

SELECTORS: dict[str, type[Selector]] = {cls.name: cls for cls in (
    Dense, Streaming, StreamingLLM, Random, TopK, FaissTopK, Router, SketchRouter, TokenSelect, LFPS, Quest, MagicPIG,
    SnapKV, PyramidKV)}

__all__ = ["SELECTORS", "Selector"]
