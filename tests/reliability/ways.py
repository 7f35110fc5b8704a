"""Ways of running an attached model: what each must come to. `python tests/reliability/ways.py` draws the table of
docs/reliability.md."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import io
import pickle
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import sparsekv
from sparsekv.runtime.hf.attach import RunOptions
from sparsekv.util.errors import SparseKVError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- ways -->\n", "<!-- end of ways -->"
SPARSE, REFUSED, WARNED = "sparse", "refused", "warned"
TINY: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": None, "initializer_range": 0.3}
NEW = 3


class Way(NamedTuple):
    """group, name: as in the page. run: does it with a fresh model and a prompt, and returns the attachment, if any.
    comes_to: SPARSE, REFUSED or WARNED. says: words of the refusal or warning. reason: for the page."""

    group: str
    name: str
    run: Callable[[Any, torch.Tensor], Any]
    comes_to: str
    says: str
    reason: str


class Found(NamedTuple):
    """What a way came to; "silent" where it is none of the three, and what was said."""

    what: str
    said: str


WAYS: list[Way] = []


def way(group: str, name: str, comes_to: str = SPARSE, says: str = "", reason: str = "") -> Callable[[Any], Any]:
    def add(run: Callable[[Any, torch.Tensor], Any]) -> Any:
        WAYS.append(Way(group, name, run, comes_to, says, reason))
        return run

    return add


def fresh_model(**changes: Any) -> Any:
    import transformers

    torch.manual_seed(7)
    return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**{**TINY, **changes})).eval()


def fresh_prompt(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 97, (rows, 60), generator=torch.Generator().manual_seed(seed))


def attach(model: Any, **options: Any) -> Any:
    return sparsekv.attach(model, **{"selector": "streaming", "dense_below": 0, "dense_layers": (), **options})


def answer(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    return model.generate(ids, **{"max_new_tokens": NEW, "do_sample": False, **options})


def loop(model: Any, ids: torch.Tensor, cache: Any = None, **options: Any) -> torch.Tensor:
    """A loop of one's own over the model's passes."""
    with torch.no_grad():
        for _ in range(NEW):
            out = model(input_ids=ids if cache is None or not cache.get_seq_length() else ids[:, -1:],
                        past_key_values=cache, **options)
            cache = out.past_key_values
            ids = torch.cat([ids, out.logits[:, -1:].argmax(-1)], dim=1)
    return ids


def judge(one: Way) -> Found:
    """What the way comes to. Exceptions other than refusals come out."""
    with warnings.catch_warnings(record=True) as heard, contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("always")
        try:
            attachment = one.run(fresh_model(), fresh_prompt())
        except SparseKVError as refusal:
            return Found(REFUSED, str(refusal))
    if attachment is not None and attachment.report()["in_force"] and attachment.report()["sparse_calls"]:
        return Found(SPARSE, "")
    ours = [str(w.message) for w in heard if "sparse" in str(w.message)]
    return Found(WARNED, ours[0]) if len(ours) == 1 else Found("silent", " / ".join(ours))


def wrong(one: Way) -> str | None:
    """A word where a way comes to something else."""
    try:
        found = judge(one)
    except Exception as error:
        return f"{one.name}: {type(error).__name__}: {error}"
    right = found.what == one.comes_to and one.says in found.said
    return None if right else f"{one.name}: {found}"


# ---------------------------------------------------------------------------------------------------------- calling

CALLS: dict[str, Callable[[Any, Any, torch.Tensor], Any]] = {
    "`model.generate`": lambda m, a, x: answer(m, x),
    "`attachment.generate`": lambda m, a, x: a.generate(x, max_new_tokens=NEW),
    "`attachment.prefill`, then `attachment.step`": lambda m, a, x: a.step(x[:, -1:], a.prefill(x)),
    "passes of one's own, no cache given": lambda m, a, x: loop(m, x),
    "passes of one's own, `attachment.cache()`": lambda m, a, x: loop(m, x, a.cache()),
    "passes with positional arguments": lambda m, a, x: _positional(m, a, x),
    "passes of the decoder without the head": lambda m, a, x: _decoder(m, a, x),
    "sampling": lambda m, a, x: answer(m, x, do_sample=True),
    "beams": lambda m, a, x: answer(m, x, num_beams=2),
    "several answers": lambda m, a, x: answer(m, x, do_sample=True, num_return_sequences=2),
    "a left-padded batch": lambda m, a, x: _padded(m, x),
    "embeddings in place of ids": lambda m, a, x: answer(m, None, inputs_embeds=m.get_input_embeddings()(x)),
    "hidden states": lambda m, a, x: answer(m, x, output_hidden_states=True, return_dict_in_generate=True),
    "`return_dict=False`": lambda m, a, x: _tuples(m, a, x),
    "a streamer in another thread": lambda m, a, x: _streamed(m, x),
    "inference mode": lambda m, a, x: _within(torch.inference_mode(), m, x),
    "autocast": lambda m, a, x: _within(torch.autocast("cpu", torch.bfloat16), m, x),
    "anomaly detection": lambda m, a, x: _within(torch.autograd.set_detect_anomaly(True, check_nan=False), m, x),
    "a default device": lambda m, a, x: _within(torch.device("cpu"), m, x),
    "`model.train()`": lambda m, a, x: answer(m.train(), x),
    "`model.double()` inside": lambda m, a, x: answer(m.double(), x),
    "`custom_generate`": lambda m, a, x: m.generate(x, custom_generate=lambda model, input_ids, **_: loop(
        model, input_ids)),
    "a second turn": lambda m, a, x: _turns(m, a, x),
    "forks of a cache": lambda m, a, x: answer(m, torch.cat([x, x[:, :3]], 1), past_key_values=a.prefill(x).fork()),
    "a pipeline": lambda m, a, x: _pipeline(m),
}


def _called(call: Callable[[Any, Any, torch.Tensor], Any]) -> Callable[[Any, torch.Tensor], Any]:
    def run(model: Any, ids: torch.Tensor) -> Any:
        with attach(model) as attachment:
            call(model, attachment, ids)
        return attachment

    return run


def _positional(model: Any, attachment: Any, ids: torch.Tensor) -> None:
    cache = attachment.cache()
    with torch.no_grad():
        model(ids, None, None, cache)
        model(ids[:, -1:], None, None, cache)


def _decoder(model: Any, attachment: Any, ids: torch.Tensor) -> None:
    cache = attachment.cache()
    with torch.no_grad():
        model.model(ids, past_key_values=cache)
        model.model(ids[:, -1:], past_key_values=cache)


def _tuples(model: Any, attachment: Any, ids: torch.Tensor) -> None:
    cache = attachment.cache()
    with torch.no_grad():
        model(ids, past_key_values=cache, return_dict=False)
        model(ids[:, -1:], past_key_values=cache, return_dict=False)


def _padded(model: Any, ids: torch.Tensor) -> None:
    mask = torch.ones(2, ids.shape[1], dtype=torch.long)
    mask[1, :9] = 0
    answer(model, ids.repeat(2, 1), attention_mask=mask)


def _streamed(model: Any, ids: torch.Tensor) -> None:
    from tiny import make_tokenizer
    from transformers import TextIteratorStreamer

    streamer = TextIteratorStreamer(make_tokenizer(), timeout=60)
    thread = threading.Thread(target=answer, args=(model, ids), kwargs={"streamer": streamer})
    thread.start()
    list(streamer)
    thread.join()


def _within(block: Any, model: Any, ids: torch.Tensor) -> None:
    with block:
        answer(model, ids)


def _turns(model: Any, attachment: Any, ids: torch.Tensor) -> None:
    cache = attachment.cache()
    first = answer(model, ids, past_key_values=cache)
    answer(model, torch.cat([first, ids[:, :5]], dim=1), past_key_values=cache)


def _pipeline(model: Any) -> None:
    from tiny import make_tokenizer
    from transformers import pipeline

    pipeline("text-generation", model=model, tokenizer=make_tokenizer())("many words " * 8, max_new_tokens=NEW)


for _name, _call in CALLS.items():
    way("calling", _name)(_called(_call))


@way("calling", "`use_cache=False` to `generate`", REFUSED, "needs a cache", "full attention over all text, every step")
def _(model: Any, ids: torch.Tensor) -> Any:
    with attach(model) as attachment:
        answer(model, ids, use_cache=False)
    return attachment


@way("calling", "passes with `use_cache=False`", WARNED, "passes kept no cache", "there is nothing to select from")
def _(model: Any, ids: torch.Tensor) -> Any:
    with attach(model) as attachment, torch.no_grad():
        for _ in range(2):
            model(ids, use_cache=False)
    return attachment


@way("calling", "`output_attentions=True`", REFUSED, "attentions", "no matrix of attentions is made")
def _(model: Any, ids: torch.Tensor) -> Any:
    with attach(model) as attachment:
        answer(model, ids, output_attentions=True, return_dict_in_generate=True)
    return attachment


@way("calling", "`output_attentions=True` to a pass", REFUSED, "attentions", "no matrix of attentions is made")
def _(model: Any, ids: torch.Tensor) -> Any:
    with attach(model) as attachment:
        model(ids, output_attentions=True)
    return attachment


@way("calling", "a gradient through a step", REFUSED, "no gradient", "a step chooses, and choosing has no gradient")
def _(model: Any, ids: torch.Tensor) -> Any:
    with attach(model) as attachment:
        cache = attachment.prefill(ids)
        model(ids[:, -1:], past_key_values=cache).logits.sum().backward()
    return attachment


@way("calling", "caches that are short", WARNED, "too short", "full attention is the faster one there")
def _(model: Any, ids: torch.Tensor) -> Any:
    with attach(model, dense_below=1000) as attachment:
        answer(model, ids)
    return attachment


@way("calling", "every layer in `dense_layers`", WARNED, "no layer decodes sparsely", "as asked")
def _(model: Any, ids: torch.Tensor) -> Any:
    with attach(model, dense_layers=(0, 1)) as attachment:
        answer(model, ids)
    return attachment


# ------------------------------------------------------------------------------------------------------------ caches

@way("caches", "a `DynamicCache` to `generate`", REFUSED, "no sparse index", "it is transformers' own")
def _(model: Any, ids: torch.Tensor) -> Any:
    from transformers import DynamicCache

    with attach(model) as attachment:
        answer(model, ids, past_key_values=DynamicCache(config=model.config))
    return attachment


@way("caches", "a `StaticCache` to a pass", REFUSED, "no sparse index", "it is transformers' own")
def _(model: Any, ids: torch.Tensor) -> Any:
    from transformers import StaticCache

    with attach(model) as attachment:
        loop(model, ids, StaticCache(config=model.config, max_cache_len=100))
    return attachment


@way("caches", "another model's cache", REFUSED, "another model", "its keys are not this model's")
def _(model: Any, ids: torch.Tensor) -> Any:
    with attach(fresh_model()) as other:
        cache = other.prefill(ids)
    with attach(model) as attachment:
        loop(model, ids, cache)
    return attachment


@way("caches", "a cache of other rows", REFUSED, "rows", "the cache stays as it was")
def _(model: Any, ids: torch.Tensor) -> Any:
    with attach(model) as attachment:
        answer(model, torch.cat([ids, ids[:, :2]], dim=1), past_key_values=attachment.prefill(ids), do_sample=True,
               num_return_sequences=3)
    return attachment


for _kind in ("dynamic", "static", "offloaded", "quantized", "hybrid"):
    @way("caches", f"a checkpoint whose generation_config names the cache {_kind!r}")
    def _(model: Any, ids: torch.Tensor, kind: str = _kind) -> Any:
        model.generation_config.cache_implementation = kind
        with attach(model) as attachment:
            answer(model, ids)
        return attachment

for _kind in ("static", "offloaded", "paged"):
    @way("caches", f"`cache_implementation={_kind!r}` to `generate`", REFUSED, "no sparse index",
         "it is transformers' own")
    def _(model: Any, ids: torch.Tensor, kind: str = _kind) -> Any:
        with attach(model) as attachment:
            answer(model, ids, cache_implementation=kind)
        return attachment


@way("caches", "`cache_implementation` in a `GenerationConfig` of the call", REFUSED, "no sparse index",
     "it is transformers' own")
def _(model: Any, ids: torch.Tensor) -> Any:
    from transformers import GenerationConfig

    with attach(model) as attachment:
        model.generate(ids, generation_config=GenerationConfig(cache_implementation="static", max_new_tokens=NEW))
    return attachment


@way("caches", "a fresh `GenerationConfig`")
def _(model: Any, ids: torch.Tensor) -> Any:
    from transformers import GenerationConfig

    with attach(model) as attachment:
        model.generate(ids, generation_config=GenerationConfig(max_new_tokens=NEW, do_sample=False))
    return attachment


# ------------------------------------------------------------------------------------------ attention, compiled code

@way("attention", "`set_attn_implementation` inside, then `generate`", REFUSED, "set to 'eager'",
     "steps would not be sparsekv's")
def _(model: Any, ids: torch.Tensor) -> Any:
    with attach(model) as attachment:
        model.set_attn_implementation("eager")
        answer(model, ids)
    return attachment


@way("attention", "`set_attn_implementation` between steps", REFUSED, "set to 'sdpa'", "steps would not be sparsekv's")
def _(model: Any, ids: torch.Tensor) -> Any:
    with attach(model) as attachment:
        cache = attachment.prefill(ids)
        model.set_attn_implementation("sdpa")
        loop(model, ids, cache)
    return attachment


@way("attention", "`set_attn_implementation` before attach")
def _(model: Any, ids: torch.Tensor) -> Any:
    model.set_attn_implementation("eager")
    with attach(model) as attachment:
        answer(model, ids)
    return attachment


@way("attention", "an attention's `forward` replaced", REFUSED, "was not sparsekv's", "layers would be skipped")
def _(model: Any, ids: torch.Tensor) -> Any:
    with attach(model) as attachment:
        module = model.model.layers[1].self_attn
        module.forward = types.MethodType(lambda self, hidden_states, **_: (hidden_states, None), module)
        answer(model, ids)
    return attachment


@way("attention", "sparsekv's name registered anew", REFUSED, "was not sparsekv's", "layers would be skipped")
def _(model: Any, ids: torch.Tensor) -> Any:
    from transformers import AttentionInterface

    with attach(model) as attachment:
        AttentionInterface.register("sparsekv", AttentionInterface()["sdpa"])
        loop(model, ids)
    return attachment


@way("attention", "`model.forward` as it was before attach", REFUSED, "no sparse index", "it bypasses the attachment")
def _(model: Any, ids: torch.Tensor) -> Any:
    before = model.forward
    with attach(model) as attachment:
        loop(before, ids)
    return attachment


@way("attention", "`model.generate` as it was before attach", REFUSED, "no sparse index", "it bypasses the attachment")
def _(model: Any, ids: torch.Tensor) -> Any:
    before = model.generate
    with attach(model) as attachment:
        before(ids, max_new_tokens=NEW)
    return attachment


@way("attention", "another head over the attached layers", REFUSED, "no sparse index", "it bypasses the attachment")
def _(model: Any, ids: torch.Tensor) -> Any:
    other = fresh_model()
    other.model = model.model
    with attach(model) as attachment:
        answer(other, ids)
    return attachment


@way("attention", "hooks on layers")
def _(model: Any, ids: torch.Tensor) -> Any:
    model.model.layers[0].register_forward_hook(lambda *_: None)
    with attach(model) as attachment:
        answer(model, ids)
    return attachment


@way("attention", "an inner part compiled that holds no attention (an MLP)")
def _(model: Any, ids: torch.Tensor) -> Any:
    model.model.layers[0].mlp.forward = torch.compile(model.model.layers[0].mlp.forward, backend="eager")
    with attach(model) as attachment:
        loop(model, ids)
    return attachment


def _whole(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def _layers(model: Any) -> Any:
    for layer in model.model.layers:
        layer.compile(backend="eager")
    return model


def _inner(model: Any) -> Any:
    model.model = torch.compile(model.model, backend="eager")
    return model


def _inner_in_place(model: Any) -> Any:
    model.model.compile(backend="eager")
    return model


def _forward(model: Any) -> Any:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def _attention_module(model: Any) -> Any:
    model.model.layers[1].self_attn.compile(backend="eager")
    return model


COMPILED = {
    "`model.compile()`": _whole, "`layer.compile()`": _layers, "`model.model = torch.compile(model.model)`": _inner,
    "`model.model.compile()`": _inner_in_place, "an attention module's `compile()`": _attention_module,
    "`model.forward = torch.compile(model.forward)`": _forward}
for _name, _compile in COMPILED.items():
    @way("compiled", f"{_name} before attach", REFUSED, "compiled", "compiled code calls no attention of sparsekv's")
    def _(model: Any, ids: torch.Tensor, compiled: Any = _compile) -> Any:
        compiled(model)
        with attach(model) as attachment:
            answer(model, ids)
        return attachment

for _name, _compile in COMPILED.items():
    @way("compiled", f"{_name} inside", REFUSED, "compiled", "compiled code calls no attention of sparsekv's")
    def _(model: Any, ids: torch.Tensor, compiled: Any = _compile) -> Any:
        with attach(model) as attachment:
            loop(compiled(model), ids)
        return attachment


@way("compiled", "`torch.compile(model)` attached to", REFUSED, "compiled", "attach to the model in it")
def _(model: Any, ids: torch.Tensor) -> Any:
    with attach(torch.compile(model, backend="eager")) as attachment:
        answer(model, ids)
    return attachment


@way("compiled", "`torch.compile(model)` of before, its model attached to")
def _(model: Any, ids: torch.Tensor) -> Any:
    compiled = torch.compile(model, backend="eager")
    with attach(model) as attachment:
        loop(compiled, ids)
    return attachment


@way("compiled", "a function that calls the model, compiled")
def _(model: Any, ids: torch.Tensor) -> Any:
    @torch.compile(backend="eager")
    def step(ids: torch.Tensor, cache: Any) -> torch.Tensor:
        return model(ids, past_key_values=cache).logits

    with attach(model) as attachment, torch.no_grad():
        cache = attachment.prefill(ids)
        step(ids[:, -1:], cache)
    return attachment


# ---------------------------------------------------------------------------------------------------------- training

@way("training", "checkpointing and `train()`, `generate`", REFUSED, "gradient checkpointing",
     "layers drop the cache they are given")
def _(model: Any, ids: torch.Tensor) -> Any:
    model.gradient_checkpointing_enable()
    with attach(model.train()) as attachment:
        answer(model, ids)
    return attachment


@way("training", "checkpointing and `train()`, a pass with a cache", REFUSED, "gradient checkpointing",
     "layers drop the cache they are given")
def _(model: Any, ids: torch.Tensor) -> Any:
    model.gradient_checkpointing_enable()
    with attach(model.train()) as attachment:
        loop(model, ids, attachment.cache())
    return attachment


@way("training", "checkpointing and `train()`, a loss", WARNED, "passes kept no cache", "a training step has no cache")
def _(model: Any, ids: torch.Tensor) -> Any:
    model.gradient_checkpointing_enable()
    with attach(model.train()) as attachment:
        model(ids, labels=ids).loss.backward()
    return attachment


@way("training", "checkpointing and `eval()`")
def _(model: Any, ids: torch.Tensor) -> Any:
    model.gradient_checkpointing_enable()
    with attach(model) as attachment:
        answer(model, ids)
    return attachment


# ---------------------------------------------------------------------------------------------------------- wrappers

class Tuner(nn.Module):
    """The shape of PEFT's LoraModel: it hands on to the model in it."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.model, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.forward(*args, **kwargs)


