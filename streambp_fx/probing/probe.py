"""The independence probe: what the analysis claims of rows, tried on the tensors of a real step.

The captured graph is run once, op by op. Each op of which something is claimed is run again on its own
operands with some of their rows replaced; the rows that are claimed not to read those must come out the same,
bit for bit. The claims of single ops make up those of the model: a value whose op reads row i alone, of
operands that read rows up to i, reads rows up to i.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from ..errors import VerificationError
from ..passes.graph.facts import Facts, Kind, Mixing, Reach, Role, operands
from ..passes.graph.kernel_settings import plain_attention
from ..passes.graph.ops.recurrence import RECURRENCE
from ..passes.graph.ops.row_selection import RowSelection
from ..passes.graph.purity import is_random
from ..passes.graph.sources import source_line
from ..passes.masks.at_run_time import first_column_open
from ..passes.s2_prove.axes import is_secondary
from ..passes.s2_prove.footprints import mask_facts
from ..passes.s6_schedule.step_parts import masks_to_test
from .captured_run import CapturedRun
from .poisoned_rows import Operand, Poison, first_difference
from .tried_claims import NotClaimed, Probe

aten = torch.ops.aten
# Ops of PyTorch that check floating point operands; one that is missing here is met on the CPU only.
CHECKED = {aten.binary_cross_entropy.default, aten.bernoulli.default, aten.multinomial.default}
Interval = tuple[int, int]


def check_not_random(facts: Facts) -> None:
    """Raise if an op of the graph draws random numbers: no two runs of it could be compared.

    Raises:
        VerificationError: names the op and its source line.
    """
    for node in facts.nodes:
        if is_random(node):
            raise VerificationError(
                f"the model draws random numbers that are no dropout: {node.target} ({source_line(node)}). "
                "Two steps of it cannot be compared. Switch this off and verify again."
            )


class IndependenceProbe(CapturedRun):
    """Runs a captured graph on real inputs and tries every claim.

    NOTE [rows of identical segments]: the first of identical segments is tried at all rows, and each of the
    others at one of them in turn. They have the same ops on the same shapes under the same masks, and a deep
    model would take minutes otherwise.

    Args:
        facts: of the graph, after all passes.
        inputs: of the graph, in the order of its placeholders.
        rows: the rows r; for each, rows after r are poisoned, and rows before it.
        everywhere: all rows in all segments, see NOTE [rows of identical segments].
        seed: of the poison. PyTorch's own random state is not touched.
        distinct: nothing is tried in a segment that is identical to an earlier one.
    """

    def __init__(
        self,
        facts: Facts,
        inputs: Sequence[Any],
        rows: Sequence[int],
        everywhere: bool = False,
        seed: int = 0,
        distinct: bool = False,
    ) -> None:
        super().__init__(facts, inputs, seed)
        self.rows = tuple(rows)
        self.rows_of = {} if everywhere else _rows_in_turn(facts, self.rows)
        if distinct:
            self.rows_of = dict.fromkeys(self.rows_of, ())
        self.segment_of = {n: s for s in facts.segments for n in s.nodes}
        self.masks = masks_to_test(facts)
        self.probes: list[Probe] = []
        self.not_claimed: list[NotClaimed] = []

    def run(self) -> None:
        """Fill `probes` and `not_claimed`, in the order of the graph.

        Raises:
            VerificationError: an op failed while it was probed; the message names the op and its source line.
        """
        asked = (mask_facts(self.facts, mask).linear.values() for mask in self.masks)
        order, last_readings = self._lifetimes(first=itertools.chain.from_iterable(asked))
        plain = plain_attention(self.inputs.values())
        with torch.no_grad(), torch._C._DisableAutocast(), plain:
            for position, node in enumerate(order):
                try:
                    self._value(node)
                    if self._is_made(node):
                        self._probe(node)
                except Exception as error:
                    raise VerificationError(
                        f"the probe failed at {node.target} ({source_line(node)}): "
                        f"{type(error).__name__}: {error}"
                    ) from error
                for dead in last_readings.get(position, ()):
                    del self.values[dead]

    def _is_made(self, node: Node) -> bool:
        """True for a streamed value that an op computes."""
        computed = node.op == "call_function" and node.target is not operator.getitem
        return computed and self.facts.kinds[node] is Kind.STREAM

    # ---- what is claimed

    def _probe(self, node: Node) -> None:
        if not self.rows_of.get(self._index(node), self.rows) or self._is_sorted(node):
            return
        reason = self._why_not(node)
        if reason is not None:
            self._leave_out(node, reason)
            return
        mixing = self.facts.mixings.get(node)
        found = self._try_own_rows(node)
        reach, window = Reach.ROW, None
        if mixing is not None:
            reach, window = self._for_this_batch(mixing)
            if self.facts.has_columns(node):
                found += self._try_columns(node)
            elif reach is not Reach.FULL:
                found += self._try_mixing(node, window)
        if not found:
            self._leave_out(node, "it reads nothing by rows")
            return
        self.probes.append(
            Probe(
                segment=self._index(node),
                value=node.name,
                op=str(node.target),
                reach=reach,
                window=window,
                rows=tuple(dict.fromkeys(r for r, _ in found)),
                contradictions=tuple(text for _, text in found if text is not None),
                line=source_line(node),
            )
        )

    def _is_sorted(self, node: Node) -> bool:
        """True for rows in an order of their own, and for what brings them back: row r is not at place r.

        Nothing of the kind is tried here, since a grouped product, or a product of selected rows, may round a
        row otherwise where other rows are beside it. The self-check compares what comes of it with the graph
        that was captured.
        """
        if isinstance(node.target, RowSelection):
            return True
        values = (node, *operands(node))
        orders = (a.order for n in values for a in self.facts.layouts.get(n) or () if a is not None)
        return any(n in self.facts.local for n in values) or any(order is not None for order in orders)

    def _index(self, node: Node) -> int | None:
        return self.segment_of[node].index if node in self.segment_of else None

    def _why_not(self, node: Node) -> str | None:
        """Why nothing is claimed of a value, or None."""
        facts, segment = self.facts, self.segment_of.get(node)
        layout = facts.layouts.get(node)
        if segment is not None and not segment.chunked:
            return segment.reason or "its segment runs unchunked"
        if node in facts.refusals:
            return facts.refusals[node]
        if node in facts.slices:
            return "a slice of the sequence begins a sequence of its own"
        if layout is None or len([a for a in layout if a is not None and a.role is Role.ROW]) != 1:
            return "the sequence axis of the result is unknown"
        return None

    def _leave_out(self, node: Node, reason: str) -> None:
        """One entry for each cause: an unchunked segment, or an op that no other refusal explains."""
        segment, first = self.segment_of.get(node), node
        if segment is not None and not segment.chunked:
            first = segment.refused or node
        elif is_secondary(reason):
            return
        entry = NotClaimed(self._index(node), first.name, str(first.target), reason, source_line(first))
        if entry not in self.not_claimed:
            self.not_claimed.append(entry)

    def _for_this_batch(self, mixing: Mixing) -> tuple[Reach, int | None]:
        """The reach of a mixing op in this step, as the runtime takes it.

        See NOTE [rows that see nothing] in `passes.s6_schedule.step_parts`: with padding it may be FULL.
        """
        mask = mixing.mask
        if mask is not None and self.masks.get(mask):  # uncertain
            known = mask_facts(self.facts, mask)
            if not first_column_open(known, self.values.__getitem__):  # type: ignore[arg-type]
                return Reach.FULL, None
        window = None if mixing.window is None else int(mixing.window)
        return mixing.reach, window if mixing.reach is Reach.WINDOW else None

    # ---- trials

    def _try_own_rows(self, node: Node) -> list[tuple[int, str | None]]:
        """Rows of the result against the same rows of the operands, other than columns.

        NOTE [which poison]: NaN wherever rows are not touched at all: nothing absorbs it. Where a mask hides
        rows they *are* touched, as 0 * x, and 0 * NaN is NaN; there the poison is finite random numbers, of
        several times the size of the rows they replace. Token ids and other integers are exchanged for those
        of other rows, since they must stay in range; and so are floating point numbers of an op that checks
        them, as a loss of probabilities does. On an accelerator such a check ends the process, so that NaN is
        given there to no op that may make one.
        """
        operands = {
            n: Operand(self.values[n], rows, self.seed)
            for n in self._operands(node, columns=False)
            if (rows := self._own_rows(node, n)) is not None
        }

        def run() -> Any:
            return self._call(
                node, lambda n, column: operands[n].buffer if n in operands and not column else self.values[n]
            )

        return self._trials(
            node, list(operands.values()), run, Role.ROW, reads=1, kind=self._poison_for(node)
        )

    def _poison_for(self, node: Node) -> Poison:
        """NaN, if the op takes it."""
        known = getattr(node.target, "namespace", None) in ("aten", "prims") and node.target not in CHECKED
        read = [self.values[n] for n in node.all_input_nodes]
        on_cpu = all(v.device.type == "cpu" for v in read if isinstance(v, Tensor))
        return Poison.NAN if known or on_cpu else Poison.OTHER_ROWS

    def _try_columns(self, node: Node) -> list[tuple[int, str | None]]:
        """Scores: column j against row j of the operand that is read by columns."""
        operands = self._column_operands(node)

        def run() -> Any:
            return self._call(
                node, lambda n, column: operands[n].buffer if n in operands and column else self.values[n]
            )

        return self._trials(node, list(operands.values()), run, Role.COLUMN, reads=1)

    def _try_mixing(self, node: Node, window: int | None) -> list[tuple[int, str | None]]:
        """Rows up to r against keys and values after r; and from r on against those before its window.

        Where the weights are a value of their own, the ops that they are made of are run again as well, from
        the poisoned keys on: it is the mask on the scores that makes the weights zero. Keys of scores that
        are normalised before they are masked have a part in all rows: nothing is claimed of them.
        """
        members = [*self.regions[node], node]
        bounded = [
            m for m, found in self.facts.mixings.items() if m in members and found.reach is not Reach.FULL
        ]
        operands = {n: o for m in bounded for n, o in self._column_operands(m).items()}

        def run() -> Any:
            made: dict[Node, Any] = {}

            def value(n: Node, column: bool) -> Any:
                if column and n in operands:
                    return operands[n].buffer
                return made.get(n, self.values[n])

            for member in members:
                made[member] = self._call(member, value)
            return made[node]

        # a recurrence multiplies what it is given over and over: numbers of another size would overflow
        kind = Poison.OTHER_ROWS if node.target is RECURRENCE else Poison.NUMBERS
        return self._trials(node, list(operands.values()), run, Role.ROW, reads=window, kind=kind)

    def _trials(
        self,
        node: Node,
        operands: list[Operand],
        run: Callable[[], Any],
        role: Role,
        reads: int | None,
        kind: Poison = Poison.NAN,
    ) -> list[tuple[int, str | None]]:
        """What was tried: rows r, and in words what changed, if anything did.

        Args:
            operands: those in which rows are poisoned.
            run: computes the value from the operands' buffers.
            role: the axis of the value along which it is compared.
            reads: how many rows row r reads, itself the last; None: all up to its own.
            kind: of poison, see NOTE [which poison].
        """
        if not operands:
            return []
        layout = self.facts.layouts[node] or ()
        dim, axis = next((d, a) for d, a in enumerate(layout) if a is not None and a.role is role)
        reference = self.values[node]
        if not all(o.faithful for o in operands):  # another memory layout may mean another kernel
            reference = pytree.tree_map_only(Tensor, torch.clone, run())
        value = next(v for v in pytree.tree_leaves(reference) if isinstance(v, Tensor))
        rows = self._along(value, dim, axis)
        tried: list[tuple[int, str | None]] = []
        for r in self.rows_of.get(self._index(node), self.rows):
            for poisoned, compared, words in _sides(r, rows.length, reads):
                found = self._poisoned(operands, poisoned, run, kind)
                difference = first_difference(reference, found, rows, *compared)
                if difference and kind is Poison.NAN and _may_pad(node):
                    found = self._poisoned(operands, poisoned, run, Poison.NUMBERS)
                    difference = first_difference(reference, found, rows, *compared)
                tried.append((r, difference and f"{role.value} {difference} when {words} were poisoned"))
        return tried

    def _poisoned(self, operands: list[Operand], rows: Interval, run: Callable[[], Any], kind: Poison) -> Any:
        """The value from poisoned operands; with those of other rows if the op refuses NaN."""
        for operand in operands:
            operand.poison(*rows, kind)
        try:
            return run()
        except RuntimeError:
            if kind is not Poison.NAN:
                raise
            return self._poisoned(operands, rows, run, Poison.OTHER_ROWS)
        finally:
            for operand in operands:
                operand.restore(*rows)


def _may_pad(node: Node) -> bool:
    """True for what is computed in half precision.

    NOTE [kernels that pad]: oneDNN's products in bfloat16 on a CPU with AMX fill up what is summed over to 32
    entries: with what lies behind a row in memory, times zero. That is nothing, but for NaN. So where NaN
    shows up in half precision, numbers decide: what is read of a row then adds something to the result.
    """
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _sides(r: int, length: int, reads: int | None) -> Iterator[tuple[Interval, Interval, str]]:
    """Which rows are poisoned, and which must then stay: those up to r; and those from r on.

    Args:
        reads: how many rows row r reads, itself the last; None: all up to its own.
    """
    if r + 1 < length:
        yield (r + 1, length), (0, r + 1), f"rows after {r}"
    if reads is not None and r - reads + 1 > 0 and r < length:
        first = r - reads + 1
        yield (0, first), (r, length), f"rows before {first}"


def _rows_in_turn(facts: Facts, rows: tuple[int, ...]) -> dict[int | None, tuple[int, ...]]:
    """The rows of those segments that are not the first of their kind."""
    seen: dict[str, int] = {}
    found: dict[int | None, tuple[int, ...]] = {}
    for segment in facts.segments:
        count = seen[segment.signature] = seen.get(segment.signature, -1) + 1
        if count:
            found[segment.index] = (rows[count % len(rows)],)
    return found
