"""Every way of running an attached model decodes sparsely, is refused in one sentence, or warns once."""

from __future__ import annotations

import pytest
from ways import PAGE, WAYS, Way, judge, table


def test_the_table_is_long_enough_and_names_every_way_once() -> None:
    assert len(WAYS) >= 60 and len({w.name for w in WAYS}) == len(WAYS)


@pytest.mark.parametrize("one", WAYS, ids=[w.name for w in WAYS])
def test_no_way_is_silent(one: Way) -> None:
    found = judge(one)
    assert found.what == one.comes_to, found
    assert one.says in found.said and "\n" not in found.said


def test_the_page_has_the_table() -> None:
    assert table() in PAGE.read_text()
