"""segment: cut the graph where little is alive, so that each piece holds one level of mixing.

A cut is a position in the order of streamed nodes; the values alive there are what is stored. Between
two ops that mix rows (attentions) the position with the fewest bytes a row is taken: the residual
stream, found by counting and not by name.
"""

from __future__ import annotations

import itertools
import math
import operator
from typing import Any

import sympy
from torch.fx import Node

from ..graph.facts import Facts, Kind, Reach, Segment, operands, shape_of, tensors_of
from ..graph.ops.causal_convolution import CHANNELS_APART
from ..graph.ops.recurrence import RECURRENCE
from ..masks.analysis import can_materialize
from ..rules import places
from ..rules.contractions import aten
from ..s2_prove.inner_outputs import refuse_inner, shown
from .alive_bytes import alive_costs, lifetimes, own_costs, row_axis, row_bytes
from .context_cuts import context_cuts
from .joined_parts import joined_parts
from .rows_behind import RowsBehind

# A cut that costs more than this many times the cheapest one between mixing ops is not made: the two
# levels of mixing then share a segment.
EXPENSIVE = 4.0


def segment(facts: Facts) -> Facts:
    """Split the streamed nodes into segments and the epilogue."""
    order = _streamed(facts)
    cuts, epilogue_at = _cuts(facts, order)
    bounds = [0, *cuts, epilogue_at]
    facts.epilogue = order[epilogue_at:]
    parts = (order[start:stop] for start, stop in itertools.pairwise(bounds) if stop > start)
    pieces = [_judged(facts, nodes) for nodes in parts]
    if any(p.refused is not None for p in pieces):
        pieces = [_judged(facts, nodes) for nodes in joined_parts(facts, order, pieces)]
    behind = RowsBehind(facts, order, lambda n: _is_stop(facts, n))
    for piece in itertools.chain.from_iterable(_parts(facts, behind, piece) for piece in pieces):
        piece.index = len(facts.segments)
        facts.segments.append(piece)
    refuse_inner(facts)
    return facts


def _parts(facts: Facts, behind: RowsBehind, piece: Segment) -> list[Segment]:
    """A segment, or two if it runs unchunked and ends with rows: NOTE [rows behind an unchunked part]."""
    nodes = piece.nodes
    if piece.chunked or piece.refused is None:
        return [piece]
    before = behind.begin(nodes)
    if before is None or not any(is_product(facts, n) for n in nodes[before:]):
        return [piece]
    first, rows = _judged(facts, nodes[:before]), _judged(facts, nodes[before:])
    rows.is_behind = True
    return [first, rows] if rows.chunked else [piece]


def _judged(facts: Facts, nodes: list[Node]) -> Segment:
    piece = Segment(0, nodes)
    connect(facts, piece)
    _judge(facts, piece)
    return piece


def _streamed(facts: Facts) -> list[Node]:
    """Streamed nodes in graph order, with those reduced values that streamed ones are made of.

    And with all results of a streamed op that has several: a cut may not come between.
    """
    feeds: set[Node] = set()
    for node in reversed(facts.nodes):
        if node.target is operator.getitem and facts.kinds[node.args[0]] is Kind.STREAM:
            feeds.add(node)
        if facts.kinds.get(node) is Kind.STREAM or node in feeds:
            feeds.update(n for n in operands(node) if facts.kinds[n] is Kind.REDUCED)
    order = [
        n for n in facts.nodes if n.op == "call_function" and (facts.kinds[n] is Kind.STREAM or n in feeds)
    ]
    # a context comes before the rows that read it; what a later layer makes of it, that layer makes
    position = {n: k for k, n in enumerate(order)}
    first = next((k for n, k in position.items() if n in facts.mixings), len(order))
    return sorted(order, key=lambda n: n not in facts.context or position[n] > first)


