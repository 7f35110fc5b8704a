"""What the demo shows: the table, the report and its figures, on a tiny random model."""

import re
from itertools import pairwise

import pytest

from sparsekv.evaluation.demo import DemoConfig, run_demo
from sparsekv.evaluation.demo_report import BUDGETS, COLUMNS, shown
from sparsekv.evaluation.figures import error_by_budget


@pytest.fixture(scope="module")
def made(tmp_path_factory, saved_model):
    root = tmp_path_factory.mktemp("demo")
    return run_demo(DemoConfig(model=str(saved_model), output=root / "out", context_length=256, num_documents=4,
                               num_heldout=2, num_needles=3, num_buckets=8, phi_steps=2, phi_width=8))


def test_the_table_says_what_was_read_what_was_found_and_what_it_cost(made) -> None:
    header, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in made.table.splitlines())
    assert tuple(header) == COLUMNS and len(lines) == len(shown())
    assert lines[0][0] == "all tokens (full attention)" and lines[0][1:3] == ["100.0%", "100.0%"]
    found = {line[0]: line for line in lines}
    assert set(found) >= {"sink + tail (4 and 16 tokens) + φ", "the best 1 % (exact top-k)",
                          "the router's 5 %, by buckets + φ", "the router's best 1 %, by sketches + φ"}
    for line in lines:
        assert re.fullmatch(r"\d of 3", line[3]) and all(float(x.rstrip("%")) >= 0 for x in (*line[1:3], *line[4:]))
    share = {name: float(line[2].rstrip("%")) for name, line in found.items()}
    assert share["the best 1 % (exact top-k)"] > 50, "exact top-k reads every key to choose"


def test_the_report_explains_itself(made) -> None:
    page = made.report.read_text(encoding="utf-8")
    assert made.words in page and made.words in made.summary()
    number = re.search(r"the hidden number is (\d{7})", page)
    assert number and page.count("<tr") == 2 * (1 + len(shown())) and page.count("<svg") == 3
    last = made.table.splitlines()[-1].strip("| ").replace("'", "&#39;").split(" | ")
    assert f'<tr class="default"><td>{last[0]} <b>default</b>' in page
    assert page.index("<dt>Gain") < page.index("<dt>Loss") < page.index("<dt>Setting") < page.index("<table")
    for words in (f"takes {last[-1]} ms on this machine", f"{last[3]} hidden numbers are",
                  "token_budget=0.01)</code></dd>"):
        assert words in page
    for words in ("4 windows of 256 tokens of Python&#39;s language reference and presidents&#39; addresses",
                  "2 windows of presidents&#39; addresses to Congress that were held out", "Full attention reads",
                  "was left as it is", "the held-out text surprises", "Down is better"):
        assert words in page


def test_no_two_labels_of_the_figure_touch() -> None:
    ends = {"topk": 0.045, "topk+phi": 0.044, "router": 0.05, "router+phi": 0.0441, "streaming": 0.5,
            "streaming+phi": 0.0442}
    svg = error_by_budget(BUDGETS, {m: [2 * e, 1.5 * e, e] for m, e in ends.items()})
    placed = [float(y) for y, words in re.findall(r'<text [^>]*?y="([\d.]+)"[^>]*>([^<]*)</text>', svg)
              if words.startswith(("exact", "router", "sink"))]
    assert len(placed) == len(ends)
    heights = sorted(placed)
    assert min(b - a for a, b in pairwise(heights)) >= 9.5, heights  # the letters are 9 points
