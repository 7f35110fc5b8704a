"""Attacks by seeded chance: flipped bits, records and headers that say something else, options, command lines,
numbers, kills. Each returns how many cases it tried and which of them failed; `benchmarks/reliability.py` runs the long
forms."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import io
import json
import math
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from test_families import captured
from test_integrity import loaded, prefix_parts, written
from test_interrupts import Interrupt, Interrupting, state_of
from test_training import sharp
from tiny import make_model, prompt, save_model
from tiny_artifacts import artifacts
from training_child import stopped, train

from sparsekv.artifacts.checks import digest
from sparsekv.artifacts.format import CONFIG, TENSORS
from sparsekv.capture.store.manifest import MANIFEST, sealed
from sparsekv.capture.store.store import CaptureStore, finished_document
from sparsekv.cli import COMMANDS, main
from sparsekv.core.estimators import CentroidEstimator
from sparsekv.core.selectors import SELECTORS
from sparsekv.evaluation.cells import read_cells
from sparsekv.evaluation.requests import Question, load_requests, save_requests
from sparsekv.runtime.config import SparseConfig
from sparsekv.runtime.hf.attach import attach
from sparsekv.runtime.process import _GATE
from sparsekv.trainers import work
from sparsekv.trainers.fit import check_checkpoint
from sparsekv.util.config import MOST_STEPS
from sparsekv.util.errors import SparseKVError

CHILD = Path(__file__).with_name("killed_child.py")


class Outcome(NamedTuple):
    """How many cases, and a word on each that failed."""

    cases: int
    failed: list[str]


class Target(NamedTuple):
    """A file to damage, and a function that reads it and returns what it says."""

    name: str
    file: Path
    read: Callable[[], Any]
    summed: bool = True
    """The file has a checksum."""


def targets(folder: Path) -> list[Target]:
    """One sound file of every format, in a new folder."""
    found = []
    for kind in ("router", "phi"):
        path = written(kind, folder)
        for name in (CONFIG, TENSORS):
            found.append(Target(f"{kind} {name}", path / name, lambda k=kind, p=path: _artifact(k, p)))
    settings = folder / "settings.json"
    settings.write_text(json.dumps({"artifacts": "trained", "token_budget": 0.02, "dense_layers": [0, 1],
                                    "prefill": {"share": 0.3}, "options": {}}))
    found.append(Target("settings", settings, lambda: dataclasses.asdict(SparseConfig.load(settings)), summed=False))
    path = written("prefix", folder)
    found.append(Target("prefix", path, lambda p=path: [t.clone() for x in loaded("prefix", p).layers
                                                       for t in (x.keys, x.values, x.recent)]))
    store = captured(sharp(), folder / "store", num_documents=2, context_length=96, queries_per_document=12)
    place = Path(store.path)
    found.append(Target("store manifest", place / MANIFEST, lambda: _opened(place)))
    for name in ("doc00000/layer001.safetensors", "doc00001/rotary.safetensors"):
        found.append(Target(f"store {name.rpartition('/')[2]}", place / name, lambda: _opened(place)))
    found.append(Target("store document.json", place / "doc00000" / "document.json", lambda: finished_document(
        store._place, 0) or _refuse()))
    for method, kind, pattern in (("keep", "phi", "checkpoints/*"), ("finish", "phi", "parts/*"),
                                  ("fit", "router", "parts/*")):
        output = folder / f"{kind}-{method}"
        with stopped(method), contextlib.redirect_stderr(io.StringIO()):
            train(kind, str(place), str(output), max_steps=5)
        file = sorted(output.glob(pattern))[0]
        found.append(Target(f"{kind} {file.parent.name}", file, lambda f=file, o=output, s=store: _resumed(f, o, s)))
    return found


def _artifact(kind: str, path: Path) -> Any:
    made = loaded(kind, path)
    config = {k: v for k, v in json.loads(json.dumps(dataclasses.asdict(made.config))).items()}
    return [config, {k: t.clone() for k, t in load_file(path / TENSORS).items()}]


def _opened(place: Path) -> Any:
    store = CaptureStore.open(place)
    store.check()
    return [store.manifest, *(t.clone() for layer in store.layers for d in range(store.num_documents)
                              for t in (store.read(layer, d).keys_rot(), store.read(layer, d).values))]


def _resumed(file: Path, output: Path, store: CaptureStore) -> Any:
    if file.suffix == ".ckpt":
        check_checkpoint(file)
        held = torch.load(file, map_location="cpu", weights_only=True)
        return [{k: t.clone() for k, t in held["state_dict"].items()}, held["global_step"]]
    run = work.Run.__new__(work.Run)
    run.out, run._mark = output, json.loads((output / work.MARK).read_text())
    return run._read(file.stem)


def _refuse() -> None:
    raise SparseKVError("not finished")


def same(one: Any, other: Any) -> bool:
    """Whether two things that were read say the same."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(v, other[k]) for k, v in one.items())
    if isinstance(one, list | tuple):
        return isinstance(other, list | tuple) and len(one) == len(other) and all(map(same, one, other))
    return one == other