def sequences(facts: Facts) -> sympy.Expr:
    """How many sequences there are: the number of rows of the last segment's input at one position."""
    streamed = [n for s in reversed(facts.segments) if s.chunked for n in s.rows]
    found = next(((n, r) for n in streamed if (r := row_axis(facts, n)) is not None), None)
    if found is None:
        return sympy.S.One
    node, (dim, axis) = found
    sizes = shape_of(node)
    width = len(sizes) - 1  # the last dim, if it is not the sequence, is the width of a row
    return sympy.Mul(axis.outer, axis.inner, *(s for d, s in enumerate(sizes) if d not in (dim, width)))


def _is_stop(facts: Facts, node: Node) -> bool:
    """True for a node that a segment has only one of, if it can be cut off from the next one."""
    refused = node in facts.refusals and node not in facts.context
    unlike = node in facts.mixings or node in facts.slices or is_reduction(facts, node)
    return refused or unlike or facts.layouts.get(node) is None


def _stops(facts: Facts, order: list[Node]) -> list[int]:
    found = [k for k, n in enumerate(order) if _is_stop(facts, n)]
    pairs = itertools.zip_longest(found, found[1:])
    return [k for k, then in pairs if not _goes_with(order[k], None if then is None else order[then])]


def _goes_with(node: Node, then: Node | None) -> bool:
    """True for a convolution that goes from chunk to chunk, as the recurrence does that comes next.

    What is between the two is wide, and would be stored. Without it nothing more is computed again: the
    states of both are those of a chunk.
    """
    apart = node.target is RECURRENCE and node.args[0] == CHANNELS_APART
    return apart and then is not None and then.target is RECURRENCE


def _side_by_side(facts: Facts, nodes: list[Node]) -> bool:
    """True if the last of the nodes reads along the same rows as others of them do, and nothing they make.

    A cut between two levels spares making the first again while the state of the second is made. Here that
    state is made without the first, so a cut spares nothing, and what is alive at it would be stored. But a
    window beside a longer reach would be read as far as that.
    """
    stops = [n for n in nodes if _is_stop(facts, n)]
    if len(stops) < 2 or nodes[-1] is not stops[-1] or not all(n in facts.mixings for n in stops):
        return False
    mixings = [facts.mixings[n] for n in stops]
    alike = len({(m.reach, m.window) for m in mixings}) == 1
    if any(n.target is RECURRENCE for n in stops):  # a step in which a row reads all rows would run unchunked
        alike = alike and not any(m.may_read_all for m in mixings)
    before, last = set(stops[:-1]), stops[-1]
    made_of = _rows_made_of(facts, nodes)
    together = any(not made_of[n].isdisjoint(made_of[last]) for n in before)
    trained = {n in facts.needs_grad for n in stops}
    return alike and together and len(trained) == 1 and made_of[last].isdisjoint(before)


def _rows_made_of(facts: Facts, nodes: list[Node]) -> dict[Node, set[Node]]:
    """Of each node the streamed values, but for ids and the like, that it is made of within these nodes."""
    found: dict[Node, set[Node]] = {}
    for node in nodes:
        rows = [n for n in operands(node) if facts.kinds[n] is Kind.STREAM]
        found[node] = {n for n in rows if any(v.is_floating_point() or v.is_complex() for v in tensors_of(n))}
        found[node].update(*(found[n] for n in rows if n in found))
    return found


def _contracts(facts: Facts, piece: Segment) -> bool:
    """True if a segment multiplies by a parameter. One that does not (an embedding) is run unchunked."""
    return any(is_product(facts, n) for n in piece.nodes)


def is_reduction(facts: Facts, node: Node) -> bool:
    """True for a value without the sequence that streamed rows go into, as a loss."""
    return facts.kinds.get(node) is Kind.REDUCED and node not in facts.context


def is_product(facts: Facts, node: Node) -> bool:
    """True for a product of a streamed value and a parameter."""
    products = (aten.linear.default, aten.matmul.default, aten.addmm.default, aten.mm.default)
    return node.target in products and any(facts.kinds[n] is Kind.CONSTANT for n in operands(node))


