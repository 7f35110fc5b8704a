"""The table of speed and quality of served requests is filled by rows alone."""

import re

from benchmarks import _served_page as page
from benchmarks._rows import row

CARD = {"machine": "NVIDIA H100 80GB HBM3, torch 2.11.0", "commit": "abc1234", "command": "-"}


def rows(*found):
    return [{**row(*r[:5], **(r[5] if len(r) > 5 else {})), **CARD} for r in found]


SPEED = rows(("8b-128k-b3", "vllm_fa3", "token_ms", 20.0, "milliseconds"),
             ("8b-128k-b3", "vllm_sparsekv", "token_ms", 8.0, "milliseconds"),
             ("tp2-8b-128k-b4-fp8", "vllm_fa3", "token_ms", 9.0, "milliseconds"),
             ("tp2-8b-128k-b4-fp8", "vllm_sparsekv", "token_ms", 6.0, "milliseconds"),
             ("8b-8k-b1", "vllm_sparsekv", "token_ms", 5.0, "milliseconds"),
             ("8b-128k-b3", "vllm_fa3", "first_s", 30.0, "seconds"),
             ("8b-128k-b3", "vllm_sparsekv", "first_s", 31.0, "seconds"),
             ("8b-128k-b3", "vllm_sparsekv", "index_s", 0.4, "seconds"),
             ("8b-128k-b3", "vllm_sparse_prompts", "first_s", 16.0, "seconds"),
             *[("8b-8k-b1", method, "first_s", 0.2, "seconds") for method in list(page.METHODS)[:2]],
             *[("8b-load-0.4", method, metric, 7.0, "tokens a second") for method in list(page.METHODS)[:2]
               for metric in (*page.SPANS, "page_tokens")])
SCORES = rows(("small:ruler@16384", "vllm_fa3", "score", 80.0, "points"),
              ("small:ruler@16384", "vllm_fa3", "token_ms", 4.0, "milliseconds"),
              *[(f"small:{task}@16384", "vllm_sparsekv", "score", 79.5, "points", {"budget": 0.02})
                for task in ("ruler", "ruler_vt")],
              ("small:ruler@16384", "vllm_sparsekv", "token_ms", 5.0, "milliseconds", {"budget": 0.02}),
              ("small:ruler@16384", "vllm_sparsekv", "above_vllm_fa3", -0.5, "points",
               {"budget": 0.02, "low": -1.5, "high": 0.4}))


def test_a_configuration_is_a_line_with_its_speed_and_its_scores() -> None:
    scored, timed = ([re.split(r" *\| *", line.strip("| ")) for line in table.splitlines()[2:]]
                     for table in page.side_by_side(SPEED, SCORES).split("\n\n"))
    assert scored == [["small, 16,384", "2 %, sketch + φ", "4.00", "5.00", "80.0", "79.5", "–", "−0.5, −1.5 to +0.4",
                       "H100 abc1234"]]
    assert [c[:3] + c[6:7] for c in timed] == [["8B shape", "128k", "3", "2.50 ×"],
                                                  ["8B shape", "128k, 2 GPUs, fp8 cache", "4", "1.50 ×"]]


def test_what_one_method_alone_has_is_no_line_and_a_cpu_is_none() -> None:
    assert "| 8k |" not in page.side_by_side(SPEED, SCORES)
    here = [{**r, "machine": "x86_64 CPU, 1 threads"} for r in SPEED + SCORES]
    assert len(page.side_by_side(here, here).splitlines()) == 2


def test_the_page_has_a_table_of_every_kind_of_row() -> None:
    from benchmarks.tables import load

    text = page.page(load("serving") + SPEED, load("served_quality") + SCORES)
    for part in ("## Under load\n", "## By task: small at 16,384 tokens, H100 abc1234", "| vt |",
                 "| 0.4 |", "they hold 7.", "| 8B shape | 128k | 3 | 30.00 | 31.00 | 0.40 | 16.00 | – | H100 abc1234 |",
                 "| 8B shape | 8k | 1 | 0.20 | 0.20 | – | – | – | H100 abc1234 |"):
        assert part in text, part
