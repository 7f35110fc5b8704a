"""Figures of prompts that are read sparsely: what the how-to page, README and the page of missed targets say is in rows
of prefill.json and real.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from test_first_screen import README, ROOT, rows, shown, table

HOW_TO = (ROOT / "docs" / "how-to" / "prompts.md").read_text(encoding="utf-8")
MISSED = (ROOT / "docs" / "results" / "missed.md").read_text(encoding="utf-8")
CASE, SCORED = "8b-128k-b1", "coder-1.5b:prefill@16384"
READ = {"full attention": "dense", "sparse": "sparse", "sparse + φ": "sparse_phi",
        "XAttention's rule": "xattention:share=0.1"}
"""What the pages call a way to read prompts, and what rows do."""
Run = dict[Any, Any]


def runs(found: Iterable[dict[str, Any]], key: Callable[[dict[str, Any]], Any]) -> list[Run]:
    """Rows by `key`, for each card and commit apart."""
    made: dict[tuple[str, str], Run] = {}
    for r in found:
        made.setdefault((r["machine"], r["commit"]), {})[key(r)] = r
    return list(made.values())


def tables(page: str) -> dict[str, list[list[str]]]:
    """The tables of a page by their headers, the header left out."""
    parts = [table(part) for part in page.split("\n\n")]
    return {" | ".join(part[0]): part[1:] for part in parts if len(part) > 1}


def first_tokens() -> list[Run]:
    return runs((r for r in rows("prefill") if (r["case"], r["metric"]) == (CASE, "first_token_s")),
                lambda r: r["method"])


def differences() -> list[Run]:
    """Points to prompts read densely, by method; of each run, those with most prompts."""
    return runs((r for r in rows("real") if (r["case"], r["metric"]) == (SCORED, "difference")
                 and r["against"] == "sketch+phi"), lambda r: r["method"])


def method_of(name: str) -> str:
    """What rows call a line of the table of points: "`share=0.1`, φ"."""
    share = re.search(r"`(share=[\d.]+)`", name)
    return f"prompt:{share[1]}{'+phi' if 'φ' in name else ''}" if share else READ[name]


def says(text: str, r: dict[str, Any]) -> bool:
    """Whether `−11.8 ± 6.4` is what a row says."""
    points, _, half = text.partition(" ± ")
    return (shown(points) == pytest.approx(r["value"], abs=0.0501)
            and shown(half) == pytest.approx((r["high"] - r["low"]) / 2, abs=0.0501))


def test_first_tokens_are_those_of_one_run() -> None:
    lines = {READ[name]: shown(seconds) for name, seconds in tables(HOW_TO)["prompt read by | first token [s]"]}
    assert set(lines) == {"dense", "sparse", "sparse_phi"}
    assert any(set(lines) <= set(run) and all(run[m]["value"] == pytest.approx(v, abs=0.0501) for m, v in lines.items())
               for run in first_tokens())


def test_readme_has_first_tokens_of_the_how_to_page() -> None:
    lines = {READ[name]: seconds for name, seconds in tables(HOW_TO)["prompt read by | first token [s]"]}
    bullet = " ".join(README.partition("does not shorten the prefill")[2].partition("\n- ")[0].split())
    assert "first token of 128k tokens (8B shape)" in bullet
    said = re.findall(r"([\d.]+) s\b", bullet)
    assert said == [lines["sparse_phi"], lines["dense"]]


def test_points_and_pairs_are_those_of_one_run() -> None:
    lines = tables(HOW_TO)["prompt read by | pairs of query and key | points"]
    prompts = re.search(r"on (\d+) prompts of RULER with 16k tokens", HOW_TO)
    assert len(lines) >= 4 and prompts is not None
    for run in differences():
        if all(method_of(name) in run and run[method_of(name)]["samples"] == int(prompts[1])
               and says(points, run[method_of(name)])
               and shown(pairs) == pytest.approx(100 * run[method_of(name)]["pairs"], abs=0.501)
               for name, pairs, points in lines):
            return
    raise AssertionError("no run has all of these points and pairs")


def test_changes_of_perplexity_are_the_largest_of_their_run() -> None:
    page = " ".join(HOW_TO.split())
    found = re.search(r"changes by up to ([\d.]+) % on prose, and by up to ([\d.]+) % on program text", page)
    assert found is not None

    def largest(run: Run, text: str) -> float:
        return max((abs(100 * r["value"] - 100) for (of, _), r in run.items() if of == text), default=-1.0)

    of_text = runs((r for r in rows("real") if r["metric"] == "perplexity_ratio" and r["case"] in {
        f"coder-1.5b:prefill_perplexity_{text}@16384" for text in ("prose", "code")}),
        lambda r: (r["case"].partition("_perplexity_")[2].partition("@")[0], r["method"]))
    assert any(largest(run, "prose") == pytest.approx(float(found[1]), abs=0.0501)
               and largest(run, "code") == pytest.approx(float(found[2]), abs=0.0501) for run in of_text)


def test_missed_targets_have_their_rows() -> None:
    lines = [line for line in next(t for h, t in tables(MISSED).items() if h == "another target | found")]
    of_prompts = [f"{target}: {found}" for target, found in lines if "how-to/prompts.md" in found]
    points = [says_what for line in of_prompts for says_what in re.findall(r"[−+][\d.]+ ± [\d.]+", line)]
    known = [r for run in differences() for r in run.values()]
    assert len(points) >= 3
    for text in points:
        assert any(says(text, r) for r in known), text
    ratio = next(found for target, found in lines if "by the first token" in target)
    phi, alone = (float(x) for x in re.findall(r"\d\.\d\d", ratio))
    assert any({"dense", "sparse", "sparse_phi"} <= set(run)
               and run["dense"]["value"] / run["sparse_phi"]["value"] == pytest.approx(phi, abs=0.00501)
               and run["dense"]["value"] / run["sparse"]["value"] == pytest.approx(alone, abs=0.00501)
               for run in first_tokens())