def refused(work: Callable[[], Any]) -> tuple[str | None, Any]:
    """What came of reading: a word where that was no sentence, and what was read."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return None, work()
    except SparseKVError as error:
        return (None if "\n" not in str(error) and 10 < len(str(error)) < 3000 else f"said {str(error)[:200]!r}"), None
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}", None


def flip_bits(folder: Path, count: int, seed: int = 0) -> Outcome:
    """Single bits, as many in every format: refused in one sentence, or nothing that is read is another, where the file
    has a checksum."""
    rng, failed, cases = random.Random(seed), [], 0
    every = targets(folder)
    for target in every:
        sound, good = target.file.read_bytes(), target.read()
        header = min(len(sound), 8 + int.from_bytes(sound[:8], "little")) if target.file.suffix == ".safetensors" else 0
        for i in range(-(-count // len(every))):
            bit = rng.randrange(8 * (header if header and i % 2 else len(sound)))
            data = bytearray(sound)
            data[bit // 8] ^= 1 << bit % 8
            target.file.write_bytes(data)
            problem, read = refused(target.read)
            if problem or (target.summed and read is not None and not same(read, good)):
                failed.append(f"{target.name}, bit {bit}: {problem or 'read as something else'}")
            cases += 1
        target.file.write_bytes(sound)
    return Outcome(cases, failed)


HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 2.5, -0.0, 1e308, -1e308, 5e-324, math.nan, math.inf, -math.inf, 10**400,
    -10**30, 2**63, 2**31, "", "x", "0", "\0", "../../etc/passwd", "/etc/passwd", "é", "\ud800", "a" * 2_000, [],
    [None], [[]], [0, 0], [1e9], {}, {"": {}}, {"0": None}, [[[[[[[[]]]]]]]])


def mutated(rng: random.Random, record: Any) -> Any:
    """A copy of a JSON value in which some places say something else, or are gone, or are doubled."""
    record = copy.deepcopy(record)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        part = record
        while True:
            keys = list(part) if isinstance(part, dict) else range(len(part))
            if not keys:
                break
            key = rng.choice(list(keys))
            if isinstance(part[key], dict | list) and part[key] and rng.random() < 0.7:
                part = part[key]
                continue
            what = rng.random()
            if what < 0.2:
                del part[key]
            elif what < 0.3 and isinstance(part, dict):
                part[f"{key}{rng.choice('x 0')}"] = part.pop(key)
            elif what < 0.4 and type(part[key]) in (int, float) and not isinstance(part[key], bool):
                part[key] = rng.choice((-part[key], part[key] + 1, part[key] * 10**30, str(part[key])))
            else:
                part[key] = copy.deepcopy(rng.choice(HOSTILE))
            break
    return record


def change_records(folder: Path, count: int, seed: int = 0) -> Outcome:
    """Records that say something else, with a checksum that fits them: refused in one sentence, or loaded."""
    rng, failed, cases = random.Random(seed), [], 0
    (folder / "records").mkdir()
    every = {t.name: t for t in targets(folder / "records")}
    router = every["router config.json"]
    phi, manifest, document = every["phi config.json"], every["store manifest"], every["store document.json"]
    prefix = every["prefix"].file
    meta, tensors = prefix_parts(prefix)
    requests = folder / "requests.jsonl"
    save_requests(requests, [Question("needle", 128, 0, "a", ["b"], "first_number", 4, [])], {})
    settings = folder / "settings.json"
    settings.write_text(json.dumps({"artifacts": "a", "token_budget": 0.1, "sink_size": 3, "dense_layers": [0, -1],
                                    "selector": "sketch", "candidates": 0.2, "prefill": {"share": 0.3}}))
    cells = folder / "cells.jsonl"
    cells.write_text('{"format": "sparsekv-sweep", "format_version": 1, "origin": {}}\n{"case": "a", "indices": [0]}\n')

    def artifact(target: Target, path: Path) -> tuple[Any, Callable[[Any], None], Callable[[], Any]]:
        held = load_file(path / TENSORS)
        good = {k: v for k, v in json.loads(target.file.read_text()).items() if k != "sha256"}
        return good, lambda new: target.file.write_text(json.dumps({**new, "sha256": digest(new, held)})), target.read

    def plain(file: Path, read: Callable[[], Any], seal: bool = False, line: int | None = None) -> Any:
        lines = file.read_text().split("\n")
        good = json.loads(file.read_text() if line is None else lines[line])
        good.pop("sha256", None)

        def put(new: Any) -> None:
            text = json.dumps(sealed(new) if seal else new)
            file.write_text(text if line is None else "\n".join([*lines[:line], text, *lines[line + 1:]]))

        return good, put, read

    def put_prefix(new: Any) -> None:
        save_file(tensors, prefix, {"sparsekv": json.dumps({**new, "sha256": digest(new, tensors)})})

    groups = [artifact(router, router.file.parent), artifact(phi, phi.file.parent),
              (meta, put_prefix, every["prefix"].read), plain(settings, lambda: SparseConfig.load(settings)),
              plain(manifest.file, manifest.read, seal=True), plain(document.file, document.read, seal=True),
              plain(requests, lambda: load_requests(requests), line=0),
              plain(requests, lambda: load_requests(requests), line=1), plain(cells, lambda: read_cells(cells), line=0)]
    for good, put, read in groups:
        for _ in range(-(-count // len(groups))):
            new = mutated(rng, good)
            try:
                put(new)
            except (ValueError, TypeError, OverflowError):  # a record that cannot be written at all
                continue
            problem, _ = refused(read)
            if problem:
                failed.append(f"{json.dumps(new)[:300]}: {problem}")
            cases += 1
        put(good)
    return Outcome(cases, failed)


def change_headers(folder: Path, count: int, seed: int = 0) -> Outcome:
    """Headers of safetensors files that promise other lengths, offsets, shapes and dtypes, and bytes by chance."""
    rng, failed, cases = random.Random(seed), [], 0
    every = [t for t in targets(folder) if t.file.suffix == ".safetensors" or t.name == "prefix"]
    for target in every:
        sound, good = target.file.read_bytes(), target.read()
        size = int.from_bytes(sound[:8], "little")
        header, body = json.loads(sound[8:8 + size]), sound[8 + size:]
        for i in range(-(-count // len(every))):
            if i % 4 == 0:
                lengths = (0, 1, size - 1, size + 1, len(sound), 2**31, 2**40, 2**63, 2**64 - 1)
                data = struct.pack("<Q", rng.choice(lengths)) + sound[8:]
            elif i % 4 == 1:
                data = bytearray(sound)
                for _ in range(rng.randrange(1, 30)):
                    data[rng.randrange(8 + size)] = rng.randrange(256)
            else:
                text = json.dumps(mutated(rng, header)).encode("utf-8", "surrogatepass")
                data = struct.pack("<Q", len(text)) + text + body
            target.file.write_bytes(data)
            problem, read = refused(target.read)
            if problem or (read is not None and not same(read, good)):
                failed.append(f"{target.name}: {problem or 'read as something else'}")
            cases += 1
        target.file.write_bytes(sound)
    return Outcome(cases, failed)


def attach_with_anything(count: int, seed: int = 0) -> Outcome:
    """Arguments of attach: refused in one sentence, or the text is made."""
    rng, failed = random.Random(seed), []
    model = make_model()
    router, phi = artifacts(model)
    names = {"token_budget", "completion", "sink_size", "window_size", "decode_window", "dense_layers", "dense_below",
             "placement", "router", "phi"}
    usual = {"token_budget": (8, 0.1, 1, 0.0, 1.0, None), "completion": ("none", "centroid", "phi", None),
             "sink_size": (0, 4, 500), "window_size": (0, 16, 500), "decode_window": (1, 4, 1024), "router": (router,),
             "dense_layers": ((), (0,), (-1, 1), [0, 1, 2]), "dense_below": (0, 10, None), "phi": (phi, None),
             "placement": ("gpu", "cpu", "offload")}
    for _ in range(count):
        name = rng.choice(sorted(SELECTORS))
        given: dict[str, Any] = {"selector": name, "token_budget": 8}
        if SELECTORS[name].is_trained():
            given["router"] = router
        options = sorted(names | set(SELECTORS[name].option_names()))
        for option in rng.sample(options, rng.randrange(1, 4)):
            given[option] = rng.choice(usual[option]) if option in usual and rng.random() < 0.6 else rng.choice(HOSTILE)
        for option, value in given.items():  # what costs memory and time is no attack on the checks
            if type(value) is int and 10_000 < value < 2**31:
                given[option] = 10_000
        asked = prompt(rng.choice((1, 2, 30, 70)))

        def generate(given: dict[str, Any] = given, asked: torch.Tensor = asked) -> Any:
            with attach(model, **{"dense_below": 0, **given}):
                out = model.generate(asked, max_new_tokens=3, do_sample=False)
            assert out.shape[1] == asked.shape[1] + 3
            return out

        problem, _ = refused(generate)
        if problem:
            failed.append(f"{ {k: repr(v)[:40] for k, v in given.items()} } on {asked.shape[1]} tokens: {problem}")
        if model.config._attn_implementation == "sparsekv" or "generate" in model.__dict__:
            failed.append(f"{given}: the model is not as before")
            break
    return Outcome(count, failed)


DRAWN = {"random", "magicpig"}
"""Selectors that draw tokens anew at every step: no two runs are the same."""


def pad(count: int, seed: int = 0) -> Outcome:
    """Batches padded on the left, for every selector, budget and completion: logits of each row over six steps are
    those of the row alone, without padding."""
    rng, failed = random.Random(seed), []
    model = copy.deepcopy(make_model()).double()
    router, phi = artifacts(model)
    phi.config = dataclasses.replace(phi.config, read_shares=[0.0, 0.05, 0.3])
    phi.shift = torch.linspace(-2, 2, 3)[None, :, None].expand(phi.config.model["num_layers"], 3, phi.shift.shape[-1])
    phi.shift = phi.shift.contiguous()
    for case in range(count):
        name = sorted(set(SELECTORS) - DRAWN)[case % (len(SELECTORS) - len(DRAWN))]
        given: dict[str, Any] = {
            "selector": name, "token_budget": rng.choice((1, 6, 20, 0.05, 0.3, 1.0)), "phi": rng.choice((None, phi)),
            "sink_size": rng.choice((0, 4)), "window_size": rng.choice((0, 8)), "decode_window": rng.choice((2, 64)),
            "dense_below": 0}
        if SELECTORS[name].is_trained():
            given["router"] = router
        if name == "sketch":
            given |= {"candidates": rng.choice((None, 1.0, 0.3)), "fit": rng.choice(("fixed", "fitted"))}
        lengths = (17, 26, 40, 64, 90, 90, 600) if rng.random() < 0.2 else (17, 26, 40, 64, 90)
        rows = [prompt(rng.choice(lengths), seed=1000 * case + i) for i in range(rng.choice((1, 2, 3)))]
        longest = max(row.shape[1] for row in rows) + rng.choice((0, 1, 7, 23))
        padded = torch.stack([torch.cat([row.new_zeros(longest - row.shape[1]), row[0]]) for row in rows])
        mask = torch.stack([torch.arange(longest) >= longest - row.shape[1] for row in rows]).long()
        problem, together = refused(lambda g=given, p=padded, m=mask: _logits(model, g, p, m))
        alone = None if problem or together is None else torch.cat([_logits(model, given, row, None) for row in rows])
        if alone is not None and (error := float((together - alone).norm() / alone.norm())) > 1e-3:
            problem = f"logits differ by {error:.2g}"
        if problem:
            shown = {k: v if isinstance(v, int | float | str | None) else True for k, v in given.items()}
            failed.append(f"{shown} on {[row.shape[1] for row in rows]} of {longest} tokens: {problem}")
    return Outcome(count, failed)


def _logits(model: Any, given: dict[str, Any], ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Logits of six steps after a prompt, `[B, 6, V]`."""
    with torch.no_grad(), attach(model, **given) as attachment:
        cache, got = attachment.prefill(ids, mask), []
        for token in range(5, 11):
            step: dict[str, Any] = {}
            if mask is not None:
                mask = torch.cat([mask, mask.new_ones(len(ids), 1)], dim=1)
                step = {"attention_mask": mask, "position_ids": mask.sum(-1, keepdim=True) - 1}
            got.append(model(torch.full((len(ids), 1), token), past_key_values=cache, use_cache=True, **step).logits)
    return torch.cat(got, dim=1)


