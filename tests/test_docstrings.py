"""The check of docstrings finds what is missing, and asks for no more than it should."""

import ast
import textwrap

import pytest
from docstrings import Code, problems


def found(source, exported=()):
    """Name of each place in a module to the kinds of rules that it breaks."""
    first = ast.parse(f"__all__ = {list(exported)}")
    code = Code({"streambp_fx/__init__.py": first, "streambp_fx/a.py": ast.parse(textwrap.dedent(source))})
    return {p.node.name: {k for k, wrong in problems(p).items() if wrong} for p in code.places()}


def of_function(signature, doc="", body="pass", exported=()):
    text = f'"""{textwrap.dedent(doc)}"""' if doc else "..."
    return found(f"def f({signature}:\n" + textwrap.indent(f"{text}\n{body}", "    "), exported)["f"]


def test_public_names_have_a_docstring():
    source = """
        class A:
            def f(self): ...
            def _g(self): ...
            def __len__(self): ...
            @property
            def p(self): ...
            @p.setter
            def p(self, value): ...
        class _B:
            def h(self): ...
        def k():
            def inner(): ...
    """
    assert found(source) == {name: {"docstring"} for name in "Afpk"}


@pytest.mark.parametrize(
    ("signature", "doc", "wrong"),
    [
        ("x: Tensor)", "Twice that.", {"tensors"}),
        ("x: Tensor)", "Twice that (the sum, say).", {"tensors"}),
        ("x: Tensor)", "Twice x, (batch, T, hidden).", set()),
        ("x: Tensor)", "Twice x, (B, H or fewer, n).", set()),
        ("x: Tensor)", "Twice x, of any shape and dtype.", set()),
        ("x: list[torch.Tensor] | None)", "Twice that.", {"tensors"}),
        ("x: Callable[[Tensor], Tensor])", "Twice that.", set()),
        (") -> int", "What is held.", {"units"}),
        (") -> float | None", "What is held.", {"units"}),
        (") -> int", "What is held, in bytes.", set()),
        (") -> str", "What is held.", set()),
    ],
)
def test_tensors_and_numbers(signature, doc, wrong):
    assert of_function(signature, doc) == wrong


@pytest.mark.parametrize(
    ("body", "named", "wrong"),
    [
        ("raise PlanError(1)", "", {"errors"}),
        ("raise PlanError(1)", "PlanError: a reason.", set()),
        ("raise PlanError(1)", "ValueError: a reason.", {"errors"}),
        ("raise errors.PlanError", "", {"errors"}),
        ("try:\n    g()\nexcept KeyError as e:\n    raise PlanError(1) from e", "", {"errors"}),
        ("try:\n    raise Stop\nexcept Stop:\n    pass", "", set()),
        ("try:\n    g()\nexcept KeyError:\n    raise", "", set()),
        ("error = g()\nraise error", "", set()),
        ("raise NotImplementedError", "", set()),
        ("def inner():\n    raise PlanError(1)", "", set()),
    ],
)
def test_errors(body, named, wrong):
    doc = f"Does it.\n\nRaises:\n    {named}\n" if named else "Does it, or raises PlanError."
    assert of_function(")", textwrap.indent(doc, "    ").lstrip(), body) == wrong


def test_arguments_are_described_to_users():
    doc = "Does it.\n\n    Args:\n        a: one.\n    "
    assert of_function("a, b)", doc, exported=["f"]) == {"arguments"}
    assert of_function("a, b)", doc) == set()
    assert of_function("a, b)", doc.replace("a: one", "a, b: both"), exported=["f"]) == set()
    assert of_function("a)", "Does it.", exported=["f"]) == set()


def test_one_line_is_enough_where_the_rest_is_known():
    source = '''
        @rule(op)
        def of_an_op(x: Tensor) -> Tensor:
            """Keeps rows apart."""
            raise NotSeparable("")

        class Base:
            """A base."""
            def run(self, x: Tensor) -> Tensor:
                """Of any shape."""

        class Derived(Base):
            """Derived."""
            def run(self, x: Tensor) -> Tensor:
                """As the base."""

        class Function(torch.autograd.Function):
            """Of autograd."""
            def backward(ctx, gradient: Tensor) -> Tensor:
                """The gradient."""
            def other(ctx, gradient: Tensor) -> Tensor:
                """The gradient."""

        class Held:
            """Something."""
            @property
            def value(self) -> Tensor:
                """What is held."""
    '''
    wrong = {name: kinds for name, kinds in found(source).items() if kinds}
    assert wrong == {"other": {"tensors"}}


def test_the_repository_is_read():
    """Passes are read once, and the names that users import are known."""
    code = Code.of_repository()
    assert "passes/graph/facts.py" in code.trees and "streambp_fx/plan.py" in code.trees
    assert not any(path.startswith("streambp_fx/passes") for path in code.trees)
    assert {"transform", "Options"} <= code.exported
    names = [p.node.name for p in code.places() if p.exported]
    assert {"transform", "Options", "as_dict"} <= set(names)
