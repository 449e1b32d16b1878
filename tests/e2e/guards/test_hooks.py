"""Hooks and side channels: what a user sees of the inside of a model, and changes there, is as in eager."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from e2e_models import sample
from torch import Tensor, nn
from torch.autograd import graph
from torch.nn import functional as F
from torch.nn.modules import module as modules
from torch.nn.utils import parametrizations, parametrize

import streambp_fx

VOCAB, WIDTH = 19, 12
Call = Callable[..., Tensor]
Scenario = Callable[[Any, Call], dict[str, Any]]
DOORS = ("compile", "transform")
IDS = [torch.arange(2 * n).remainder(7).view(2, n) * 2 + torch.arange(n) % 5 for n in (33, 12)]
OPTIONS = {"chunk": 8, "loss_chunk": 8, "check": "never", "on_error": "raise"}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.o = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        h = self.norm(x)
        q, k, v = (t.unflatten(2, (3, 4)).transpose(1, 2) for t in (self.q(h), h, h))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2)) * scale
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.kept: Any = None

    def forward(self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            x = layer(x, scale=0.7)
        return F.cross_entropy(self.head(x).flatten(0, 1), x.detach().argmax(-1).flatten())


# ---- what is done with a model


def gradients(model: nn.Module) -> dict[str, Any]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def steps(model: nn.Module, call: Call, *changes: Callable[[], Any]) -> dict[str, Any]:
    """Steps of two lengths, and again after each change: losses and gradients."""
    found: dict[str, Any] = {}
    for number, change in enumerate((lambda: None, *changes)):
        change()
        for ids in IDS:
            model.zero_grad()
            loss = call(ids)
            loss.backward()
            found[f"loss {number} {ids.shape[1]}"] = loss.detach()
            found |= {f"{name} {number} {ids.shape[1]}": g for name, g in gradients(model).items()}
    return found


class Handles:
    """Hooks that come and go."""

    def __init__(self) -> None:
        self.all: list[Any] = []

    def add(self, register: Callable[..., Any], hook: Any, **more: Any) -> Callable[[], None]:
        return lambda: self.all.append(register(hook, **more))

    def remove(self) -> None:
        while self.all:
            self.all.pop().remove()


def forward_hooks(model: Any, call: Call) -> dict[str, Any]:
    """Added after the first step, with keywords, one before another, one for another, taken away."""
    handles, layer, seen = Handles(), model.layers[1], []
    doubled = lambda module, args, kwargs: (args, {"scale": kwargs["scale"] * 2})  # noqa: E731
    scaled = lambda module, args, kwargs, output: output * kwargs["scale"]  # noqa: E731
    shown = lambda module, args, output: seen.append(output.detach().clone())  # noqa: E731
    found = steps(
        model,
        call,
        handles.add(layer.register_forward_pre_hook, doubled, with_kwargs=True),
        handles.add(layer.register_forward_hook, scaled, with_kwargs=True),
        handles.add(layer.register_forward_hook, shown, prepend=True, always_call=True),
        handles.remove,
        handles.add(model.layers[0].up.register_forward_hook, lambda module, args, output: output * 1.5),
        handles.remove,
        handles.add(model.layers[0].up.register_forward_hook, lambda module, args, output: output * 0.5),
    )
    return {**found, "seen": seen}


def hooks_on_the_model(model: Any, call: Call) -> dict[str, Any]:
    handles, seen = Handles(), []
    found = steps(
        model,
        call,
        handles.add(model.register_forward_hook, lambda module, args, output: output * 2),
        handles.add(model.register_forward_pre_hook, lambda module, args: (args[0].flip(1),)),
        handles.add(
            model.register_full_backward_hook, lambda module, given, made: seen.append(made[0].clone())
        ),
        handles.remove,
    )
    return {**found, "seen": seen}


def hooks_of_all_modules(model: Any, call: Call) -> dict[str, Any]:
    handles = Handles()
    scaled = lambda module, args: (args[0] * 1.1,) if isinstance(module, nn.Linear) else None  # noqa: E731
    try:
        register = modules.register_module_forward_pre_hook
        return steps(model, call, handles.add(register, scaled), handles.remove)
    finally:
        handles.remove()


def hooks_that_read_python(model: Any, call: Call) -> dict[str, Any]:
    """What a hook closes over and counts."""
    state = {"factor": 1.5, "calls": 0}

    def hook(module: Any, args: Any, output: Tensor) -> Tensor:
        state["calls"] += 1
        return output * state["factor"]

    model.layers[0].register_forward_hook(hook)
    return {**steps(model, call, lambda: state.update(factor=0.5)), **state}


def hooks_of_parameters(model: Any, call: Call) -> dict[str, Any]:
    """Each once a step, with the whole gradient, also of tied weights."""
    model.head.weight = model.embed.weight
    seen: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        note = lambda value, name=name: seen.setdefault(name, []).append(value.clone())  # noqa: E731
        parameter.register_hook(lambda g, note=note: (note(g), g * 2)[1])
        parameter.register_post_accumulate_grad_hook(lambda p, note=note: note(p.grad))
    graph.register_multi_grad_hook(
        list(model.parameters()), lambda found: seen.setdefault("all", []).append([g.clone() for g in found])
    )
    return {**steps(model, call), **seen}


def an_optimizer_in_the_backward(model: Any, call: Call) -> dict[str, Any]:
    def update(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    steps(model, call)
    return dict(model.named_parameters())


def parametrized(model: Any, call: Call) -> dict[str, Any]:
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 2

    torch.manual_seed(1)
    parametrizations.weight_norm(model.layers[0].down)
    parametrizations.spectral_norm(model.layers[1].down)
    up = model.layers[0].up
    found = steps(
        model,
        call,
        lambda: parametrize.register_parametrization(up, "weight", Doubled()),
        lambda: parametrize.remove_parametrizations(up, "weight"),
    )
    return {**found, **dict(model.named_buffers())}


class Adapted(nn.Module):
    """A frozen layer and a low-rank one beside it; what came in is kept."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.a = base.requires_grad_(False), nn.Linear(base.in_features, 3, bias=False).double()
        self.b, self.last = nn.Linear(3, base.out_features, bias=False).double(), None

    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        return self.base(x) + self.b(self.a(x))