def interrupt(count: int, seed: int = 0) -> Outcome:
    """Interrupts at random moments of entering, reading a prompt, stepping and leaving: half of them at a line of the
    runtime's own code, half by a timer, wherever it finds the process. The model is as it was, no lock is held, and it
    writes what it wrote before."""
    rng, failed = random.Random(seed), []
    model, ids = copy.deepcopy(make_model()), prompt(40, 2)
    how: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    before, wanted = state_of(model), model.generate(ids, **how)
    router, phi = artifacts(model)
    ways = [{"selector": "topk", "token_budget": 8}, {"router": router, "phi": phi, "token_budget": 0.2},
            {"selector": "quest", "token_budget": 0.3}, {"router": router, "token_budget": 8, "placement": "cpu"},
            {"selector": "snapkv", "token_budget": 6, "completion": "centroid"}]
    lengths: dict[tuple[int, bool], tuple[int, float]] = {}

    def work(way: int, ours: bool) -> None:
        with attach(model, dense_below=0, decode_window=2, **ways[way]) as attachment:
            if ours:
                attachment.generate(ids, max_new_tokens=5)
            else:
                model.generate(ids, **how)

    armed = [False]

    def late(*_: Any) -> None:
        if armed[0]:
            raise Interrupt

    kept = signal.signal(signal.SIGALRM, late)
    try:
        cases, tries = 0, 0
        while cases < count:
            tries += 1
            way, ours = rng.randrange(len(ways)), rng.random() < 0.5
            if (way, ours) not in lengths:
                work(way, ours)  # what is done once
                began, lines = time.perf_counter(), Interrupting(10**9)
                work(way, ours)
                seconds = time.perf_counter() - began
                with lines:
                    work(way, ours)
                lengths[way, ours] = 10**9 - lines.left, seconds
            most, seconds = lengths[way, ours]
            where = ""
            try:
                try:
                    if tries % 2:
                        with Interrupting(rng.randint(1, most)):
                            work(way, ours)
                    else:
                        armed[0] = True
                        signal.setitimer(signal.ITIMER_REAL, max(1e-5, rng.random() * seconds))
                        work(way, ours)
                finally:
                    armed[0] = False
            except Interrupt as error:
                where = str(error) or "a moment"
                cases += 1
            sys.settrace(None)
            signal.setitimer(signal.ITIMER_REAL, 0)
            problem = "the model is not as it was" if state_of(model) != before else (
                "a lock is held" if _GATE._is_owned() else
                None if torch.equal(model.generate(ids, **how), wanted) else "the model writes something else")
            if problem:
                failed.append(f"{ {k: v for k, v in ways[way].items() if isinstance(v, str)} }, {where}: {problem}")
                if "lock" not in problem:
                    model = copy.deepcopy(make_model())
                    before = state_of(model)
    finally:
        signal.signal(signal.SIGALRM, kept)
    return Outcome(count, failed)


