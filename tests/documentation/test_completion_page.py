"""The table of maps of keys in docs/completion.md is what rows and pages say."""

import json
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"


def rows(name: str) -> list[dict[str, Any]]:
    return json.loads((DOCS / "results" / f"{name}.json").read_text(encoding="utf-8"))


def test_the_maps_of_keys() -> None:
    page = (DOCS / "completion.md").read_text(encoding="utf-8")
    none, kept, ships = ([cell.strip() for cell in line.strip("|").split("|")]
                         for line in page.partition("| map of keys |")[2].splitlines()[2:5])
    forms = rows("phi-forms")
    for cells, form in ((none, None), (kept, "base"), (ships, "shared64")):
        of_form = [r for r in forms if r.get("form") == form and r["metric"] == "rel_err" and r["budget"] == 0.01]
        assert len(of_form) == 1 and cells[4] == f"{of_form[0]['value']:.4f}"
        if form is not None:
            assert cells[1:3] == [f"{of_form[0]['kflop_key']:.0f}", str(of_form[0]["bytes_kept"])]
    for cells, commit in ((kept, "8b2d5e3"), (ships, "e7d6883")):
        steps = {r["method"]: r["value"] for r in rows("decode")
                 if r["case"] == "32x8-128k-b1" and r["commit"] == commit and r["machine"].startswith("NVIDIA H200")}
        assert cells[3] == f"+{steps['sparse_sketch_phi'] - steps['sparse_sketch']:.1f}"
    short = (DOCS / "results" / "real.md").read_text(encoding="utf-8").partition("## In short, 16k")[2]
    for cells, method in ((none, "| sketches (`sketch`) |"), (ships, "| **… + φ** |")):
        line = next(line for line in short.splitlines() if line.startswith(method))
        assert cells[5] == line.split("|")[2].strip()
