"""Every method, a row each: what tables, figures, help texts and pages say of a selector or of an estimator. Nothing
else lists them. A class is imported when it is asked for (`core.selectors.SELECTORS`, `core.estimators.ESTIMATORS`), so
that a help text costs no torch."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

FULL = "full"
"""What the selector `dense` is called among methods and in result rows."""
NONE = "none"
"""The completion that estimates nothing."""
GREY = "#7f7f7f"
PAPERS = {"Saap": "self-attention with asymmetric partitions",
          "top-k paper": "top-k attention over a vector database",
          "completion paper": "top-k retrieval with fixed-size linear-attention completion"}
"""Papers that have a name of their own here, and what they are about."""


@dataclass(frozen=True)
class SelectorRow:
    """A selector. Other properties, its options and whether it spends a budget, are class attributes."""

    name: str
    kind: str | type[Any]
    """The class, or where it lies: `module:Class`."""
    reads: str
    """What a query reads, in words."""
    source: str
    """Paper and section, or `baseline` or `this project`."""
    label: str = ""
    """Its name where there is room for words, if another."""
    colour: str = GREY
    """In figures; what completes it is the line's style."""
    lane: str = ""
    """Where it is compared: `rival` (a system to compare with), `own` (this project's, completed or not), `exact` (the
    selection that scores every key); empty: nowhere unless it is named."""
    needs: tuple[str, ...] = ()
    """What must have been trained for it: `router`, and `sketches` of its keys."""
    untrained: bool = False
    """Whether it decodes without what it needs too, by what is fitted to the request."""
    default: bool = False
    """Whether `attach` takes it where none is named: the last such row whose needs are met."""
    usual: bool = False
    """Whether `sparsekv eval` and the demo measure it where no methods are named."""
    diagnosed: bool = False
    """Whether `sparsekv eval diagnostics` takes its steps."""
    served: bool = False
    """Whether the vLLM backend decodes with it."""
    demo_budget: float = 0.01
    """The share of the context at which the demo's table shows it."""
    demo_words: str = ""
    """What the demo's table calls it, with the fields budget, sink and window; else its label and the budget."""


@dataclass(frozen=True)
class EstimatorRow:
    """An estimator of what is not read."""

    name: str
    kind: str | type[Any]
    stands: str
    """What stands for the tokens that are not read, in words."""
    source: str
    symbol: str = ""
    """Its name where there is room for signs, if another."""
    line: str = "-."
    """The style of its lines in figures, as matplotlib writes it."""
    needs: tuple[str, ...] = ()
    """What must have been trained for it: `phi`."""
    usual: bool = False
    """Whether it is measured where no methods are named and it has what it needs."""


SELECTOR_ROWS: dict[str, SelectorRow] = {}
ESTIMATOR_ROWS: dict[str, EstimatorRow] = {}


def register(row: SelectorRow | EstimatorRow) -> None:
    """Add a method: from here on it is known by its name everywhere. Raises ValueError for a name that is taken."""
    if row.name in SELECTOR_ROWS or row.name in ESTIMATOR_ROWS or row.name in (FULL, NONE):
        raise ValueError(f"the name {row.name!r} is taken by another method; expected one that is free")
    if isinstance(row, SelectorRow):
        SELECTOR_ROWS[row.name] = row
    else:
        ESTIMATOR_ROWS[row.name] = row


class Classes(Mapping[str, Any]):
    """The classes of rows, by name, as the rows are now."""

    def __init__(self, rows: Mapping[str, SelectorRow] | Mapping[str, EstimatorRow]):
        self.rows = rows

    def __getitem__(self, name: str) -> Any:
        kind = self.rows[name].kind
        if isinstance(kind, str):
            module, _, word = kind.partition(":")
            return getattr(importlib.import_module(f"sparsekv.core.{module}"), word)
        return kind

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def row_of(selector: str) -> SelectorRow | None:
    """The row of a selector by its name among methods, where `dense` is `full`; None for one that is not registered."""
    return SELECTOR_ROWS.get("dense" if selector == FULL else selector)


def method_names() -> list[str]:
    """Selectors by their names among methods."""
    return [FULL if name == "dense" else name for name in SELECTOR_ROWS]


def rivals() -> tuple[str, ...]:
    """The systems to compare with."""
    return tuple(row.name for row in SELECTOR_ROWS.values() if row.lane == "rival")


