"""The instructions of a training step: what they are, and that broken ones are rejected."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from golden import check_golden
from graphs import facts_of
from torch import Tensor, nn

from streambp_fx.passes.graph.facts import Facts
from streambp_fx.passes.s3_cut.policy import Policy
from streambp_fx.passes.s6_schedule.build import schedule
from streambp_fx.passes.s6_schedule.checker import UnsoundStep, check_step
from streambp_fx.passes.s6_schedule.offloading import moved
from streambp_fx.passes.s6_schedule.program import (
    Add,
    Again,
    Call,
    Drop,
    Fetch,
    Group,
    Layers,
    Leave,
    StepInstruction,
    StepProgram,
    unrolled,
)
from streambp_fx.passes.s6_schedule.program.values import Value
from streambp_fx.passes.s6_schedule.step_parts import Making, StepParts
from streambp_fx.passes.s6_schedule.text import step_text, step_to_json
from streambp_fx.passes.s6_schedule.transforms import (
    drop_what_nobody_reads,
    fold_layers,
    keep_inputs_of_groups,
    transformed,
)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, v = self.query(x)[:, None], self.value(x)[:, None]
        return x + F.scaled_dot_product_attention(q, q, v, is_causal=True)[:, 0]


class Model(nn.Module):
    """Layers that attend, a head and a loss.

    Args:
        count: of layers.
        tied: the head's weight is the embedding's.
        linear: the loss is linear in its rows.
        whole: a part that must run whole lies before the layers.
        logits: they are returned as well.
        shifted: a row's label is the next token.
        shown: what the layers are given is returned as well.
    """

    def __init__(
        self,
        count: int = 5,
        tied: bool = False,
        linear: bool = True,
        whole: bool = False,
        logits: bool = False,
        shifted: bool = False,
        shown: bool = False,
    ) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(count))
        self.linear, self.whole, self.logits, self.shifted = linear, whole, logits, shifted
        self.shown = shown
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.embed(ids)
        x = x - x.mean(1, keepdim=True) if self.whole else x
        given = x
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        rows, labels = (logits[:, :-1], ids[:, 1:]) if self.shifted else (logits, ids)
        loss = F.cross_entropy(rows.flatten(0, 1), labels.flatten(), reduction="none")
        loss = loss.mean() if self.linear else loss.mean().sigmoid()
        if self.shown:
            return loss, given
        return (loss, logits) if self.logits else loss


@functools.cache
def facts(**kwargs: bool | int) -> Facts:
    torch.manual_seed(0)
    logits = "lazy" if kwargs.get("logits") else "keep"
    return facts_of(Model(**kwargs), torch.randint(0, 11, (2, 13)), logits=logits)  # type: ignore[arg-type]


def parts(policy: Policy | None = None, **kwargs: bool | int) -> StepParts:
    making = Making("eager", policy or Policy(), "float32", bool(kwargs.get("logits")))
    return StepParts(facts(**kwargs), making, {})


STEPS: dict[str, Callable[[], StepParts]] = {
    "plain": lambda: parts(),
    "tied": lambda: parts(tied=True),
    "two sweeps": lambda: parts(linear=False),
    "whole part": lambda: parts(whole=True, shifted=True, count=2),
    "lazy logits": lambda: parts(logits=True, count=2),
    "kept attention": lambda: parts(Policy("attention"), count=2),
    "every second": lambda: parts(Policy(every=2)),
    "on disk": lambda: parts(Policy(offload="disk")),
    "chunks first": lambda: parts(Policy(order="chunks"), count=2),
    "chunks first and tied": lambda: parts(Policy(order="chunks"), tied=True),
    "all of it": lambda: parts(Policy("attention", 2, "disk"), tied=True),
}


def program(name: str, left_out: bool = False) -> StepProgram:
    own = STEPS[name]()
    return transformed(schedule(own), own, left_out)


@pytest.mark.parametrize("name", STEPS)
def test_text(name: str) -> None:
    found = program(name)
    check_golden(step_text(found, procedures=False), __file__, f"step_{name.replace(' ', '_')}")


def test_a_forward_alone_keeps_nothing() -> None:
    own = STEPS["plain"]()
    found = transformed(schedule(own, training=False), own)
    assert not found.backward and not found.gradients
    dropped = {v for i in found.instructions() if isinstance(i, Drop) for v in i.inputs}
    made = {v for i in found.instructions() for v in i.results}
    assert made - set(found.returned) <= dropped


def test_layers_are_a_loop() -> None:
    """A deeper model has a longer loop, and not a longer text."""
    short, deep = (step_text(transformed(schedule(own), own)) for own in (parts(count=5), parts(count=11)))
    assert len(deep.splitlines()) == len(short.splitlines())
    assert "for each of 10 layers" in deep and "for each of 4 layers" in short


def test_json() -> None:
    found = json.loads(json.dumps(step_to_json(program("all of it"))))
    kinds = {i["instruction"] for i in found["forward"]}
    assert {"Group", "Leave", "CallLoss", "Return"} <= kinds
    called = {i["procedure"] for i in _all(found["forward"] + found["backward"]) if "procedure" in i}
    assert called == set(found["procedures"])
    backward = [i for i in _all(found["backward"]) if "procedure" in i]
    assert all({"segment", "way", "place"} <= set(i) for i in backward)
    assert any(i["way"]["saves"] for i in backward) and any(i["way"]["overwrites"] for i in backward)
    assert all(
        i["chunks"].startswith("ceiling(") for i in backward if not i["procedure"].startswith("scaling")
    )


def _all(body: list[dict]) -> Iterator[dict]:
    for i in body:
        yield i
        for inner in (i.get("body", []), *i.get("rounds", [])):
            yield from _all(inner)


# ---- transformations


def test_a_tied_weight_is_handed_over_once() -> None:
    found = program("tied")
    names = [v.node for v in found.gradients]
    assert len(names) == len(set(names)) == len(list(Model(tied=True).parameters()))
    text = step_text(found, procedures=False)
    assert text.count("begins") == 1 and text.count("add ") == 1
    tied = next(v.node for i in found.instructions() if isinstance(i, Add) for v in i.results)
    assert "to grad_embed.weight\n" in step_text(found, {tied: "embed.weight"}, procedures=False)


def test_groups_run_again_what_they_do_not_keep() -> None:
    own = STEPS["every second"]()
    before = schedule(own)
    after = keep_inputs_of_groups(before, own)
    grouped = [i for i in after.forward if isinstance(i, Group)]
    again = [i for i in after.backward if isinstance(i, Again)]
    assert [len(g.body) for g in grouped] == [3, 2] and [len(a.body) for a in again] == [1, 2]
    assert [c.segment for a in again for c in a.body] == [3, 0, 1]
    assert len(list(after.instructions())) == len(list(before.instructions())) + 3


@pytest.mark.parametrize(("every", "count"), [(1, 0), (2, 2)])
def test_what_is_returned_is_not_made_again(every: int, count: int) -> None:
    own = parts(Policy(every=every), shown=True)
    found = transformed(schedule(own), own)
    again = [c.segment for a in unrolled(found.backward) if isinstance(a, Again) for c in a.body]
    assert again == [3, 1][:count]  # the embedding, segment 0, is returned


def test_what_is_kept_leaves_and_comes_back() -> None:
    found = program("on disk")
    left = [v for i in unrolled(found.forward) if isinstance(i, Leave) for v in i.inputs]
    fetched = [v for i in unrolled(found.backward) if isinstance(i, Fetch) for v in i.inputs]
    assert len(left) == len(set(left)) == len(fetched) and set(left) == set(fetched) == set(moved(found))


def test_rows_are_left_out_of_every_call() -> None:
    assert all(c.way.left_out for c in program("all of it", left_out=True).calls())
    assert not any(c.way.left_out for c in program("all of it").calls())


def test_loops_change_nothing() -> None:
    own = STEPS["on disk"]()
    flat = drop_what_nobody_reads(keep_inputs_of_groups(schedule(own), own))
    assert list(fold_layers(flat).instructions()) == list(flat.instructions())
    assert any(isinstance(i, Layers) for i in fold_layers(flat).forward)


# ---- broken programs

Body = tuple[StepInstruction, ...]


def changed(body: Body, change: Callable[[Body, int], Body | None]) -> Iterator[tuple[str, Body]]:
    """A body changed at each instruction, those within loops and groups among them."""
    for k, instruction in enumerate(body):
        new = change(body, k)
        if new is not None:
            yield f"{k} {type(instruction).__name__}", new
        if isinstance(instruction, Layers):
            for r, own in enumerate(instruction.rounds):
                for words, inner in changed(own, change):
                    rounds = (*instruction.rounds[:r], inner, *instruction.rounds[r + 1 :])
                    yield f"{k} round {r} {words}", _replaced(body, k, rounds=rounds)
        elif isinstance(instruction, Group | Again):
            for words, inner in changed(instruction.body, change):
                yield f"{k} {words}", _replaced(body, k, body=inner)


def _replaced(of: Body, k: int, **kwargs: object) -> Body:
    return (*of[:k], dataclasses.replace(of[k], **kwargs), *of[k + 1 :])  # type: ignore[arg-type]


def dropped(body: Body, k: int) -> Body:
    return (*body[:k], *body[k + 1 :])


def doubled(body: Body, k: int) -> Body:
    return (*body[: k + 1], *body[k:])


def moved_on(body: Body, k: int) -> Body | None:
    """Past the next instruction, if the two have to do with each other."""
    if k + 1 == len(body):
        return None
    one, two = body[k], body[k + 1]
    both = {*_ends(one)} & {*two.inputs, *two.results} | {*_ends(two)} & {*one.inputs, *one.results}
    return (*body[:k], two, one, *body[k + 2 :]) if both else None


def _ends(instruction: StepInstruction) -> tuple[Value, ...]:
    """Values of which something is changed."""
    moves = isinstance(instruction, Drop | Leave | Fetch)
    return (*instruction.results, *instruction.consumed, *(instruction.inputs if moves else ()))


@pytest.mark.parametrize("change", [dropped, doubled, moved_on])
@pytest.mark.parametrize("name", STEPS)
def test_broken_steps_are_rejected(name: str, change: Callable[[Body, int], Body | None]) -> None:
    found, tried = program(name), 0
    for part in ("prologue", "forward", "backward"):
        for words, body in changed(getattr(found, part), change):
            broken = dataclasses.replace(found, **{part: body})
            tried += 1
            with pytest.raises(UnsoundStep) as error:
                check_step(broken)
                pytest.fail(f"{change.__name__} in {part}, {words}, is not noticed")
            assert error.value.instruction is not None and "at `" in str(error.value)
    assert tried >= 5


def _calls(found: StepProgram, name: str) -> list[Call]:
    return [c for c in found.calls() if c.procedure_name == name]


def test_a_value_that_was_written_over_is_not_read() -> None:
    found = program("plain")
    (loss,) = _calls(found, "loss")
    (taken,) = loss.way.overwrites
    written = loss.bindings()[taken]
    late = dataclasses.replace(found.forward[-1], inputs=(*found.forward[-1].inputs, written))
    place = next(k for k, i in enumerate(found.forward) if i is loss)
    forward = (*found.forward[: place + 1], late, *found.forward[place + 1 : -1])
    with pytest.raises(UnsoundStep, match="was written over"):
        check_step(dataclasses.replace(found, forward=forward))


def test_operands_must_fit_the_procedure() -> None:
    found = program("whole part")
    call = next(i for i in found.forward if isinstance(i, Call))
    swapped = dataclasses.replace(call, inputs=(call.inputs[1], call.inputs[0], *call.inputs[2:]))
    forward = tuple(swapped if i is call else i for i in found.forward)
    with pytest.raises(UnsoundStep, match="stands where the procedure has"):
        check_step(dataclasses.replace(found, forward=forward))
