"""README's picture and the site's curves are drawn of rows; what has no row is left out."""

from __future__ import annotations

import pytest

from benchmarks import curves
from benchmarks._rows import load
from benchmarks.pages import CURVES


def test_points_are_rows_and_missing_ones_are_left_out(monkeypatch, tmp_path) -> None:
    few = "sketch:candidates=0.2"
    kl = [{"case": "coder-1.5b-eight:text@32768", "method": m, "metric": "kl", "budget": b, "value": v}
          for m, b, v in ((f"{few}+phi", 0.02, 0.005), (f"{few}+phi", 0.01, 0.01), (few, 0.01, 0.04),
                          ("sketch+phi", 0.01, 0.003), ("topk", 0.01, 0.02))]
    ms = [{"case": "coder-30k-b8", "method": m, "metric": "loop_ms", "value": v, "budget": b}
          for m, b, v in (("dense", None, 8.0), ("sketch_phi", 0.01, 6.0), ("sketch_phi", 0.02, 6.5),
                          ("untrained", 0.01, 6.5))]
    monkeypatch.setattr(curves, "load", lambda name: {"kl": kl, "generate": ms}[name])
    found = curves.kl_lines("text", 32_768)
    assert found == {"full attention": [(8.0, 0.0)], "sketch + φ": [(6.0, 0.01), (6.5, 0.005)]}
    assert curves.kl_lines("text", 65_536) == {} and [title for title, _ in curves.panels("kl")[0]] == [
        "text, 32k tokens"]
    drawn = [curves.readme(found, "H200", look, tmp_path / "x.svg").read_text() for look in (curves.LIGHT, curves.DARK)]
    assert all("full attention" in text and "one H200" in text for text in drawn) and "#e6e6e6" in drawn[1]
    with pytest.raises(SystemExit, match="no method has rows of both"):
        curves.readme({}, "H200", curves.LIGHT, tmp_path / "none.svg")


def test_memory_has_a_line_through_the_budgets_of_a_method(monkeypatch) -> None:
    rows = [{"case": "8b-128k-b1", "method": m, "metric": metric, "value": v} for m, gb, speed in (
        ("full", 34.0, 120.0), ("sketch_phi-1%", 19.6, 95.0), ("sketch_phi-2%", 19.9, 75.0),
        ("sketch_phi-1%@cold", 19.5, 90.0), ("sketch-1%@gpu", 35.0, 170.0)) for metric, v in (
            ("gpu_gb", gb), ("tokens_s", speed))] + [
        {"case": "8b-128k-b1", "method": "full_host", "metric": "tokens_s", "value": 3.0}]
    monkeypatch.setattr(curves, "load", lambda name: rows)
    assert curves.memory_lines("8b-128k-b1") == {
        "full attention, keys on the GPU": [(34.0, 120.0)], "sketch + φ": [(19.6, 95.0), (19.9, 75.0)],
        "sketch, keys on the GPU": [(35.0, 170.0)]}
    assert b"<svg" in (curves.picture("offload") or b"")
    monkeypatch.setattr(curves, "load", lambda name: [])
    assert curves.picture("offload") is None


@pytest.mark.parametrize(("case", "model", "codes"), [
    ("coder-30k-b1", "coder-1.5b", ""), ("coder-30k-b8", "coder-1.5b-eight", ":candidates=0.2")])
def test_times_with_keys_in_cpu_memory_meet_kl_of_their_budget(monkeypatch, case, model, codes) -> None:
    ms = [{"case": case, "method": m, "metric": "ms", "value": v} for m, v in (
        ("full", 2.0), ("sketch-1%", 2.6), ("sketch-5%", 2.7), ("sketch_phi-1%", 2.8), ("sketch_phi-1%@gpu", 2.4))]
    kl = [{"case": f"{model}:text@32768", "method": m, "metric": "kl", "budget": b, "value": v} for m, b, v in (
        ("full", None, 0.0), (f"sketch{codes}, 5 %", 0.05, 0.008), (f"sketch{codes}", 0.01, 0.04),
        (f"sketch{codes}+phi", 0.01, 0.007), (f"sketch{codes}+phi, 2 %", 0.02, 0.004), ("topk", 0.01, 0.03))]
    kl.append({**kl[2], "method": "sketch:fit=fixed", "value": 1.0})
    monkeypatch.setattr(curves, "load", lambda name: {"kl": kl, "offload": ms}[name])
    found = curves.host_lines(case, "ms")
    assert found == {"sketch": [(2.6, 0.04), (2.7, 0.008)], "sketch + φ": [(2.8, 0.007)]}


def test_the_rows_that_ship_give_all_pictures() -> None:
    assert load("kl") and all(b"<svg" in (curves.picture(name) or b"") for name in CURVES)