def _head(facts: Facts, order: list[Node], after: int) -> int | None:
    """The last product with a parameter after the last mixing op, if what follows is a head.

    It is one if a loss is made of it or if its result is wider than its operand; the last product of a
    decoder layer that was captured alone is neither.
    """
    found = next((k for k in range(len(order) - 1, after, -1) if is_product(facts, order[k])), None)
    if found is None or any(is_reduction(facts, n) for n in facts.nodes):
        return found
    sources = [n for n in operands(order[found]) if facts.kinds[n] is Kind.STREAM]
    wide = all(row_bytes(facts, order[found]) > row_bytes(facts, n) for n in sources)
    return found if wide else None


def _cuts(facts: Facts, order: list[Node]) -> tuple[list[int], int]:
    lives = list(lifetimes(facts, order))
    costs = alive_costs(lives, len(order))
    stops = _stops(facts, order)
    head = _head(facts, order, stops[-1] if stops else -1)
    walls = sorted({*stops, *_inner_heads(facts, order, costs, stops), *(() if head is None else (head,))})
    gaps = [gap for a, b in itertools.pairwise([-1, *walls]) for gap in _gaps(facts, order, a + 1, b)]
    ordinary = [min(costs[a : b + 1]) for a, b, usual in gaps if usual]
    places = [_cheapest(costs, start, stop) for start, stop, _ in gaps]
    own = own_costs(lives, places)
    usual_places = [place for place, (_, _, usual) in zip(places, gaps, strict=True) if usual]
    limit = EXPENSIVE * min((own[k] for k in usual_places if own[k] > 0), default=math.inf)
    cuts: list[int] = []
    for cut, (start, stop, usual) in zip(places, gaps, strict=True):
        least = costs[cut]
        if math.isinf(least) or (usual and own[cut] > limit):
            continue
        if usual and _side_by_side(facts, order[cuts[-1] if cuts else 0 : stop + 1]):
            continue
        if len(cuts) > 1 and order[start - 1] in facts.mixings:
            near = [k for k in range(start, stop + 1) if costs[k] <= 2 * least]
            cut = _like_another(order, cuts, near, cut)
        cuts.append(cut)
    if head is None and len(cuts) > 1 and stops:
        near = [k for k in range(stops[-1] + 1, len(order)) if costs[k] <= 2 * min(ordinary)]
        cuts.append(_like_another(order, cuts, near, len(order)))
    # a slice of rows stands alone: before it and after it there are two sequences of different length
    around = {p for k, n in enumerate(order) if n in facts.slices for p in (k, k + 1)}
    lengths = [_removed(facts, n) for n in order]
    around |= {
        k for k in range(1, len(order)) if lengths[k] and lengths[k - 1] and lengths[k] != lengths[k - 1]
    }
    cuts = sorted({*cuts, *(p for p in around if not math.isinf(costs[p]))} - {0, len(order)})
    epilogue_at, returned = _epilogue(facts, order, costs, head, cuts), shown(facts)
    behind = {k + 1 for k, n in enumerate(order[:epilogue_at]) if n in returned and costs[k + 1] < math.inf}
    return sorted({*cuts, *behind, *context_cuts(facts, order[:epilogue_at])} - {epilogue_at}), epilogue_at


def _cheapest(costs: list[float], start: int, stop: int) -> int:
    """The last of the positions at which the fewest bytes are alive."""
    least = min(costs[start : stop + 1])
    return max(k for k in range(start, stop + 1) if costs[k] == least)


def _gaps(facts: Facts, order: list[Node], start: int, stop: int) -> list[tuple[int, int, bool]]:
    """Ranges of positions between two walls in each of which a cut is made; False where it costs little.

    An embedding begins a model: before it, what is alive belongs to another one, and after it lies what its
    first layer stores.
    """
    sources = [k for k in range(start, stop) if _is_source(facts, order[k])]
    if not sources:
        return [(start, stop, True)]
    return [(start, sources[0], False), (sources[-1] + 1, stop, True)]