class Adapted(nn.Module):
    """The shape of PEFT's PeftModelForCausalLM."""

    def __init__(self, model: Any):
        super().__init__()
        self.base_model, self.config = Tuner(model), model.config

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model.generate(*args, **kwargs)


RUNS = {"generates": answer, "is called": loop}
WRAPPERS = {"PEFT's wrapper": Adapted, "DataParallel": nn.DataParallel}
for _name, _wrapper in WRAPPERS.items():
    for _verb, _run in RUNS.items():
        if _wrapper is nn.DataParallel and _run is answer:
            continue  # it has no `generate`

        @way("wrappers", f"{_name} attached to, and {_verb}")
        def _(model: Any, ids: torch.Tensor, wrapper: Any = _wrapper, run: Any = _run) -> Any:
            wrapped = wrapper(model)
            with attach(wrapped) as attachment:
                run(wrapped, ids)
            return attachment

        @way("wrappers", f"the model attached to, {_name} {_verb}")
        def _(model: Any, ids: torch.Tensor, wrapper: Any = _wrapper, run: Any = _run) -> Any:
            with attach(model) as attachment:
                run(wrapper(model), ids)
            return attachment

    @way("wrappers", f"{_name} attached to, the model in it generates")
    def _(model: Any, ids: torch.Tensor, wrapper: Any = _wrapper) -> Any:
        with attach(wrapper(model)) as attachment:
            answer(model, ids)
        return attachment


