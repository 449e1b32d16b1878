"""Hooks and side channels: what a user sees of the inside of a model, and changes there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from e2e_adversary import WHATEVER, Cases, Record, tokens
from e2e_subject import Subject, token_loss
from torch import Tensor, nn

CASES = Cases("hooks")
MAYBE = {"want": WHATEVER}


def plain(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + m.lin(x)


def scenario(function: Any) -> Any:
    return CASES.scenario(**MAYBE, block=plain)(function)


# ---- hooks that the forward itself registers


@CASES.block(**MAYBE)
def gradient_of_a_hidden_state_scaled(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    h.register_hook(lambda g: g * 0.5)
    return x + h


@CASES.block(**MAYBE)
def gradient_of_a_hidden_state_normed(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    h.register_hook(lambda g: g / (g.norm() + 1e-3))
    return x + h


@CASES.block(**MAYBE)
def gradient_of_a_hidden_state_clamped(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    if h.requires_grad:
        h.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    return x + h.tanh()


@CASES.block(**MAYBE)
def gradient_of_a_weight_inside_scaled(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    weight = m.lin.weight * 1.5
    weight.register_hook(lambda g: g.sign())
    return x + nn.functional.linear(x, weight)


@CASES.block(**MAYBE)
def two_hooks_of_one_value(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    h = m.lin(x)
    h.register_hook(lambda g: g * 2)
    h.register_hook(lambda g: g + 1e-3)
    return x + h


@CASES.loss(**MAYBE)
def gradient_of_the_logits_scaled(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    logits = m.head(x)
    logits.register_hook(lambda g: g * (1 + g.abs().max()))
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


@CASES.loss(**MAYBE)
def gradient_of_the_loss_scaled(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    loss = token_loss(m, x, ids)
    loss.register_hook(lambda g: g * 3)
    return loss


class Kept(nn.Module):
    """Keeps what it saw."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        return x * 1.0


@CASES.scenario(**MAYBE, block=lambda m, x, ids: m.kept(x + m.lin(x)), parts=lambda: {"kept": Kept()})
def a_hidden_state_kept_by_a_module(m: Any, call: Any, record: Record) -> None:
    for length in (33, 12):
        call(tokens(2, length)).backward()
        record("kept", m.kept.last.detach())
        record.state(m)


@CASES.scenario(**MAYBE, block=lambda m, x, ids: m.kept(x + m.lin(x)), parts=lambda: {"kept": Kept()})
def a_gradient_taken_of_a_kept_hidden_state(m: Any, call: Any, record: Record) -> None:
    loss = call(tokens(2, 33))
    (gradient,) = torch.autograd.grad(loss, m.kept.last, allow_unused=True)
    record("gradient", gradient)


@CASES.scenario(**MAYBE, block=lambda m, x, ids: m.kept(x + m.lin(x)), parts=lambda: {"kept": Kept()})
def a_loss_of_a_kept_hidden_state(m: Any, call: Any, record: Record) -> None:
    loss = call(tokens(2, 33))
    (loss + m.kept.last.square().mean()).backward()
    record.state(m)


# ---- hooks that the user adds to modules and parameters


def _added(kind: str, module: str, when: int) -> Any:
    """Hooks of a kind on a module, added before step number `when`, taken away after two."""

    def run(m: Any, call: Any, record: Record) -> None:
        handle, seen = None, []

        def forward(module: Any, args: Any, output: Tensor) -> Tensor:
            seen.append(output.detach().clone())
            return output * 1.5

        def pre(module: Any, args: Any) -> Any:
            seen.append(args[0].detach().clone())
            return (args[0] * 0.5, *args[1:])

        def backward(module: Any, inputs: Any, outputs: Any) -> Any:
            seen.append(outputs[0].detach().clone())
            return tuple(None if g is None else g * 2 for g in inputs)

        def backward_pre(module: Any, outputs: Any) -> Any:
            seen.append(outputs[0].detach().clone())
            return tuple(g * 0.5 for g in outputs)

        hooks = {"forward_hook": forward, "forward_pre_hook": pre}
        hooks |= {"full_backward_hook": backward, "full_backward_pre_hook": backward_pre}
        target = m.get_submodule(module) if module else m
        for step, length in enumerate((33, 21, 33, 12)):
            if step == when:
                handle = getattr(target, f"register_{kind}")(hooks[kind])
            if step == when + 2 and handle is not None:
                handle.remove()
            record.step(m, call, tokens(2, length))
            record("seen", list(seen))
            seen.clear()

    return run