def adapters(model: Any, call: Call) -> dict[str, Any]:
    torch.manual_seed(1)
    for layer in model.layers:
        layer.up = Adapted(layer.up)
    handles, a = Handles(), model.layers[0].up.a
    hook = handles.add(a.register_forward_hook, lambda module, args, output: output * 2)
    found = steps(model, call, hook, handles.remove)
    taken = torch.autograd.grad(call(IDS[0]), [layer.up.last for layer in model.layers])
    return {**found, "taken": taken}


# ---- gradients of what is inside


def kept_by(model: Any, name: str) -> list[Tensor]:
    kept: list[Tensor] = []
    model.get_submodule(name).register_forward_hook(lambda module, args, output: kept.append(output))
    return kept


def taken(name: str) -> Scenario:
    """The gradient of a hidden state: taken, kept, changed by a hook, of one more loss, in a second graph."""

    def scenario(model: Any, call: Call) -> dict[str, Any]:
        kept, found, seen = kept_by(model, name), {}, []
        first, second = call(IDS[0]), call(IDS[1])
        found["both"] = torch.autograd.grad(first + second, kept)
        kept.clear()
        parameters = [p for p in model.parameters() if p.requires_grad]
        found["with parameters"] = torch.autograd.grad(call(IDS[0]), [*kept, *parameters], allow_unused=True)
        kept.clear()
        loss = call(IDS[0])
        kept[0].retain_grad()
        kept[0].register_hook(lambda g: (seen.append(g), g * 2)[1])
        graph.register_multi_grad_hook((kept[0], model.embed.weight), lambda found: seen.append(found[0]))
        (loss + kept[0].square().mean()).backward()
        return {**found, "retained": kept[0].grad, "seen": seen, **gradients(model)}

    return scenario


def given_embeddings(model: Any, call: Call) -> dict[str, Any]:
    """A leaf, and a value of a graph outside of the model."""
    seen: list[Tensor] = []
    leaf = torch.linspace(-1, 1, 2 * 33 * WIDTH).double().view(2, 33, WIDTH).requires_grad_()
    leaf.register_hook(lambda g: seen.append(g.clone()))
    (gradient,) = torch.autograd.grad(call(inputs_embeds=leaf), leaf)
    made = model.embed(IDS[0]) * 1.5
    made.retain_grad()
    made.register_hook(lambda g: g * 2)
    call(inputs_embeds=made).backward()
    return {"seen": seen, "gradient": gradient, "made": made.grad, **gradients(model)}


def saved_on_the_cpu(model: Any, call: Call) -> dict[str, Any]:
    with graph.save_on_cpu():
        return steps(model, call)


