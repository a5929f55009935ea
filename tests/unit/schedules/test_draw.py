"""Drawings: what they show, and that they keep to the width."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.schedules.actions import Schedule
from autopar.schedules.draw import draw
from autopar.schedules.make import make_schedule
from autopar.schedules.simulate import durations, simulate
from tests.unit.schedules.cases import made


def drawn(name: str, *sizes: int, width: int = 100, wrap: bool = False, **options) -> str:
    timeline = simulate(make_schedule(name, *sizes, **options), durations())
    return draw(timeline, width, wrap=wrap)


def test_1f1b():
    assert drawn("1f1b", 2, 2).splitlines() == [
        "rank 0 |F0 F1 ......B0--- ...B1--- |",
        "rank 1 |...F0 B0--- F1 B1--- ......|",
        "        0 s     bubble 33 %     9 s",
    ]


def test_zb_h1():
    assert drawn("zb_h1", 3, 3).splitlines() == [
        "rank 0 |F0 F1 F2 ......I0 W0 I1 W1 I2 W2 |",
        "rank 1 |...F0 F1 ...I0 F2 I1 W0 I2 W1 W2 |",
        "rank 2 |......F0 I0 F1 I1 F2 I2 W0 W1 W2 |",
        "        0 s       bubble 18 %        11 s",
    ]


def test_stages_are_named_where_a_rank_has_several():
    assert drawn("zbv", 1, 1, chunks=2).splitlines()[0] == "rank 0 |0F0 1F0 1I0 1W0 0I0 0W0 |"


def test_narrow_drawings_have_a_letter_per_column():
    assert drawn("1f1b", 2, 2, width=27).splitlines() == [
        "rank 0 |FFFF....BBBB..BBBB|",
        "rank 1 |..FFBBBBFFBBBB....|",
        "        0 s            9 s",
    ]
    assert drawn("zbv", 1, 1, chunks=2, width=15).splitlines()[0] == "rank 0 |FfiwIW|"


def test_wrapped_drawings_go_on_below():
    assert drawn("1f1b", 2, 2, width=24, wrap=True).splitlines() == [
        "rank 0 |F0 F1 ......B0-|",
        "rank 1 |...F0 B0--- F1 |",
        "        0 s         5 s",
        "",
        "rank 0 |-- ...B1--- |",
        "rank 1 |B1--- ......|",
        "        5 s      9 s",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.0, "6 s"), (2e-3, "6 ms"), (2e-6, "6 us"), (2e-9, "6 ns")]
)
def test_units_of_time(seconds: float, text: str):
    cost = durations(forward_s=seconds, input_gradient_s=seconds, weight_gradient_s=seconds)
    assert draw(simulate(make_schedule("1f1b", 1, 1), cost)).splitlines()[-1].endswith(text)


@given(made(max_ranks=12), st.integers(24, 150), st.booleans())
def test_lines_keep_to_the_width(schedule: Schedule, width: int, wrap: bool):
    text = draw(simulate(schedule, durations()), width, wrap=wrap)
    assert max(map(len, text.splitlines())) <= width
    for rank in range(schedule.num_ranks):
        assert f"rank {rank} |" in text


@given(made(max_ranks=3), st.integers(0, 23))
def test_no_width_is_too_small_to_draw(schedule: Schedule, width: int):
    assert "rank 0 |" in draw(simulate(schedule, durations()), width)


def test_nothing_to_draw():
    cost = durations(forward_s=0, input_gradient_s=0, weight_gradient_s=0)
    assert draw(simulate(make_schedule("1f1b", 2, 1), cost)) == "rank 0 ||\nrank 1 ||"


def test_short_actions_lose_their_label_only():
    cost = durations(forward_s=0.01, update_s=0.5)
    line = draw(simulate(make_schedule("1f1b", 1, 2), cost)).splitlines()[0]
    assert "B0" in line
    assert "B1" in line
    assert "U" in line