def _is_source(facts: Facts, node: Node) -> bool:
    """True for rows that are made of parameters and data alone. (A context has no rows.)"""
    made_of_rows = any(facts.kinds[n] in (Kind.STREAM, Kind.REDUCED) for n in operands(node))
    return node not in facts.context and not made_of_rows


def _inner_heads(facts: Facts, order: list[Node], costs: list[float], stops: list[int]) -> set[int]:
    """Heads of models that are followed by another: products after which far less is alive than before."""
    found = set()
    for after, before in itertools.pairwise(stops):
        least = min(costs[after + 1 : before + 1])
        narrow = max(k for k in range(after + 1, before + 1) if costs[k] == least)
        products = [k for k in range(after + 1, narrow) if is_product(facts, order[k])]
        if products and least * 4 <= min(costs[after + 1 : products[-1] + 1]) < math.inf:
            found.add(products[-1])
    return found


def _like_another(order: list[Node], cuts: list[int], candidates: list[int], otherwise: int) -> int:
    """Of nearly equal cuts, the one that makes the layer end as a layer before it does."""
    targets = [n.target for n in order]
    known = {tuple(targets[a:b]) for a, b in itertools.pairwise(cuts)}
    return next((cut for cut in candidates if tuple(targets[cuts[-1] : cut]) in known), otherwise)


def _epilogue(facts: Facts, order: list[Node], costs: list[float], head: int | None, cuts: list[int]) -> int:
    """Where the epilogue begins: small values by rows (losses, log-probabilities) and what follows.

    It runs as ordinary autograd on values of a few numbers a row. Without a reduction there is none.
    """
    reduced = [n for n in facts.nodes if is_reduction(facts, n) and n not in set(order)]
    start = (head if head is not None else (cuts[-1] if cuts else 0)) + 1
    if not reduced or start > len(order):
        return len(order)
    least = min(costs[start:])
    width = min((costs[k] for k in cuts), default=math.inf)
    if math.isinf(least) or least * 4 > width:
        return len(order)
    ends = [k for k in range(start, len(costs)) if costs[k] == least]
    length = _removed(facts, order[start - 1])
    return max(k for k in ends if k == ends[0] or all(_removed(facts, n) == length for n in order[start:k]))


def _removed(facts: Facts, node: Node) -> set[int]:
    """By how many rows the sequence of a value is shorter than the inputs' (none if it carries none)."""
    return {a.removed for a in facts.layouts.get(node) or () if a is not None}


def closure(facts: Facts, nodes: list[Node], kinds: set[Kind]) -> list[Node]:
    """Nodes of `kinds` that `nodes` are made of, in graph order."""
    needed: set[Node] = set()
    pending = [o for n in nodes for o in operands(n)]
    while pending:
        node = pending.pop()
        if node in needed or facts.kinds[node] not in kinds:
            continue
        needed.add(node)
        pending.extend(operands(node))
    return [n for n in facts.nodes if n in needed]


def connect(facts: Facts, piece: Segment) -> None:
    """Find what goes into a segment and what comes out of it."""
    inside = set(piece.nodes)
    inlined = closure(facts, piece.nodes, {Kind.CONSTANT, Kind.SQUARE})
    read = [o for n in (*piece.nodes, *inlined) for o in operands(n) if o not in inside]
    read = list(dict.fromkeys(read))
    piece.rows = [n for n in read if facts.kinds[n] is Kind.STREAM]
    piece.constants = [
        n for n in read if facts.kinds[n] in (Kind.CONSTANT, Kind.REDUCED) and _is_input(facts, n)
    ]
    piece.whole = [
        n
        for n in read
        if facts.kinds[n] is Kind.WHOLE or (facts.kinds[n] is Kind.SQUARE and n.op == "placeholder")
    ]
    piece.outputs = [n for n in piece.nodes if any(u not in inside for u in n.users)]
    piece.mixings = [facts.mixings[n] for n in piece.nodes if n in facts.mixings]


