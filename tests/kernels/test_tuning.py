"""Configurations measured once and read by every later launch."""

import json
import subprocess
import sys

import pytest
import torch

from sparsekv.kernels import tuning

SHAPE = {"rows": 7, "group": 4, "dim": 128, "length": 100_000, "dtype": torch.bfloat16}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "_name", lambda device: "a GPU")
    tuning._saved.cache_clear()
    yield
    tuning._saved.cache_clear()


def test_the_best_candidate_is_kept_and_read_again() -> None:
    default = dict(tuning.DEFAULTS["attend"])

    def time(run) -> float:
        how = run()
        if how["block"] == 128:
            raise RuntimeError("out of resource: shared memory")
        sizes = how["programs"] / 512 + how["merge_width"] / 64
        return how["warps"] + how["merge_warps"] + (how["block"] != 64) + sizes

    best, value = tuning.tune("attend", lambda: tuning.DEFAULTS["attend"], time)
    assert best == {"block": 64, "warps": 1, "programs": 256, "merge_width": 32, "merge_warps": 2}
    assert value == 1 + 2 + 0 + 0.5 + 0.5
    assert tuning.DEFAULTS["attend"] == default
    device = torch.device("cuda")
    assert tuning.configuration("attend", device, **SHAPE) == default
    name = tuning.key("attend", "a GPU", 8, 4, 128, 131_072, torch.bfloat16)
    tuning.save(name, best)
    assert tuning.configuration("attend", device, **SHAPE) == best
    assert tuning.configuration("attend_phi", device, **SHAPE) == tuning.DEFAULTS["attend_phi"]
    assert tuning.configuration("attend", device, **{**SHAPE, "length": 200_000}) == default
    assert tuning.configuration("attend", torch.device("cpu"), **SHAPE) == default


@pytest.mark.parametrize("text", ["", "[1]", "{\"x\": {\"block\": 3}}", json.dumps({"x": None})])
def test_a_damaged_cache_counts_as_none(text: str) -> None:
    path = tuning.cache_file()
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert tuning.configuration("attend", torch.device("cuda"), **SHAPE) == tuning.DEFAULTS["attend"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says so only without a GPU")
def test_without_a_gpu_tuning_says_so() -> None:
    done = subprocess.run([sys.executable, "-m", "sparsekv.kernels.tuning"], capture_output=True, text=True)
    assert done.returncode == 1 and "CUDA device" in done.stderr and "Traceback" not in done.stderr
