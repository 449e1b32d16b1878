"""lower: an explicit program graph -> Python that runs on eager kernels, or on what Inductor makes of it.

Dead code goes; the gradient of a parameter is added to its accumulator as soon as it is known (a product is
added by `addmm_`, without a temporary), so that no two gradients of one parameter are alive at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from ..cost.storages import Storages
from ..graph.facts import tensors_of
from ..graph.functionalization import changes_something, written_operands
from ..graph.purity import is_impure
from ..graph.tracing import without_saved_tensors_hooks
from ..pipeline.runner import Pass, run_passes
from ..pipeline.verifier import verify_program
from ..s4_trace.columns_of_others import ATTEND_TO_OTHERS_BACKWARD
from . import sparse_gradients  # noqa: F401  (registers its rewrites)
from .accumulate import accumulate
from .recorded_steps import record_steps
from .rematerialize import rematerialize, typical
from .reorder import reorder
from .simplify import simplify
from .workspace import into_workspace, widest_product
from .write_in_place import write_in_place

aten = torch.ops.aten
#: What writes rows into a buffer that is an input, and what adds to one.
WRITES = (aten.copy_.default,)
ADDS = (aten.add_.Tensor, ATTEND_TO_OTHERS_BACKWARD)


@dataclass
class Lowered:
    """A runnable program.

    Attributes:
        run: function of the flat inputs; returns the outputs that are not accumulated.
        module: the graph it was generated from.
        sizes: names of the size symbols of its values.
        product: of `module`, whose memory is one more input of `run` at the end, a tensor without elements
            that is given to each call again (see `workspace`); None: there is no such input.
    """

    run: Callable[..., list[Any]]
    module: GraphModule
    sizes: Mapping[sympy.Symbol, str] = field(default_factory=dict)
    product: Node | None = None

    @property
    def workspace(self) -> torch.dtype | None:
        """Dtype of the input that the product's memory is."""
        return None if self.product is None else tensors_of(self.product)[0].dtype


@dataclass(frozen=True)
class LoweringSettings:
    """How a traced program is made runnable.

    Attributes:
        title: what it is, for people.
        accumulators: its last so many outputs are gradients, and its last so many inputs the buffers that
            they are added to.
        names: readable names of the inputs.
        body: "eager" or "inductor".
        fakes: the inputs that it was traced with (for Inductor).
        swept: the caller keeps memory for the widest product (eager kernels only).
        sizes: names of the size symbols.
        window: how many rows a row reads at most, where that is known.
    """

    title: str
    accumulators: int
    names: Sequence[str]
    body: str = "eager"
    fakes: Sequence[Any] = ()
    swept: bool = False
    sizes: Mapping[sympy.Symbol, str] = field(default_factory=dict)
    window: int | None = None

    @property
    def eager(self) -> bool:
        """Inductor fuses elementwise ops and plans its buffers itself."""
        return self.body == "eager"


@dataclass
class Lowering:
    """A program that is being lowered.

    Attributes:
        title: what it is, for people.
        storages: of its values, once it is known what lies where.
        product: whose memory is given to each call again.
    """

    module: GraphModule
    title: str
    storages: Storages | None = None
    product: Node | None = None

    def __str__(self) -> str:
        return f"# {self.title}\n{self.module.graph.python_code('self').src}"


def lower(module: GraphModule, settings: LoweringSettings) -> Lowered:
    """Turn a traced program into a runnable one.

    Args:
        module: the program, which is changed.

    Raises:
        PassError: a pass failed.
    """
    inputs = len(module.graph.find_nodes(op="placeholder"))
    outputs = len(module.graph.output_node().args[0]) - settings.accumulators  # type: ignore[arg-type]

    def verify(one: ProgramPass, lowering: Lowering) -> None:
        verify_program(lowering.module.graph, inputs, outputs)

    with without_saved_tensors_hooks():  # a recurrence is run, to see what it holds
        lowering = run_passes(PROGRAM_PASSES, Lowering(module, settings.title), settings, verify)
    module.graph.lint()
    module.recompile()
    if not settings.eager:
        return Lowered(_compiled_by_inductor(module, settings.fakes), module, settings.sizes)
    product = lowering.product
    run = module if product is None else into_workspace(module, product)
    return Lowered(run.forward, module, settings.sizes, product)


