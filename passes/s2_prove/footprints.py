"""footprints: which rows of its operands a row reads.

Most values are ROW: row i reads row i. Where an op reads columns, a mask limits them; here it is proved
by how much: CAUSAL [0, i], WINDOW [i - w + 1, i] or FULL. What is known of scores is derived op by op, see
`scores`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from ..graph.facts import Facts, Kind, Layout, Mask, Mixing, NotSeparable, Reach, Role, operands
from ..masks.analysis import analyze_parts
from ..rules import RuleContext, rule_for
from . import score_rules  # noqa: F401  (registers the transfer functions)
from .scores import Hidden, Score, Scores, is_elementwise, normalised_dim

aten = torch.ops.aten


def footprints(facts: Facts) -> Facts:
    """Prove the reach of every mixing op from its mask."""
    scores = Scores(facts, lambda mask: mask_facts(facts, mask))
    for node in facts.nodes:
        scores.visit(node)
    for mixing in facts.mixings.values():
        if mixing.mask is None and not facts.has_columns(mixing.node):
            mixing.mask = _zeros_of_weights(scores, mixing)
        if mixing.mask is not None and mixing.reach is Reach.FULL:
            mixing.reach, mixing.window = reach_of(facts, mixing.mask)
    for mixing in facts.mixings.values():
        if facts.has_columns(mixing.node):
            _follow_readers(facts, scores, mixing)
    return facts


def mask_facts(facts: Facts, mask: Mask) -> Any:
    """What is proved about a mask (cached on the facts)."""
    if mask not in facts.masks:
        is_whole = lambda n: facts.kinds.get(n) is Kind.WHOLE  # noqa: E731
        facts.masks[mask] = analyze_parts(mask.parts, facts.sequence, is_whole)  # type: ignore[arg-type]
    return facts.masks[mask]


def reach_of(facts: Facts, mask: Mask) -> tuple[Reach, Any]:
    """How far a row reads under a mask, and the rows of its window."""
    known = mask_facts(facts, mask)
    if not known.causal:
        return Reach.FULL, None
    return (Reach.WINDOW, known.window) if known.window is not None else (Reach.CAUSAL, None)


def _zeros_of_weights(scores: Scores, mixing: Mixing) -> Mask | None:
    """Where the weights of a product of weights and values are exactly zero.

    The columns of the values are contracted with those of the weights, which come before them.
    """
    weights = [n for n in mixing.node.all_input_nodes if scores.facts.has_columns(n)]
    masked = mixing.node.target is aten.scaled_dot_product_attention.default  # its mask is no weights
    if len(weights) != 1 or weights[0] in mixing.columns or masked:
        return None
    known = scores.of(weights[0])
    return Mask(known.parts) if known is not None and known.hidden is Hidden.ZERO else None


def _follow_readers(facts: Facts, scores: Scores, mixing: Mixing) -> None:
    """Scores read the columns that what is made of them keeps: the reach of their last reader.

    NOTE [scores]: a score that its softmax multiplies by exactly zero contributes nothing, forwards or
    backwards, so the columns of the scores need only reach as far as those of the product with the values.
    Two kinds of op may stand between the two: those that make an element of elements at the same row and
    column, and a softmax over the columns of scores that are masked out by the very mask that limits the
    product.
    A reduction to a number a row, to which what a mask hides adds nothing, reads as far as that mask.
    Any other use of a (row, column) value makes it FULL.

    NOTE [columns that are selected]: which columns a row selects (`topk`, by an indexer of sparse attention)
    depends on all of them, those that a mask hides included: how equal scores are told apart, on how many
    there are. So such a row reads all columns, in their own places, and what it makes of them (a scatter into
    a value of rows and columns, a gather from one) is as if nothing were chunked. As many are selected as a
    number says; where that is the least of a number and the length, the graph is for lengths on one side of
    the number. Scores are rounded in chunks otherwise than as a whole: of two that differ by less than that,
    another may be selected, as another expert may.
    """
    readers: list[Mixing] = []
    crossed: set[Mask] = set()
    pending, seen = [mixing.node], {mixing.node}
    while pending:
        node = pending.pop()
        for user in node.users:
            if user in seen:
                continue
            seen.add(user)
            reader = facts.mixings.get(user)
            if reader is not None and not facts.has_columns(user) and node not in reader.columns:
                readers.append(reader)
                continue
            over = _masked_softmax(facts, scores, node, user)
            ends = _masked_reduction(facts, scores, node, user) if over is None else None
            if over is not None:
                crossed.add(over)
            elif ends is not None:
                readers.append(Mixing(user, (), ends, *reach_of(facts, ends)))
                continue
            elif not facts.has_columns(user) or not _keeps_places(facts, user):
                return _read_all(mixing)
            pending.append(user)
    if not readers:
        mixing.reach = Reach.CONST
        return None
    widest = max(readers, key=lambda m: (m.reach, m.window or 0))
    # if a row sees nothing is asked of the masks of mixing ops, and a reduction is none
    asked = {widest.mask, *(m.mask for m in readers if m.node in facts.mixings)}
    if not crossed <= asked or any(m.mask not in asked for m in readers):
        return _read_all(mixing)
    mixing.reach, mixing.window, mixing.mask = widest.reach, widest.window, widest.mask
    return None


def _keeps_places(facts: Facts, node: Node) -> bool:
    """True for an op that makes what is at a row and a column of what is there in its operands.

    Either it is elementwise, or its rule says so (of a linear map of features): of rows it does, and it is
    asked about the columns as if they were rows.
    """
    if is_elementwise(facts, node):
        return True
    layouts = {n: _columns_as_rows(facts.layouts.get(n)) for n in operands(node)}
    asked = replace(facts, layouts=layouts, mixings={}, local=dict(facts.local), not_linear=set())
    function = rule_for(facts, node)
    try:
        found = None if function is None else function(RuleContext(asked), node)
    except NotSeparable:
        return False
    return found is not None and found == _columns_as_rows(facts.layouts[node]) and not asked.mixings


def _columns_as_rows(layout: Layout | None) -> Layout | None:
    axes = (a if a is not None and a.role is Role.COLUMN else None for a in layout or ())
    return None if layout is None else tuple(None if a is None else replace(a, role=Role.ROW) for a in axes)


def _read_all(mixing: Mixing) -> None:
    mixing.reach, mixing.window, mixing.mask = Reach.FULL, None, None


def _masked_softmax(facts: Facts, scores: Scores, operand: Node, node: Node) -> Mask | None:
    """The mask of a softmax over columns that gives no weight to what the mask hides."""
    dim = normalised_dim(node)
    layout = facts.layouts.get(node)
    if dim is None or layout is None or layout[dim] is None or layout[dim].role is not Role.COLUMN:  # type: ignore[union-attr]
        return None
    known: Score | None = scores.of(operand)
    return Mask(known.parts) if known is not None and known.is_masked_out else None


# Reductions over columns to which minus infinity adds nothing, and those to which zero adds nothing.
OVER_VISIBLE = (aten.logsumexp.default, aten.amax.default, aten.max.dim)
OVER_WEIGHTS = (aten.sum.dim_IntList,)


def _masked_reduction(facts: Facts, scores: Scores, operand: Node, node: Node) -> Mask | None:
    """The mask of a reduction over columns, to whose result, a number a row, what is hidden adds nothing."""
    if node.target not in (*OVER_VISIBLE, *OVER_WEIGHTS) or facts.has_columns(node):
        return None
    known = scores.of(operand)
    if known is None:
        return None
    nothing = known.is_masked_out if node.target in OVER_VISIBLE else known.hidden is Hidden.ZERO
    return Mask(known.parts) if nothing else None