def ask_for_too_much(folder: Path, every: int = 1) -> Outcome:
    """Every size among the arguments, in a settings file and in artifacts, as large as a number can be, in a process
    that may take 2 GB more: refused in one sentence, or the text is made, in 30 s. every: of so many cases one."""
    model = make_model()
    router, phi = artifacts(model)
    asked = prompt(200)
    usual: dict[str, Any] = {"token_budget": 8, "dense_below": 0, "decode_window": 2}
    cases: dict[str, dict[str, Any]] = {}
    for size in (10**6, 10**9, 2**31 - 1):
        for name in ("sink_size", "window_size", "decode_window", "dense_below", "token_budget"):
            for place in ("gpu", "cpu", "offload"):
                cases[f"{name} {size} {place}"] = {"router": router, "phi": phi, "placement": place, name: size}
        cases[f"centroid {size}"] = {"selector": "topk", "completion": CentroidEstimator(size)}
        for name, selector in SELECTORS.items():
            given = {"router": router} if selector.is_trained() else {}
            for option in dataclasses.fields(selector):
                if option.metadata and "int" in str(option.type):
                    alone = {"token_budget": None} if option.name == "probes" else {}
                    cases[f"{name} {option.name} {size}"] = {
                        "selector": name, **given, **alone, option.name: size}
        for kind, artifact in (("router", router), ("phi", phi)):
            for name in ("sink_size", "window_size"):
                changed = copy.copy(artifact)
                changed.config = dataclasses.replace(artifact.config, **{name: size})
                changed.save(folder / f"{kind} {name} {size}")
                other = "phi" if kind == "router" else "router"
                cases[f"{kind}'s {name} {size}"] = {
                    kind: folder / f"{kind} {name} {size}", other: None, **({} if kind == "router" else {
                        "selector": "topk"})}
    cases["hnsw"] = {"selector": "faiss", "factory": "hnsw", "ef_search": 2**31 - 1}
    cases["links"] = {"selector": "faiss", "factory": "hnsw", "links": 2**31 - 1}
    failed = []
    tried = dict(list(cases.items())[::every])
    for name, given in tried.items():
        def generate(given: dict[str, Any] = given) -> Any:
            with torch.no_grad(), attach(model, **{**usual, **given}):
                return model.generate(asked, max_new_tokens=6, do_sample=False)

        problem = _alone(lambda generate=generate: refused(generate)[0], 30.0, 2 << 30)
        if problem:
            failed.append(f"{name}: {problem}")
    return Outcome(len(tried), failed)


