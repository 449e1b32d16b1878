"""FX nodes as Python: what a line of a printed program looks like."""

from __future__ import annotations

import operator
import os
import re
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch.fx import Node
from torch.utils._sympy.printers import PythonPrinter

from .facts import expression
from .sources import source_line

aten = torch.ops.aten
WIDTH = 110

# Overloads that Python's operators call on tensors.
INFIX = {
    aten.add.Tensor: "+", aten.add.Scalar: "+", aten.sub.Tensor: "-", aten.sub.Scalar: "-",
    aten.mul.Tensor: "*", aten.mul.Scalar: "*", aten.div.Tensor: "/", aten.div.Scalar: "/",
    aten.pow.Tensor_Scalar: "**", aten.mm.default: "@", aten.matmul.default: "@",
    aten.le.Tensor: "<=", aten.le.Scalar: "<=", aten.lt.Tensor: "<", aten.lt.Scalar: "<",
    aten.ge.Tensor: ">=", aten.ge.Scalar: ">=", aten.gt.Tensor: ">", aten.gt.Scalar: ">",
    aten.eq.Tensor: "==", aten.eq.Scalar: "==", aten.ne.Tensor: "!=", aten.ne.Scalar: "!=",
    aten.bitwise_and.Tensor: "&", aten.bitwise_or.Tensor: "|", aten.__and__.Tensor: "&",
    aten.__or__.Tensor: "|",
}  # fmt: skip
# Overloads that are methods of a tensor, under the same name and with the same arguments.
METHODS = {
    aten.view.default, aten.reshape.default, aten.t.default, aten.transpose.int, aten.permute.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default, aten.clone.default,
    aten.contiguous.default, aten.detach.default, aten.neg.default, aten.exp.default, aten.log.default,
    aten.rsqrt.default,
    aten.sqrt.default, aten.cos.default, aten.sin.default, aten.tanh.default, aten.sigmoid.default,
    aten.abs.default, aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim,
    aten.select.int, aten.cumsum.default, aten.logical_not.default, aten.logaddexp.default,
    aten.masked_fill.Scalar, aten.copy_.default, aten.add_.Tensor, aten.mul_.Tensor, aten.addmm_.default,
    aten.any.default, aten.all.default, aten.flatten.using_ints, aten.new_ones.default,
}  # fmt: skip
OPERATORS: dict[Any, str] = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.floordiv: "//", operator.mod: "%",
    operator.truediv: "/", operator.pow: "**", operator.and_: "&", operator.or_: "|", operator.eq: "==",
    operator.ne: "!=", operator.le: "<=", operator.lt: "<", operator.ge: ">=", operator.gt: ">",
}  # fmt: skip
# Arguments that change nothing here, and only make a line longer.
IDLE = {("pin_memory", False), ("layout", torch.strided), ("non_blocking", False)}
OWN_OPS = {
    "streambp_fx::dropout_factors": "dropout_mask",
    "streambp_fx::random_numbers": "random_numbers",
}
# Ops that are given the number of something that this process holds.
OF_THIS_PROCESS = {
    "streambp_fx::selected_rows": "the ops on rows that are selected by their values",
    "streambp_fx::selected_rows_vjp": "the backward of ops on rows that are selected by their values",
    "streambp_fx::foreign_vjp": "a backward of another package",
}


class Unprintable(Exception):
    """A node that Python text cannot stand for; the message says why."""


class Printer:
    """Turns nodes into Python.

    Args:
        names: of the size symbols.
        device: the device that `DEVICE` stands for, or None to print every device as it is.
    """

    def __init__(self, names: Mapping[sympy.Symbol, str], device: torch.device | None = None) -> None:
        self.symbols = {s: sympy.Symbol(n, integer=True) for s, n in names.items()}
        self.device = device

    # ---- sizes

    def knows(self, value: Any) -> bool:
        """True if all symbols of a size have a name."""
        return not isinstance(value, torch.SymInt) or value.node.expr.free_symbols <= set(self.symbols)

    def size(self, value: int | torch.SymInt | sympy.Expr) -> str:
        """A size, such as `rows` or `2 * rows`."""
        expr = value if isinstance(value, sympy.Basic) else expression(value)
        text = PythonPrinter().doprint(expr.xreplace(self.symbols))
        return re.sub(r"(?<!\*)\*(?!\*)", " * ", text)

    def shape(self, value: Any) -> str:
        """`[2, rows, 64] float64`, or "" for what has no shape."""
        if isinstance(value, (tuple, list)):
            return ", ".join(filter(None, map(self.shape, value)))
        if not isinstance(value, torch.Tensor):
            return ""
        sizes = ", ".join(self.size(s) for s in value.shape)
        return f"[{sizes}] {str(value.dtype).removeprefix('torch.')}"

    # ---- values

    def literal(self, value: Any, name: Callable[[Node], str]) -> str:
        """An argument.

        Raises:
            Unprintable: it is an object that has no literal.
        """
        if isinstance(value, Node):
            return name(value)
        if isinstance(value, torch.SymInt):
            return self.size(value)
        if isinstance(value, (list, tuple)):
            items = ", ".join(self.literal(v, name) for v in value)
            return f"[{items}]" if isinstance(value, list) else f"({items}{',' * (len(value) == 1)})"
        if isinstance(value, torch.device):
            return "DEVICE" if value == self.device else f'torch.device("{value}")'
        if isinstance(value, slice):
            return f"slice({', '.join(self.literal(v, name) for v in (value.start, value.stop, value.step))})"
        if isinstance(value, float) and (value != value or abs(value) == float("inf")):
            return f'float("{value}")'
        if value is None or isinstance(value, (bool, int, float, str)):
            return repr(value)
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return str(value)
        raise Unprintable(f"it takes an object of type {type(value).__name__}")

    def call(self, node: Node, name: Callable[[Node], str]) -> tuple[str, list[str], str]:
        """What computes a node, as (head, arguments, tail) of a line: `aten.cat.default(`, [...], `)`.

        Raises:
            Unprintable: the op is an object that has no name, or takes one.
        """
        target, kwargs = node.target, {k: v for k, v in node.kwargs.items() if not _is_idle(k, v)}
        args = [self.literal(a, name) for a in node.args]
        if target is operator.getitem:
            return f"{args[0]}[{args[1]}]", [], ""
        infix = INFIX.get(target) or OPERATORS.get(target)
        if infix is not None and len(args) == 2 and not kwargs and isinstance(node.args[0], Node):
            return f"{_atom(args[0])} {infix} {_atom(args[1])}", [], ""
        if target is aten.sym_size.int:
            return f"{args[0]}.shape[{args[1]}]", [], ""
        args += [f"{k}={self.literal(v, name)}" for k, v in kwargs.items()]
        if target in METHODS and isinstance(node.args[0], Node):
            return f"{args[0]}.{target._schema.name.removeprefix('aten::')}(", args[1:], ")"
        return f"{function_name(target)}(", args, ")"


