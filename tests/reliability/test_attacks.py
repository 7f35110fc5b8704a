"""Attacks by seeded chance: the short forms here, the long ones with `make test-slow`."""

from __future__ import annotations

import attacks
import pytest

LONG = [pytest.mark.slow, pytest.mark.timeout(3600)]


def whole(found: attacks.Outcome) -> None:
    assert found.cases and not found.failed, f"{len(found.failed)} of {found.cases} failed:\n" + "\n".join(
        found.failed[:20])


@pytest.mark.parametrize("count", [110, pytest.param(1100, marks=LONG)])
def test_flipped_bits_are_noticed_in_every_format(count: int, tmp_path) -> None:
    whole(attacks.flip_bits(tmp_path, count))


@pytest.mark.parametrize("count", [300, pytest.param(6000, marks=LONG)])
def test_records_that_say_something_else(count: int, tmp_path) -> None:
    whole(attacks.change_records(tmp_path, count))


@pytest.mark.parametrize("count", [120, pytest.param(1500, marks=LONG)])
def test_headers_that_say_something_else(count: int, tmp_path) -> None:
    whole(attacks.change_headers(tmp_path, count))


@pytest.mark.parametrize("count", [60, pytest.param(1500, marks=LONG)])
def test_arguments_of_attach(count: int) -> None:
    whole(attacks.attach_with_anything(count))


@pytest.mark.parametrize("count", [24, pytest.param(1000, marks=LONG)])
def test_padding_changes_nothing(count: int) -> None:
    whole(attacks.pad(count))


@pytest.mark.parametrize("count", [24, pytest.param(2000, marks=LONG)])
def test_interrupts_at_random_moments(count: int) -> None:
    whole(attacks.interrupt(count))


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=LONG)])
def test_sizes_beyond_all_memory(every: int, tmp_path) -> None:
    whole(attacks.ask_for_too_much(tmp_path, every))


@pytest.mark.parametrize(("sizes", "every"), [
    ((10**9,), 5), pytest.param((10**9, 2**31 - 1, 10**12, 10**30), 1, marks=LONG)])
def test_sizes_of_commands_beyond_all_memory(sizes: tuple[int, ...], every: int, tmp_path) -> None:
    whole(attacks.ask_commands_for_too_much(tmp_path, sizes, every))


@pytest.mark.parametrize("count", [30, pytest.param(800, marks=LONG)])
def test_command_lines(count: int, tmp_path) -> None:
    whole(attacks.type_anything(tmp_path, count))


@pytest.mark.parametrize("count", [25, pytest.param(400, marks=LONG)])
def test_hard_numbers(count: int) -> None:
    whole(attacks.decode_hard_numbers(count))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_at_random_moments(tmp_path) -> None:
    whole(attacks.kill(tmp_path, 60))
