"""The instructions of a segment's step: what they are, and that broken ones are rejected."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from golden import check_golden
from graphs import OneLayer, facts_of
from torch import Tensor, nn

from streambp_fx.passes.s5_lower.programs import SegmentPrograms
from streambp_fx.passes.step.checker import UnsoundProcedure, check
from streambp_fx.passes.step.instructions import (
    Allocate,
    Buffer,
    BufferKind,
    Chunks,
    Free,
    Instruction,
    Overwrite,
    Run,
)
from streambp_fx.passes.step.procedure import Procedure
from streambp_fx.passes.step.saving import ATTENTION, Piece, Price, everywhere
from streambp_fx.passes.step.text import text, to_json
from streambp_fx.passes.step.way import Way


class WithLoss(nn.Module):
    """A model of one layer and its loss."""

    def __init__(self, model: OneLayer) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def causal(model: OneLayer, x: Tensor) -> Tensor:
    q, k, v = model.heads(x)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def of_all_rows(model: OneLayer, x: Tensor) -> Tensor:
    q, k, v = model.heads(x)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@functools.cache
def programs(body: Callable[[OneLayer, Tensor], Tensor], position: int) -> SegmentPrograms:
    torch.manual_seed(0)
    facts = facts_of(WithLoss(OneLayer(body)), torch.randint(0, 11, (2, 13)))
    return SegmentPrograms(facts, facts.segments[position])


def head() -> SegmentPrograms:
    return programs(causal, -1)


def procedures() -> dict[str, Procedure]:
    """Those of a layer, of one whose rows read all rows, of one that saves its attention, and of a head."""
    layer, full = programs(causal, 1), programs(of_all_rows, 1)
    saves = Way(saves=everywhere(ATTENTION))
    pieces = (Piece(Fraction(3, 8), None), Piece(Fraction(5, 8), ATTENTION), Piece(Fraction(1), Price(64, 0)))
    output = Buffer(BufferKind.COTANGENT, layer.diff_outputs[0])
    rows = frozenset(Buffer(BufferKind.ROWS, n) for n in head().diff_rows)
    over, padded = Way(overwrites=frozenset({output})), Way(left_out=True)
    loss = Way(overwrites=rows)
    return {
        "forward": layer.procedure("forward", Way()),
        "backward": layer.procedure("backward", Way()),
        "backward, overwriting": layer.procedure("backward", over),
        "forward, padded": layer.procedure("forward", padded),
        "forward of all rows": full.procedure("forward", Way(full=True)),
        "backward of all rows": full.procedure("backward", Way(full=True)),
        "forward that keeps": layer.procedure("forward", saves),
        "backward of what is kept": layer.procedure("backward", saves),
        "forward in pieces": layer.procedure("forward", Way(saves=pieces)),
        "backward in pieces": layer.procedure("backward", Way(saves=pieces)),
        "loss": head().procedure("loss", Way()),
        "loss, overwriting": head().procedure("loss", loss),
        "loss in float16": head().procedure("loss", Way(half=True)),
        "scaling": head().procedure("scaling", Way()),
    }


NAMES = (
    "forward", "backward", "backward, overwriting", "forward, padded", "forward of all rows",
    "backward of all rows", "forward that keeps", "backward of what is kept", "forward in pieces",
    "backward in pieces", "loss", "loss, overwriting", "loss in float16", "scaling",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_text(name: str) -> None:
    procedure = procedures()[name]
    check(procedure)
    check_golden(text(procedure), __file__, f"procedure_{name.replace(', ', '_').replace(' ', '_')}")


@pytest.mark.parametrize("name", NAMES)
def test_json(name: str) -> None:
    procedure = procedures()[name]
    found = json.loads(json.dumps(to_json(procedure)))
    held = {*found["parameters"], *(i["buffer"] for i in found["body"] if "buffer" in i)}
    read = [b for i in found["body"] for inner in i.get("body", ()) for b in inner.get("inputs", ())]
    assert read or name == "scaling"
    assert set(read) <= held and held | {"saved"} == set(found["buffers"]) | {"saved"}


Body = tuple[Instruction, ...]


def changed(body: Body, change: Callable[[Body, int], Body]) -> Iterator[tuple[str, Body]]:
    """A body changed at each instruction, those within loops among them."""
    for k, instruction in enumerate(body):
        yield f"{k}: {type(instruction).__name__}", change(body, k)
        if isinstance(instruction, Chunks):
            for words, inner in changed(instruction.body, change):
                loop = dataclasses.replace(instruction, body=inner)
                yield f"{k} {words}", (*body[:k], loop, *body[k + 1 :])


def dropped(body: Body, k: int) -> Body:
    return (*body[:k], *body[k + 1 :])


def doubled(body: Body, k: int) -> Body:
    return (*body[: k + 1], *body[k:])


@pytest.mark.parametrize("change", [dropped, doubled])
@pytest.mark.parametrize("name", NAMES)
def test_a_procedure_with_an_instruction_less_or_more_is_rejected(
    name: str, change: Callable[[Body, int], Body]
) -> None:
    procedure = procedures()[name]
    found = list(changed(procedure.body, change))
    assert found
    for words, body in found:
        with pytest.raises(UnsoundProcedure, match=f"procedure {procedure.name}, at `") as raised:
            check(dataclasses.replace(procedure, body=body))
        assert raised.value.instruction is not None, words


def moved_to(place: str) -> Callable[[Body, int], Body]:
    def change(body: Body, k: int) -> Body:
        rest = (*body[:k], *body[k + 1 :])
        return (body[k], *rest) if place == "front" else (*rest, body[k])

    return change


def depends(body: Body, k: int, place: str) -> bool:
    """True if an instruction that is moved passes one that reads or frees what it makes, or the other way."""
    passed = body[:k] if place == "front" else body[k + 1 :]
    own = touched(body[k])
    return any(own & touched(other) for other in passed)


def touched(instruction: Instruction) -> set[Buffer]:
    """Buffers of an instruction; of an allocation of a sum not its constant, which stays as it is."""
    if isinstance(instruction, Chunks):
        return {b for inner in instruction.body for b in touched(inner)}
    if isinstance(instruction, Run):
        own = {*instruction.results, *instruction.writes, *instruction.adds, *instruction.inputs}
        return {b for b in own if b.kind not in (BufferKind.CONSTANT, BufferKind.WHOLE, BufferKind.ROWS)}
    if isinstance(instruction, Overwrite):
        return {instruction.buffer}
    return {instruction.buffer}


@pytest.mark.parametrize("place", ["front", "back"])
@pytest.mark.parametrize("name", NAMES)
def test_a_procedure_with_an_instruction_in_the_wrong_place_is_rejected(name: str, place: str) -> None:
    """Moved to the front or the back of its loop or procedure, past one that it has to do with."""
    procedure, tried = procedures()[name], 0
    for k in range(len(procedure.body)):
        body = procedure.body
        if depends(body, k, place):
            tried += 1
            with pytest.raises(UnsoundProcedure):
                check(dataclasses.replace(procedure, body=moved_to(place)(body, k)))
    assert tried or name == "scaling" or place == "front"


def only(body: Body, kind: type) -> list[int]:
    return [k for k, i in enumerate(body) if isinstance(i, kind)]


def test_a_causal_backward_runs_in_reverse() -> None:
    backward = procedures()["backward"]
    last = only(backward.body, Chunks)[-1]
    loop = dataclasses.replace(backward.body[last], reverse=False)
    body = (*backward.body[:last], loop, *backward.body[last + 1 :])
    with pytest.raises(UnsoundProcedure, match="later chunks, which add to its rows, must come first"):
        check(dataclasses.replace(backward, body=body))


def test_a_forward_does_not_run_in_reverse() -> None:
    forward = procedures()["forward"]
    (place,) = only(forward.body, Chunks)
    loop = dataclasses.replace(forward.body[place], reverse=True)
    body = (*forward.body[:place], loop, *forward.body[place + 1 :])
    with pytest.raises(UnsoundProcedure, match="in reverse no rows of earlier chunks are there to be read"):
        check(dataclasses.replace(forward, body=body))


def in_pieces(name: str, **over: object) -> Procedure:
    """A procedure whose second loop is another one."""
    procedure = procedures()[name]
    place = only(procedure.body, Chunks)[1]
    loop = dataclasses.replace(procedure.body[place], **over)  # type: ignore[type-var]
    body = (*procedure.body[:place], loop, *procedure.body[place + 1 :])
    return dataclasses.replace(procedure, body=body)


@pytest.mark.parametrize("share", [(3, 4), (2, 5), (3, 6), (4, 5), (5, 3)])
def test_rows_are_neither_left_out_nor_run_twice(share: tuple[int, int]) -> None:
    with pytest.raises(UnsoundProcedure, match="left out, or run twice"):
        check(in_pieces("forward in pieces", share=tuple(Fraction(k, 8) for k in share)))


def test_all_rows_are_run_in_the_same_way() -> None:
    with pytest.raises(UnsoundProcedure, match="not run in the same way"):
        check(in_pieces("forward in pieces", reverse=True))


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_what_is_saved_is_made_and_read(name: str) -> None:
    procedure = procedures()[name]
    place = only(procedure.body, Chunks)[-1]
    run, *others = procedure.body[place].body  # type: ignore[union-attr]
    loop = dataclasses.replace(
        procedure.body[place],  # type: ignore[type-var]
        body=(dataclasses.replace(run, price=ATTENTION), *others),
    )
    body = (*procedure.body[:place], loop, *procedure.body[place + 1 :])
    with pytest.raises(UnsoundProcedure, match="is to be saved"):
        check(dataclasses.replace(procedure, body=body))


def test_a_sum_begins_with_zero() -> None:
    backward = procedures()["backward"]
    body = tuple(
        dataclasses.replace(i, zero=False) if isinstance(i, Allocate) and i.zero else i for i in backward.body
    )
    with pytest.raises(UnsoundProcedure, match="does not begin with zero"):
        check(dataclasses.replace(backward, body=body))


def test_what_belongs_to_the_caller_is_not_freed() -> None:
    forward = procedures()["forward"]
    body = (*forward.body, Free(forward.parameters[0]))
    with pytest.raises(UnsoundProcedure, match="belongs to who has called"):
        check(dataclasses.replace(forward, body=body))
