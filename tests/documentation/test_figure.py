"""README's picture is drawn of rows, light and dark, and says what is missing."""

from __future__ import annotations

import pytest

from benchmarks import readme_figure


def test_points_are_rows_and_missing_ones_are_named(monkeypatch, tmp_path) -> None:
    kl = [{"case": "m:text@16384", "method": m, "metric": "kl", "budget": 0.01, "value": v}
          for m, v in (("sketch+phi", 0.01), ("sketch", 0.04), ("topk", 0.02))]
    ms = [{"case": "8b-128k-b1", "method": m, "metric": "loop_ms", "value": v}
          for m, v in (("dense", 8.0), ("sketch_phi", 6.0), ("untrained", 6.5))]
    monkeypatch.setattr(readme_figure, "load", lambda name: {"kl": kl, "generate": ms}[name])
    found = readme_figure.points("text@16384", "8b-128k-b1")
    assert found == {"full attention": (0.0, 8.0), "trained": (0.01, 6.0)}
    drawn = [readme_figure.drawn(found, ink, tmp_path / f"{ink[1:]}.svg").read_text() for ink in ("#1d1d1e", "#e6e6e6")]
    assert all("full attention" in text and "trained" in text for text in drawn) and "#e6e6e6" in drawn[1]
    with pytest.raises(SystemExit, match="no method has rows of both"):
        readme_figure.points("text@32768", "8b-128k-b1")