for _kind in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
    for _when in (0, 1):
        for _module in ("lin", "head", "norm", "embed"):
            if (_kind == "forward_pre_hook" and _module == "embed") or (
                _kind == "full_backward_hook" and _module == "embed"
            ):
                continue
            CASES.scenario(**MAYBE, block=plain, name=f"{_kind} on {_module} before step {_when}")(
                _added(_kind, _module, _when)
            )


@scenario
def forward_hook_that_only_looks(m: Any, call: Any, record: Record) -> None:
    record.step(m, call, tokens(2, 33))
    shapes: list[Any] = []
    handle = m.lin.register_forward_hook(lambda mod, a, out: shapes.append(tuple(out.shape)))
    record.step(m, call, tokens(2, 33))
    record.step(m, call, tokens(2, 20))
    handle.remove()
    record.step(m, call, tokens(2, 20))
    record("shapes", shapes)


@scenario
def forward_hook_that_keeps_with_the_graph(m: Any, call: Any, record: Record) -> None:
    kept: dict[str, Any] = {}
    m.lin.register_forward_hook(lambda mod, a, out: kept.update(out=out))
    for length in (33, 20):
        m.zero_grad()
        loss = call(tokens(2, length))
        (loss + kept["out"].square().mean()).backward()
        record("kept", kept["out"])
        record.state(m)


def before_with_and_after(m: Any, call: Any, record: Record, register: Callable[[], Any]) -> None:
    """A step without a hook, one with it, and one when it has gone."""
    record.step(m, call, tokens(2, 33))
    handle = register()
    try:
        record.step(m, call, tokens(2, 33))
    finally:
        handle.remove()
    record.step(m, call, tokens(2, 33))


@scenario
def hook_on_the_model(m: Any, call: Any, record: Record) -> None:
    twice = lambda mod, a, out: out * 2  # noqa: E731
    before_with_and_after(m, call, record, lambda: m.register_forward_hook(twice))


@scenario
def pre_hook_on_the_model(m: Any, call: Any, record: Record) -> None:
    flipped = lambda mod, a: (a[0].flip(1),)  # noqa: E731
    before_with_and_after(m, call, record, lambda: m.register_forward_pre_hook(flipped))


@scenario
def backward_hook_on_the_model(m: Any, call: Any, record: Record) -> None:
    seen: list[Any] = []
    look = lambda mod, i, o: seen.append(o[0].clone())  # noqa: E731
    before_with_and_after(m, call, record, lambda: m.register_full_backward_hook(look))
    record("seen", seen)


@scenario
def hooks_on_parameters(m: Any, call: Any, record: Record) -> None:
    seen: list[Any] = []
    m.lin.weight.register_hook(lambda g: seen.append(g.norm()) or g * 2)
    m.embed.weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    for length in (33, 20):
        record.step(m, call, tokens(2, length))
    m.head.weight.register_hook(lambda g: g * 0)
    record.step(m, call, tokens(2, 33))
    record("seen", seen)


@scenario
def hooks_after_accumulation(m: Any, call: Any, record: Record) -> None:
    """As optimizers in the backward do: once a parameter, when its gradient is complete."""
    seen: dict[str, list[Tensor]] = {}
    for name, p in m.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, n=name: seen.setdefault(n, []).append(p.grad.clone()))
    for length in (33, 20):
        record.step(m, call, tokens(2, length))
    record("seen", dict(sorted(seen.items())))


@scenario
def optimizer_in_the_backward(m: Any, call: Any, record: Record) -> None:
    def update(p: Tensor) -> None:
        with torch.no_grad():
            p.sub_(p.grad, alpha=0.1)
        p.grad = None

    for p in m.parameters():
        p.register_post_accumulate_grad_hook(update)
    for length in (33, 20, 33):
        loss = call(tokens(2, length))
        loss.backward()
        record("loss", loss)
        record("parameters", dict(m.named_parameters()))