@way("wrappers", "accelerate's hooks")
def _(model: Any, ids: torch.Tensor) -> Any:
    from accelerate import dispatch_model

    model = dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)
    with attach(model) as attachment:
        answer(model, ids)
    return attachment


for _name in ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager"):
    @way("wrappers", f"`model.{_name}`", REFUSED, "continuous batching", "its pages have no sparse index")
    def _(model: Any, ids: torch.Tensor, name: str = _name) -> Any:
        with attach(model) as attachment:
            getattr(model, name)(ids.tolist())
        return attachment


@way("wrappers", "an assistant's candidates", WARNED, "sparse_chunks", "several tokens are read as a prompt is")
def _(model: Any, ids: torch.Tensor) -> Any:
    with attach(model):
        answer(model, ids, assistant_model=fresh_model())


@way("wrappers", "an assistant's candidates, `sparse_chunks`")
def _(model: Any, ids: torch.Tensor) -> Any:
    with attach(model, run=RunOptions(sparse_chunks=True)) as attachment:
        answer(model, ids, assistant_model=fresh_model())
    return attachment


@way("wrappers", "an attached assistant")
def _(model: Any, ids: torch.Tensor) -> Any:
    with attach(model) as attachment:
        answer(fresh_model(), ids, assistant_model=model, max_new_tokens=20)
    return attachment


