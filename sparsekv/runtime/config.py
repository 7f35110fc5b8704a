"""Options of sparse decoding, declared once: the arguments of `attach`, the flags of `sparsekv generate` and `eval`,
a settings file and vLLM's JSON are the fields of `SparseConfig`."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

from sparsekv.core.registry import ESTIMATOR_ROWS, NONE, SELECTOR_ROWS
from sparsekv.util.config import check_ranges, number_or_word, object_or_word, option
from sparsekv.util.errors import SparseKVError, brief, check_choice

GROUP = "Sparse decoding"
SIZES = {"sink_size": 4, "window_size": 16}
"""Tokens of sink and local window where neither options nor artifacts say."""


@dataclass(frozen=True, kw_only=True)
class SparseConfig:
    """Options of sparse decoding. In Python artifacts may be objects, as may selector (`Selector`), completion
    (`Estimator`) and prefill (`SparsePrompts`); elsewhere they are named."""

    artifacts: str | None = option(None, group=GROUP, help=(
        "What `sparsekv train` made, router and feature maps: a folder, smollm2-135m (which ships), or a name on the "
        "Hugging Face hub, as user/name or user/name@revision."))
    router: str | None = option(None, objects="RouterArtifact", group=GROUP, help=(
        "Router artifact (folder or name), instead of that of the artifacts."))
    phi: str | None = option(None, objects="PhiArtifact", group=GROUP, help=(
        "Feature-map artifact (folder or name), instead of that of the artifacts."))
    selector: str | None = option(None, objects="Selector", group=GROUP, help=lambda: (
        f"What chooses the tokens that are read: {', '.join(SELECTOR_ROWS)}. Without it sketch if the router has "
        "sketches (and no probes are given), else router; without one sketch where a budget is given, else dense."))
    token_budget: int | float | None = option(None, flag=float, min=0, group=GROUP, help=(
        "Tokens retrieved per query and KV head: below 1 (in Python and JSON: a float) a share of the context, from 1 "
        "on (an int) a count [tokens]. Without it router and sketch take 0.05 and magicpig what it samples; dense and "
        "streaming spend none, the others need one."))
    completion: str | None = option(None, objects="Estimator", group=GROUP, help=lambda: (
        f"What estimates the attention to what is not read: {', '.join((*ESTIMATOR_ROWS, NONE))}; without it phi if "
        "there are feature maps, centroid for sketch where nothing was trained, else none."))
    probes: int | None = option(None, group=GROUP, help=(
        "Buckets read whole per query and KV head, instead of a token budget; selector router [buckets]."))
    candidates: float | None = option(None, group=GROUP, help=(
        "Tokens whose sketches are scored, a share of the context; selector sketch."))
    sink_size: int | None = option(None, min=0, group=GROUP, help=(
        f"First tokens, always read [tokens]; without it the artifact's, else {SIZES['sink_size']}."))
    window_size: int | None = option(None, min=0, group=GROUP, help=(
        f"Last prompt tokens, always read [tokens]; without it the artifact's, else {SIZES['window_size']}."))
    decode_window: int = option(1024, min=1, group=GROUP, help=(
        "Generated tokens stay exact until there are more; then the older half joins what may be selected [tokens]."))
    dense_layers: list[int] | None = option(None, group=GROUP, help=(
        "Layers that decode with full attention, by number, from the end if negative; without it layer 0."))
    dense_below: int | None = option(None, min=0, group=GROUP, help=(
        "Shorter caches are decoded with full attention [tokens]; 0: none; without it those for which that was "
        "measured to be faster."))
    placement: str = option("gpu", choices=("gpu", "offload", "cpu"), group=GROUP, help=(
        "Where keys and values lie: gpu (the model's device), offload (CPU memory; index and anchors on the device, "
        "which reads selected rows over the bus) or cpu (CPU memory, and sparse layers' attention there too)."))
    kv_memory: float | str | None = option(None, flag=str, parser=number_or_word, metavar="GB|auto", min=0,
                                           choices=("auto",), group=GROUP, help=(
        "What keys and values may take of the GPU's memory [GB], or auto: what is free there; caches that need more go "
        "to CPU memory, as with placement offload. Rows of them that were read lately stay on the GPU, as many as fit "
        "in; without a number, and with auto, four times those that a step reads. At most half of what is free."))
    prefill: str | dict[str, Any] = option("dense", objects="SparsePrompts", flag=str, parser=object_or_word,
                                           metavar="dense|sparse|JSON", group=GROUP, help=(
        "How prompts are read: dense, or sparse, by blocks that read a list of the blocks before them; a JSON object "
        "with some of the fields of SparsePrompts, in Python a SparsePrompts, says how."))
    options: dict[str, Any] = option(dict, flag=None, help="The selector's other options, by name.")

    @classmethod
    def of(cls, config: SparseConfig | str | Path | None = None, **overrides: object) -> Self:
        """These options with others in their place; a name that is no field is an option of the selector. config: a
        `SparseConfig`, or a settings file. Raises SparseKVError."""
        if isinstance(config, str | Path):
            config = cls.load(config)
        if not isinstance(config, SparseConfig | None):
            raise SparseKVError(f"config is a SparseConfig or the path of a settings file, found "
                                f"{type(config).__name__}")
        names = {f.name for f in fields(cls)}
        base = cls() if config is None else cls(**{name: getattr(config, name) for name in names})
        own: dict[str, Any] = {name: value for name, value in overrides.items() if name in names}
        options = {name: value for name, value in overrides.items() if name not in names}
        return replace(base, **own, options={**base.options, **own.get("options", {}), **options}) if overrides else (
            base)

    @classmethod
    def load(cls, path: str | Path, where: str | None = None) -> Self:
        """Load a JSON file with some of the fields; artifacts that lie beside it go before the hub. where: the file in
        a sentence. Raises SparseKVError for another file and for values that are none."""
        from sparsekv.artifacts.checks import parse_object, reason
        from sparsekv.artifacts.hub.named import REPOSITORY

        path = Path(path)
        where = where or f"the settings file {str(path)!r}"
        names = [f.name for f in fields(cls)]
        try:
            content = path.read_bytes()
        except (OSError, ValueError) as error:  # a name with a zero byte
            raise SparseKVError(f"{where} could not be read ({reason(error)}); expected a JSON file with some of "
                                f"{', '.join(names)}") from error
        raw = parse_object(content, where)
        if isinstance(raw.get("layers"), dict):
            raise SparseKVError(f"{where} has budgets and gates by layer, which are not read; expected some of "
                                f"{', '.join(names)}; give one token_budget for all layers")
        for name in raw:
            if name not in names:
                raise SparseKVError(f"{where} has an entry {brief(name)}; expected some of {', '.join(names)}")
        config = cls(**raw)
        config.check(where)
        beside = {name: str(path.parent / x) for name in ("artifacts", "router", "phi")
                  if (x := getattr(config, name)) is not None
                  and (os.path.exists(path.parent / x) or not REPOSITORY.fullmatch(x))}
        return replace(config, **beside)  # type: ignore[arg-type]

    def check(self, where: str | None = None) -> None:
        """Refuse values that are of another type or out of their range. where: the file that they are from. Raises
        SparseKVError."""
        from sparsekv.core.regions import check_budget

        try:
            check_ranges(self, str)
            check_budget(self.token_budget)
            if isinstance(self.completion, str):
                check_choice("completion", self.completion, (*ESTIMATOR_ROWS, NONE))
            self.prompts()
        except SparseKVError as error:
            raise SparseKVError(f"{where}: {error}" if where else str(error)) from error

    @property
    def away(self) -> bool:
        """True where keys and values may lie elsewhere than on the model's device."""
        return self.placement != "gpu" or self.kv_memory is not None

    def prompts(self) -> Any:
        """Make the reader of sparse prompts (`SparsePrompts`); None: prompts are read densely. Raises SparseKVError."""
        from sparsekv.core.prefill import SparsePrompts

        if isinstance(self.prefill, SparsePrompts):
            return self.prefill
        names = [f.name for f in fields(SparsePrompts)]
        if isinstance(self.prefill, dict) and set(self.prefill) <= set(names):
            return SparsePrompts(**self.prefill)
        if self.prefill not in ("dense", "sparse"):
            raise SparseKVError(f"prefill is {self.prefill!r}; expected dense, sparse, or a JSON object (in Python "
                                f"a SparsePrompts) with some of {', '.join(names)}")
        return SparsePrompts() if self.prefill == "sparse" else None

    def selector_options(self) -> dict[str, Any]:
        """The selector's own options that are given."""
        given = {"token_budget": self.token_budget, "probes": self.probes, "candidates": self.candidates,
                 **self.options}
        return {name: value for name, value in given.items() if value is not None}

    def given(self) -> dict[str, Any]:
        """The fields that are not their defaults; how prompts are read as a settings file has it."""
        plain = SparseConfig()
        given = {f.name: getattr(self, f.name) for f in fields(SparseConfig)
                 if getattr(self, f.name) != getattr(plain, f.name)}
        return given if isinstance(self.prefill, str | dict) else {**given, "prefill": vars(self.prefill)}

    def sizes(self, *artifacts: Any) -> tuple[int, int]:
        """Sink and window [tokens]: as given, else the artifacts' own (they must agree), else the defaults. Raises
        SparseKVError."""
        sizes = []
        for name, default in SIZES.items():
            given = getattr(self, name)
            trained = {getattr(a.config, name) for a in artifacts if a is not None} if given is None else {given}
            if len(trained) > 1:
                raise SparseKVError(f"the router and the feature maps were trained with different {name} "
                                    f"({' and '.join(map(str, sorted(trained)))} tokens); say which with {name}=...")
            sizes.append(trained.pop() if trained else default)
        return sizes[0], sizes[1]
