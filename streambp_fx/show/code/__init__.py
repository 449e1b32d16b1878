"""The compiled training step as one Python module that runs and needs nothing but PyTorch.

names      what the model calls its values
body       a graph as the body of a function: a line an op, with shape and source line
context    names of sizes, and the questions that a step asks its masks
programs   the chunk programs of a distinct segment, one function for each kind of chunk
sweeps     what runs them chunk by chunk, forwards and in reverse
printed_subgraphs
           what runs unchunked, as functions
step_functions
           the functions that the driver calls
step       the driver: whole values, segments, loss, and the way back
helpers    functions that the program brings along
"""

from __future__ import annotations

import dataclasses
import re

from ...options import Options
from ...passes.graph.facts import Facts
from ...passes.graph.printing import WIDTH
from ...runtime.executor import Executor
from .context import Context
from .helpers import HELPERS
from .step import StepCode


def generate(facts: Facts, options: Options, seq_len: int | None = None) -> str:
    """The step of a compiled graph as Python.

    Args:
        facts: of the graph, after all passes.
        options: that it was compiled with.
        seq_len: tokens of a sequence; None: as many as in the call for which the graph was captured.

    Raises:
        CompileError: a program cannot be traced.
    """
    assert facts.sequence is not None
    tokens = facts.values[facts.sequence] if seq_len is None else seq_len
    executor = Executor(facts, dataclasses.replace(options, body="eager", order="layers"))
    context = Context(executor, tokens)
    step = StepCode(context)
    driver, called = step.text(), step.functions
    whole = [called.whole.text, *(test.text for test in called.tests)]
    sections = _section("Values that are computed once, whole, and sliced by chunks", whole)
    for sweeps in called.sweeps.values():
        texts = [*sweeps.code.functions(), *sweeps.functions()]
        sections += _section(f"{sweeps.numbers}, chunk by chunk", texts)
    if called.parts:
        sections += _section("What runs unchunked", [p.text for p in called.parts.values()])
    sections += _section("The step", [called.epilogue.text, *_table(step), driver])
    body = "\n\n\n".join(sections)
    used = [text.strip() for name, text in HELPERS.items() if re.search(rf"\b{name}\(", body)]
    head = _head(context, options, seq_len, step, OWN in body)
    return "\n\n\n".join([head, *_section("Helpers", used), body]) + "\n"


def _left_out(options: Options) -> str:
    """What of the memory policy the text does not do: what is kept stays where it is."""
    if options.order == "chunks":
        words = "a layer runs all chunks before the next one begins"
        return f" Nor does a chunk go\nthrough all layers at once: {words}."
    place = {"none": "", "host": "host memory", "disk": "disk"}[options.offload]
    rows = ", and rows between layers" if options.offload_rows else ""
    return f" Nor does it move to {place}\nwhat is kept for the backward{rows}." if place else ""


def _section(title: str, texts: list[str]) -> list[str]:
    texts = [t for t in texts if t]
    if not texts:
        return []
    return [f"# {'-' * 4} {title} {'-' * max(4, WIDTH - len(title) - 8)}\n\n\n{texts[0]}", *texts[1:]]


def _table(step: StepCode) -> list[str]:
    if not step.tables:
        return []
    title = "# Parameters of each segment, in the order in which its functions take them."
    return ["\n".join([title, *step.tables])]


#: Where the text calls an op of this package.
OWN = "torch.ops.streambp_fx."
HEAD = """\
A training step, streamed along the sequence: forward and backward, with exact gradients.

Printed by streambp-fx for {tokens} tokens{why}.
It runs, and needs {needs}:

    {result}, gradients = step({call})

Inputs are tensors by name; `parameters` (and `buffers`) are dicts by dotted name, as of
`dict(model.named_parameters(remove_duplicate=False))`; so are the gradients.

Shapes are given in T, the sequence length, and in the rows of a chunk: rows [start, start + rows), columns
[low, low + columns), of which `prefix` come before the chunk's own rows. The comment above a line is the
line of the model that it comes from. The runtime also frees values within programs after their last use, and
writes gradients over buffers that nobody reads any more; this text does not.{policy}
"""


def _head(context: Context, options: Options, seq_len: int | None, step: StepCode, own: bool) -> str:
    why = "" if seq_len is not None else " (the length that it was captured with)"
    result = "outputs" if step.loss is None else "loss"
    call = ", ".join(step.parameters())
    needs = "PyTorch, and this package for the ops of its own" if own else "nothing but PyTorch"
    given = {"tokens": context.tokens, "why": why, "result": result, "call": call, "needs": needs}
    text = HEAD.format(**given, policy=_left_out(options))
    return "\n".join([
        f'"""{text}"""',
        "",
        "import itertools",
        "",
        "import torch",
        *(["import streambp_fx  # makes its ops known: torch.ops.streambp_fx"] if own else []),
        "",
        "aten = torch.ops.aten",
        f"CHUNK, LOSS_CHUNK = {context.rows}, {context.loss_rows}  # rows of a chunk: in a layer, in a head",
        f'DEVICE = torch.device("{context.device}")',
        *step.constants,
    ])  # fmt: skip