@scenario
def global_forward_hook(m: Any, call: Any, record: Record) -> None:
    hook = lambda mod, a, out: out * 1.1 if isinstance(mod, nn.Linear) else None  # noqa: E731
    register = torch.nn.modules.module.register_module_forward_hook
    before_with_and_after(m, call, record, lambda: register(hook))


@scenario
def a_submodule_replaced(m: Any, call: Any, record: Record) -> None:
    record.step(m, call, tokens(2, 33))
    old = m.lin
    m.lin = nn.Sequential(old, nn.Tanh())
    record.step(m, call, tokens(2, 33))
    m.lin = old
    record.step(m, call, tokens(2, 33))


@scenario
def a_forward_replaced(m: Any, call: Any, record: Record) -> None:
    record.step(m, call, tokens(2, 33))
    original = m.lin.forward
    m.lin.forward = lambda x: original(x).sin()
    record.step(m, call, tokens(2, 33))
    del m.lin.forward
    record.step(m, call, tokens(2, 33))


@scenario
def weights_changed_between_forward_and_backward(m: Any, call: Any, record: Record) -> None:
    """Eager refuses it, or takes the gradient with what it kept: the same, or an error."""
    loss = call(tokens(2, 33))
    with torch.no_grad():
        m.scale.mul_(2)
        m.unused.weight.zero_()
    loss.backward()
    record.state(m)


def _refused(change: Any) -> Any:
    def run(m: Any, call: Any, record: Record) -> None:
        loss = call(tokens(2, 33))
        change(m)
        try:
            loss.backward()
        except RuntimeError:
            record("refused", True)
        else:
            record("refused", False)
            record.state(m)

    return run


def _in_place(m: Any) -> None:
    with torch.no_grad():
        m.lin.weight.mul_(2)


def _by_data(m: Any) -> None:
    m.lin.weight.data = m.lin.weight.data * 2


CASES.scenario(**MAYBE, block=plain, name="a weight changed between forward and backward")(
    _refused(_in_place)
)
CASES.scenario(**MAYBE, block=plain, name="a weight's data replaced between forward and backward")(
    _refused(_by_data)
)


@scenario
def the_input_changed_between_forward_and_backward(m: Any, call: Any, record: Record) -> None:
    """The token ids are overwritten by the loader before the backward: eager raises."""
    ids = tokens(2, 33)
    loss = call(ids)
    ids.zero_()
    try:
        loss.backward()
    except RuntimeError:
        record("refused", True)
    else:
        record("refused", False)
        record.state(m)


@scenario
def a_counter_in_python(m: Any, call: Any, record: Record) -> None:
    m.calls = 0
    inner = m.block

    def counted(model: Any, x: Tensor, ids: Tensor) -> Tensor:
        model.calls += 1
        return inner(model, x, ids) * (1 + 0.1 * model.calls)

    m.block = counted
    for length in (33, 33, 20, 33):
        record.step(m, call, tokens(2, length))
        record("calls", m.calls)


@scenario
def a_list_of_hidden_states(m: Any, call: Any, record: Record) -> None:
    m.states = []
    inner = m.block

    def kept(model: Any, x: Tensor, ids: Tensor) -> Tensor:
        y = inner(model, x, ids)
        model.states.append(y.detach().mean())
        return y

    m.block = kept
    for length in (33, 20):
        record.step(m, call, tokens(2, length))
    record("states", list(m.states))


@scenario
def retained_gradient_of_an_input_embedding(m: Any, call: Any, record: Record) -> None:
    """`register_forward_hook` that makes the embeddings keep their gradient, as saliency tools do."""
    kept: list[Tensor] = []

    def keep(mod: Any, args: Any, out: Tensor) -> None:
        out.retain_grad()
        kept.append(out)

    m.embed.register_forward_hook(keep)
    call(tokens(2, 33)).backward()
    record("saliency", [k.grad for k in kept])
    record.state(m)


@scenario
def inputs_require_grad_by_a_hook(m: Any, call: Any, record: Record) -> None:
    """`enable_input_require_grads` of transformers, with frozen embeddings."""
    m.embed.requires_grad_(False)
    m.embed.register_forward_hook(lambda mod, a, out: out.requires_grad_(True))
    record.step(m, call, tokens(2, 33))
