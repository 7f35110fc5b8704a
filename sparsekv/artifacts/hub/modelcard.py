"""The page of an artifact, `README.md`, as the hub shows it: what it is, for which model, how it was trained, how good
it is, how it is used."""

from __future__ import annotations

import html
import json
import re
import shlex
from pathlib import Path, PurePath
from typing import Any

from sparsekv.artifacts.card import sound
from sparsekv.artifacts.hub.named import REPOSITORY
from sparsekv.artifacts.hub.quality import figure_caption, quality_figure, quality_table
from sparsekv.artifacts.hub.text_quality import CAPTION, TextQuality
from sparsekv.core.registry import NONE, PAPERS
from sparsekv.util.disk import placed
from sparsekv.util.errors import printable
from sparsekv.util.pages import template

README, FIGURE = "README.md", "quality.png"
SHOWN = ("preset", "num_buckets", "scores", "key_space", "sketch_bytes", "width", "keys_per_step", "optimizer", "seed")
STEPS = ("hidden_size", "max_steps", "batch_size", "lr")
"""Options of a training that its page names; `STEPS` where there are any, which `mean_key` scores need none of."""
SAYS = {
    "router": "a router: buckets of keys, and sketches of keys, by which a decoding step finds the few per cent of the "
              "cache that it reads",
    "phi": "feature maps φ: they estimate the attention over all that a decoding step does not read"}
SOURCES = {"router": f"{PAPERS['Saap']} (Saap)", "phi": PAPERS["completion paper"]}


def write_card(
    folder: str | Path, configs: dict[str, dict[str, Any]], *, nested: bool = False, text: TextQuality | None = None,
) -> None:
    """Write the page and its figures beside an artifact, or into the folder of a training. Raises SparseKVError where
    the disk fails."""
    for place, data in card_files(configs, nested=nested, text=text).items():
        with placed(Path(folder) / place) as temporary:
            temporary.write_bytes(data)


def card_files(
    configs: dict[str, dict[str, Any]], *, nested: bool = False, name: str | None = None,
    text: TextQuality | None = None,
) -> dict[str, bytes]:
    """The page and a figure for every artifact that was judged, by their places. configs: of artifacts, by kind.
    nested: they lie in folders of their kinds. name: of the repository, where it has one. text: what was measured with
    all of them together; its figure lies beside the page."""
    from huggingface_hub import ModelCard

    files: dict[str, bytes] = {} if text is None else {FIGURE: text.figure().png}
    parts = {}
    for kind, config in configs.items():
        quality = sound(config.get("quality", {}), len(config["layers"]))
        place = f"{kind}/{FIGURE}" if nested else FIGURE
        if (figure := quality_figure(kind, quality)) is not None:
            files[place] = figure
        parts[kind] = {"made": _made(kind, config), "table": quality_table(kind, quality),
                       "figure": place if figure else "", "caption": figure_caption(kind)}
    base, best = _model(configs), None if text is None else text.recommended
    title = " and ".join({"router": "Router", "phi": "feature maps"}.get(kind, kind) for kind in configs)
    origins = [config.get("provenance", {}) for config in configs.values()]
    corpora = sorted({_code(local_name(origin["corpus"])) for origin in origins if "corpus" in origin})
    page = ModelCard.from_template(
        _metadata(configs, text), template_str=template(__package__, "card.md.j2"), configs=configs, parts=parts,
        title=f"{title[:1].upper()}{title[1:]} for {_words(base)}", model=next(iter(configs.values()))["model"],
        base=base, says=SAYS, place=name or "PATH", text=text, caption=CAPTION, figure=FIGURE, corpora=corpora,
        given="--router" if best is not None and best.completion == NONE else "--artifacts",
        budget="0.05" if best is None else f"{best.token_budget:g}",
        arguments="token_budget=0.05" if best is None else best.arguments,
        words=_words, code=_code, local=local_name, quote=shlex.quote, json=_plain)
    return {README: f"{page}\n".encode(), **files}


def _metadata(configs: dict[str, dict[str, Any]], text: TextQuality | None) -> Any:
    """The hub's metadata, with what was measured on text as the model's results."""
    from huggingface_hub import EvalResult, ModelCardData

    model = " ".join(_model(configs).split())
    data: dict[str, Any] = {}
    if REPOSITORY.fullmatch(model) and "@" not in model:
        data = {"base_model": model, "base_model_relation": "adapter"}
    if text is not None:
        best, corpus = text.recommended, _code(local_name(text.corpus))
        values = {"perplexity": text.perplexity * (1 + best.loss), "kl": best.kl, "same next token": best.same_tokens}
        data |= {"model_name": f"sparsekv, {best.arguments}", "eval_results": [
            EvalResult("text-generation", corpus, corpus, metric, round(value, 5))
            for metric, value in values.items() if value is not None]}
    return ModelCardData(library_name="sparsekv", pipeline_tag="text-generation", **data,
                         tags=["sparsekv", "sparse-attention", "kv-cache", "long-context", *configs])


def _made(kind: str, config: dict[str, Any]) -> str:
    made = config.get("provenance", {})
    try:
        options = made.get("options", {})
        names = SHOWN if options.get("scores") == "mean_key" else (*SHOWN, *STEPS)
        shown = ", ".join(f"{k} {_words(x if isinstance(x, str) else _plain(x))}" for k in names
                          if (x := options.get(k)) is not None)
        windows, others = len(made["train_documents"]), len(made["validation_documents"])
        version, corpus = _code(made["sparsekv"]), _code(local_name(made["corpus"]))
        length, split, by = (_words(made[name]) for name in ("context_length", "split", "disjoint_by"))
    except (KeyError, TypeError, AttributeError):
        return f"Method: {SOURCES.get(kind, kind)}. How it was trained is not recorded."
    return (f"Method: {SOURCES.get(kind, kind)}. Trained by `sparsekv {version}` on {windows} windows of {length} "
            f"tokens of `{corpus}` ({split}), judged on {others} other{'s' * (others != 1)}, disjoint by "
            f"{by}. Always read beside what is chosen: the first {config['sink_size']} tokens and the "
            f"last {config['window_size']} of the prompt. Options: {shown}.")


def _model(configs: dict[str, dict[str, Any]]) -> str:
    """The model's name, where it is recorded, else its architecture."""
    first = next(iter(configs.values()))
    name = first.get("provenance", {}).get("model")
    return local_name(name) if name else str(first["model"]["architecture"])


def _words(value: Any) -> str:
    """What a file says, as plain words of a page, whatever it holds of HTML and Markdown."""
    text = html.escape(" ".join(printable(str(value)).split()), quote=False)
    return re.sub(r"[\\`*\[\]|~]", r"\\\g<0>", text)


def _code(value: Any) -> str:
    """The same between backticks or in a block of code."""
    return " ".join(printable(str(value)).split()).replace("`", "'")


def local_name(name: Any) -> str:
    """A name without the folders of the machine it was trained on."""
    name = str(name)
    path = PurePath(name)
    return path.name if path.is_absolute() or len(path.parts) > 2 or name.startswith((".", "~")) else name


def _plain(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
