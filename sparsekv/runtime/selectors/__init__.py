"""Every selector by name. A new one is a file here and a line below."""

from __future__ import annotations

from sparsekv.runtime.selectors.base import Selection, Selector
from sparsekv.runtime.selectors.dense import Dense
from sparsekv.runtime.selectors.faiss import FaissTopK
from sparsekv.runtime.selectors.lfps import LFPS
from sparsekv.runtime.selectors.magicpig import MagicPIG
from sparsekv.runtime.selectors.pyramidkv import PyramidKV
from sparsekv.runtime.selectors.quest import Quest
from sparsekv.runtime.selectors.random import Random
from sparsekv.runtime.selectors.router import Router
from sparsekv.runtime.selectors.snapkv import SnapKV
from sparsekv.runtime.selectors.streaming import Streaming
from sparsekv.runtime.selectors.token_select import TokenSelect
from sparsekv.runtime.selectors.topk import TopK

SELECTORS: dict[str, type[Selector]] = {cls.name: cls for cls in (
    Dense, Streaming, Random, TopK, FaissTopK, Router, TokenSelect, LFPS, Quest, MagicPIG, SnapKV, PyramidKV)}

__all__ = ["SELECTORS", "Selection", "Selector"]
