"""Every family is right or refused, at `attach` and at `capture`, in one sentence; docs/families.md says which."""

from __future__ import annotations

import families
import pytest

FAST = ("llama", "gemma3_text", "gpt_neox", "deepseek_v3", "falcon", "llama4_text", "mistral with a window", "gemma2",
        "gpt_oss", "qwen3_next")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
                                  for name in families.FAMILIES])
def test_a_family_is_right_or_refused(name: str) -> None:
    found = families.judge(name)
    if found.attach:
        assert "is not supported: " in found.attach and "\n" not in found.attach
        assert found.capture, "what cannot be attached to is not captured either"
    else:
        assert found.layers[0] > 0, "it attaches and stays dense in silence"
        assert found.error < 1e-4
    if found.capture:
        assert "is not supported: " in found.capture and "\n" not in found.capture
    assert families.table(families.PAGE.read_text()).get(name) == families.row(name)


def test_the_page_has_these_families() -> None:
    assert list(families.table(families.PAGE.read_text())) == list(families.FAMILIES)