ProgramPass = Pass[Lowering, LoweringSettings]


def on_graph(change: Callable[[Graph], Any]) -> Callable[[Lowering, LoweringSettings], Lowering]:
    """A pass that needs nothing but the graph, which it changes."""

    def run(lowering: Lowering, settings: LoweringSettings) -> Lowering:
        change(lowering.module.graph)
        return lowering

    return run


def _accumulated(lowering: Lowering, settings: LoweringSettings) -> Lowering:
    accumulate(lowering.module.graph, settings.accumulators, settings.eager)
    return lowering


def _recorded(lowering: Lowering, settings: LoweringSettings) -> Lowering:
    record_steps(lowering.module.graph, typical(settings.sizes, settings.window))
    return lowering


def _rematerialized(lowering: Lowering, settings: LoweringSettings) -> Lowering:
    rematerialize(lowering.module.graph, typical(settings.sizes, settings.window))
    return lowering


def _written_in_place(lowering: Lowering, settings: LoweringSettings) -> Lowering:
    lowering.storages = write_in_place(lowering.module.graph)
    return lowering


def _with_workspace(lowering: Lowering, settings: LoweringSettings) -> Lowering:
    if lowering.storages is not None:
        lowering.product = widest_product(lowering.module.graph, lowering.storages)
    return lowering


def _named(lowering: Lowering, settings: LoweringSettings) -> Lowering:
    inputs = lowering.module.graph.find_nodes(op="placeholder")
    for node, name in zip(inputs, settings.names, strict=True):
        node._rename(name)
        node.target = node.name
    return lowering


def _is_eager(settings: LoweringSettings) -> bool:
    return settings.eager


def _copy_what_is_no_view(graph: Graph) -> None:
    """Views of what the program computes may copy.

    NOTE [strides of fake tensors]: where a value lies in memory is known of inputs. Of what ops make (also in
    the forward of the chunk, if that has saved it), fake tensors say it, and are wrong for some (the backward
    of a softmax over a dim that is not the last): the view that the trace has recorded is then impossible.
    Nobody reads such a value by another name later.
    """
    storages = Storages(graph)
    for node in graph.find_nodes(op="call_function", target=aten.view.default):
        makers = [storages.maker(key) for key in storages.of[node]]
        if not all(n.op == "placeholder" and not n.meta.get("saved") for n in makers):
            node.target = aten.reshape.default


def restrict(
    module: GraphModule,
    outputs: list[Any],
    inputs: int,
    writes: bool,
    given: Sequence[Node] = (),
    place: int = 0,
    unwritten: frozenset[Node] = frozenset(),
) -> GraphModule:
    """A copy of a program with some of its outputs and its first `inputs` inputs.

    Args:
        writes: keep what is written into buffers that are inputs (state rows); else only what is added.
        given: values that become inputs, from position `place` on, instead of being computed.
        unwritten: inputs that nothing is written into: they hold it already.
    """
    unwanted = ADDS if writes else WRITES
    wanted = {n for n in outputs if isinstance(n, Node)}
    live = live_nodes(module.graph, wanted, unwanted, frozenset(given), unwritten)
    graph = Graph()
    copies: dict[Node, Node] = {}
    for position, node in enumerate(module.graph.nodes):
        if position == place:
            for k, value in enumerate(given):
                copies[value] = graph.placeholder(f"saved_{k}")
                copies[value].meta.update(value.meta)
                copies[value].meta["saved"] = True
        if node not in copies and ((node.op == "placeholder" and position < inputs) or node in live):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[n] if isinstance(n, Node) else n for n in outputs])
    return GraphModule(module, graph)


