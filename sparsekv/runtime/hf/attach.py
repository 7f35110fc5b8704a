"""`sparsekv.attach`: make a transformers model decode sparsely for as long as a `with` block lasts."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparsekv.artifacts.fingerprint import check_all_bits, model_fingerprint
from sparsekv.artifacts.hub.models import attention_modules, decoder
from sparsekv.artifacts.hub.rotary import border_of, depends_on_length, tables_of_length
from sparsekv.core.prefill import SparsePrompts
from sparsekv.runtime.break_even import NEVER
from sparsekv.runtime.config import SparseConfig
from sparsekv.runtime.counters import NOTHING_RAN, PROMPTS_ALONE, Counters
from sparsekv.runtime.decoding import Decoding, load_artifacts, make_decoding
from sparsekv.runtime.hf.attached import enter, leave, model_of
from sparsekv.runtime.hf.cache import SparseCache, SparseLayer
from sparsekv.runtime.hf.generate_hook import roomy_cache
from sparsekv.runtime.hf.loop import Streamer, decode_loop, step_across
from sparsekv.runtime.hf.plan import RunOptions
from sparsekv.runtime.hf.prefix import load_prefix, save_with_index
from sparsekv.runtime.hf.prompts import (
    check_cache_rows,
    check_chunk,
    check_ids,
    check_mask,
    end_tokens,
    pad_token,
    positions_of,
    vocabulary_of,
)
from sparsekv.runtime.hf.runner import Runner
from sparsekv.runtime.hf.supported import check_cache, eligible_layers, model_within
from sparsekv.runtime.process import usual_defaults
from sparsekv.util.config import whole
from sparsekv.util.errors import SparseKVError

__all__ = ["Attachment", "RunOptions", "SparseConfig", "SparsePrompts", "attach"]


@usual_defaults()
def attach(
    model: nn.Module, artifacts: str | Path | None = None, config: SparseConfig | str | Path | None = None, *,
    run: RunOptions | None = None, all_bits: bool = False, **overrides: object,
) -> Attachment:
    """Attach sparse decoding to a causal language model; use as `with sparsekv.attach(model, ...) as attachment:`.

    Args:
        model: a transformers model, or one in a wrapper such as PEFT's.
        artifacts: what one training made: a folder with `router/`, `phi/` or both, or one artifact; or, where nothing
            lies at that path, the name of one that ships (`smollm2-135m`), or its name on the Hugging Face hub,
            `user/name` or `user/name@revision`.
        config: a `SparseConfig`, or a settings file with some of its fields.
        run: how steps are run (`RunOptions`).
        all_bits: compare all bits of the model's weights with those that the artifacts were made for, and not a sample
            of 64 values a weight; one read of the weights.
        overrides: fields of `SparseConfig`, such as token_budget, in place of the config's; other names are options of
            the selector.

    Raises:
        SparseKVError: a model, artifact or option that cannot work, before anything is changed.
    """
    if run is not None and not isinstance(run, RunOptions):
        raise SparseKVError(f"run says how steps are run by a RunOptions, found {type(run).__name__}")
    model = model_within(model)
    modules = attention_modules(model)
    config = SparseConfig.of(config, **overrides, **({} if artifacts is None else {"artifacts": artifacts}))
    config.check()
    router, phi = load_artifacts(config.artifacts, config.router, config.phi)
    for name, artifact in (("the router", router), ("the feature maps", phi)) if all_bits else ():
        if artifact is not None:
            check_all_bits(artifact.config.model, model, name)
    decoding = make_decoding(model, modules, eligible_layers(model, modules), config, router=router, phi=phi)
    return Attachment(model, modules, decoding, RunOptions() if run is None else run)


class Attachment:
    """A model that decodes sparsely inside the `with` block and is exactly as before after it."""

    def __init__(self, model: Any, modules: dict[int, Any], decoding: Decoding, run: RunOptions):
        self.model, self.modules, self.decoding = model, modules, decoding
        self.ref = weakref.ref(self)
        """What the model holds of it: an attachment that nobody holds leaves."""
        self.runner = Runner(decoding, run, max(modules) + 1)
        self.kv_places: dict[str, int] = {}
        self._entered = self._was_entered = False

    @property
    def counters(self) -> Counters:
        """The counts so far."""
        return self.runner.counters

    def __enter__(self) -> Attachment:
        if self._entered:
            raise SparseKVError("this attachment is in use already; call attach again for another")
        try:
            self._entered = self._was_entered = True
            enter(self)
            return self
        except BaseException:
            self._leave()
            raise

    def __del__(self) -> None:
        if not self.__dict__.get("_was_entered", True):
            warnings.warn("an attachment was never entered, so nothing decoded sparsely; write `with "
                          "sparsekv.attach(...):` around generate", stacklevel=2)
        elif self.__dict__.get("_entered"):
            warnings.warn("an attachment that nothing holds has left its model, which decodes with full attention "
                          "again; keep what attach returned, or write `with sparsekv.attach(...):`", stacklevel=2)
            self._leave()

    def __exit__(self, kind: Any = None, *_: Any) -> None:
        try:
            self._leave()
        except BaseException:
            self._leave()  # an interrupt leaves it half done
            raise
        asked = kind is None and self.decoding.selector.name != "dense"
        if asked and (reason := self.counters.not_in_force(self.decoding)) not in (None, NOTHING_RAN, PROMPTS_ALONE):
            warnings.warn(f"nothing decoded sparsely: {reason}", stacklevel=2)

    def _leave(self) -> None:
        leave(self)
        self.runner.forget()
        self._entered = False

    def report(self) -> dict[str, Any]:
        """sparse_calls and dense_calls (layer steps), selectivity (mean share of the cache read over rows, layers and
        steps, dense layers included; selectivity_sparse without them), bytes_share (all that a step of a sparse layer
        reads over the bytes of its keys and values), rel_err (mean relative L2 error of the sparse layers' attention
        output; None unless it `compares`), the same per layer, and the selectors' own numbers.
        index_seconds: building index and estimates, in the last pass of a prompt or the first step after it [s].
        replayed_steps, captures and capture_seconds [s]: steps of CUDA graphs; not_replayed: why the last step that was
        not could not be, or None. sparse_from: the length from which caches decode sparsely [tokens], None: none does,
        or it is not known yet; sparse_why: what decided that. in_force: whether anything was decoded, or a prompt read,
        sparsely; not_in_force: why not, or None. bus_bytes: what steps fetched from CPU memory; hit_rate: share of the
        listed rows that lay on the GPU already, or None. kv_places: keys and values of the last cache that was made
        with room for a prompt, on the GPU (`gpu_bytes`) and in CPU memory (`host_bytes`)."""
        rule = self.decoding.rule
        known = None if rule is None or rule.shortest == NEVER else rule.shortest
        why = self.counters.not_in_force(self.decoding)
        return {"in_force": why is None, "not_in_force": why, **self.counters.report(), "sparse_from": known,
                "sparse_why": self.decoding.why(), "kv_places": self.kv_places}

    def check_in_force(self, what: str) -> None:
        """Raises SparseKVError where nothing was sparse, though something was asked for: what was measured would be
        full attention's under another name."""
        if self.decoding.selector.name != "dense" and (reason := self.counters.not_in_force(self.decoding)) is not None:
            raise SparseKVError(f"{what} was not in force: {reason}; its numbers would be those of full attention")

    def spend(self, token_budget: int | float, cache: SparseCache) -> None:
        """Decode with another budget from here on. What was built over the prompt in the cache stays where it does not
        depend on the budget (router, sketch, topk, quest), and the report begins anew.

        Raises:
            SparseKVError: a budget that is none.
        """
        self.decoding.spend(token_budget)
        self.counters.clear()
        cache.plan = None
        for layer in cache.layers:
            if isinstance(layer, SparseLayer) and layer.state is not None and layer.state.owner is self.decoding:
                layer.state = layer.state.spend(token_budget)

    def cache(self, reserve: int = 0, on_host: bool | None = None) -> SparseCache:
        """An empty cache for this model, with room for `reserve` tokens from the first on. on_host: whether layers that
        decode sparsely keep keys and values in CPU memory; by default as the placement says."""
        away = self.decoding.placement != "gpu" if on_host is None else on_host
        host = set(self.modules) - self.decoding.dense_layers if away else set()
        return SparseCache(self.model.config, host_layers=host, reserve=reserve, attachment=self)

    @usual_defaults()
    @torch.no_grad()
    def prefill(self, input_ids: Tensor, attention_mask: Tensor | None = None, *, chunk_size: int | None = None,
                cache: SparseCache | None = None) -> SparseCache:
        """Run the prompt, the last token included, as `prefill` of `attach` says, or by a selector that reads prompts.

        Args:
            input_ids: `[B, N]`.
            attention_mask: of what the cache holds and the prompt, 1 = a token.
            chunk_size: tokens that are read at once; None: all.
            cache: of an earlier turn.

        Returns:
            The cache.

        Raises:
            SparseKVError: ids, masks and chunks that are none, an attachment that is not in use, a cache of another
                model, and too little memory.
        """
        attached = model_of(self)
        check_ids(input_ids, vocabulary_of(self.model))
        check_chunk(chunk_size)
        rows, tokens = input_ids.shape
        chunks = chunk_size is not None and chunk_size < tokens and depends_on_length(self.model.config)
        cache = roomy_cache(self, rows, tokens, 0) if cache is None else cache
        cache = self._checked(input_ids, attention_mask, cache)
        with attached.passing():
            cache.belongs_to(self.model)
            past = cache.get_seq_length()
            end = past + tokens
            self.counters.passes += 1
            try:
                self.runner.prefilling, self.runner.whole = True, end
                # rotary tables of a prompt in chunks are those of one in one piece
                with contextlib.nullcontext() if not chunks else tables_of_length(
                        self.model, end if attention_mask is None else int(attention_mask.sum(-1).max())):
                    for part in input_ids.split(min(chunk_size or tokens, tokens), dim=1):
                        past += part.shape[1]
                        mask = None if attention_mask is None else attention_mask[:, :past]
                        positions = None if mask is None else positions_of(mask)[:, -part.shape[1]:]
                        mask, _ = cache.masked(mask, part.shape[1])
                        decoder(self.model)(input_ids=part, attention_mask=mask, position_ids=positions,
                                            past_key_values=cache, use_cache=True)
            finally:
                self.runner.prefilling, self.runner.whole = False, 0
        return cache

    @usual_defaults()
    @torch.no_grad()
    def generate(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, max_new_tokens: int = 128,
        temperature: float = 0.0, eos_token_id: int | Sequence[int] | None = None, pad_token_id: int | None = None,
        seed: int | None = None, streamer: Streamer | None = None, cache: SparseCache | None = None,
    ) -> Tensor:
        """Answer a prompt as `model.generate` does, by a loop that costs the host next to nothing per token.

        Args:
            input_ids: `[B, N]`; with a cache the tokens after it.
            attention_mask: 1 = a token; with a cache of both.
            max_new_tokens: the longest answer [tokens].
            temperature: 0 takes the likeliest token, above it samples, by `seed` if given.
            eos_token_id, pad_token_id: without them the model's; rows that have ended are padded.
            streamer: as transformers' (`put`, `end`).
            cache: of an earlier turn.

        Returns:
            Prompt and answer, `[B, N + n]`.

        Raises:
            SparseKVError: arguments that no answer can be made of, or too little memory for prompt and answer.
        """
        vocabulary = vocabulary_of(self.model)
        check_ids(input_ids, vocabulary)
        whole("max_new_tokens", max_new_tokens, least=1, most=2**63 - 1)
        rows, tokens = input_ids.shape
        cache = roomy_cache(self, rows, tokens, max_new_tokens) if cache is None else cache
        self._checked(input_ids, attention_mask, cache, ends=True)
        border = border_of(self.model.config)
        step = self._step if border is None else step_across(
            border, self._step, self._logits, input_ids, cache, max_new_tokens)
        cache.prompt = cache.get_seq_length() + tokens if max_new_tokens > 1 else 0
        config = self.model.generation_config
        eos = end_tokens(config.eos_token_id if eos_token_id is None else eos_token_id)
        pad = config.pad_token_id if pad_token_id is None else pad_token_id
        fill = pad_token((eos or [0])[0] if pad is None else pad, rows, vocabulary)
        return decode_loop(self._logits, step, cache, input_ids, attention_mask, max_new_tokens=max_new_tokens,
                           temperature=temperature, eos=eos, fill=fill, seed=seed, streamer=streamer)

    def _checked(self, ids: Tensor, mask: Tensor | None, cache: Any, *, ends: bool = False) -> SparseCache:
        """The cache, where it and the mask are of these rows. Raises SparseKVError."""
        check_cache(cache)
        check_cache_rows(cache, ids.shape[0])
        if mask is not None:
            check_mask(mask, *ids.shape, held=cache.get_seq_length(), ends=ends)
        return cast(SparseCache, cache)

    def step(self, ids: Tensor, cache: SparseCache) -> Tensor:
        """Take the tokens `[B, n]` into a cache, in a loop of one's own, without padding.

        Returns:
            Logits `[B, 1, V]` of what follows, overwritten by the next step.

        Raises:
            SparseKVError: anything but a tensor of rows and tokens.
        """
        if not isinstance(ids, Tensor) or ids.dim() != 2:
            raise SparseKVError(f"a step takes a tensor of rows and tokens, found "
                                f"{list(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__}")
        return self._step(ids, None, None, cache) if ids.shape[1] == 1 else self._logits(ids, None, None, cache)

    def _logits(self, ids: Tensor, mask: Tensor | None, positions: Tensor | None, cache: SparseCache) -> Tensor:
        return self.model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache,
                          use_cache=True, logits_to_keep=1).logits

    def _step(self, token: Tensor, mask: Tensor | None, positions: Tensor | None, cache: SparseCache) -> Tensor:
        """Logits `[B, 1, V]` after one more token of every row, overwritten by the next step."""
        attached = model_of(self)
        mask, _ = cache.masked(mask, 1)
        with attached.lock:
            logits = self.runner.step(attached, cache, token, mask, positions)
            return self._logits(token, mask, positions, cache) if logits is None else logits

    def save_prefix(self, cache: SparseCache, path: str | Path) -> None:
        """Write a prefilled cache to one safetensors file, with the index and estimates that decoding builds over it,
        where it has one row and selector and completion can be restored. Raises SparseKVError for a model with
        sliding-window layers, an empty cache, values that are not finite, and a disk that fails."""
        save_with_index(cache, path, model_fingerprint(self.model), self.runner)

    def load_prefix(self, path: str | Path, *, index: bool = True) -> SparseCache:
        """A cache from `save_prefix`, on the model's device. index: with the index and estimates that it holds; without
        them they are built when decoding begins. Raises SparseKVError for another model's, and for index and estimates
        that this attachment would not make."""
        device = next(self.model.parameters()).device
        return load_prefix(self.cache(), path, model_fingerprint(self.model), device, self.decoding if index else None)
