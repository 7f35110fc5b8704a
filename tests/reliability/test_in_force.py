"""Rows of a method that was not in force are never written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiny import make_model, make_tokenizer, prompt

from sparsekv.evaluation.evaluator import Evaluator
from sparsekv.evaluation.methods import Method
from sparsekv.evaluation.requests import Question
from sparsekv.runtime.hf.attach import attach
from sparsekv.util.errors import SparseKVError


def test_a_report_says_whether_the_method_was_in_force_and_why_not() -> None:
    model, ids = make_model(), prompt(80)
    with attach(model, selector="topk", token_budget=8, dense_below=0) as attachment:
        assert not attachment.report()["in_force"] and "no pass" in attachment.report()["not_in_force"]
        attachment.prefill(ids)
        assert "no token decoded" in attachment.report()["not_in_force"]
        attachment.generate(ids, max_new_tokens=3)
        assert attachment.report()["in_force"] and attachment.report()["not_in_force"] is None
        attachment.check_in_force("topk")
    short = attach(model, selector="topk", token_budget=8, dense_below=1000)
    with pytest.warns(UserWarning, match="nothing decoded sparsely: caches were too short"), short:
        short.generate(ids, max_new_tokens=3)
    with pytest.raises(SparseKVError, match="topk was not in force: caches were too short"):
        short.check_in_force("topk")


@pytest.mark.parametrize("metric", ["string_match_all", "continuation"])
def test_an_evaluation_refuses_rows_of_a_method_that_was_not_in_force(metric: str, tmp_path: Path) -> None:
    asked = [Question("task", 64, 0, "one " * 30, ["two"], metric, 4, [])]
    method = Method("topk", budget=0.1)
    made = Evaluator(make_model(), make_tokenizer(), asked, output=tmp_path)
    made.config = replace(made.config, dense_below=1000)
    with pytest.raises(SparseKVError, match="method topk was not in force"), pytest.warns(UserWarning):
        made.run([method])
    assert not made.done
    made.config, made.begun = replace(made.config, dense_below=0), None
    assert made.run([method]) and made.done