@way("wrappers", "`prompt_lookup_num_tokens`, `sparse_chunks`")
def _(model: Any, ids: torch.Tensor) -> Any:
    with attach(model, run=RunOptions(sparse_chunks=True)) as attachment:
        answer(model, ids, prompt_lookup_num_tokens=3)
    return attachment


@way("wrappers", "`assistant_early_exit`", REFUSED, "assistant_early_exit", "layers' caches would differ in length")
def _(model: Any, ids: torch.Tensor) -> Any:
    with attach(model) as attachment:
        answer(model, ids, assistant_early_exit=1)
    return attachment


@way("wrappers", "a copy of the attached model", REFUSED, "cannot be copied", "it would take the attachment with it")
def _(model: Any, ids: torch.Tensor) -> Any:
    with attach(model) as attachment:
        answer(copy.deepcopy(model), ids)
    return attachment


@way("wrappers", "a pickle of the attached model", REFUSED, "cannot be copied", "it would take the attachment with it")
def _(model: Any, ids: torch.Tensor) -> Any:
    with attach(model) as attachment:
        pickle.dumps(model)
    return attachment


# ------------------------------------------------------------------------------------------- threads and coroutines

@way("threads", "another thread generates")
def _(model: Any, ids: torch.Tensor) -> Any:
    with attach(model) as attachment, ThreadPoolExecutor(1) as pool:
        pool.submit(answer, model, ids).result()
    return attachment