def methods_of_classes(model: Any, call: Call) -> dict[str, Any]:
    """A method of a class is replaced after the first step, and comes back."""
    original = Layer.forward

    def doubled(self: Layer, x: Tensor, scale: float = 1.0) -> Tensor:
        return original(self, x, scale * 2)

    def put(function: Callable[..., Tensor]) -> Callable[[], None]:
        return lambda: setattr(Layer, "forward", function)

    try:
        return steps(model, call, put(doubled), put(original))
    finally:
        put(original)()


STREAMED: dict[str, Scenario] = {
    "methods of classes": methods_of_classes,
    "forward hooks": forward_hooks,
    "hooks on the model": hooks_on_the_model,
    "hooks of all modules": hooks_of_all_modules,
    "hooks that read Python": hooks_that_read_python,
    "hooks of parameters": hooks_of_parameters,
    "an optimizer in the backward": an_optimizer_in_the_backward,
    "parametrized": parametrized,
    "adapters": adapters,
    "given embeddings": given_embeddings,
    "saved on the CPU": saved_on_the_cpu,
    **{
        f"gradient of {n}": taken(n)
        for n in ("embed", "layers.0.norm", "layers.0.q", "layers.0.up", "layers.1")
    },
}


# ---- what runs unstreamed


def backward_hooks(name: str) -> Scenario:
    def scenario(model: Any, call: Call) -> dict[str, Any]:
        handles, seen = Handles(), []

        def hook(module: Any, given: Any, made: Any) -> Any:
            seen.append(made[0].clone())
            return tuple(None if g is None else g * 2 for g in given)

        module = model.get_submodule(name)
        before = lambda module, made: (made[0] * 0.5,)  # noqa: E731
        add = handles.add(module.register_full_backward_hook, hook)
        add_before = handles.add(module.register_full_backward_pre_hook, before)
        return {**steps(model, call, add, add_before, handles.remove), "seen": seen}

    return scenario


def backward_hook_of_all_modules(model: Any, call: Call) -> dict[str, Any]:
    handles = Handles()
    hook = lambda module, given, made: (  # noqa: E731
        tuple(None if g is None else g * 2 for g in given) if isinstance(module, nn.LayerNorm) else None
    )
    try:
        add = handles.add(modules.register_module_full_backward_hook, hook)
        return steps(model, call, add, handles.remove)
    finally:
        handles.remove()


def hook_with_a_number(model: Any, call: Call) -> dict[str, Any]:
    seen: list[float] = []
    model.layers[0].register_forward_hook(lambda module, args, output: seen.append(output.mean().item()))
    return {**steps(model, call), "seen": torch.tensor(seen)}


def hook_that_keeps_gradients(model: Any, call: Call) -> dict[str, Any]:
    kept: list[Tensor] = []
    model.embed.register_forward_hook(lambda module, args, out: (out.retain_grad(), kept.append(out))[0])
    found = steps(model, call)
    return {**found, "kept": [k.grad for k in kept]}


def hook_of_a_value(change: Callable[[Tensor], Any]) -> Scenario:
    """A hook on the gradient of a hidden state, registered in each forward."""

    def scenario(model: Any, call: Call) -> dict[str, Any]:
        layer = model.layers[0]
        layer.register_forward_hook(lambda module, args, out: (out.register_hook(change), None)[1])
        return steps(model, call)

    return scenario


def changed_when_saved(model: Any, call: Call) -> dict[str, Any]:
    """The number of values is that of eager too."""
    saved: list[int] = []
    coarse = lambda t: t.round(decimals=1) if t.is_floating_point() else t  # noqa: E731
    found = steps(model, call)
    with graph.saved_tensors_hooks(lambda t: (saved.append(1), coarse(t))[1], lambda t: t):
        return {**found, **{f"hooked {k}": v for k, v in steps(model, call).items()}, "saved": len(saved)}


