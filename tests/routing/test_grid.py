"""Sums of scores are exact."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from extproc.routing.grid import SCORE_SCALE, on_grid


@given(st.lists(st.floats(0.0, 1.0)))
def test_sums_on_the_grid_are_exact_in_any_order(values: list[float]) -> None:
    """A value on the grid is the nearest multiple of 2⁻³⁰, and sums of them do not round."""
    grid = [on_grid(value) for value in values]
    assert all(g == round(v * SCORE_SCALE) / SCORE_SCALE for g, v in zip(grid, values, strict=True))
    exact = sum(map(Fraction, grid), Fraction())
    assert sum(grid) == exact == sum(reversed(grid))
