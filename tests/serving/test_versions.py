"""Versions of vLLM, pages and ways of writing keys that sparsekv does not know are refused, never served."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparsekv.runtime.vllm.checks import NEWEST, OLDEST, check_pages, check_version
from sparsekv.runtime.vllm.settings import VARIABLE
from sparsekv.util.errors import SparseKVError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("version", ["0.26.0", "0.27.1", "0.32.0+cpu", "0.33.0", "0.33.1.dev5+g1234"])
def test_versions_that_are_served(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "0.34.0rc1", "1.0.0", "0.8.5", "dev"])
def test_versions_that_are_refused_with_numbers(version: str) -> None:
    with pytest.raises(SparseKVError, match=rf"^vLLM {re.escape(version)} is installed; expected 0\.26 to 0\.33, "):
        check_version(version)


def test_the_package_installs_what_is_served() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["vllm"] == [f"vllm>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"]
    page = (ROOT / "docs" / "serve.md").read_text()
    assert f"vLLM {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}" in page


@pytest.mark.parametrize("shape", [(2, 9, 16, 4, 32), (9, 16, 4, 64), (9, 4, 16, 32), (9, 4, 32, 64), (9, 4096)])
def test_pages_of_another_layout_are_refused(shape: tuple[int, ...]) -> None:
    """Keys and values apart, tokens before heads, keys alone, pages of another size, bytes."""
    check_pages((9, 4, 16, 64), 4, 32, 16)
    with pytest.raises(SparseKVError, match=r"expected \[blocks, 4, 16, 64\], keys beside values"):
        check_pages(shape, 4, 32, 16)


@pytest.mark.vllm
def test_a_version_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import vllm

    from sparsekv.runtime.vllm.plugin import register

    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    monkeypatch.delenv(VARIABLE, raising=False)
    register()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none.json"))
    with pytest.raises(SparseKVError, match=r"vLLM 0\.99\.0 is installed"):
        register()


@pytest.mark.vllm
def test_an_attention_that_writes_keys_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparsekv.runtime.vllm import stock

    stock.check_hook()
    monkeypatch.setattr(stock.StockBackend, "forward_includes_kv_cache_update", True)
    with pytest.raises(SparseKVError, match="writes keys in its forward; expected a call of do_kv_cache_update"):
        stock.check_hook()


@pytest.mark.vllm
def test_keys_that_were_written_past_the_hook_are_refused() -> None:
    from sparsekv.runtime.vllm.backend import SparseImpl, SparseMetadata

    impl: Any = object.__new__(SparseImpl)
    impl.served = SimpleNamespace(layer_idx=3)
    with pytest.raises(SparseKVError, match="keys of layer 3 were written past do_kv_cache_update"):
        impl.forward(None, *[None] * 4, SparseMetadata(full=None, decode=object()), None)