def _is_input(facts: Facts, node: Node) -> bool:
    return node.op in ("placeholder", "get_attr") or facts.kinds[node] is Kind.REDUCED


def _is_chained(facts: Facts, piece: Segment) -> bool:
    """True if the columns that one mixing op reads are made of what another one gives.

    NOTE [chained states]: the state rows of a chunk then depend on earlier chunks, so they are rebuilt in
    order, reading the prefix; with a reach of FULL they could not be rebuilt chunk by chunk at all.
    """
    inside, mixed = set(piece.nodes), set()
    if any(m.node.target is RECURRENCE for m in piece.mixings):
        return True  # each state is made of the one before
    for node in piece.nodes:
        if node in facts.mixings and any(n in mixed for n in facts.mixings[node].columns):
            return True
        if node in facts.mixings or any(n in mixed for n in operands(node) if n in inside):
            mixed.add(node)
    return False


def _judge(facts: Facts, piece: Segment) -> None:
    """Decide whether a segment can be chunked, and how far its rows reach."""
    alone = len(piece.nodes) == 1 and piece.nodes[0] in facts.slices
    if alone or facts.context.issuperset(piece.nodes):
        piece.kind = "unchunked"
        return
    for node in piece.nodes:
        reason = facts.refusals.get(node)
        if node in facts.slices:
            reason = "a slice of the sequence axis amid other ops"
        if reason is None and facts.layouts.get(node) is None:
            reason = "the sequence axis of the result is unknown"
        if reason is not None:
            piece.chunked, piece.reason, piece.refused = False, reason, node
            break
    for mask in closure(facts, piece.nodes, {Kind.SQUARE}) if piece.chunked else ():
        read_by_rows = any(u in set(piece.nodes) for u in mask.users)
        cut = [d for d, axis in enumerate(places(facts, mask) or ()) if axis is not None] or None
        if read_by_rows and not can_materialize(mask, lambda n: facts.kinds.get(n) is Kind.WHOLE, cut):
            piece.chunked, piece.refused = False, mask
            piece.reason = "a sequence x sequence value cannot be built by rows"
    for value in closure(facts, piece.nodes, {Kind.CONSTANT}) if piece.chunked else ():
        if any(facts.kinds[n] is Kind.SQUARE for n in operands(value)):
            piece.chunked, piece.refused = False, value
            piece.reason = "a weight is made of a sequence x sequence value"
    for node in (*piece.rows, *piece.outputs):
        if piece.chunked and row_axis(facts, node) is None:
            piece.chunked, piece.refused = False, node
            piece.reason = "a value at its border cannot be stored by rows"
    not_linear = [n for n in piece.nodes if n in facts.not_linear and n in facts.needs_grad]
    if piece.chunked and not_linear and sum(n in facts.needs_grad for n in piece.outputs) > 1:
        piece.chunked, piece.refused = False, not_linear[0]  # NOTE [backwards that are not linear]
        piece.reason = "a custom autograd function, whose backward may not be linear, amid several results"
    lengths = {
        a.removed: n for n in (*piece.rows, *piece.nodes) for a in facts.layouts.get(n) or () if a is not None
    }
    piece.removed = max(lengths, default=0)
    if piece.chunked and len(lengths) > 1:
        piece.chunked, piece.refused = False, lengths[piece.removed]
        piece.reason = "two values with different numbers of rows are combined in it"
    if not piece.mixings:
        piece.kind = "rows" if _contracts(facts, piece) or piece.rows else "unchunked"
        return
    piece.reach = max(m.reach for m in piece.mixings)
    piece.chained = _is_chained(facts, piece)
    if piece.chained and piece.reach is Reach.FULL and piece.chunked:
        piece.chunked, piece.refused = False, piece.mixings[0].node
        piece.reason = "levels of mixing that cannot be cut apart, one of which reads later rows"
    windows: list[Any] = [m.window for m in piece.mixings]
    piece.window = (
        max(windows) if piece.reach is Reach.WINDOW and all(w is not None for w in windows) else None
    )
