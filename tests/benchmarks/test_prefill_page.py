"""The time line of one request is of one card."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import _prefill_page as page


def row(machine: str, method: str, metric: str, value: float) -> dict[str, Any]:
    return {"case": page.CASE, "method": method, "metric": metric, "value": value, "commit": "aaaaaaa",
            "machine": f"NVIDIA {machine}, torch"}


def rows(machine: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Of prefill.json and generate.json."""
    return ([row(machine, m, "first_token_s", s) for m, s in (("dense", 11.0), ("sparse@0.3", 6.0))],
            [row(machine, m, "loop_ms", ms) for m, ms in (("dense", 8.0), ("sketch_phi", 6.0))]
            + [row(machine, "sketch_phi", "first_token_s", 12.0)])


def test_a_request_has_three_ways_of_one_card() -> None:
    prompts, tokens = rows("H200")
    older = [row("H100", r["method"], r["metric"], 99.0) for r in prompts]
    found = page.timeline(prompts + older, tokens)
    assert [(way.first, round(way.rest, 3)) for way in found] == [
        (11.0, pytest.approx(2.04)), (12.0, pytest.approx(1.53)), (6.0, pytest.approx(1.53))]
    assert "on one H200." in page.page(prompts, [], tokens)


def test_what_no_card_has_all_of_is_not_drawn() -> None:
    prompts, tokens = rows("H200")
    assert not page.timeline(prompts[:-1], tokens) and not page.timeline(prompts, rows("H100")[1])
    assert "request.png" not in page.page(prompts[:-1], [], tokens)