@way("threads", "two threads generate at once")
def _(model: Any, ids: torch.Tensor) -> Any:
    with attach(model) as attachment, ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: answer(model, ids), range(2)))
    return attachment


@way("threads", "another thread attaches", REFUSED, "another thread", "one would decode with the other's settings")
def _(model: Any, ids: torch.Tensor) -> Any:
    with attach(model), ThreadPoolExecutor(1) as pool:
        return pool.submit(_called(CALLS["`model.generate`"]), model, ids).result()


def _decoded(model: Any, ids: torch.Tensor, cache: Any) -> None:
    with torch.no_grad():
        cache = model.model(ids, past_key_values=cache).past_key_values
        model.model(ids[:, -1:], past_key_values=cache)


@way("threads", "another thread calls the decoder by itself, `attachment.cache()`", REFUSED, "the decoder by itself",
     "it does not come by the model's own pass")
def _(model: Any, ids: torch.Tensor) -> Any:
    with attach(model) as attachment, ThreadPoolExecutor(1) as pool:
        pool.submit(_decoded, model, ids, attachment.cache()).result()
    return attachment


@way("threads", "another thread calls the decoder by itself, no cache given", WARNED, "the decoder by itself",
     "it looks like a pass that began before")
def _(model: Any, ids: torch.Tensor) -> Any:
    with attach(model), ThreadPoolExecutor(1) as pool:
        pool.submit(_decoded, model, ids, None).result()


