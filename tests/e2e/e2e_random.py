"""Random small models: blocks, losses, options and situations drawn from a menu of what people write.

One seed: `python tests/e2e/e2e_random.py 17`; the least of it that fails: `python tests/e2e/e2e_random.py 17
shrink`; some of its blocks: `python tests/e2e/e2e_random.py 17 0,2`.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from e2e_adversary import REFUSED, SILENT, our_warnings, outcome, streamed
from e2e_random_menu import LOSSES, MAY_BE_REFUSED, Layer
from e2e_random_plan import Plan, RefusedByEager, entry_of, plan_of
from e2e_subject import VOCAB, WIDTH, Subject, generator_of
from torch import Tensor, nn

import streambp_fx

RTOL = 1e-8
ATTEMPTS = 200


class RandomModel(nn.Module):
    """An embedding, the blocks of a plan with a norm before each, and its loss."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        entries = [entry_of(*b) for b in plan.blocks]
        loss, parts = LOSSES[plan.loss[0]][plan.loss[1]]
        self.layers: list[Layer] = [layer for layer, _ in entries]
        self.loss = loss
        self.units = nn.ModuleList()
        plain: Subject | None = None
        for number, (_, own) in enumerate(entries):
            if number in plan.shared and plain is not None and own is None:
                self.units.append(plain)
                continue
            unit = Subject(parts=own)
            plain = unit if plain is None and own is None else plain
            self.units.append(unit)
        self.last = Subject(parts=parts)
        self.embed = self.last.embed
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in entries])
        generator = generator_of(plan.seed)
        self.double().train()
        with torch.no_grad():
            for p in self.parameters():
                p.add_(0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
        self.prepare(plan)

    def prepare(self, plan: Plan) -> None:
        """Situations that last: frozen, tied and strided parameters, hooks on parameters."""
        choose = random.Random(plan.seed)
        if "frozen" in plan.extras:
            for p in self.parameters():
                p.requires_grad_(choose.random() < 0.7)
            self.last.head.weight.requires_grad_(True)
        if "tied" in plan.extras:
            self.last.head.weight = self.last.embed.weight
        if "strided" in plan.extras:
            for unit in self.units:
                weight = unit.lin.weight
                unit.lin.weight = nn.Parameter(weight.detach().T.clone().T, weight.requires_grad)

    def forward(self, input_ids: Tensor) -> Any:
        x = self.embed(input_ids)
        past = [x]
        for layer, unit, norm in zip(self.layers, self.units, self.norms, strict=True):
            x = layer(unit, norm(x), past, input_ids)
            past.append(x)
        return self.loss(self.last, x, past, input_ids)


def _between(plan: Plan, model: RandomModel, step: int) -> None:
    """Situations that begin with a step."""
    unit = model.units[0]
    if "forward hook" in plan.extras and step == 1:
        unit.lin.register_forward_hook(lambda mod, args, out: out * 1.25)
    if "parameter hook" in plan.extras and step == 0 and model.last.head.weight.requires_grad:
        model.last.head.weight.register_hook(lambda g: g * 2)
    if "gradient hook" in plan.extras and step == 1:
        unit.lin.register_full_backward_hook(
            lambda mod, i, o: tuple(None if g is None else g * 0.5 for g in i)
        )


def _loss(plan: Plan, output: Any) -> Tensor:
    """Some outputs or all of them, as one number."""
    leaves = [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    if not leaves:
        raise RefusedByEager("nothing has a gradient")
    if "picked" in plan.extras:
        leaves = leaves[plan.seed % len(leaves) :][:1]
    parts = [torch.view_as_real(t) if t.is_complex() else t for t in leaves]
    return sum((t * torch.linspace(0.5, 1.5, t.numel(), dtype=t.dtype).view(t.shape)).sum() for t in parts)  # type: ignore[return-value]


Seen = tuple[float, dict[str, Any], dict[str, Tensor]]


def steps(plan: Plan, model: RandomModel, call: Callable[..., Any]) -> Iterator[Seen]:
    """Loss, gradients and state after each step."""
    for number, (batch, length) in enumerate(plan.sizes):
        generator = generator_of(plan.seed + number)
        ids = torch.randint(0, VOCAB, (batch, length), generator=generator)
        model.zero_grad()
        _between(plan, model, number)
        torch.manual_seed(number)
        loss = _loss(plan, call(ids))
        loss.backward()
        found = {n: None if p.grad is None else _plain(p.grad) for n, p in model.named_parameters()}
        if "optimizer" in plan.extras:
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None and not p.grad.is_sparse:
                        p.sub_(p.grad / (1 + p.grad.norm()), alpha=0.01)
        yield float(loss.detach()), found, {n: v.detach().clone() for n, v in model.state_dict().items()}


def _plain(g: Tensor) -> Tensor:
    g = g.to_dense() if g.is_sparse else g
    return (torch.view_as_real(g) if g.is_complex() else g).clone()


def _norm(found: dict[str, Any]) -> float:
    return math.sqrt(sum(float(g.square().sum()) for g in found.values() if g is not None))


def tried(plan: Plan) -> list[Seen]:
    """What eager does.

    Raises:
        RefusedByEager: it is of no use as a test.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            eager = RandomModel(plan)
            seen = list(steps(plan, eager, eager))
    except (RuntimeError, IndexError, ValueError, NotImplementedError) as error:
        raise RefusedByEager(str(error)) from error
    for loss, found, state in seen:
        values = [v for v in state.values() if v.is_floating_point()]
        if not (math.isfinite(loss) and 1e-6 < _norm(found) < 1e6) or not all(
            v.isfinite().all() for v in values
        ):
            raise RefusedByEager(f"loss {loss}, gradients {_norm(found)}")
    return seen


def drawn(seed: int) -> Plan:
    """The first plan of a seed that eager takes."""
    for attempt in range(ATTEMPTS):
        plan = plan_of(seed, attempt)
        try:
            tried(plan)
        except RefusedByEager:
            continue
        return plan
    raise AssertionError(f"seed {seed}: nothing that eager takes in {ATTEMPTS} attempts")


@dataclass
class Outcome:
    """What was streamed of a plan."""

    outcome: str
    chunked: int
    segments: int
    warned: list[str] = field(default_factory=list)


def run(plan: Plan) -> Outcome:
    """Eager and streamed, compared.

    Raises:
        AssertionError: they differ; the message has the plan.
    """
    want = tried(plan)
    torch._dynamo.reset()
    segment = importlib.import_module("streambp_fx.passes.s3_cut.segment")
    before, segment.EXPENSIVE = segment.EXPENSIVE, plan.expensive  # type: ignore[attr-defined]
    model = RandomModel(plan)
    try:
        with our_warnings() as warned:
            call = streamed(model, plan.door, _options(plan))
            if plan.draws:
                _compare_with_itself(plan, model, call)
            else:
                for number, (a, b) in enumerate(zip(steps(plan, model, call), want, strict=True)):
                    _compare(a, b, f"step {number}")
    except Exception as error:
        if isinstance(error, streambp_fx.CaptureError) and _has_no_single_graph(plan):
            return Outcome(REFUSED, 0, 0)
        raise AssertionError(f"{type(error).__name__}: {error}\n{plan}") from error
    finally:
        segment.EXPENSIVE = before  # type: ignore[attr-defined]
    found = outcome(model, warned)
    assert found != SILENT, f"not all is streamed, and no warning\n{plan}"
    segments = segments_of(model)
    return Outcome(found, sum(s.chunked for s in segments), len(segments), warned)


def _has_no_single_graph(plan: Plan) -> bool:
    """True if PyTorch cannot capture the model whole either, as `transform` has to, or does so wrongly."""
    if any(name in MAY_BE_REFUSED for _, name in plan.blocks):
        return True
    torch._dynamo.reset()
    batch, length = plan.sizes[0]
    call = torch.compile(RandomModel(plan), backend="eager", fullgraph=True, dynamic=True)
    try:
        call(torch.zeros(batch, length, dtype=torch.long))
    except (
        torch._dynamo.exc.TorchDynamoException,
        torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode,
    ):
        return True
    return False


def segments_of(model: nn.Module) -> list[Any]:
    schedule = streambp_fx.schedule(model)
    return [] if schedule is None else schedule.segments


def _options(plan: Plan) -> dict[str, Any]:
    """The self-check is off but for every eighth plan: it would hide what is wrong. There it must agree."""
    check = "first" if plan.seed % 8 == 7 else "never"
    return {"check": check, "on_error": "raise", **dict(plan.options)}


def _compare(got: Seen, want: Seen, where: str) -> None:
    assert math.isclose(got[0], want[0], rel_tol=RTOL, abs_tol=1e-11), (
        f"{where}: loss {got[0]}, eager {want[0]}"
    )
    total = _norm(want[1])
    for name, b in want[1].items():
        a = got[1][name]
        assert (a is None) == (b is None), f"{where}: {name}: eager {b is not None}, streamed {a is not None}"
        error = 0.0 if a is None else float((a - b).norm())
        assert error <= RTOL * total, f"{where}: {name}: error {error}, of {total}"
    for name, value in want[2].items():
        same = torch.allclose(got[2][name], value, rtol=RTOL, atol=1e-9 * max(1.0, total))
        assert same, f"{where}: {name} is another after the step"


def _compare_with_itself(plan: Plan, model: RandomModel, call: Callable[..., Any]) -> None:
    """Random ops: the same with the same seed, and a gradient that agrees with a finite difference."""
    twice = [list(steps(plan, model, call)) for _ in range(2)] if not list(model.buffers()) else []
    for a, b in zip(*twice, strict=True) if twice else ():
        assert a[0] == b[0], f"{a[0]} and {b[0]} with one seed"
        _compare(a, b, "once more")
    batch, length = plan.sizes[0]
    ids = torch.randint(0, VOCAB, (batch, length), generator=generator_of(plan.seed))
    parameters = [p for p in model.parameters() if p.requires_grad]

    def loss() -> Tensor:
        torch.manual_seed(5)
        return _loss(plan, call(ids))

    model.zero_grad()
    loss().backward()
    generator = generator_of(3)
    along = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]
    expected = sum(
        float((p.grad * d).sum()) for p, d in zip(parameters, along, strict=True) if p.grad is not None
    )
    sides = []
    for shift in (1e-6, -2e-6):
        with torch.no_grad():
            for p, d in zip(parameters, along, strict=True):
                p.add_(d, alpha=shift)
        sides.append(float(loss().detach()))
    difference = (sides[0] - sides[1]) / 2e-6
    assert abs(difference - expected) <= 1e-4 * max(abs(expected), 1e-2), f"gradient {expected}, {difference}"


def shrunk(plan: Plan, fails: Callable[[Plan], bool]) -> Plan:
    """The plan without what it fails without."""
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(plan):
            try:
                tried(candidate)
            except RefusedByEager:
                continue
            if fails(candidate):
                plan, smaller = candidate, True
                break
    return plan


def _smaller(plan: Plan) -> Iterator[Plan]:
    for k in range(len(plan.blocks)):
        if len(plan.blocks) > 1:
            yield dataclasses.replace(plan, blocks=plan.blocks[:k] + plan.blocks[k + 1 :], shared=frozenset())
    for extra in plan.extras:
        yield dataclasses.replace(plan, extras=plan.extras - {extra})
    if plan.loss != ("ordinary", "tokens"):
        yield dataclasses.replace(plan, loss=("ordinary", "tokens"))
    if plan.shared:
        yield dataclasses.replace(plan, shared=frozenset())
    for number in range(len(plan.sizes) if len(plan.sizes) > 1 else 0):
        yield dataclasses.replace(plan, sizes=plan.sizes[:number] + plan.sizes[number + 1 :])
    for name, _ in plan.options:
        if name not in ("chunk", "loss_chunk"):
            yield dataclasses.replace(plan, options=tuple(o for o in plan.options if o[0] != name))


def fails(plan: Plan) -> bool:
    try:
        run(plan)
    except AssertionError:
        return True
    return False


def main(arguments: list[str]) -> None:
    plan = drawn(int(arguments[0]))
    if arguments[1:] == ["shrink"]:
        plan = shrunk(plan, fails)
    elif arguments[1:]:
        kept = [int(k) for k in arguments[1].split(",")]
        plan = dataclasses.replace(plan, blocks=tuple(plan.blocks[k] for k in kept), shared=frozenset())
    print(plan)
    print(run(plan))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
