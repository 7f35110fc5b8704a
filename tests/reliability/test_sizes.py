"""Sizes that nothing could hold are refused in one sentence, before anything is allocated or written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from training_child import train

from sparsekv.capture.config import CaptureConfig, check_options, parse_layers
from sparsekv.evaluation.own_tasks import check_prompts
from sparsekv.trainers.phi import PhiConfig
from sparsekv.trainers.router import RouterConfig
from sparsekv.util.config import check_ranges
from sparsekv.util.errors import SparseKVError
from sparsekv.util.memory import check_memory, memory_of
from sparsekv.util.ranks import join


def refused(sentence: str) -> Any:
    return pytest.raises(SparseKVError, match=sentence)


@pytest.mark.parametrize(("kind", "options", "sentence"), [
    ("router", {"num_buckets": 10**9}, "1000000000 buckets need at least as many keys, and the capture has 480 a head"),
    ("router", {"num_buckets": 1}, "--num-buckets must be a whole number from 2 to 2147483647, found 1"),
    ("router", {"num_buckets": 10**30}, "--num-buckets must be a whole number from 2 to 2147483647, found 1000"),
    ("router", {"num_buckets": 2.5}, "--num-buckets must be a whole number"),
    ("router", {"sketch_bytes": 10**6}, "expected 1 to 16, the head dimension; use other bytes"),
    ("router", {"max_steps": 10**12}, "--max-steps must be a whole number from 1 to 1000000000, found"),
    ("phi", {"width": 10**8}, r"6 KV heads at once, with --width 100000000, .* take .* GB at least, and the"),
    ("phi", {"width": 10**9}, r"GB at least, .* use smaller ones, or fewer layers at once \(--layer-group\)"),
    ("phi", {"key_width": 10**9}, "--key-width 1000000000"), ("phi", {"batch_size": 10**9}, "--batch-size 1000000000"),
    ("phi", {"batch_size": True}, "--batch-size must be a whole number from 2 to 2147483647, found True"),
    ("phi", {"output_weight": 10**400}, "--output-weight must be a finite number from 0 on, found 1000"),
    ("phi", {"devices": 10**9}, "--devices 1000000000 was asked for; this machine has [0-9]+ CPU cores, and takes"),
    ("phi", {"layer_group": -1}, "--layer-group must be a whole number from 0 to"),
    ("phi", {"seed": 2**32}, "--seed must be a whole number from 0 to 4294967295, found 4294967296")])
def test_sizes_of_trainings(kind: str, options: dict[str, Any], sentence: str, store, tmp_path) -> None:
    with refused(sentence):
        train(kind, str(store), str(tmp_path / "out"), **options)
    assert not (tmp_path / "out").exists()


def test_a_training_that_the_memory_holds_is_not_refused(store, tmp_path, monkeypatch) -> None:
    needed: list[float] = []
    monkeypatch.setattr("sparsekv.trainers.work.check_memory", lambda count, *_: needed.append(count))
    for kind in ("router", "phi"):
        train(kind, str(store), str(tmp_path / kind), max_steps=2)
    assert 0 < needed[0] < needed[1] < 100e6


@pytest.mark.parametrize(("options", "sentence"), [
    ({"context_length": 10**30}, "--context-length must be a whole number from 64 to 2147483647"),
    ({"num_documents": 0}, "--num-documents must be a whole number from 1 to"),
    ({"chunk_size": "x"}, "--chunk-size must be a whole number from 16 to 2147483647, found 'x'"),
    ({"layers": "0-999999999999"}, "layers '0-999999999999' not understood"), ({"layers": "3-1"}, "not understood")])
def test_sizes_of_a_capture(options: dict[str, Any], sentence: str) -> None:
    with refused(sentence):
        check_options(CaptureConfig("m", "c", "o", **options))


def test_layers_are_read() -> None:
    assert parse_layers("0-2,5") == [0, 1, 2, 5]


def test_prompts_that_no_machine_holds() -> None:
    check_prompts([4096, 131_072], 100)
    with refused(r"1000000000 prompts of every length \(4096, 8192 tokens\) take 9.83e\+04 GB at least"):
        check_prompts([4096, 8192], 10**9)


def test_every_default_is_in_its_range() -> None:
    for config in (RouterConfig("c", "o"), PhiConfig("c", "o"), CaptureConfig("m", "c", "o")):
        check_ranges(config)


def test_memory_is_what_this_process_may_take(monkeypatch) -> None:
    whole = memory_of("cpu")
    monkeypatch.setattr("resource.getrlimit", lambda _: (2 << 30, -1))
    assert memory_of("cpu") == min(whole, 2 << 30)
    check_memory(2 << 30, "cpu", "x", "y")
    with refused("x take 2.15 GB at least, and the device cpu has 2.15 GB in all; y"):
        check_memory((2 << 30) + 1, "cpu", "x", "y")


def test_processes_of_a_cpu() -> None:
    with refused("--devices 1000 was asked for; this machine has"):
        join("cpu", 1000)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_memory_that_runs_out_is_a_sentence(error: Exception, cli, monkeypatch) -> None:
    monkeypatch.setattr("sparsekv.artifacts.inspection.inspect_path", lambda _: (_ for _ in ()).throw(error))
    status, _, said = cli("inspect", Path(__file__).parent)
    assert status == 1 and "error: memory ran out (" in said and "ask for smaller sizes" in said
