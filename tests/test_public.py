"""The package as a notebook and an editor show it."""

import inspect
import subprocess
import sys

import pytest

import sparsekv

PUBLIC = [sparsekv.attach, sparsekv.SparseConfig.of, sparsekv.SparseConfig.load, sparsekv.SparseConfig.check, *(
    method for name, method in vars(sparsekv.Attachment).items() if inspect.isfunction(method) and name[0] != "_")]


def test_the_names_are_listed_before_anything_is_loaded() -> None:
    code = "import sys, sparsekv; print(*dir(sparsekv)); assert 'torch' not in sys.modules"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {"attach", "SparseConfig", "Attachment"} <= set(shown)
    with pytest.raises(AttributeError, match="'sparsekv' has no attribute 'atach'"):
        sparsekv.atach  # noqa: B018


@pytest.mark.parametrize("function", PUBLIC, ids=lambda f: f.__qualname__)
def test_public_parameters_have_types(function) -> None:
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in ("self", "cls"):
            assert parameter.annotation not in (inspect.Parameter.empty, "Any"), name