def live_nodes(
    graph: Graph,
    wanted: set[Node],
    unwanted: Sequence[Any],
    given: frozenset[Node] = frozenset(),
    unwritten: frozenset[Node] = frozenset(),
) -> set[Node]:
    """Nodes that `wanted` are made of, with the changes in place that they or the caller can see.

    What `given` are made of does not count.

    A change of a value is seen by those who read the value, or a view of it, later; a change of an input is
    seen by the caller, except that of the ops `unwanted` and that of the inputs `unwritten`.
    """
    storages = Storages(graph)
    live, read = set(wanted), {key for n in wanted for key in storages.of[n]}
    for node in reversed(storages.nodes):
        if changes_something(node):
            changed = {key for n in written_operands(node) for key in storages.of[n]}
            makers = {storages.maker(key) for key in changed}
            from_outside = any(maker.op == "placeholder" for maker in makers)
            if from_outside and (node.target in unwanted or makers <= unwritten):
                continue
            if from_outside or not changed.isdisjoint(read):
                live.add(node)
        if node in live and node.op != "output" and node not in given:
            live.update(node.all_input_nodes)
            read.update(storages.read_by(node))
    return live


def _compiled_by_inductor(module: GraphModule, fakes: Sequence[Any]) -> Callable[..., Any]:
    """One compilation for all chunks: the sizes are symbols of the fake inputs.

    NOTE [without Dynamo]: the program is a graph already, so Inductor is called on it directly. What it
    assumes about the sizes becomes guards of the same ShapeEnv, which `vjp` checks for each chunk.

    NOTE [modes of a step]: a program is compiled by the first step that runs it, and for all steps. What that
    step runs in (a self-check, in which dropout drops nothing; somebody's mode for dispatch) is for its ops
    alone: compiled within, its answers would become part of the program, and of Inductor's cache on disk.
    """
    from torch._inductor.compile_fx import compile_fx

    with torch.no_grad(), _disable_current_modes():
        return compile_fx(module, list(fakes))  # type: ignore[return-value, arg-type]


def _drop_dead_code(graph: Graph) -> None:
    for node in list(graph.nodes):
        schema = getattr(node.target, "_schema", None)
        if schema is not None and not schema.returns and not schema.is_mutable and not node.users:
            graph.erase_node(node)  # it makes nothing: an assertion, which held when it was traced
    graph.eliminate_dead_code(is_impure_node=is_impure)


#: The passes over a chunk program, in the order in which they run.
PROGRAM_PASSES: tuple[ProgramPass, ...] = (
    Pass(
        "accumulate",
        "gradients of parameters are added to their sums where they are made",
        _accumulated,
        applies=lambda settings: settings.accumulators > 0,
    ),
    Pass(
        "dead_code",
        "what nobody reads goes, and assertions that held in the trace",
        on_graph(_drop_dead_code),
    ),
    Pass(
        "recorded_steps",
        "a recurrence that is run and differentiated is run once",
        _recorded,
        applies=_is_eager,
        optional=True,
    ),
    Pass(
        "simplify",
        "the same values in fewer passes over memory",
        on_graph(simplify),
        applies=_is_eager,
        optional=True,
    ),
    Pass(
        "reorder",
        "ops run when somebody needs what they make",
        on_graph(reorder),
        applies=_is_eager,
        optional=True,
    ),
    Pass(
        "rematerialize",
        "elementwise values are made again after the peak of a program",
        _rematerialized,
        applies=_is_eager,
        optional=True,
    ),
    Pass(
        "write_in_place",
        "ops write over operands that nobody reads any more",
        _written_in_place,
        gives=("storages",),
        applies=_is_eager,
        optional=True,
    ),
    Pass(
        "workspace",
        "the logits of all chunks lie in one place, in a sweep over the loss head",
        _with_workspace,
        needs=("storages",),
        applies=lambda settings: settings.eager and settings.swept,
        optional=True,
    ),
    Pass(
        "views",
        "views of what the program makes may copy",
        on_graph(_copy_what_is_no_view),
        applies=_is_eager,
    ),
    Pass("names", "inputs have the names of what they are", _named),
)
