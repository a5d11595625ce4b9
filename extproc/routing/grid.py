"""Numbers that add up exactly: scores are multiples of 2⁻³⁰, so sums of them never round.

A sum is then the same in any order of changes, and equals are equal to the last bit.
"""

from __future__ import annotations

from typing import Final

SCORE_BITS: Final = 30
SCORE_SCALE: Final = float(1 << SCORE_BITS)

# Adding and subtracting 1.5 · 2²² leaves a double of a few units rounded to 2⁻³⁰, half to even.
SHIFT: Final = 1.5 * 2.0 ** (52 - SCORE_BITS)


def on_grid(value: float) -> float:
    """The multiple of 2⁻³⁰ nearest to `value`, which lies between -1 and 1."""
    return (value + SHIFT) - SHIFT
