"""Whatever runs the kernels, their outputs are poisoned first, and what they launch is noted."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from cases import Case, entry_kernels


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New tensors hold NaN, or -7, or true."""

    def poison(made: Any) -> Any:
        def fresh(*shape: Any, **how: Any) -> torch.Tensor:
            x = made(*shape, **how)
            return x.fill_(float("nan") if x.is_floating_point() else x.dtype == torch.bool or -7)

        return fresh

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))


@pytest.fixture
def launched() -> Iterator[set[str]]:
    """Names of the kernels that a test launches, as they are launched."""
    names: set[str] = set()
    hooks = []
    for name, (module, function) in entry_kernels().items():
        kernel = getattr(import_module(module), function)
        hooks.append((kernel.pre_run_hooks, lambda *_, name=name, **__: names.add(name)))
        kernel.add_pre_run_hook(hooks[-1][1])
    yield names
    for listed, hook in hooks:
        listed.remove(hook)


@pytest.fixture
def constants(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets constants of `sparsekv`, by module and name, for a test."""

    def place(values: dict[str, Any]) -> None:
        for name, value in values.items():
            monkeypatch.setattr(f"sparsekv.{name}", value)

    return place


@pytest.fixture
def run(constants: Any, poisoned: None, launched: set[str]) -> Any:
    """Runs a case on a device and gives the names of the kernels that it launched."""

    def called(case: Case, device: str, **more: Any) -> set[str]:
        constants({**more, **case.constants})
        case.run(*case.given, device=device, **case.options)
        return launched

    return called