def ask_commands_for_too_much(folder: Path, sizes: tuple[int, ...], every: int = 1) -> Outcome:
    """Every number among the options of every command that trains, captures or measures, as large as these sizes, in a
    process that may take 2 GB more: one sentence, or the work is done, in 40 s. every: of so many cases one."""
    model = save_model(folder / "model")
    store = captured(sharp(), folder / "store", num_documents=3, context_length=160, queries_per_document=32).path
    text = folder / "text.txt"
    text.write_text("some words of a text, not all of them the same. " * 400)
    source, short = f"--model {model} --corpus {text}", "--context-length 256 --num-documents 4"
    training = f"--capture {store} --max-steps 2 --max-time 00:00:02"
    commands = {
        "capture": f"{source} --context-length 128 --num-documents 2", "train-router": f"{training} --num-buckets 4",
        "train-phi": f"{training} --width 8 --key-width 8 --batch-size 4 --keys-per-step 8",
        "train": f"{model} {text} {short} --phi-steps 1",
        "eval": f"{source} --lengths 128 --samples 1 --methods topk --budgets 0.1 --tasks needle",
        "eval diagnostics": f"--capture {store} --requests 1",
        "demo": f"{source} {short} --num-heldout 1 --num-needles 1 --num-buckets 4 --phi-steps 1 --phi-width 8"}
    cases = []
    for command, usual in commands.items():
        row = COMMANDS[command]
        for field in dataclasses.fields(getattr(importlib.import_module(row.module), row.config)):
            flag = f"--{field.name.replace('_', '-')}"
            endless = field.name == "phi_steps"  # nothing but their number
            for size in sizes if "int" in str(field.type) or field.name == "lengths" else ():
                words = f"{usual} --device cpu --output {folder / f'out{len(cases)}'}".split()
                if flag in words:
                    words[words.index(flag) + 1] = str(size)
                else:
                    words += [flag, str(size)]
                if not endless or size > MOST_STEPS:
                    cases.append([*command.split(), *words])
    failed, tried = [], cases[::every]
    for words in tried:
        problem = _alone(lambda words=words: "; ".join(_typed(words)), 40.0, 2 << 30)
        if problem:
            failed.append(f"{' '.join(words)}: {problem}")
    return Outcome(len(tried), failed)


