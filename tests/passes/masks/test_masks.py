"""Facts about masks against the brute-force T x T mask, and blocks against its slices."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sympy.core.function import AppliedUndef
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from streambp_fx.passes.masks import analysis
from streambp_fx.passes.masks.elements import repeats_no_symbol
from streambp_fx.passes.masks.predicates import greatest, implies, impossible

B, T = 2, 9
MIN = torch.finfo(torch.float32).min
i, j = analysis.ROW_INDEX, analysis.COLUMN_INDEX

# --- Helpers --------------------------------------------------------------------------------------


def trace(function: Callable, *inputs: torch.Tensor) -> tuple[fx.Node, sympy.Expr]:
    """The mask node of `function` and the symbol of T, the last size of the first input."""
    graph = make_fx(function, pre_dispatch=True, tracing_mode="symbolic")(*inputs).graph
    first = next(n for n in graph.nodes if n.op == "placeholder")
    node = next(n for n in graph.nodes if n.op == "output").args[0]
    node.meta["graph"] = graph  # keeps it alive
    return node, first.meta["val"].shape[-1].node.expr


class Values:
    """Evaluates nodes on real inputs, on demand; `fetch` serves only what a compiler would have."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        self.inputs = inputs
        self.known: dict[fx.Node, Any] = {}

    def __call__(self, node: fx.Node) -> Any:
        if node not in self.known:
            if node.op == "placeholder":
                self.known[node] = self.inputs[node.name]
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), self)
                self.known[node] = node.target(*args, **kwargs)
        return self.known[node]

    def fetch(self, node: fx.Node) -> Any:
        assert node.op == "placeholder" or repeats_no_symbol(node)
        return self(node)


def values_for(node: fx.Node, *inputs: torch.Tensor) -> Values:
    names = [n.name for n in node.graph.nodes if n.op == "placeholder"]
    return Values(dict(zip(names, inputs, strict=True)))


def pad(*starts_and_stops: tuple[int, int], length: int) -> torch.Tensor:
    """(B, length) attention mask with ones in the given intervals."""
    mask = torch.zeros(len(starts_and_stops), length, dtype=torch.int64)
    for row, (start, stop) in zip(mask, starts_and_stops, strict=True):
        row[start:stop] = 1
    return mask


