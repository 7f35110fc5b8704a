"""Whatever runs the kernels, their outputs are poisoned first."""

from typing import Any

import pytest
import torch


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
