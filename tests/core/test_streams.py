"""Work beside other work has a stream of its own, whatever the caller's is."""

from __future__ import annotations

import pytest
import torch

from sparsekv.core.streams import beside


@pytest.mark.gpu
def test_what_runs_beside_is_on_another_stream_than_the_callers() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    found = torch.zeros(64, device=device)
    for i in range(70):  # torch gives out 32 streams in turn
        with torch.cuda.stream(torch.cuda.Stream(device)):
            main = torch.cuda.current_stream(device)
            main.wait_stream(torch.cuda.default_stream(device))
            with beside(device) as join:
                assert torch.cuda.current_stream(device) != main
                made = torch.full((64,), float(i), device=device)
            join()
            found = made + 1
            torch.cuda.synchronize(device)
        assert torch.equal(found, torch.full_like(found, i + 1.0))


def test_without_a_gpu_it_runs_in_place() -> None:
    with beside(torch.device("cpu")) as join:
        made = torch.ones(3)
    join()
    assert made.sum() == 3