def check_blocks(node: fx.Node, values: Values) -> None:
    full = values(node)
    rows, cols = full.shape[-2:]
    cuts = [(0, 1), (0, rows // 2), (rows // 2, rows), (rows - 1, rows), (3, 4)]
    assert analysis.can_materialize(node)
    for row in [*cuts, None]:
        for col in [(0, cols), (1, cols - 1), None]:
            dims = (None,) * (full.dim() - 2) + (row, col)
            block = analysis.materialize(node, dims, values.fetch)
            part = full
            for dim, interval in ((-2, row), (-1, col)):
                if interval is not None and full.shape[dim] > 1:
                    part = part.narrow(dim, interval[0], interval[1] - interval[0])
            assert block.dtype == part.dtype
            torch.testing.assert_close(block, part, rtol=0, atol=0)


def check_facts(facts: analysis.MaskFacts, values: Values, true_attends: bool = True) -> None:
    """Everything that was proved holds for the brute-force mask; the predicate is exactly the mask."""
    assert facts.understood, facts.reason
    full = values(facts.node)
    attended = full > torch.finfo(full.dtype).min / 2 if full.is_floating_point() else full == true_attends
    while attended.dim() < 4:
        attended = attended.unsqueeze(-3 if attended.dim() == 3 else 0)
    length = max(attended.shape[-2:])
    attended = attended.expand(*attended.shape[:-2], length, length)
    row, col = torch.arange(length)[:, None], torch.arange(length)
    triangle = col <= row
    if facts.causal:
        assert not attended[..., ~triangle].any()
    if facts.window is not None:
        assert not attended[..., (col <= row - facts.window)].any()
    if facts.plain:
        assert (attended == triangle).all() and not facts.has_bias
    if analysis.data_holds(facts, values.fetch) and facts.plain_without_data:
        assert (attended == triangle).all()
    if analysis.first_column_open(facts, values.fetch):
        assert (attended & triangle).any(-1).all()
    check_predicate(facts, values, attended)


def executable(symbols: tuple, predicate: Any, functions: dict | None = None) -> Callable:
    """`predicate` as a Python function; floors in integers, as floats would round."""
    quotient = sympy.Function("quotient")
    exact = sympy.sympify(predicate).replace(
        sympy.floor, lambda a: quotient(*sympy.fraction(sympy.together(a)))
    )
    modules = [{"quotient": operator.floordiv, **(functions or {})}, "math"]
    return sympy.lambdify(symbols, exact, modules=modules)


def element_of(value: torch.Tensor) -> Callable:
    return lambda *at: int(value[at])


def check_predicate(facts: analysis.MaskFacts, values: Values, attended: torch.Tensor) -> None:
    names = {f.func.__name__ for f in facts.predicate.atoms(AppliedUndef)}
    functions = {name: element_of(values(facts.linear[name])) for name in names}
    holds = executable((analysis.BATCH, analysis.HEAD, i, j), facts.predicate, functions)
    for at in torch.cartesian_prod(*(torch.arange(s) for s in attended.shape)).tolist():
        assert bool(holds(*at)) == bool(attended[tuple(at)]), at


def check(function: Callable, **options: Any) -> analysis.MaskFacts:
    """Trace, analyse and compare at lengths other than the traced one, with and without padding."""
    node, length = trace(function, pad((0, T), (0, T), length=T))
    facts = analysis.analyze(node, length, **options)
    for n in (5, 11):
        for mask in (
            pad((0, n), (0, n), length=n),
            pad((2, n), (0, n), length=n),
            pad((0, 3), (0, n), length=n),
        ):
            values = values_for(node, mask)
            check_facts(facts, values, options.get("true_attends", True))
            check_blocks(node, values)
    return facts


def positions(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    at = torch.arange(mask.shape[1])
    return at[:, None], at[None, :]


def by_positions(rule: Callable) -> Callable:
    """A mask `rule(i, j, mask)`, broadcast to (B, 1, T, T)."""

    def function(mask: torch.Tensor) -> torch.Tensor:
        value = rule(*positions(mask), mask)
        return value.expand(mask.shape[0], 1, mask.shape[1], mask.shape[1])

    return function


def keys(mask: torch.Tensor) -> torch.Tensor:
    """Padding as the model applies it: (B, 1, 1, T)."""
    return mask.bool()[:, None, None, :]


# --- Proofs ---------------------------------------------------------------------------------------


def test_proofs_on_integer_predicates():
    f = sympy.Function("f", integer=True)
    quotients = sympy.Eq(sympy.floor(i / 4), sympy.floor(j / 4))
    assert implies(sympy.And(j <= i, j > i - 3), j <= i)
    assert not implies(j <= i + 1, j <= i)
    assert implies(sympy.Or(j <= i, sympy.And(i < 7, j < 7)), j <= i + 6)
    assert greatest(i - j, quotients) == 3
    assert not implies(quotients, j <= i)
    assert implies(sympy.And(f(i) <= f(j), f(j) < f(i)), j <= i)
    assert impossible(sympy.And(3 * i > 4, 3 * i < 6))  # 4/3 < i < 2 has rational solutions only
    assert not impossible(sympy.Ne(f(i), 0))


numbers = st.integers(-2, 3)
sides = st.one_of(
    *(st.builds(lambda s, d: s + d, st.just(s), numbers) for s in (i, j)),
    *(
        st.builds(lambda s, d, c: sympy.floor((s + d) / c), st.just(s), numbers, st.integers(2, 3))
        for s in (i, j)
    ),
    st.builds(lambda a, b, d: a * i + b * j + d, numbers, numbers, numbers),
    numbers.map(sympy.Integer),
)
kinds = st.sampled_from([sympy.Le, sympy.Lt, sympy.Ge, sympy.Gt, sympy.Eq, sympy.Ne])
predicates = st.recursive(
    st.builds(lambda kind, a, b: kind(a, b), kinds, sides, sides),
    lambda inner: st.one_of(
        st.builds(sympy.And, inner, inner), st.builds(sympy.Or, inner, inner), st.builds(sympy.Not, inner)
    ),
    max_leaves=4,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(predicates, predicates)
def test_proofs_agree_with_enumeration(premise, goal):
    length = 7
    bounds = (i <= length - 1, j <= length - 1)
    where = [(a, b) for a in range(length) for b in range(length)]
    first, second = (executable((i, j), p) for p in (premise, goal))
    holds = [at for at in where if first(*at)]
    for other, test in ((goal, second), (j <= i, lambda a, b: b <= a), (j > i - 3, lambda a, b: b > a - 3)):
        if implies(premise, other, bounds):
            assert all(test(*at) for at in holds)
        if implies(other, premise, bounds):
            assert all(first(*at) for at in where if test(*at))
    bound = greatest(i - j, premise, bounds)
    assert bound is None or all(a - b <= bound for a, b in holds)


# --- Masks by hand --------------------------------------------------------------------------------


def test_causal():
    facts = check(by_positions(lambda i, j, mask: j <= i))
    assert facts.plain and facts.causal and facts.plain_without_data
    assert facts.kind == "bool" and facts.window is None and str(facts) == "causal"


@pytest.mark.parametrize("padding", [keys, lambda mask: (mask > 0)[:, None, None, :]])
def test_causal_and_padding(padding):
    facts = check(by_positions(lambda i, j, mask: (j <= i) & padding(mask)))
    assert facts.causal and facts.plain_without_data and not facts.plain
    assert [c.kind for c in facts.conjuncts] == ["causal", "data"]
    assert str(facts) in ("causal and mask_1[b, j]", "causal and mask_1[b, j] > 0")


def test_run_time_tests_of_padding():
    node, length = trace(
        by_positions(lambda i, j, mask: (j <= i) & keys(mask)), pad((0, T), (0, T), length=T)
    )
    facts = analysis.analyze(node, length)
    for starts_and_stops, holds, opened in [
        (((0, 7), (0, 7)), True, True),
        (((0, 7), (0, 4)), False, True),  # padded right: every row sees column 0
        (((0, 7), (2, 7)), False, False),  # padded left: the first rows see nothing
    ]:
        values = values_for(node, pad(*starts_and_stops, length=7))
        assert analysis.data_holds(facts, values.fetch) is holds
        assert analysis.first_column_open(facts, values.fetch) is opened


@pytest.mark.parametrize("window", [3, 100])
def test_sliding_window(window):
    facts = check(by_positions(lambda i, j, mask: (j > i - window) & (j <= i) & keys(mask)))
    assert facts.causal and facts.window == window
    assert not facts.plain_without_data
    assert str(facts) == f"causal and window {window} and mask_1[b, j]"


def test_window_is_open_on_the_diagonal_only():
    node, length = trace(
        by_positions(lambda i, j, mask: (j > i - 3) & (j <= i) & keys(mask)), pad((0, T), (0, T), length=T)
    )
    facts = analysis.analyze(node, length)
    assert analysis.first_column_open(facts, values_for(node, pad((0, 7), (0, 7), length=7)).fetch)
    assert not analysis.first_column_open(facts, values_for(node, pad((0, 7), (0, 3), length=7)).fetch)


def test_chunks():
    facts = check(by_positions(lambda i, j, mask: (i // 4 == j // 4) & (j <= i)))
    assert facts.causal and facts.window == 4 and not facts.plain_without_data
    both_ways = check(by_positions(lambda i, j, mask: i // 4 == j // 4))
    assert not both_ways.causal and both_ways.window == 4


def test_packed_documents():
    facts = check(
        by_positions(lambda i, j, mask: (j <= i) & (mask[:, None, :, None] == mask[:, None, None, :]))
    )
    assert facts.causal and facts.plain_without_data
    node = facts.node
    one, several = torch.ones(B, 7, dtype=torch.int64), torch.tensor([[1] * 7, [1, 1, 1, 2, 2, 2, 2]])
    one[1] = 5  # the number may differ between batch entries
    assert analysis.data_holds(facts, values_for(node, one).fetch)
    assert not analysis.data_holds(facts, values_for(node, several).fetch)
    assert analysis.first_column_open(facts, values_for(node, several).fetch)


def packed_by_positions(at: torch.Tensor) -> torch.Tensor:
    """Documents told apart by jumps of their positions, and a window in positions."""
    document = (torch.diff(at, prepend=at[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    batch = torch.arange(at.shape[0])[:, None, None]
    row, col = positions(at)
    here, there = at[batch, row], at[batch, col]
    return (document[batch, row] == document[batch, col]) & (there <= here) & (there > here - 4)


def test_packed_positions_from_the_caller():
    node, length = trace(packed_by_positions, torch.arange(T).expand(B, T).contiguous())
    facts = analysis.analyze(node, length)
    assert facts.causal and facts.window == 4
    for at in (
        torch.arange(11).expand(B, 11),
        torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3], [5, 4, 3, 3, 4, 5, 1, 2, 3, 0, 9]]),
    ):
        values = values_for(node, at)
        check_facts(facts, values)
        check_blocks(node, values)
    assert analysis.data_holds(facts, values_for(node, torch.arange(3, 10).expand(B, 7)).fetch)


def test_positions_made_in_the_model_are_no_documents():
    def function(mask):
        return packed_by_positions(torch.arange(mask.shape[1]).expand(mask.shape[0], -1))

    facts = check(function)
    assert facts.causal and facts.window == 4 and {c.kind for c in facts.conjuncts} == {"window", "causal"}


TRAPS = {
    "one row ahead": lambda i, j, mask: j <= i + 1,
    "anti-causal": lambda i, j, mask: j >= i,
    "prefix": lambda i, j, mask: (j <= i) | ((i < 3) & (j < 3)),
    "padding may open": lambda i, j, mask: (j <= i) | keys(mask),
    "no condition on columns": lambda i, j, mask: keys(mask) & (i >= 0),
    "one branch is not causal": lambda i, j, mask: torch.where(i < 4, j <= i, j < 6),
    "rounding towards the chunk's end": lambda i, j, mask: j // 2 <= i // 2,
    "shifted by a slice": lambda i, j, mask: torch.arange(mask.shape[1] + 1)[None, 1:] - 2 <= i,
}


@pytest.mark.parametrize("name", TRAPS)
def test_not_causal(name):
    facts = check(by_positions(TRAPS[name]))
    assert not (facts.causal or facts.plain or facts.plain_without_data)


CAUSAL = {
    "strict": lambda i, j, mask: j < i,
    "negated": lambda i, j, mask: ~(j > i),
    "from the other end": lambda i, j, mask: (mask.shape[1] - 1 - j) >= (mask.shape[1] - 1 - i),
    "both branches": lambda i, j, mask: ((i // 2 == j // 2) & (j <= i)) | ((j < i) & keys(mask)),
    "product": lambda i, j, mask: (j <= i) * keys(mask),
    "absolute distance": lambda i, j, mask: ((i - j).abs() < 3) & (j <= i),
    "remainder": lambda i, j, mask: (i % 3 == j % 3) & (j <= i),
    "tril": lambda i, j, mask: torch.tril(torch.ones(mask.shape[1], mask.shape[1], dtype=torch.bool)),
    "transposed": lambda i, j, mask: (i <= j).transpose(-1, -2),
    "selected": lambda i, j, mask: torch.stack([mask, mask])[1].bool()[:, None, None, :] & (j <= i),
    "shifted padding": lambda i, j, mask: (j <= i) & (j[:, :1] + j - 1 < i) & keys(mask),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_causal_in_other_words(name):
    assert check(by_positions(CAUSAL[name])).causal


@pytest.mark.parametrize("name", [*TRAPS, *CAUSAL])
def test_facts_hold_at_every_length(name):
    node, length = trace(by_positions({**TRAPS, **CAUSAL}[name]), pad((0, T), (0, T), length=T))
    facts = analysis.analyze(node, length)
    for n in range(2, 41):
        check_facts(facts, values_for(node, pad((n // 4, n), (0, n), length=n)))


def test_masked_fill_mask_is_the_inverse():
    facts = check(by_positions(lambda i, j, mask: (j > i) | ~keys(mask)), true_attends=False)
    assert facts.causal and facts.plain_without_data


# --- Additive masks -------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", [MIN, float("-inf")])
def test_additive(fill):
    facts = check(by_positions(lambda i, j, mask: torch.where((j <= i) & keys(mask), 0.0, fill)))
    assert facts.kind == "additive" and facts.causal and facts.plain_without_data and not facts.has_bias


def test_additive_from_triu():
    def function(mask):
        length = mask.shape[1]
        return torch.triu(torch.full((length, length), float("-inf")), 1)

    assert check(function).plain


def test_additive_by_arithmetic():
    def function(mask):
        allowed = (positions(mask)[1] <= positions(mask)[0]) & keys(mask)
        return ((1.0 - allowed.float()) * MIN).masked_fill(~keys(mask), MIN)

    assert check(function).plain_without_data


def test_small_fill_masks_nothing():
    facts = check(by_positions(lambda i, j, mask: torch.where(j <= i, 0.0, -1e9)))
    assert not facts.causal and facts.has_bias


def test_alibi():
    def function(mask):
        slopes = 2.0 ** -torch.arange(1, 4)
        bias = slopes[:, None, None] * torch.arange(mask.shape[1])
        allowed = torch.where((positions(mask)[1] <= positions(mask)[0]) & keys(mask), 0.0, MIN)
        return bias[None] + allowed

    facts = check(function)
    assert facts.causal and facts.has_bias and not (facts.plain or facts.plain_without_data)
    values = values_for(facts.node, pad((0, 7), (0, 5), length=7))
    assert not analysis.data_holds(facts, values.fetch)


def test_alibi_by_distance_has_a_bias_of_rows_and_columns():
    def function(mask):
        row, col = positions(mask)
        return torch.where(col <= row, (col - row) * 0.5, MIN)

    facts = check(function)
    assert facts.causal and facts.has_bias
    # The bias cannot be read in time linear in T, so nothing is said about it.
    assert not analysis.first_column_open(facts, values_for(facts.node, pad((0, 7), length=7)).fetch)


# --- Refusals -------------------------------------------------------------------------------------


def analyze_rule(rule: Callable) -> analysis.MaskFacts:
    return analysis.analyze(*trace(by_positions(rule), pad((0, T), (0, T), length=T)))


def test_unknown_operation_on_two_sequence_dims_is_refused():
    def products(i, j, mask):
        return (j <= i) & (mask.float()[:, None, :, None] @ mask.float()[:, None, None, :] > 0)

    facts = analyze_rule(products)
    assert not facts.understood and "matmul" in facts.reason and "not understood" in facts.describe()
    assert (
        not facts.causal
        and not analysis.data_holds(facts, None)
        and not analysis.first_column_open(facts, None)
    )
    assert not analysis.can_materialize(facts.node)
    with pytest.raises(analysis.MaskNotUnderstood):
        analysis.materialize(
            facts.node, (None, None, (0, 2), None), values_for(facts.node, pad((0, 7), length=7)).fetch
        )


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.bfloat16])
def test_positions_in_narrow_dtypes_are_refused(dtype):
    assert not analyze_rule(lambda i, j, mask: j.to(dtype) <= i.to(dtype)).causal


def test_an_index_that_wraps_is_not_a_shift():
    # At j = 0 the last column is read: the gather must stay unknown.
    facts = analyze_rule(lambda i, j, mask: (j <= i) & mask.bool()[:, j[0] - 1][:, None, None, :])
    assert facts.causal and all(
        arg.is_nonnegative for f in facts.predicate.atoms(AppliedUndef) for arg in f.args
    )
    check(by_positions(lambda i, j, mask: (j <= i) & mask.bool()[:, j[0] - 1][:, None, None, :]))


def test_rows_that_are_not_the_sequence_are_refused():
    node, length = trace(lambda mask: torch.ones(mask.shape[1] - 1, mask.shape[1]), pad((0, T), length=T))
    assert "not the sequence" in analysis.analyze(node, length).reason


def test_mask_from_the_caller_is_a_condition_on_data():
    given_mask = torch.ones(B, 1, T, T, dtype=torch.bool)

    def function(mask, given_mask):
        return given_mask & (positions(mask)[1] <= positions(mask)[0])

    node, length = trace(function, pad((0, T), (0, T), length=T), given_mask)
    facts = analysis.analyze(node, length)
    values = values_for(node, pad((0, T), (0, T), length=T), torch.rand(B, 1, T, T) < 0.5)
    assert facts.causal and not facts.plain and not analysis.data_holds(facts, values.fetch)
    check_blocks(node, values)


# --- Tracing --------------------------------------------------------------------------------------


def test_blocks_are_traced_with_symbolic_bounds():
    def rule(i, j, mask):
        return torch.where((j > i - 4) & (j <= i) & keys(mask), 0.0, MIN)

    node, _ = trace(by_positions(rule), pad((0, T), (0, T), length=T))

    def block(mask, prefix, rows):
        start, stop = prefix.shape[0], prefix.shape[0] + rows.shape[0]
        return analysis.materialize(
            node, (None, None, (start, stop), (0, stop)), values_for(node, mask).fetch
        )

    example = pad((0, 20), (0, 20), length=20), torch.zeros(6), torch.zeros(5)
    traced = make_fx(block, tracing_mode="symbolic")(*example)
    length = next(n for n in traced.graph.nodes if n.op == "placeholder").meta["val"].shape[1].node.expr
    for n in traced.graph.nodes:
        if isinstance(n.meta.get("val"), torch.Tensor):
            assert [s.node.expr for s in n.meta["val"].shape if isinstance(s, torch.SymInt)].count(length) < 2
    for n, prefix, rows in ((20, 6, 5), (31, 7, 24), (17, 9, 2)):
        mask = pad((0, n), (3, n), length=n)
        full = by_positions(rule)(mask)
        found = traced(mask, torch.zeros(prefix), torch.zeros(rows))
        assert torch.equal(found, full[:, :, prefix : prefix + rows, : prefix + rows])


# --- Random masks ---------------------------------------------------------------------------------

offsets = st.integers(-3, 3)
relations = st.sampled_from([operator.le, operator.lt, operator.ge, operator.gt, operator.eq, operator.ne])
atoms = st.one_of(
    st.just(lambda i, j, mask: j <= i),
    st.builds(lambda op, d: lambda i, j, mask: op(j, i + d), relations, offsets),
    st.builds(
        lambda op, d, c: lambda i, j, mask: op(j // c, (i + d + 3) // c),
        relations,
        offsets,
        st.integers(2, 4),
    ),
    st.builds(lambda op, d: lambda i, j, mask: op(j, d + 3), relations, offsets),
    st.just(lambda i, j, mask: keys(mask)),
    st.just(lambda i, j, mask: mask.bool()[:, None, :, None]),
    st.builds(lambda op: lambda i, j, mask: op(mask[:, None, :, None], mask[:, None, None, :]), relations),
)


def combine(inner):
    return st.one_of(
        st.builds(lambda a, b: lambda *x: a(*x) & b(*x), inner, inner),
        st.builds(lambda a, b: lambda *x: a(*x) | b(*x), inner, inner),
        st.builds(lambda a: lambda *x: ~a(*x), inner),
    )


rules = st.recursive(atoms, combine, max_leaves=5)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(rules, st.booleans(), st.sampled_from([5, 7]), st.integers(0, 2**14 - 1))
def test_random_masks(rule, additive, length, bits):
    def function(mask):
        value = by_positions(rule)(mask)
        return torch.where(value, 0.0, MIN) if additive else value

    node, symbol = trace(function, pad((0, T), (0, T), length=T))
    facts = analysis.analyze(node, symbol)
    mask = torch.tensor([bits >> k & 1 for k in range(B * length)]).view(B, length)
    for data in (mask, torch.ones_like(mask)):
        values = values_for(node, data)
        check_facts(facts, values)
        check_blocks(node, values)


# --- Masks of real models -------------------------------------------------------------------------


def capture_model(family: str, attention: str, padded: bool, **config: Any) -> fx.GraphModule:
    """Graph of a tiny model of transformers in training."""
    transformers = pytest.importorskip("transformers")
    from streambp_fx.passes.s1_capture.capture import capture

    torch._dynamo.reset()
    config = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, **config}
    config |= {"use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    full = transformers.AutoConfig.for_model(family, **config)
    model = transformers.AutoModelForCausalLM.from_config(full, attn_implementation=attention).train()
    found = []

    def backend(module, inputs):
        found.append(capture(module, inputs).module)
        return module

    inputs = {"input_ids": torch.randint(3, 97, (2, 67))}
    if padded:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    for value in inputs.values():
        torch._dynamo.mark_dynamic(value, 1)
    torch.compile(model, backend=backend, fullgraph=True)(**inputs)
    return found[0]


def model_masks(module: fx.GraphModule) -> list[fx.Node]:
    """Values of two sequence dims that depend on no parameter, where they meet one that does."""
    free: dict[fx.Node, bool] = {}
    for n in module.graph.nodes:
        value = n.meta.get("val")
        given_float = n.op == "placeholder" and isinstance(value, torch.Tensor) and value.is_floating_point()
        free[n] = not given_float and all(free[a] for a in n.all_input_nodes)
    square = [n for n in free if free[n] and not repeats_no_symbol(n)]
    return [n for n in square if any(not free[u] for u in n.users)]


WINDOWS = {"sliding_window": 4, "num_hidden_layers": 2, "head_dim": 8}
WINDOWS |= {"layer_types": ["sliding_attention", "full_attention"]}
CHUNKS = {"attention_chunk_size": 4, "num_local_experts": 2, "head_dim": 8}
MODELS = [
    ("llama", "sdpa", False, {}, {None}),
    ("mistral", "sdpa", True, {"sliding_window": 4}, {4}),
    ("gemma3_text", "eager", True, WINDOWS, {None, 4}),
    ("llama4_text", "sdpa", False, CHUNKS, {4}),
    ("bloom", "eager", True, {}, {None}),
]


@pytest.mark.parametrize(
    ("family", "attention", "padded", "config", "windows"), MODELS, ids=[m[0] for m in MODELS]
)
def test_masks_of_models(family, attention, padded, config, windows):
    sizes = {"intermediate_size": 48, "num_key_value_heads": 2} if family != "bloom" else {}
    module = capture_model(family, attention, padded, **sizes, **config)
    found, length = set(), 11
    for node in model_masks(module):
        facts = analysis.analyze(node, node.meta["val"].shape[-1])
        assert facts.causal and not facts.has_bias, facts.describe()
        assert facts.plain_without_data == (facts.window is None)
        assert facts.plain == (facts.window is None and not padded)
        found.add(facts.window)
        for data in (pad((0, length), (0, length), length=length), pad((3, length), (0, 7), length=length)):
            places = [n for n in module.graph.nodes if n.op == "placeholder"]
            values = Values({n.name: data if is_data(n) else length for n in places})
            assert analysis.data_holds(facts, values.fetch) == (bool(data.all()) or not padded)
            check_facts(facts, values)
            check_blocks(node, values)
    assert found == windows


def is_data(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], torch.Tensor)
