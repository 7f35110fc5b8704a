"""Figures of prompts that are read sparsely: what the how-to page, README and the page of missed targets say is in rows
of prefill.json and real.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from test_first_screen import README, ROOT, rows, shown, table

from sparsekv.core.prefill import SparsePrompts

HOW_TO = (ROOT / "docs" / "how-to" / "prompts.md").read_text(encoding="utf-8")
MISSED = (ROOT / "docs" / "results" / "missed.md").read_text(encoding="utf-8")
CASES, SCORED = ("8b-32k-b1", "8b-128k-b1"), ("coder-1.5b:prefill@16384", "coder-1.5b:prefill@32768")
HEADER = "prompt read by | first token [s] | times as fast"
READ = {"full attention": "dense", "`share=0.1`": "sparse@0.1", "`share=0.2`": "sparse@0.2",
        "`share=0.3`, the default": "sparse@0.3"}
"""What the how-to page calls a way to read prompts, and what rows of times do."""
ALL = ("sparse@0.3", "sparse@0.2", "sparse@0.1")
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
    return runs((r for r in rows("prefill") if r["case"] in CASES and r["metric"] == "first_token_s"),
                lambda r: (r["method"], r["case"]))


def differences(case: str = SCORED[0]) -> list[Run]:
    """Points to prompts read densely, by method; of each run, those with most prompts."""
    return runs((r for r in rows("real") if (r["case"], r["metric"]) == (case, "difference")
                 and r["against"] == "sketch+phi"), lambda r: r["method"])


def found_in(run: Run, name: str, pairs: str) -> dict[str, Any] | None:
    """The row of a line of the table of points: "`share=0.1`", or XAttention's rule at as many pairs."""
    share = re.search(r"`(share=[\d.]+)`", name)
    rule = f"prompt:{share[1]}" if share else "xattention:"
    return next((r for m, r in run.items() if m.startswith(rule)
                 and shown(pairs) == pytest.approx(100 * r["pairs"], abs=0.501)), None)


def says(text: str, r: dict[str, Any]) -> bool:
    """Whether `−11.8 ± 6.4` is what a row says."""
    points, _, half = text.partition(" ± ")
    return (shown(points) == pytest.approx(r["value"], abs=0.0501)
            and shown(half) == pytest.approx((r["high"] - r["low"]) / 2, abs=0.0501))


def test_first_tokens_are_those_of_one_run() -> None:
    lines = tables(HOW_TO)[HEADER]
    said = {(READ[name], CASES[1]): shown(seconds) for name, seconds, _ in lines}
    assert len(said) == len(READ)
    assert any(set(said) <= set(run) and all(run[m]["value"] == pytest.approx(v, abs=0.0501) for m, v in said.items())
               for run in first_tokens())
    ratios = {(r["case"], r["method"]): r["value"] for r in rows("prefill") if r["metric"] == "first_token_speedup"}
    for name, _, ratio in lines[1:]:
        assert ratios[CASES[1], READ[name]] == pytest.approx(shown(ratio.split()[0]), abs=0.00501)
    found = {(r["case"], r["method"], r["metric"]): r["value"] for r in rows("prefill")}
    lines = tables(HOW_TO)["prompts | full attention [s] | sparse [s]"]
    for (_, *said), (case, metric) in zip(lines, ((CASES[0], "first_token_s"), ("coder-30k-b8", "first_token_s"),
                                                  ("8b-512k-b1", "cold_prompt_s")), strict=True):
        assert [shown(x) for x in said] == pytest.approx(
            [found[case, m, metric] for m in ("dense", "sparse@0.1")], abs=0.0501 if case[3:6] == "512" else 0.00501)


def test_readme_has_first_tokens_of_the_how_to_page() -> None:
    lines = {READ[name]: seconds for name, seconds, _ in tables(HOW_TO)[HEADER]}
    bullet = " ".join(README.partition("does not shorten the prefill")[2].partition("\n- ")[0].split())
    assert "first token of 128k tokens (8B shape)" in bullet
    assert re.findall(r"([\d.]+) s\b", bullet) == [lines["sparse@0.3"], lines["dense"]]


def test_points_and_pairs_are_those_of_one_run() -> None:
    lines = tables(HOW_TO)["prompt read by | pairs of query and key | points"]
    prompts = re.search(r"on (\d+) prompts of RULER with 16k tokens", HOW_TO)
    assert len(lines) >= 4 and prompts is not None

    def holds(r: dict[str, Any] | None, points: str) -> bool:
        return r is not None and r["samples"] == int(prompts[1]) and says(points, r)

    assert any(all(holds(found_in(run, name, pairs), points) for name, pairs, points in lines)
               for run in differences())


