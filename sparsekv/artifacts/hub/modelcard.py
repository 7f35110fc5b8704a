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
    configs = {kind: {**config, "quality": sound(config.get("quality", {}), len(config["layers"]))}
               for kind, config in configs.items()}
    figures = {kind: f"{kind}/{FIGURE}" if nested else FIGURE for kind in configs}
    drawn = {figures[kind]: data for kind, config in configs.items()
             if (data := quality_figure(kind, config.get("quality", {}))) is not None}
    parts = [_metadata(configs), f"# {_title(configs)}", _what(configs), "## Use", _use(configs, name, text)]
    if text is not None:
        drawn[FIGURE] = text.figure()
        parts += ["## What it loses and wins on text", f"Text: `{_code(_local(text.corpus))}`. {text.about()}",
                  text.table(), f"**{text.advice()}.**", f"![{CAPTION}]({FIGURE})"]
    for kind, config in configs.items():
        parts += [f"## {'Router' if kind == 'router' else 'Feature maps'}", _made(kind, config)]
        if table := quality_table(kind, config.get("quality", {})):
            parts += [_judged(kind), table]
        if figures[kind] in drawn:
            parts.append(f"![{figure_caption(kind)}]({figures[kind]})")
    parts += ["## Licence", _licence(configs)]
    return {README: ("\n\n".join(parts) + "\n").encode(), **drawn}


def _metadata(configs: dict[str, dict[str, Any]]) -> str:
    lines = ["---", "library_name: sparsekv", "pipeline_tag: text-generation"]
    model = " ".join(_model(configs).split())
    if REPOSITORY.fullmatch(model) and "@" not in model:
        lines += [f"base_model: {model}", "base_model_relation: adapter"]
    lines += ["tags:", *(f"- {tag}" for tag in ("sparsekv", "sparse-attention", "kv-cache", "long-context", *configs)),
              "---"]
    return "\n".join(lines)


def _title(configs: dict[str, dict[str, Any]]) -> str:
    kinds = {"router": "Router", "phi": "feature maps"}
    title = " and ".join(kinds[kind] for kind in configs if kind in kinds)
    return f"{title[:1].upper()}{title[1:]} for {_words(_model(configs))}"


def _what(configs: dict[str, dict[str, Any]]) -> str:
    first = next(iter(configs.values()))
    model = first["model"]
    lines = ["`sparsekv` lets a frozen Hugging Face model decode long contexts while it reads a few per cent of its KV "
             "cache. Here is", ""]
    lines += [f"- {SAYS[kind]} ({len(config['layers'])} of {model['num_layers']} layers);"
              for kind, config in configs.items() if kind in SAYS]
    lines[-1] = lines[-1][:-1] + "."
    lines += ["", f"For **{_words(_model(configs))}** alone: {_words(model['architecture'])}, "
              f"{model['num_layers']} layers, {model['num_query_heads']} query and {model['num_kv_heads']} KV heads of "
              f"{model['head_dim']}, weights `{_code(model['weights'][:12])}`. Any other model is refused. The model "
              "itself is not in here, nor changed."]
    return "\n".join(lines)


def _use(configs: dict[str, dict[str, Any]], name: str | None, text: TextQuality | None) -> str:
    model, place = _code(_model(configs)), name or "PATH"
    budget = "0.05" if text is None else f"{text.recommended.token_budget:g}"
    arguments = f"token_budget={budget}" if text is None else text.recommended.arguments
    given = "--artifacts" if text is None or text.recommended.completion != NONE else "--router"
    where = "" if name else "\n\n`PATH` is this folder, or its name on the hub once it is pushed (`sparsekv push`)."
    return f"""```
pip install 'sparsekv[gpu]'     # or [cpu]
sparsekv generate --model {shlex.quote(model)} {given} {place} --token-budget {budget} --prompt-file long.txt
```

```python
import sparsekv
from sparsekv.artifacts.hub.models import load_model   # or any way of transformers

model, tokenizer = load_model({json.dumps(model, ensure_ascii=False)})
inputs = tokenizer("A long text", return_tensors="pt").to(model.device)
with sparsekv.attach(model, "{place}", {arguments}):
    output = model.generate(**inputs, max_new_tokens=256)
```{where}"""


def _made(kind: str, config: dict[str, Any]) -> str:
    made = config.get("provenance", {})
    try:
        options = made.get("options", {})
        names = SHOWN if options.get("scores") == "mean_key" else (*SHOWN, *STEPS)
        shown = ", ".join(f"{k} {_words(_plain(options[k]))}" for k in names if options.get(k) is not None)
        windows, others = len(made["train_documents"]), len(made["validation_documents"])
        version, corpus = _code(made["sparsekv"]), _code(_local(made["corpus"]))
        length, split, by = (_words(made[name]) for name in ("context_length", "split", "disjoint_by"))
    except (KeyError, TypeError, AttributeError):
        return f"Method: {SOURCES.get(kind, kind)}. How it was trained is not recorded."
    return (f"Method: {SOURCES.get(kind, kind)}. Trained by `sparsekv {version}` on {windows} windows of {length} "
            f"tokens of `{corpus}` ({split}), judged on {others} other{'s' * (others != 1)}, disjoint by "
            f"{by}. Always read beside what is chosen: the first {config['sink_size']} tokens and the "
            f"last {config['window_size']} of the prompt. Options: {shown}.")


def _judged(kind: str) -> str:
    if kind == "router":
        return ("Share of the attention between sink and local window that is read, by the share of the context read; "
                "held-out windows, mean over layers and heads. The oracle knows the true attention in every bucket.")
    return ("Relative L2 error of a head's output against full attention, by what is read exactly; held-out windows, "
            "mean over layers and heads.")


def _licence(configs: dict[str, dict[str, Any]]) -> str:
    corpus = {_code(_local(c["provenance"]["corpus"])) for c in configs.values() if "corpus" in c.get("provenance", {})}
    return (f"What this page's metadata names as `license`. The files were computed with the weights of "
            f"{_words(_model(configs))}" + (f" from `{'` and `'.join(sorted(corpus))}`" if corpus else "") +
            ", whose own terms hold for what is made of them.")


def _model(configs: dict[str, dict[str, Any]]) -> str:
    """The model's name, where it is recorded, else its architecture."""
    first = next(iter(configs.values()))
    name = first.get("provenance", {}).get("model")
    return _local(name) if name else str(first["model"]["architecture"])


def _words(value: Any) -> str:
    """What a file says, as plain words of a page, whatever it holds of HTML and Markdown."""
    text = html.escape(" ".join(printable(str(value)).split()), quote=False)
    return re.sub(r"[\\`*\[\]|~]", r"\\\g<0>", text)


def _code(value: Any) -> str:
    """The same between backticks or in a block of code."""
    return " ".join(printable(str(value)).split()).replace("`", "'")


def _local(name: Any) -> str:
    """A name without the folders of the machine it was trained on."""
    name = str(name)
    path = PurePath(name)
    return path.name if path.is_absolute() or len(path.parts) > 2 or name.startswith((".", "~")) else name


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
