"""Forms of expressions that the loops of models have."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence

from .names import assigned, before, loads, names_in, read_first, stores
from .places import is_all

# Functions of `torch` that make a tensor that nobody else knows of.
NEW = {"zeros", "ones", "empty", "full"}
FRESH = {*NEW, *(f"{n}_like" for n in NEW)}
JOINS = {"stack", "cat", "concat"}


def is_join(node: ast.AST, lists: Sequence[ast.Name]) -> bool:
    """True for `torch.stack(name, ...)` and `torch.cat(name, ...)`, where a list is read that is given."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
        return False
    if len(node.args) + len(node.keywords) > 2 or any(k.arg != "dim" for k in node.keywords):
        return False
    module = node.func.value
    is_torch = isinstance(module, ast.Name) and module.id == "torch" and node.func.attr in JOINS
    return is_torch and any(node.args[0] is n for n in lists)


def is_fresh(value: ast.expr) -> bool:
    """True for `torch.zeros(...)`, `torch.zeros_like(...)`, `x.new_zeros(...)` and their like."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return False
    if any(k.arg not in ("dtype", "device") for k in value.keywords):
        return False
    if isinstance(value.func.value, ast.Name) and value.func.value.id == "torch":
        return value.func.attr in FRESH
    return value.func.attr in {f"new_{n}" for n in NEW}


def is_identity(node: ast.Compare) -> bool:
    """True for `is` and `is not`, but with None."""
    by_identity = any(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops)
    operands = (node.left, *node.comparators)
    return by_identity and not any(isinstance(x, ast.Constant) and x.value is None for x in operands)


def assigned_names(tree: ast.FunctionDef) -> set[str]:
    """What a function assigns, and what it takes."""
    parameters = {a.arg for a in ast.walk(tree.args) if isinstance(a, ast.arg)}
    return stores(tree) | parameters


def read_for_facts(tree: ast.AST) -> Iterator[ast.expr]:
    """Variables that are read for the dtype, the device or the shape of their tensor."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("dtype", "device", "shape"):
            yield node.value