def test_points_at_32k_are_in_rows() -> None:
    lines = tables(HOW_TO)["prompt read by | prompts, 1.5B | points, 1.5B | prompts, SmolLM2 | points, SmolLM2"]
    assert len(lines) == 3
    for name, *cells in lines:
        for case, prompts, points in ((SCORED[1], *cells[:2]), ("smollm2-long:prefill@32768", *cells[2:])):
            row, = [run[f"prompt:{name.strip('`')}"] for run in differences(case)]
            assert row["samples"] == int(prompts) and says(points, row), (name, case)


def test_the_default_share_is_the_pages() -> None:
    said = next(name for name in READ if "the default" in name)
    assert said.startswith(f"`share={SparsePrompts().share}`")
    assert [default for field, default, _ in tables(HOW_TO)["field | default | what it is"] if field == "`share`"] == [
        str(SparsePrompts().share)]


def test_first_tokens_in_vllm_are_in_rows() -> None:
    lines = tables(HOW_TO)["prompt read by | first token in vLLM [s] | vLLM's own [s] | times as fast"]
    found = runs((r for r in rows("serving") if (r["case"], r["metric"]) == (CASES[1], "first_s")),
                 lambda r: r["method"])
    for method, (_, ours, own, ratio) in zip(("vllm_sparse_prompts", "vllm_sparse_prompts_tenth"), lines, strict=True):
        run, = (run for run in found if method in run)
        values = [run[m]["value"] for m in (method, "vllm_fa3")]
        assert [shown(ours), shown(own)] == pytest.approx(values, abs=0.0501)
        assert shown(ratio.split()[0]) == pytest.approx(values[1] / values[0], abs=0.00501)


def test_changes_of_perplexity_are_in_rows() -> None:
    header = "prompt read by | what follows: prose | program text | the prompt: prose | program text"
    lines = tables(HOW_TO)[header]
    columns = [f"coder-1.5b:prefill_{kind}_{text}@16384" for kind in ("perplexity", "prompt")
               for text in ("prose", "code")]
    ratios = {(r["case"], r["method"]): r["value"] for r in rows("real") if r["metric"] == "perplexity_ratio"}
    assert len(lines) == 3
    for name, *cells in lines:
        for case, cell in zip(columns, cells, strict=True):
            assert 100 * ratios[case, f"prompt:{name.strip('`')}"] - 100 == pytest.approx(shown(cell), abs=0.0501)


def test_words_by_share_are_in_rows() -> None:
    line, = tables(HOW_TO)["full attention | `share=0.1` | `share=0.2` | `share=0.3`"]
    scores = {r["method"]: r["value"] for r in rows("real") if (r["case"], r["metric"]) == (
        "coder-1.5b:prefill_ruler_fwe@16384", "score")}
    for method, said in zip(("sketch+phi", *(f"prompt:share=0.{i}" for i in (1, 2, 3))), line, strict=True):
        assert scores[method] == pytest.approx(int(said), abs=0.501)


def test_missed_targets_have_their_rows() -> None:
    lines = [line for line in next(t for h, t in tables(MISSED).items() if h == "another target | found")]
    points = [x for _, found in lines if "how-to/prompts.md" in found
              for x in re.findall(r"[−+][\d.]+ ± [\d.]+", found)]
    known = [r for case in SCORED for run in differences(case) for r in run.values()]
    assert len(points) >= 5
    for text in points:
        assert any(says(text, r) for r in known), text
    values = {(r["case"], r["method"], r["metric"]): r["value"] for r in rows("prefill")}
    for words, case, metric, methods in (
            ("eight layers of that shape", "8b-quarter-512k-b1", "prompt_speedup", ("sparse@0.1", "sparse@0.05")),
            ("at 128k, by the first token", CASES[1], "first_token_speedup", ALL),
            ("in pieces of 32,768", CASES[1], "prompt_speedup", ALL),
            ("of 32k at least as fast", CASES[0], "first_token_speedup", ("sparse@0.1",))):
        said = next(found for target, found in lines if words in target)
        assert [float(x) for x in re.findall(r"\d\.\d\d", said.replace("0.05", ""))] == pytest.approx(
            [values[case, m, metric] for m in methods], abs=0.00501), words
    dense, sparse = (values["8b-512k-b1", m, "cold_prompt_s"] for m in ("dense", "sparse@0.1"))
    said = next(found for target, found in lines if "sparse prompt of 512k" in target)
    assert f"missed: {dense / sparse:.2f} at" in said