def _alone(work: Callable[[], str | None], seconds: float, more: int) -> str | None:
    """What work says in a fork that has so much time and so many more bytes."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            torch.set_num_threads(1)
            now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (now + more, now + more))
            signal.setitimer(signal.ITIMER_REAL, seconds)
            os.write(write, (work() or "").encode()[:2000])
        except BaseException as error:
            os.write(write, repr(error).encode()[:2000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, errors="replace") as said:
        found = said.read()
    status = os.waitpid(child, 0)[1]
    return found or (f"ended with {status}" if status else None)


WORDS = ("", " ", "0", "1", "-1", "2.5", "nan", "inf", "-inf", "1e400", "1e-45", "1e30", "9" * 30, "x", "auto", "true",
         "None", "{}", "[1]", "{", "../x", "/", "/dev/null", "/proc/1", "a,b", ",", "0-3,8", "é\u202e", "\udcff",
         "a" * 5000, "memory://", "nope://x", "router", "streaming:x=1", "topk:alpha=nan")


def type_anything(folder: Path, count: int, seed: int = 0) -> Outcome:
    """Command lines: one sentence on standard error and status 1 or 2; no model is there to be loaded."""
    rng, failed = random.Random(seed), []
    store = captured(sharp(), folder / "store", num_documents=2, context_length=96, queries_per_document=12)
    artifact = written("router", folder)
    here = Path.cwd()
    os.chdir(folder)
    try:
        for _ in range(count):
            command = rng.choice(sorted(COMMANDS))
            row = COMMANDS[command]
            words = command.split()
            for field in dataclasses.fields(getattr(importlib.import_module(row.module), row.config)):
                if "typer" not in field.metadata:
                    continue
                flag = f"--{field.name.replace('_', '-')}"
                needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
                if not needed and field.name != "model" and rng.random() < 0.75:
                    continue
                value = rng.choice(WORDS)
                if rng.random() < 0.5:
                    value = {"capture": str(store.path), "output": f"out{rng.randrange(4)}", "model": "/nonexistent",
                             "router": str(artifact), "path": str(artifact)}.get(field.name, value)
                if field.name in ("model", "corpus") and not value.startswith(("/", ".")):
                    value = f"/nonexistent/{value[:20]}"  # a name would be asked for on the network
                if field.name in ("output", "save_requests") and "/" in value and ":" not in value:
                    value = "out"
                if field.metadata["typer"].get("argument"):
                    words.append(value)
                elif str(field.type).startswith("bool"):
                    words.append(flag)
                else:
                    words += [flag, value]
            if command == "train-phi":
                words += ["--max-steps", "1"]
            if command == "train-router":
                words += ["--num-buckets", "3", "--max-steps", "1"]
            failed += _typed(words)
    finally:
        os.chdir(here)
    return Outcome(count, failed)


def _typed(words: list[str]) -> list[str]:
    shown, before = io.StringIO(), sys.argv
    sys.argv = ["sparsekv", *words]
    try:
        with contextlib.redirect_stderr(shown), contextlib.redirect_stdout(io.StringIO()):
            main()
        status: Any = 0
    except SystemExit as stop:
        status = stop.code or 0
    except BaseException as error:
        return [f"{words}: {type(error).__name__}: {error}"]
    finally:
        sys.argv = before
    said = shown.getvalue()
    silent = status and not said.strip()
    if status not in (0, 1, 2) or "Traceback" in said or "--debug for the traceback" in said or silent:
        return [f"{words}: status {status}, {' '.join(said.split())[-300:]}"]
    return []


def decode_hard_numbers(count: int, seed: int = 0) -> Outcome:
    """Weights scaled to nothing and to overflow, equal keys, huge keys: finite logits, or those of full attention."""
    rng, failed = random.Random(seed), []
    router, phi = artifacts(make_model())
    router.config.model["weights"] = phi.config.model["weights"] = "any"
    for case in range(count):
        model = copy.deepcopy(make_model())
        scale, part = rng.choice((0.0, 1e-30, 1e-4, 1.0, 30.0, 1e3, 1e6)), rng.choice(("q_proj", "k_proj", "v_proj"))
        with torch.no_grad():
            for layer in model.model.layers:
                getattr(layer.self_attn, part).weight.mul_(scale)
        name = rng.choice(sorted(SELECTORS))
        given: dict[str, Any] = {"selector": name, "token_budget": rng.choice((1, 8, 0.2, 1.0)), "phi": rng.choice((
            None, phi)), "sink_size": rng.choice((0, 4)), "window_size": rng.choice((0, 16)), "decode_window": 2}
        if name == "router":
            given["router"] = router
        asked = prompt(rng.choice((3, 40, 90)), seed=case)
        if rng.random() < 0.3:
            asked = asked[:, :1].expand(-1, asked.shape[1]).contiguous()
        for artifact in (router, phi):
            artifact.check = lambda _: None  # type: ignore[method-assign]
        plain = model(asked).logits.isfinite().all()

        def run(model: Any = model, given: dict[str, Any] = given, asked: torch.Tensor = asked) -> Any:
            with torch.no_grad(), attach(model, dense_below=0, **given) as attachment:
                cache, got = attachment.prefill(asked), []
                for token in (5, 6, 7, 8):
                    got.append(model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits)
            return torch.cat(got)

        problem, logits = refused(run)
        if problem or (logits is not None and plain and not logits.isfinite().all()):
            failed.append(f"{part} times {scale}, {name}, {asked.shape[1]} tokens, phi {given['phi'] is not None}, "
                          f"budget {given['token_budget']}: {problem or 'logits are not finite'}")
    return Outcome(count, failed)


def kill(folder: Path, count: int, seed: int = 0) -> Outcome:
    """Captures, trainings and evaluations killed at random moments and started again until they end: what they made is
    that of one that was not killed."""
    failed, cases = [], 0
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    for kind in ("capture", "phi", "router", "eval"):
        (folder / kind).mkdir(parents=True)
        done = subprocess.run([sys.executable, str(CHILD), kind, str(folder / kind), str(-(-count // 4)), str(seed)],
                              capture_output=True, text=True, env=environment)
        cases += -(-count // 4)
        if done.returncode or not done.stdout.strip().endswith("kills survived"):
            failed.append(f"{kind}: {done.stdout[-300:]}{done.stderr[-1000:]}")
    return Outcome(cases, failed)