def is_container(value: ast.expr) -> bool:
    """True for what makes a new list or dict: `[a, b]`, `[a for ...]`, `[a] * n`, `list(...)`, `{"h": a}`."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
        return is_container(value.left)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return value.func.id in ("list", "dict")
    return isinstance(value, (ast.List, ast.ListComp, ast.Dict, ast.DictComp))


def containers_of(tree: ast.FunctionDef, loop: ast.For) -> set[str]:
    """Lists and dicts of which a loop assigns entries, `states[i] = state`, and that nobody else knows of.

    They are made right before the loop, or within it for each row; and the loop takes and assigns entries,
    goes over them, and does nothing else with them. So that they are others for each row shows in nothing.
    """
    subscripts = [n for s in loop.body for n in ast.walk(s) if isinstance(n, ast.Subscript)]
    entries = [n.value for n in subscripts if isinstance(n.ctx, ast.Store)]
    names = {n.id for n in entries if isinstance(n, ast.Name)} | _own_containers(loop)
    kept = names - {n for s in loop.body for n in stores(s)}
    given = {n for n in kept if _is_entered(n, loop) and is_made_before(n, tree, loop, is_container)}
    return given | {n for n in names if _is_own(n, loop)}


def _own_containers(loop: ast.For) -> set[str]:
    """Variables to which a loop assigns new containers, and nothing else."""
    return {n for s in loop.body for n in stores(s) if _is_own(n, loop)}


def _is_own(name: str, loop: ast.For) -> bool:
    statements = [n for s in loop.body for n in ast.walk(s) if isinstance(n, ast.stmt)]
    made = [assigned(name, s) for s in statements if name in _targets(s)]
    is_made = bool(made) and all(m is not None and is_container(m) for m in made)
    return is_made and name not in read_first(loop.body, stores(loop.target))[0]


def _targets(statement: ast.stmt) -> set[str]:
    """What a statement itself assigns."""
    if isinstance(statement, (ast.If, ast.While)):
        return set()
    return stores(statement.target) if isinstance(statement, ast.For) else stores(statement)


def is_made_before(
    name: str, tree: ast.FunctionDef, loop: ast.For, is_made: Callable[[ast.expr], bool]
) -> bool:
    """True for what is made before a loop, in the same block, and is not read until then."""
    if name in loads(loop.iter):
        return False
    facts = {id(n) for n in read_for_facts(tree)}
    earlier = before(tree.body, loop) or []
    place = next((k for k, s in enumerate(earlier) if name in stores(s)), None)
    made = None if place is None else assigned(name, earlier[place])
    read = [n for n in names_in(earlier[:place]) if n.id == name and id(n) not in facts]
    return made is not None and is_made(made) and not read


def _is_entered(name: str, loop: ast.For) -> bool:
    """All that a loop does with a container is to take or assign entries, add to it, or go over them."""
    known: set[int] = set()
    for node in (n for s in loop.body for n in ast.walk(s)):
        if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Slice):
            known.add(id(node.value))
        elif isinstance(node, ast.For):
            known.add(id(node.iter))
        elif isinstance(node, ast.Attribute) and node.attr in ("append", "items", "values"):
            known.add(id(node.value))
        elif isinstance(node, ast.Call) and _reads_entries(node.func):
            known |= {id(a) for a in node.args}
    read = [n for s in loop.body for n in names_in([s]) if n.id == name and isinstance(n.ctx, ast.Load)]
    return all(id(n) in known for n in read)


def _reads_entries(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id in ("zip", "enumerate", "len", "reversed", "tuple")
    module = function.value if isinstance(function, ast.Attribute) else None
    is_torch = isinstance(module, ast.Name) and module.id == "torch"
    return is_torch and isinstance(function, ast.Attribute) and function.attr in JOINS


# Methods that change a tensor, of which there is a function with the same arguments.
CHANGES = {
    *("abs_", "add_", "addcdiv_", "addcmul_", "addmm_", "baddbmm_", "clamp_", "clamp_max_", "clamp_min_"),
    *("div_", "exp_", "lerp_", "masked_fill_", "mul_", "neg_", "pow_", "relu_", "sigmoid_", "sqrt_", "sub_"),
    *("subtract_", "multiply_", "divide_", "tanh_"),
}


def changed_by(statement: ast.stmt) -> str | None:
    """The tensor's variable if a statement changes one: `h.mul_(a).add_(b)`, `h[...] = a`; None of others."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        if not isinstance(target, ast.Subscript) or not isinstance(target.value, ast.Name):
            return None
        entries = target.slice.elts if isinstance(target.slice, ast.Tuple) else [target.slice]
        return target.value.id if all(map(is_all, entries)) else None
    node = statement.value if isinstance(statement, ast.Expr) else None
    calls = []
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
        calls.append(node)
        node = node.func.value
    if not calls or not isinstance(node, ast.Name):
        return None
    later = [a for call in calls[:-1] for a in (*call.args, *call.keywords)]
    return None if node.id in {n.id for n in names_in(later)} else node.id


def as_assignment(statement: ast.stmt, name: str, module: str) -> ast.stmt:
    """`h = module.changed("mul", h, a)` for a statement that changes `name`, see `scanning.changed`."""

    def call(method: str, *given: ast.expr, keywords: Sequence[ast.keyword] = ()) -> ast.expr:
        function = ast.Attribute(ast.Name(module, ast.Load()), "changed", ast.Load())
        return ast.Call(function, [ast.Constant(method), *given], list(keywords))

    def function_of(node: ast.expr) -> ast.expr:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return ast.Name(name, ast.Load())
        method = node.func.attr.removesuffix("_")
        return call(method, function_of(node.func.value), *node.args, keywords=node.keywords)

    assert isinstance(statement, (ast.Expr, ast.Assign))
    of = statement.value
    made = (
        function_of(of) if isinstance(statement, ast.Expr) else call("copy", ast.Name(name, ast.Load()), of)
    )
    new = ast.Assign([ast.Name(name, ast.Store())], made)
    return ast.fix_missing_locations(ast.copy_location(new, statement))


def added(target: ast.expr, op: ast.operator, value: ast.expr, module: str) -> ast.expr:
    """`module.added(a, a + b)` for `a += b`, see `scanning.added`."""
    function = ast.Attribute(ast.Name(module, ast.Load()), "added", ast.Load())
    return ast.Call(function, [target, ast.BinOp(target, op, value)], [])
