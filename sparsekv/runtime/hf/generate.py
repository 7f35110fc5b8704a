"""`sparsekv generate`: text from a prompt, decoded sparsely."""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsekv.core.registry import NONE
from sparsekv.runtime.config import SparseConfig
from sparsekv.util.config import ROPE_SCALING, SEEDS, check_ranges, option
from sparsekv.util.errors import SparseKVError, first_line
from sparsekv.util.progress import hide


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(SparseConfig):
    model: str = option(help="Frozen model: Hugging Face name, folder, .gguf file, or package:NAME.")
    prompt_file: Path | None = option(None, help="File with the prompt, instead of --prompt.")
    prompt: str | None = option(None, help="Prompt text; '-' reads standard input.")
    max_new_tokens: int = option(128, help="Longest answer [tokens].", min=1, group="Answer")
    temperature: float = option(0.0, help="Sampling temperature; 0 takes the likeliest token.", min=0, group="Answer")
    seed: int = option(0, help="Seed of sampling.", group="Answer", **SEEDS)
    chat_template: bool = option(False, help="Wrap the prompt in the model's chat template.", group="Answer")
    special_tokens: bool = option(False, help="Read the text of special tokens in the prompt, such as <|im_end|>, as "
                                              "these tokens; without it their text stays text.", group="Answer")
    rope_scaling: str | None = option(None, help=ROPE_SCALING, group="Machine")
    dtype: str = option("auto", help="Arithmetic: auto, float32, bfloat16 or float16.", group="Machine")
    device: str = option("auto", help="auto, cpu, cuda, or balanced (spread over all GPUs).", group="Machine")


def generate(config: GenerateConfig) -> None:
    """Print the answer as it is made, then its tokens, time, method, and the share of the cache that was read."""
    import time

    from transformers import TextStreamer

    from sparsekv.artifacts.hub.models import load_model
    from sparsekv.artifacts.hub.rotary import beyond_positions
    from sparsekv.runtime.decoding import choose_selector, load_artifacts
    from sparsekv.runtime.hf.attach import attach

    check_ranges(config)
    text = read_prompt(config)
    router, phi = load_artifacts(config.artifacts, config.router, config.phi)
    sparse = SparseConfig.of(config, artifacts=None, router=router, phi=phi, token_budget=budget(config.token_budget))
    choose_selector(sparse, router)
    model, tokenizer = load_model(config.model, dtype=config.dtype, device=config.device,
                                  rope_scaling=config.rope_scaling)
    inputs = _encode(tokenizer, text, config.chat_template, config.special_tokens).to(model.device)
    beyond = beyond_positions(model.config, inputs["input_ids"].shape[1] + config.max_new_tokens)
    if beyond is not None:
        print(beyond, file=sys.stderr)
    with attach(model, config=sparse) as attachment:
        started = time.perf_counter()
        out = attachment.generate(
            inputs["input_ids"], max_new_tokens=config.max_new_tokens, temperature=config.temperature, seed=config.seed,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))
        seconds = time.perf_counter() - started
        report, decoding = attachment.report(), attachment.decoding
    prompt_tokens = inputs["input_ids"].shape[1]
    new_tokens = out.shape[1] - prompt_tokens
    method = decoding.selector.name + ("" if decoding.completion == NONE else f" + {decoding.completion}")
    if decoding.first_sparse is not None and not report["sparse_calls"]:
        method = f"full attention (faster than {method} on so short a cache; --dense-below 0 insists)"
    print(f"\n{prompt_tokens} prompt tokens, {new_tokens} generated in {seconds:.1f} s (prefill included); {method} "
          f"read {report['selectivity']:.1%} of the cache a step (tokens whose keys and values are read, sink and tail "
          "among them; mean over all layers, dense ones included)", file=sys.stderr)


def read_prompt(config: GenerateConfig) -> str:
    """The prompt's text, from exactly one of the two options."""
    if (config.prompt is None) == (config.prompt_file is None):
        raise SparseKVError("expected exactly one of --prompt and --prompt-file")
    if config.prompt_file is not None:
        if not config.prompt_file.is_file():
            raise SparseKVError(f"no prompt file at {str(config.prompt_file)!r}")
        try:
            text = config.prompt_file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise SparseKVError(f"the prompt file {str(config.prompt_file)!r} is not UTF-8 text (byte {error.start}); "
                                "convert it") from error
    else:
        text = _read_stdin() if config.prompt == "-" else str(config.prompt)
    if not text.strip():
        raise SparseKVError("the prompt is empty; give some text to continue")
    return text


def _read_stdin() -> str:
    try:
        if sys.stdin is None or sys.stdin.closed:
            raise SparseKVError("standard input is closed; give the prompt by --prompt-file")
        hide()  # who types sees what they type
        raw = getattr(sys.stdin, "buffer", None)  # in UTF-8 mode text lets wrong bytes through as surrogates
        return sys.stdin.read() if raw is None else raw.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise SparseKVError(f"standard input is not UTF-8 text (byte {error.start}); convert it") from error
    except OSError as error:
        raise SparseKVError(f"standard input could not be read ({error.strerror}); give the prompt by --prompt-file"
                            ) from error


def budget(value: float | None) -> int | float | None:
    """The command line's one number as the library's two types: a fraction below 1, else a count of tokens."""
    if value is None or value < 1:
        return value
    if not math.isfinite(value) or value != int(value):
        raise SparseKVError(f"a token budget from 1 on is a whole number of tokens, found {value}")
    return int(value)


def _encode(tokenizer: Any, text: str, chat_template: bool, special_tokens: bool) -> Any:
    import torch
    from transformers import BatchEncoding

    from sparsekv.artifacts.hub.spoken import around, as_text, chat_ids, names_special

    if not chat_template:
        try:
            return tokenizer(text, return_tensors="pt", **as_text(tokenizer, special_tokens))
        except (TypeError, ValueError, OverflowError) as error:
            raise SparseKVError(f"the model's tokenizer refuses the prompt ({first_line(error)}); give other text"
                                ) from error
    if not tokenizer.chat_template:
        raise SparseKVError("this model's tokenizer has no chat template; leave out --chat-template")
    message: Any = functools.partial(tokenizer.apply_chat_template, add_generation_prompt=True)
    try:
        if special_tokens or not names_special(tokenizer, text):
            return message([{"role": "user", "content": text}], return_tensors="pt", return_dict=True)
        parts = around(lambda words: str(message([{"role": "user", "content": words}], tokenize=False)), text)
        if parts is not None:
            ids = torch.tensor([chat_ids(tokenizer, parts)])
            return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    except Exception as error:  # templates raise whatever they like
        raise SparseKVError(f"the model's chat template could not be applied ({first_line(error)}); leave out "
                            "--chat-template") from error
    raise SparseKVError("the prompt has the text of special tokens, and the chat template changes its text; give "
                        "--special-tokens, or leave out --chat-template")