async def _attached(model: Any, ids: torch.Tensor, turn: asyncio.Event, gone: asyncio.Event) -> Any:
    with attach(model) as attachment:
        gone.set()
        await turn.wait()
        answer(model, ids)
    return attachment


async def _both(model: Any, ids: torch.Tensor) -> Any:
    one, other = asyncio.Event(), asyncio.Event()
    first = asyncio.ensure_future(_attached(model, ids, one, other))
    await other.wait()
    second = asyncio.ensure_future(_attached(model, ids, asyncio.Event(), one))
    try:
        return await second
    finally:
        one.set()
        await first


@way("threads", "two coroutines attach", REFUSED, "another coroutine", "one would decode with the other's settings")
def _(model: Any, ids: torch.Tensor) -> Any:
    return asyncio.run(asyncio.wait_for(_both(model, ids), 60))


@way("threads", "a coroutine attaches inside another's block")
def _(model: Any, ids: torch.Tensor) -> Any:
    async def inner() -> Any:
        return _called(CALLS["`model.generate`"])(model, ids)

    with attach(model, selector="dense"):
        return asyncio.run(inner())


@way("threads", "coroutines share an attachment")
def _(model: Any, ids: torch.Tensor) -> Any:
    async def one() -> None:
        await asyncio.to_thread(answer, model, ids)

    async def all_of_them() -> None:
        await asyncio.gather(one(), one())

    with attach(model) as attachment:
        asyncio.run(all_of_them())
    return attachment


