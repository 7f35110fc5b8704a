"""The table of missed targets: which rows it takes, and what it says where there are none."""

from __future__ import annotations

from typing import Any

from benchmarks import _missed_page as page


def row(case: str, method: str, value: float, card: str = "NVIDIA H200", commit: str = "aaaaaaa", metric: str = "us",
        ) -> dict[str, Any]:
    return {"case": case, "method": method, "metric": metric, "value": value, "machine": f"{card}, torch 2.11",
            "commit": commit}


def test_a_missed_target_is_a_line_and_one_that_is_met_none() -> None:
    rows = [row("32x8-32k-b1", page.STEP, 24.04), row("32x8-64k-b1", page.STEP, 27.06)]
    missed, unknown = page.speed(rows, [])
    of = [line.split(" | ") for line in missed if line.startswith("| a step of sketches")]
    assert [cells[1] for cells in of] == ["32 / 8, 64k, 1 request"]  # 24.04 is shown as 24.0
    assert of[0][2:4] == ["≤ 27 µs", "[27.1 µs (H200 aaaaaaa)](decode.md)"]
    without = [line for line in unknown if line.startswith("| a step of sketches")]
    assert len(without) == 4 and not any("32k" in line or "64k" in line for line in without)


def test_an_h200_decides_and_a_ratio_is_of_one_card_and_commit() -> None:
    case = "8b-128k-b1"
    h200 = [row(case, "dense", 10.0, metric="loop_ms"), row(case, "sketch_phi", 8.0, metric="loop_ms")]
    h100 = [row(case, "dense", 30.0, "NVIDIA H100 80GB HBM3", metric="loop_ms"),
            row(case, "sketch_phi", 10.0, "NVIDIA H100 80GB HBM3", metric="loop_ms")]
    apart = [row(case, "sketch_phi", 1.0, commit="bbbbbbb", metric="loop_ms")]
    missed, _ = page.speed([], [*h100, *apart, *h200])
    lines = [line for line in missed if "to one of sketch + φ" in line]
    assert len(lines) == 1 and "1.25 × (H200 aaaaaaa); 3.00 × (H100 aaaaaaa)" in lines[0]


def test_every_section_of_the_log_that_is_named_is_there() -> None:
    from benchmarks._rows import RESULTS

    for target in page.TARGETS:
        name, _, section = target.tried.partition("#")
        text = (RESULTS / name).resolve().read_text(encoding="utf-8")
        titles = [line[3:].lower().replace(",", "").replace(" ", "-") for line in text.splitlines()
                  if line.startswith("## ")]
        assert section in titles
