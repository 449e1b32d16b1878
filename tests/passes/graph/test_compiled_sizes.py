"""Sizes and conditions on them as functions: they give what their expressions give."""

from __future__ import annotations

import itertools

import pytest
import sympy
from torch.utils._sympy.functions import CeilDiv, FloorDiv, Max, Min, Mod, PythonMod

from streambp_fx.passes.graph.symbols import compiled, evaluate

s, b = sympy.Symbol("s10", integer=True, positive=True), sympy.Symbol("s3", integer=True, positive=True)
PADDED = s + Mod(256 - Mod(s, 256), 256)
SIZES = [
    PADDED, Mod(256 - Mod(s, 256), 256), FloorDiv(PADDED, 256), Mod(PADDED, FloorDiv(PADDED, 256)),
    PythonMod(b - s, 7),
    8 * Mod(s + 7, 5) + 1, FloorDiv(s + b, 3 * b) * Mod(b + s * s, 11), -PythonMod(-s, 4),
    Max(1, s - 40), Min(s, 2 * b) - Max(b, 3), CeilDiv(s + 1, b + 1), (s + b) * Mod(s + b, 3),
]  # fmt: skip
CONDITIONS = [
    sympy.Eq(Mod(8 * s + 8 * Mod(256 - Mod(s, 256), 256), 2048), 0), sympy.Ne(FloorDiv(s, b), s),
    sympy.Or(sympy.Eq(Mod(s + b, 4), 0), s > 100), sympy.And(b < s, Mod(s - b, 2) >= 1),
]  # fmt: skip


@pytest.mark.parametrize("expression", [*SIZES, *CONDITIONS], ids=str)
def test_what_is_compiled_is_what_was_written(expression: sympy.Expr) -> None:
    symbols = sorted(expression.free_symbols, key=str)
    function = compiled(symbols, expression)
    for values in itertools.product((2, 3, 64, 97, 256, 257, 1024), repeat=len(symbols)):
        known = dict(zip(symbols, values, strict=True))
        found, wanted = function(*values), expression.subs(known)
        assert found == wanted == evaluate(expression, known), f"{known}: {found}, not {wanted}"