class Scaled(nn.Module):
    """Keeps the weight that it makes in each forward."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.made = base, None

    def forward(self, x: Tensor) -> Tensor:
        self.made = self.base.weight * 1.5
        return F.linear(x, self.made, self.base.bias)  # type: ignore[arg-type]


def gradient_of_a_made_weight(model: Any, call: Call) -> dict[str, Any]:
    model.layers[0].up = Scaled(model.layers[0].up)
    return {"taken": torch.autograd.grad(call(IDS[0]), model.layers[0].up.made)}


# By scenario the doors through which it is to be had unstreamed; the other one may break its graph instead.
UNSTREAMED: dict[str, tuple[Scenario, tuple[str, ...]]] = {
    "backward hooks": (backward_hooks("layers.1"), ("transform",)),
    "backward hooks inside": (backward_hooks("layers.0.up"), ("transform",)),
    "a backward hook of all modules": (backward_hook_of_all_modules, ("transform",)),
    "a hook with a number": (hook_with_a_number, ("transform",)),
    "a hook that keeps gradients": (hook_that_keeps_gradients, ("transform",)),
    "a hook of a value": (hook_of_a_value(lambda g: g * 0.5), DOORS),
    "a hook of a value, of all of it": (hook_of_a_value(lambda g: g / (1 + g.norm())), DOORS),
    "changed when saved": (changed_when_saved, DOORS),
    "gradient of a made weight": (gradient_of_a_made_weight, DOORS),
}


def run(scenario: Scenario, door: str) -> tuple[nn.Module, list[str]]:
    """Eager and streamed give the same. The streamed model, and what was warned of."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = Model().double()
    streamed = copy.deepcopy(eager)
    want = scenario(eager, eager)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if door == "compile":
            got = scenario(streamed, torch.compile(streamed, backend="streambp", options=dict(OPTIONS)))
        else:
            got = scenario(streamed, streambp_fx.transform(streamed, **OPTIONS))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    return streamed, [str(w.message) for w in caught if issubclass(w.category, streambp_fx.StreamBPWarning)]


def through(doors: dict[str, tuple[str, ...]], *often: tuple[str, str]) -> list[Any]:
    return sample([(name, door) for name, own in doors.items() for door in own], *often)


OFTEN = [
    ("hooks of all modules", "transform"),
    ("methods of classes", "transform"),
    ("gradient of layers.0.up", "compile"),
]


@pytest.mark.parametrize(("name", "door"), through(dict.fromkeys(STREAMED, DOORS), *OFTEN))
def test_streamed(name: str, door: str) -> None:
    streamed, warned = run(STREAMED[name], door)
    schedule = streambp_fx.schedule(streamed)
    assert schedule is not None and all(s.chunked for s in schedule.segments), str(schedule)
    assert not warned


@pytest.mark.parametrize(
    ("name", "door"),
    through({n: doors for n, (_, doors) in UNSTREAMED.items()}, ("backward hooks", "transform"),
            ("a hook of a value", "compile"), ("changed when saved", "transform")),
)  # fmt: skip
def test_unstreamed(name: str, door: str) -> None:
    _, warned = run(UNSTREAMED[name][0], door)
    assert warned and all("runs unstreamed" in text for text in warned), warned


@pytest.mark.slow
@pytest.mark.parametrize("name", UNSTREAMED)
def test_with_graph_breaks(name: str) -> None:
    run(UNSTREAMED[name][0], "compile")


def test_the_warning_names_the_hooked_module_and_the_reason() -> None:
    _, warned = run(backward_hooks("layers.1"), "transform")
    assert "hooks of 'layers.1' (Module-level backwards hooks" in warned[0]


class Branching(Model):
    """Needs gradients of its hidden states, and takes a branch by their values: it cannot be captured."""

    def forward(self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        x.register_hook(lambda gradient: gradient * 0.5)
        return super().forward(inputs_embeds=x * 2.0 if x.sum() > 0 else x)


def test_a_model_that_needs_gradients_is_not_blamed_for_running_without() -> None:
    """Asked for its own error, it has none: what is raised is why it cannot be captured."""
    call = streambp_fx.transform(Branching().double(), chunk=8, on_error="raise")
    with pytest.raises(streambp_fx.CaptureError, match="could not be captured"):
        call(IDS[0])


def test_gradients_of_gradients_are_an_error() -> None:
    model = Model().double()
    call = torch.compile(model, backend="streambp", options={"chunk": 8})
    for parameter in (model.head.weight, model.layers[0].up.weight):
        with pytest.raises(RuntimeError, match="double backward is not supported"):
            torch.autograd.grad(call(IDS[0]), parameter, create_graph=True)


def test_hooks_are_looked_for_in_microseconds() -> None:
    """A module without hooks costs what Dynamo's own guards cost: nothing runs in Python for it."""
    model = Model().double()
    call = torch.compile(model, backend="streambp", options={"chunk": 8})
    call(IDS[0])
    looked: list[Any] = []
    original = nn.Module.modules
    nn.Module.modules = lambda self: (looked.append(self), original(self))[1]  # type: ignore[method-assign]
    try:
        call(IDS[0])
    finally:
        nn.Module.modules = original  # type: ignore[method-assign]
    assert not looked