@way("forgotten", "an attachment that was never entered", WARNED, "never entered", "nothing was attached")
def _(model: Any, ids: torch.Tensor) -> Any:
    attach(model)
    answer(model, ids)


@way("forgotten", "an attachment that was entered and dropped", WARNED, "has left its model", "nobody could leave it")
def _(model: Any, ids: torch.Tensor) -> Any:
    attach(model).__enter__()
    plain = fresh_model()
    assert torch.equal(answer(model, ids), answer(plain, ids)) and "forward" not in model.__dict__


@way("forgotten", "an attachment in a cycle that was dropped", WARNED, "has left its model", "nobody could leave it")
def _(model: Any, ids: torch.Tensor) -> Any:
    attachment = attach(model)
    attachment.itself = attachment
    attachment.__enter__()
    del attachment
    gc.collect()
    assert torch.equal(answer(model, ids), answer(fresh_model(), ids))


@way("forgotten", "an attachment that is entered and kept")
def _(model: Any, ids: torch.Tensor) -> Any:
    attachment = attach(model)
    attachment.__enter__()
    answer(model, ids)
    attachment.__exit__(None, None, None)
    return attachment


@way("forgotten", "an attachment in an `ExitStack`")
def _(model: Any, ids: torch.Tensor) -> Any:
    with contextlib.ExitStack() as stack:
        attachment = stack.enter_context(attach(model))
        answer(model, ids)
    return attachment


@way("forgotten", "a generator that is left in the middle")
def _(model: Any, ids: torch.Tensor) -> Any:
    def tokens() -> Iterator[Any]:
        with attach(model) as attachment:
            answer(model, ids)
            yield attachment

    made = tokens()
    attachment = next(made)
    made.close()
    assert "forward" not in model.__dict__
    return attachment


@way("forgotten", "an attachment inside another, the outer left first")
def _(model: Any, ids: torch.Tensor) -> Any:
    outer, inner = attach(model, selector="dense"), attach(model)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    answer(model, ids)
    inner.__exit__(None, None, None)
    return inner


def table() -> str:
    """The page's table."""
    words = {SPARSE: "decodes sparsely", REFUSED: "refused", WARNED: "warns"}
    lines = [f"| {w.group} | {w.name} | {words[w.comes_to]} | {w.reason} |" for w in WAYS]
    return "\n".join(["| | way | what comes of it | why |", "| --- | --- | --- | --- |", *lines]) + "\n"


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[1] / "runtime"))
    page = PAGE.read_text()
    PAGE.write_text(f"{page.partition(BEGIN)[0]}{BEGIN}\n{table()}\n{END}{page.partition(END)[2]}")