def _is_idle(key: str, value: Any) -> bool:
    return value is None or any(key == k and value is v for k, v in IDLE)


def _atom(text: str) -> str:
    return text if re.fullmatch(r"[\w.]+(e-?\d+)?", text) else f"({text})"


def function_name(target: Any) -> str:
    """What an op is called in a program that has `aten = torch.ops.aten`.

    Raises:
        Unprintable: it has no name that a program could use.
    """
    if isinstance(target, torch._ops.OpOverload):
        own = OWN_OPS.get(target._schema.name)
        if own is not None:
            return own
        if target._schema.name in OF_THIS_PROCESS:
            raise Unprintable(
                f"it is {OF_THIS_PROCESS[target._schema.name]}, of which a program has a number"
            )
        text = str(target)
        return text if text.startswith("aten.") else f"torch.ops.{text}"
    module, name = getattr(target, "__module__", "") or "", getattr(target, "__name__", "")
    if module in ("_operator", "operator", "math") and name:
        return f"{module.lstrip('_')}.{name}"
    if module == "torch" and getattr(torch, name, None) is target:
        return f"torch.{name}"
    if callable(target) and getattr(torch, name, None) is target:
        return f"torch.{name}"
    raise Unprintable(f"it is {name or type(target).__name__}, which is no op of PyTorch")


def fold(indent: int, head: str, items: list[str], tail: str, comment: str = "") -> list[str]:
    """A line, or several where it would be longer than `WIDTH`; the comment stands at the end."""
    space, note = " " * indent, f"  # {comment}" if comment else ""
    if items and len(space + head) > WIDTH and " = " in head:
        name, rest = head.split(" = ", 1)
        if len(f"{space}{name} = (") > WIDTH:  # many names
            names = [f"{space}(", *pack(name.split(", "), indent + 4)]
            return [*names, *fold(indent, f") = {rest}", items, tail, comment)]
        return [f"{space}{name} = (", *fold(indent + 4, rest, items, tail, comment), f"{space})"]
    line = f"{space}{head}{', '.join(items)}{tail}"
    if len(line + note) <= WIDTH:
        return [line + note]
    if len(line) <= WIDTH or not items:
        above = textwrap.wrap(comment, WIDTH - indent - 2, break_long_words=False) if comment else []
        return [*(f"{space}# {part}" for part in above), line]
    body = pack(items, indent + 4)
    return [f"{space}{head}", *body, *_closing(space, tail, note, comment)]


def _closing(space: str, tail: str, note: str, comment: str) -> list[str]:
    line = f"{space}{tail}{note}"
    return [line] if len(line) <= WIDTH else [f"{space}{tail}", remark(len(space), comment)]


def pack(items: list[str], indent: int) -> list[str]:
    """Items with commas, as many in a line as fit."""
    lines, current = [], ""
    for item in items:
        if current and indent + len(current) + len(item) + 2 > WIDTH:
            lines.append(" " * indent + current)
            current = ""
        current += f"{' ' if current else ''}{item},"
    return [*lines, " " * indent + current] if current else lines


def listed(items: list[str]) -> list[str]:
    """The items of a list as arguments that may stand on several lines."""
    if len(items) < 2:
        return [f"[{''.join(items)}]"]
    return [f"[{items[0]}", *items[1:-1], f"{items[-1]}]"]


def remark(indent: int, text: str) -> str:
    """A comment of one line, cut where it would be longer than `WIDTH`."""
    line = f"{' ' * indent}# {text}".rstrip()
    return line if len(line) <= WIDTH else line[: WIDTH - 4].rstrip() + " ..."


def place(node: Node) -> str:
    """`modeling.py:123: code` of the line of the model that made a node, or "" if unknown."""
    if not node.meta.get("stack_trace"):
        return ""
    line = source_line(node)
    file, _, rest = line.partition(".py:")
    return f"{os.path.basename(file)}.py:{rest}" if rest else line
