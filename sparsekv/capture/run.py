"""`sparsekv capture`: the frozen model over a corpus, into a capture store."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from sparsekv.artifacts.checks import digest
from sparsekv.artifacts.fingerprint import model_fingerprint
from sparsekv.artifacts.hub.models import decoder, load_config, load_model
from sparsekv.artifacts.hub.rotary import depends_on_length, tables_of_length
from sparsekv.capture.config import CaptureConfig, check_options, dataset_options
from sparsekv.capture.corpus import TokenWindow, check_corpus, make_windows, read_documents
from sparsekv.capture.document import DocumentCapture
from sparsekv.capture.prepare import STORE, begin_output, check_layers, check_output, check_space, choose_layers
from sparsekv.capture.store.manifest import FORMAT_VERSION, MANIFEST, sealed
from sparsekv.capture.store.place import Place, place
from sparsekv.capture.store.store import CaptureStore, document_name, finished_document
from sparsekv.capture.synthetic import synthetic_windows
from sparsekv.capture.tap import StopForward, probe, tap
from sparsekv.capture.transfer import Transfer, upload
from sparsekv.core.rope import LayerRope
from sparsekv.util.disk import free_space, only_writer
from sparsekv.util.errors import SparseKVError
from sparsekv.util.progress import progress
from sparsekv.util.ranks import Ranks, join

__all__ = ["CaptureConfig", "capture_documents", "capture_window", "complete_store", "run_capture"]


def run_capture(config: CaptureConfig, *, model: Any = None, tokenizer: Any = None) -> CaptureStore:
    """Capture `config.num_documents` windows; a run that was interrupted goes on where it stopped.

    `model` and `tokenizer` are loaded by name unless given. Raises SparseKVError for bad options, a missing model, a
    corpus without enough text, an unsupported architecture, an existing output, or a disk that is too small.
    """
    check_options(config)
    store = place(config.output)
    ranks = join(config.device, config.devices)
    with contextlib.ExitStack() as held:
        if (folder := store.root) is not None:
            ranks.first_does(lambda: held.enter_context(only_writer(folder)))
        return _capture(config, store, ranks, model, tokenizer)


def _capture(config: CaptureConfig, store: Place, ranks: Ranks, model: Any, tokenizer: Any) -> CaptureStore:
    def check() -> None:
        check_output(store, config)
        check_corpus(config.corpus, split=config.split, text_column=config.text_column,
                     dataset_options=dataset_options(config))
        about = (load_config(config.model) if model is None else model.config).get_text_config()
        check_layers(config.layers, about.num_hidden_layers)
        check_space(config, about, store)

    ranks.first_does(check)
    if tokenizer is None or model is None:
        model, tokenizer = load_model(config.model, dtype=config.dtype, device=ranks.device(config.device),
                                      rope_scaling=config.rope_scaling)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise SparseKVError(f"{config.model} does not fit on the devices: a part of its weights was put off to host "
                            "or disk; use more GPUs with --device balanced, or a smaller --dtype")
    ropes, skipped = probe(model)
    ropes = choose_layers(config.layers, ropes, skipped)
    fingerprint = model_fingerprint(model, whole=True)
    windows = corpus_windows(config, tokenizer)
    ranks.first_does(lambda: begin_output(store, config, fingerprint))
    ranks.all_do(_in_a_sentence(store)(lambda: capture_documents(config, ropes, model, fingerprint, windows, store,
                                                                 ranks)))
    ranks.first_does(_in_a_sentence(store)(lambda: complete_store(config, store, fingerprint, skipped)))
    return CaptureStore.open(config.output)


def corpus_windows(config: CaptureConfig, tokenizer: Any) -> list[TokenWindow]:
    """The windows of a capture: synthetic ones of the corpus's words, then the corpus's own. Raises SparseKVError where
    that has too little text."""
    windows = make_windows(
        read_documents(config.corpus, split=config.split, text_column=config.text_column,
                       dataset_options=dataset_options(config)),
        tokenizer, length=config.context_length, count=config.num_documents - config.synthetic_documents,
        seed=config.seed, pack=config.pack, chat_template=config.chat_template, special_tokens=config.special_tokens,
        remedy="a smaller --context-length or --num-documents" + ("" if config.pack else ", or --pack"))
    made = synthetic_windows(tokenizer, windows, length=config.context_length, count=config.synthetic_documents,
                             seed=config.seed)
    return made + windows


@contextlib.contextmanager
def _in_a_sentence(store: Place) -> Iterator[None]:
    """An error of the disk or of the network as one sentence."""
    try:
        yield
    except OSError as error:
        if store.root is not None and not (store.root / MANIFEST).is_file():
            raise SparseKVError(f"the store {str(store)!r} was removed while it was written, and what was finished "
                                "with it; delete what is left there, and run the same command again") from error
        raise SparseKVError(f"could not write to {str(store)!r}: {error.strerror or error} "
                            f"({free_space(store.root or Path(tempfile.gettempdir()))}). Finished documents are kept; "
                            "make room and run the same command again.") from error


def capture_documents(
    config: CaptureConfig, ropes: dict[int, LayerRope], model: Any, fingerprint: dict[str, Any],
    windows: list[TokenWindow], store: Place, ranks: Ranks,
) -> None:
    """This rank's documents, the layers in `ropes`. One is being written while the next is computed."""
    mine, length = ranks.mine(len(windows)), config.context_length
    origin = {"options": digest(config.content()), "model": fingerprint["weights"]}
    previous: DocumentCapture | None = None
    current: DocumentCapture | None = None
    bar = (progress("capture", len(mine) * length, "tokens") if ranks.rank == 0 else
           contextlib.nullcontext(lambda _: None))
    try:
        with bar as advance, Transfer() as transfer:
            try:
                for index in mine:
                    if (found := finished_document(store, index)) is not None:
                        _check_same(found, windows[index], origin, store)
                        advance(length)
                        continue
                    current = DocumentCapture(config, ropes, windows[index], index, store, transfer, origin)
                    capture_window(model, windows[index].tokens, config.chunk_size, current, advance)
                    current.seal()
                    if previous is not None:
                        previous.wait()
                    previous, current = current, None
                if previous is not None:
                    previous.wait()
                    previous = None
            except Exception:
                # All of the document before the failing one was computed: its writes may still succeed.
                if previous is not None:
                    with contextlib.suppress(Exception):
                        previous.wait()
                        previous = None
                raise
    except BaseException:
        for document in (previous, current):
            if document is not None:
                document.abandon()
        raise


