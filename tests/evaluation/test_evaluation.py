import json
import re

import pytest
import torch

from sparsekv.core import offline
from sparsekv.evaluation.accounting import cache_tokens, retrieved_tokens
from sparsekv.evaluation.decode import Method, Score, markdown_table
from sparsekv.evaluation.figures import error_by_budget, mass_curve, training_curves
from sparsekv.evaluation.needle import NEEDLE, QUESTION, found, make_needles
from sparsekv.evaluation.report import Figure, Table, write_report


def test_the_worked_example_of_the_budget_formula() -> None:
    # Llama-3.2-1B at 16384 tokens, r = d = 64, anchors 4 + 16
    assert retrieved_tokens(0.05, 16384, 20) == 800
    assert retrieved_tokens(0.03, 16384, 20, num_features=64, head_dim=64) == 439
    assert cache_tokens(64, 64) == 33.0
    assert retrieved_tokens(0.03, 16384, 20, num_features=64, head_dim=64, generated_tokens=64) == 472
    assert retrieved_tokens(0.003, 16384, 20, num_features=64, head_dim=64) is None
    assert retrieved_tokens(0.001, 16384, 20) is None


class Letters:
    def __call__(self, text: str, **_: object) -> dict:
        return {"input_ids": [ord(c) for c in text]}


def test_needles_have_the_length_the_depth_and_the_number() -> None:
    needles = make_needles(Letters(), [ord("x")] * 700, length=400, count=4)
    for needle in needles:
        text = "".join(map(chr, needle.tokens))
        assert len(text) == 400 and text.endswith(QUESTION) and text.count(needle.number) == 1
        assert abs(text.index(needle.number) / 400 - needle.depth) < 0.25
    assert len({n.number for n in needles}) == 4
    asked = make_needles(Letters(), [ord("x")] * 700, length=400, count=2, depths=[0.0, 1.0])
    assert [n.depth for n in asked] == [0, 0, 1, 1] and asked[0].tokens[:20] == [ord(c) for c in NEEDLE[:20]]
    number = needles[0].number
    assert found(needles[0], f" {number}. The") and not found(needles[0], f" 9{number}")
    assert not found(needles[0], f"no 1 {number}") and not found(needles[0], "none")


def test_the_table_is_drawn_from_the_rows() -> None:
    method = Method("router + φ", "router@0.05", "router", 0.05, True)
    rows = Score([1.0, 3.0], [0.1, 0.3], [0.2, 0.4], 2, 5).rows(method)
    table = markdown_table([method, Method("other", "other", "topk", 1, False)], rows)
    assert "| router + φ | 2 of 5 | 7.39 | 0.200 | 30.0% |" in table
    assert "| other | – | – | – | – |" in table
    assert {r["method"] for r in rows} == {"phi"} and json.dumps(rows)
    found = {r["metric"]: r for r in rows}
    assert found["perplexity"]["low"] == pytest.approx(2.71828) and found["perplexity"]["samples"] == 2
    assert 0 <= found["needles"]["low"] < 2 < found["needles"]["high"] <= 5


def test_the_report_is_one_file_with_every_figure(tmp_path) -> None:
    points = {("topk", False): [(0.01, 0.2), (0.1, 0.1)], ("sink_tail", True): [(0.01, 0.3)]}
    figures = [error_by_budget(points), mass_curve([0.001, 0.1, 0.5, 1.0], {"first": [0.1, 0.5, 0.9, 1.0]}),
               training_curves({"router training": ([1, 2], [3.0, 2.0]), "phi training": ([1, 2], [3.0, 2.0])})]
    page = write_report(tmp_path / "r.html", "A <title>", "intro", [Table("t", ["a", "b"], [["1", "<2>"]], "note")],
                        [Figure(f"f{i}", svg, "caption") for i, svg in enumerate(figures)]).read_text()
    assert page.count("<svg") == 3 and "&lt;title&gt;" in page and "&lt;2&gt;" in page
    assert not re.findall(r'(?:src|href)="https?:', page)
    assert "exact top-k" in page and "currentColor" in page and "prefers-color-scheme: dark" in page


def scene(heads_q: int = 4, heads_kv: int = 2, length: int = 60):
    torch.manual_seed(0)
    queries = torch.randn(heads_q, 5, 8, dtype=torch.float64) * 2
    keys, values = (torch.randn(heads_kv, length, 8, dtype=torch.float64) for _ in range(2))
    positions = torch.tensor([[30, 40, 50, 55, 59]])
    return offline.make_scene(queries, keys, values, positions, scale=0.5, sink_size=3, window_size=6)


def test_offline_reading_everything_or_estimating_exactly_is_full_attention() -> None:
    s = scene()
    assert float(offline.relative_error(s, offline.output(s, s.mid.expand_as(s.scores))).max()) < 1e-12
    assert float(offline.relative_error(s, offline.output(s, None, s.scores)).max()) < 1e-12
    assert float(offline.relative_error(s, offline.output(s)).min()) > 0.01


def test_offline_selections_keep_to_budget_group_and_region() -> None:
    s = scene()
    bucket = torch.randint(0, 7, (2, 60))
    mass = offline.bucket_mass(s, bucket, 7)
    torch.testing.assert_close(mass.sum(-1), torch.ones(4, 5, dtype=torch.float64))
    shared = mass.reshape(2, 2, 5, 7).sum(1)
    for fraction in (0.1, 0.3):
        want = torch.ceil(s.context * fraction)[0].long()
        for read in (offline.top_k(s, fraction), offline.top_k(s, fraction, shared=False),
                     offline.top_buckets(s, bucket, shared, fraction)):
            assert not (read & ~s.mid).any()
            assert (read.sum(-1) == want).all()
        best = offline.mass_share(s, offline.top_k(s, fraction, shared=False))
        assert (best >= offline.mass_share(s, offline.top_k(s, fraction)) - 1e-12).all()
        assert torch.equal(offline.top_k(s, fraction)[0], offline.top_k(s, fraction)[1])
    fractions, shares = offline.mass_curve(s)
    assert fractions[-1] == pytest.approx(1.0) and torch.allclose(shares[:, -1], torch.ones(4, dtype=torch.float64))
    assert (shares.diff(dim=-1) >= -1e-12).all()
