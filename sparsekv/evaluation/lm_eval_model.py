"""lm-eval's model class `sparsekv`: its own Hugging Face model, decoding sparsely.

    python -m sparsekv.evaluation.lm_eval_model --model sparsekv \\
        --model_args pretrained=M,selector=topk,token_budget=0.02,phi=ART --tasks ...

is `lm_eval` with the class registered; `import sparsekv.evaluation.lm_eval_model` registers it in one's own program.
Prompts are prefilled densely but for their last token, so every token of an answer comes from sparse attention; so do
the log-likelihoods of given answers (multiple choice), whose prompt is prefilled once for all of them. The likelihood
of whole texts (`loglikelihood_rolling`) is prefill alone and therefore dense.
"""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import torch

from sparsekv.util.errors import SparseKVError


def _make() -> Any:
    try:
        from lm_eval.api.registry import register_model
        from lm_eval.models.huggingface import HFLM
        from lm_eval.models.utils_hf import stop_sequences_criteria
        from tqdm import tqdm
    except ImportError as error:
        raise SparseKVError("the lm-eval model class needs lm-eval: run `pip install 'sparsekv[eval]'`") from error

    @register_model("sparsekv")
    class SparseKVLM(HFLM):
        """`pretrained` (anything `sparsekv` can load, `package:NAME` and .gguf included) and the arguments of
        `sparsekv.attach` (selector, token_budget, router, phi, completion, probes, sink_size, window_size,
        dense_layers as `0+1`, selector options); all else is HFLM's own. Without selector or router it is dense."""

        def __init__(self, pretrained: Any, **kwargs: Any):
            own = inspect.signature(HFLM.__init__).parameters
            options = {k: kwargs.pop(k) for k in list(kwargs) if k not in own}
            if isinstance(pretrained, str):
                from sparsekv.artifacts.hub.models import load_model

                device = kwargs.get("device") or "auto"
                dtype = kwargs.pop("dtype", "auto")
                pretrained, tokenizer = load_model(pretrained, dtype=str(dtype).removeprefix("torch."), device=device)
                kwargs.setdefault("tokenizer", tokenizer)
                kwargs["device"] = str(pretrained.device)
            super().__init__(pretrained=pretrained, **kwargs)
            self.sparse_options = attach_options(options)
            with self._attach() as attachment:  # bad options are refused before the first task
                self.dense = attachment.decoding.selector.name == "dense"
            self.rolling = False

        def _attach(self, **options: Any) -> Any:
            from sparsekv.runtime.hf.attach import attach

            return attach(self.model, **{"dense_below": 0, **options, **self.sparse_options})

        def loglikelihood_rolling(self, *args: Any, **kwargs: Any) -> list[float]:
            self.rolling = True
            try:
                return super().loglikelihood_rolling(*args, **kwargs)
            finally:
                self.rolling = False

        def _loglikelihood_tokens(
            self, requests: list[Any], disable_tqdm: bool = False, override_bs: int | None = None,
        ) -> list[tuple[float, bool]]:
            """Log-likelihood of every continuation and whether it is the greedy one, by sparse steps of all its tokens
            over a densely read context; contexts that are alike are read once."""
            if self.dense or self.rolling:
                return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
            from sparsekv.evaluation.likelihoods import likelihoods
            from sparsekv.runtime.hf.plan import RunOptions

            alike: dict[tuple[int, ...], list[int]] = {}
            for number, (_, context, answer) in enumerate(requests):
                alike.setdefault(tuple((context + answer)[-(self.max_length + 1):-len(answer)]), []).append(number)
            found: dict[int, tuple[float, bool]] = {}
            with self._attach(run=RunOptions(sparse_chunks=True)) as attachment, torch.inference_mode(), tqdm(
                    total=len(requests), disable=disable_tqdm, desc="log-likelihoods by sparse steps") as bar:
                for context, numbers in alike.items():
                    read = torch.tensor([context[:-1]], device=self.device)
                    cache = attachment.prefill(read) if len(context) > 1 else attachment.cache()
                    judged = likelihoods(self.model, cache, context[-1], [requests[n][2] for n in numbers])
                    for number, found[number] in zip(numbers, judged, strict=True):
                        if requests[number][0] is not None:
                            self.cache_hook.add_partial("loglikelihood", requests[number][0], found[number])
                        bar.update(1)
                if alike:
                    attachment.check_in_force("the method")
                    self.last_report = attachment.report()
            return [found[number] for number in range(len(requests))]

        def _model_generate(self, context: Any, max_length: int, stop: list[str], **generation_kwargs: Any) -> Any:
            mask = generation_kwargs.get("attention_mask")
            generation_kwargs.pop("temperature", None)
            if generation_kwargs.pop("do_sample", False):
                raise SparseKVError("the lm-eval class sparsekv answers greedily; this task asks for sampling")
            criteria = stop_sequences_criteria(self.tokenizer, stop, context.shape[1], context.shape[0])
            with self._attach() as attachment:
                cache = None
                if context.shape[1] > 1:
                    cache = attachment.prefill(context[:, :-1], None if mask is None else mask[:, :-1])
                out = self.model.generate(
                    input_ids=context, max_length=max_length, stopping_criteria=criteria, do_sample=False,
                    pad_token_id=self.tokenizer.pad_token_id, past_key_values=cache, **generation_kwargs)
                if out.shape[1] > context.shape[1] + 1:
                    attachment.check_in_force("the method")
                self.last_report = attachment.report()
            return out

    return SparseKVLM


def attach_options(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `attach` from lm-eval's model arguments: an integer budget counts tokens, a float is a share.

    Raises SparseKVError for what `attach` and no selector knows.
    """
    from sparsekv.core.selectors import SELECTORS
    from sparsekv.runtime.config import SparseConfig

    known = {f.name for f in fields(SparseConfig)} | {"run", *(
        n for s in SELECTORS.values() for n in s.option_names())}
    unknown = sorted(set(options) - (known - {"options"}))
    if unknown:
        raise SparseKVError(f"unknown model argument {unknown[0]!r}: expected those of lm-eval's hf model, of "
                            "sparsekv.attach, or options of a selector")
    made = dict(options)
    if isinstance(made.get("dense_layers"), str | int):
        made["dense_layers"] = [int(x) for x in str(made["dense_layers"]).split("+") if x]
    return made


SparseKVLM = _make()


def main() -> None:
    """`lm_eval`'s command line with the class `sparsekv` in it."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