def capture_window(
    model: Any, tokens: list[int], chunk: int, listener: Callable[..., None], advance: Callable[..., None],
) -> None:
    """Prefill one window in chunks under the tap, rotated as one piece would be."""
    from transformers import DynamicCache

    ids = upload(torch.tensor(tokens), model.get_input_embeddings().weight.device)[None]
    cache = DynamicCache(config=model.config) if len(tokens) > chunk else None
    changes = cache is not None and depends_on_length(model.config.get_text_config())
    tables = tables_of_length(model, len(tokens)) if changes else contextlib.nullcontext()
    with torch.inference_mode(), tap(model, listener), tables:
        for start in range(0, len(tokens), chunk):
            piece = ids[:, start:start + chunk]
            with contextlib.suppress(StopForward):
                decoder(model)(input_ids=piece, past_key_values=cache, use_cache=cache is not None)
            advance(piece.shape[1])


def _check_same(found: dict[str, Any], window: TokenWindow, origin: dict[str, str], store: Place) -> None:
    document = found["document"]
    where = f"{document_name(document['id'])} of the unfinished capture {str(store)!r}"
    if document["sha256"] != window.sha256:
        raise SparseKVError(f"{where} holds other text than the corpus gives now; bring the corpus or tokenizer back "
                            "as it was, or add --overwrite to start anew")
    differ = [name for name, value in origin.items() if found.get(name) != value]
    if differ:
        raise SparseKVError(f"{where} was made with another {' and other '.join(sorted(differ))}, by a second capture "
                            "into the same folder; add --overwrite to start anew")


def complete_store(
    config: CaptureConfig, store: Place, fingerprint: dict[str, Any], skipped: dict[int, str],
) -> None:
    """Every document is there: the manifest, in one step, turns them into a store. Raises SparseKVError where one is
    missing."""
    documents: list[dict[str, Any]] = []
    for index in range(config.num_documents):
        found = finished_document(store, index)
        if found is None:
            raise SparseKVError(f"{document_name(index)} of {str(store)!r} is missing after the run; run the same "
                                "command again")
        documents.append(found)
    store.write_json(MANIFEST, sealed({
        "format_version": FORMAT_VERSION, "complete": True, "model": fingerprint, "config": config.content(),
        "layers": documents[0]["layers"], "skipped_layers": {str(k): v for k, v in skipped.items()},
        "context_length": config.context_length, "documents": [d["document"] for d in documents],
        "shards": {k: v for d in documents for k, v in d["shards"].items()},
    }))
    if store.root is not None:
        STORE.done(store.root)
