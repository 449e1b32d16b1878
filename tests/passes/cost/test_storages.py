"""Where the values of a program lie: views, changes in place, results of several tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import Node

from streambp_fx.passes.cost.storages import Storages
from streambp_fx.passes.graph.tracing import trace

aten = torch.ops.aten


def storages(function: Callable[..., object], *shapes: tuple[int, ...]) -> Storages:
    with FakeTensorMode() as mode:
        inputs = [mode.from_tensor(torch.empty(s)) for s in shapes]
        return Storages(trace(function, *inputs).graph)


def by_op(found: Storages, name: str) -> Node:
    return next(n for n in found.nodes if str(n.target).startswith(f"aten.{name}"))


def test_views_lie_in_the_memory_of_their_base() -> None:
    def program(x: Tensor) -> list[Tensor]:
        made = x * 2
        first, second = made.view(6).split(3)
        return [first + 1, second]

    found = storages(program, (2, 3))
    made, split = by_op(found, "mul"), by_op(found, "split")
    assert found.of[split] == found.of[made] * 2 and found.is_view(split) and not found.is_view(made)
    (key,) = found.of[made]
    assert found.maker(key) is made and found.is_inside(key)
    assert found.last(key) == len(found.nodes) - 1, "the second half is returned"
    assert not found.is_inside(*found.of[found.nodes[0]])


def test_a_change_in_place_and_views_of_it() -> None:
    def program(x: Tensor, y: Tensor) -> list[Tensor]:
        made = x * 2
        return [(made + y).view(6).sin()]

    found = storages(program, (2, 3), (2, 3))
    add = by_op(found, "add")
    add.target = aten.add_.Tensor  # as `write_in_place` does; the view was traced of a tensor of its own
    found = Storages(add.graph)
    mul, view, sin = (by_op(found, n) for n in ("mul", "view", "sin"))
    assert found.of[mul] == found.of[add] == found.of[view]
    assert found.changes == {found.of[mul][0]: add}
    assert found.number(view.meta["val"]) == found.of[mul][0]
    assert found.ends(view, sin) and not found.ends(mul, add)


def test_an_op_that_writes_over_another_operand_than_its_first() -> None:
    def program(x: Tensor, y: Tensor) -> list[Tensor]:
        kept, place = x * 2, y * 3
        torch.sub(kept, y, out=place)
        return [place.sin(), kept]

    found = storages(program, (2, 3), (2, 3))
    place = found.nodes[found.position[by_op(found, "sub")] - 1]
    assert found.changes == {found.of[place][0]: by_op(found, "sub")}
    assert found.of[by_op(found, "sub")] == found.of[place] != found.of[by_op(found, "mul")]


def test_who_is_the_last_to_read() -> None:
    def program(x: Tensor) -> list[Tensor]:
        a = x * 2
        b = a + a
        c, d = b.max(1)
        return [c.sin(), c.cos() + d, b * 2]

    found = storages(program, (2, 3))
    a, b, c = by_op(found, "mul"), by_op(found, "add"), by_op(found, "max")
    assert not found.ends(a, b), "it reads it twice"
    assert not found.ends(b, c), "it is read again"
    getitem = next(n for n in c.users)
    assert not found.ends(getitem, by_op(found, "cos")), "its op makes another storage as well"
    found.take(a, b)
    assert found.of[b] == found.of[a] and found.last(found.of[a][0]) == len(found.nodes) - 2
    found.ignore_readings_of([found.nodes[-2]])
    assert found.last(found.of[a][0]) == found.position[c]


def test_bytes_that_are_alive() -> None:
    def program(x: Tensor) -> list[Tensor]:
        return [((x * 2).sum(1) + 1).sin()]

    found = storages(program, (4, 3))
    sizes = {k: v.untyped_storage().nbytes() for k, v in found.first.items()}
    sizes[found.of[found.nodes[0]][0]] = 0
    assert list(found.alive(sizes, 0)) == [0, 48, 64, 32, 32, 16]