def served() -> tuple[str, ...]:
    """List the selectors that the vLLM backend decodes with."""
    return tuple(row.name for row in SELECTOR_ROWS.values() if row.served)


def diagnosed() -> list[str]:
    """Selectors whose steps diagnostics take."""
    return [row.name for row in SELECTOR_ROWS.values() if row.diagnosed]


def default_selector(trained: Collection[str]) -> str:
    """The selector where none is named. trained: what there is, of `router` and `sketches`."""
    return [row.name for row in SELECTOR_ROWS.values() if row.default and set(row.needs) <= set(trained)][-1]


for _row in (
    SelectorRow("dense", "selectors.dense:Dense", "everything", "baseline", label="full attention", default=True,
                demo_words="all tokens (full attention)"),
    SelectorRow("streaming", "baselines.streaming:Streaming", "the anchors",
                "baseline: Saap's ℓ = 0, the completion paper's sink + tail", label="sink + tail", colour="#CC79A7",
                lane="rival", usual=True, demo_words="sink + tail ({sink} and {window} tokens)"),
    SelectorRow("streaming_llm", "baselines.streaming_llm:StreamingLLM",
                "the most recent tokens: the budget is the local window",
                "StreamingLLM (Xiao et al. 2024); completion paper, appendix E", colour="#d4789c", lane="rival"),
    SelectorRow("random", "baselines.random:Random", "a uniform sample", "baseline: Saap, appendix B"),
    SelectorRow("topk", "selectors.topk:TopK", "the best-scoring tokens, by scoring all",
                "top-k paper §3; completion paper §4.1", label="exact top-k", colour="#0072B2", lane="exact",
                usual=True, diagnosed=True, demo_words="the best {budget} (exact top-k)"),
    SelectorRow("faiss", "baselines.faiss:FaissTopK", "nearest neighbours in a Faiss index",
                "top-k paper §3"),
    SelectorRow("router", "selectors.router:Router", "the tokens of the best buckets", "Saap §4", colour="#D55E00",
                lane="own", needs=("router",), default=True, usual=True, diagnosed=True, served=True, demo_budget=0.05,
                demo_words="the router's {budget}, by buckets"),
    SelectorRow("sketch", "selectors.sketch:SketchRouter",
                "the best tokens of the best buckets, by codes of their keys", "this project",
                colour="#882255", lane="own", needs=("router", "sketches"), untrained=True, default=True,
                usual=True, diagnosed=True, served=True,
                demo_words="the router's best {budget}, by sketches"),
    SelectorRow("snapkv", "baselines.snapkv:SnapKV", "what the end of the prompt looked at, once",
                "SnapKV (Li et al. 2024) §4", colour="#E69F00", lane="rival"),
    SelectorRow("pyramidkv", "baselines.pyramidkv:PyramidKV",
                "what the end of the prompt looked at, once, less the deeper the layer", "PyramidKV (Cai et al. 2024) "
                "§4.1", colour="#b8860b", lane="rival"),
    SelectorRow("token_select", "baselines.token_select:TokenSelect",
                "one list for all heads, by vote; of the prompt, too, with `prefill_chunk`", "TokenSelect §5",
                colour="#56B4E9", lane="rival"),
    SelectorRow("lfps", "baselines.lfps:LFPS", "the best of candidates learned from past attention",
                "LFPS §4.2, appendix B", colour="#8c6bb1", lane="rival"),
    SelectorRow("quest", "baselines.quest:Quest", "pages with the largest bound", "Quest (Tang et al. 2024) §3.2",
                colour="#009E73", lane="rival"),
    SelectorRow("magicpig", "baselines.magicpig:MagicPIG", "a sample by hashing, reweighted",
                "MagicPIG (Chen et al. 2024) §4", colour="#a6761d", lane="rival"),
    EstimatorRow("centroid", "estimators.centroid:CentroidEstimator",
                 "256 buckets of the request's keys, each by its mean key and mean value",
                 "RetroInfer's estimation zone", line=":"),
    EstimatorRow("uniform", "estimators.uniform:UniformEstimator", "a uniform sample of them",
                 "vAttention (Desai et al. 2025)"),
    EstimatorRow("phi", "estimators.phi:PhiEstimator", "trained feature maps", "completion paper §4", symbol="φ",
                 line="-", needs=("phi",), usual=True),
):
    register(_row)
