"""Which functions are taken for recurrences, and that nobody else's compilation changes by it."""

from __future__ import annotations

import contextlib
import copy
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from adversaries import recurrences
from torch import Tensor
from transformers.models.mamba.modeling_mamba import mamba_selective_scan

import streambp_fx
from benchmarks.families.configs import build
from benchmarks.families.worker import batch
from streambp_fx.measure.live_bytes import peak_live_bytes
from streambp_fx.models.recurrences import declare, declare_recurrences
from streambp_fx.models.recurrences.interface import Interface, is_known
from streambp_fx.models.recurrences.linear_scan import LinearScan, selective_scan
from streambp_fx.passes.graph.ops.recurrence import RECURRENCE, RECURRENCES


def names() -> set[str]:
    return {name.split("#")[0].rsplit(".", 1)[-1] for name in RECURRENCES}


@pytest.mark.parametrize(
    ("family", "function"),
    [
        ("qwen3_next", "torch_chunk_gated_delta_rule"),
        ("kimi_linear", "chunk_kimi_delta_attention"),
        ("mamba2", "mamba2_chunk_scan"),
        ("mamba", "mamba_selective_scan"),
    ],
)
def test_functions_of_transformers(family: str, function: str) -> None:
    model = build(family)
    declare_recurrences(model.modules())
    assert function in names()
    assert not declare_recurrences(model.modules()), "each is looked at once"


@pytest.mark.parametrize("family", ["mamba", "mamba2", "qwen3_next", "kimi_linear"])
def test_tried_whatever_the_first_step_runs_in(family: str) -> None:
    """Autocast is for the ops of the step; the trial of a function is as exact within it."""
    module = sys.modules[type(build(family)).__module__]
    known = [v for v in vars(module).values() if isinstance(v, types.FunctionType) and is_known(v)]
    pairs = [(f, i) for f in known for i in declare.INTERFACES if i.fits(f)]
    found = []
    for mode in (contextlib.nullcontext(), torch.autocast("cpu", torch.bfloat16), torch.no_grad()):
        with mode:
            found.append([fault(*pair) for pair in pairs])
    assert found[0].count("") == 1 and found[0] == found[1] == found[2]


def fault(function: Callable, interface: Interface) -> str:
    """What a trial says: "" if a function does what an interface says."""
    try:
        return declare._fault(function, interface, interface.recurrence("tried", interface.step(function)))
    except RuntimeError as error:
        return str(error)


def test_what_only_looks_like_one_is_none() -> None:
    declare_recurrences([recurrences.Decay()])
    assert not any("adversaries" in n for n in RECURRENCES)


def test_linear_scan_has_the_derivative_of_the_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *s: torch.randn(*s, dtype=torch.float64, generator=generator).requires_grad_()  # noqa: E731
    assert torch.autograd.gradcheck(LinearScan.apply, (draw(2, 5, 3), draw(2, 5, 3), draw(2, 3)))
    assert torch.autograd.gradcheck(LinearScan.apply, (draw(2, 1, 3), draw(2, 1, 3), draw(2, 3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("more", [True, False])
def test_selective_scan_is_that_of_transformers(more: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, dt, z = (torch.randn(2, 6, 9, dtype=dtype) for _ in range(3))
    b, c = (torch.randn(2, 4, 9, dtype=dtype) for _ in range(2))
    a, d, bias = -torch.randn(6, 4).exp(), torch.randn(6), torch.randn(6)
    options: dict[str, Any] = (
        {"D": d, "z": z, "delta_bias": bias} if more else dict.fromkeys(("D", "z", "delta_bias"))
    )
    want: Tensor = mamba_selective_scan(x, dt, a, b, c, **options, delta_softplus=more)
    found, _ = selective_scan(x, dt, a, b, c, **options, delta_softplus=more, state=None)
    assert found.dtype == want.dtype
    torch.testing.assert_close(found, want)


@pytest.mark.slow
def test_others_compile_the_function_itself() -> None:
    """In the same process, with another backend: none of our ops is in their graph."""
    model = build("mamba2")
    given = {"input_ids": torch.arange(40).view(2, 20), "use_cache": False}
    want = model(**given).logits
    streambp_fx.transform(copy.deepcopy(model), chunk=8)(**given, labels=given["input_ids"])
    torch._dynamo.reset()
    targets: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        targets.extend(str(n.target) for n in graph.graph.nodes)
        return graph

    found = torch.compile(model, backend=backend)(**given).logits
    torch.testing.assert_close(found, want)
    assert targets and not any("recurrence" in t for t in targets)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mamba2", "qwen3_next"])
def test_the_peak_is_predicted(family: str) -> None:
    """To a hundredth, where a chunk is a whole number of the blocks that the function has."""
    model, given = build(family), batch(1024, (0,))
    planned = streambp_fx.explain(model, seq_len=1024, chunk=512, loss_chunk=64)
    streambp_fx.transform(model, chunk=512, loss_chunk=64, check="never")
    run = lambda: model(**given, use_cache=False).loss.backward()  # noqa: E731
    run()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    known = [*model.parameters(), *gradients, *model.buffers(), *given.values()]
    expected = planned.cost.peak(planned.cost.sizes(1024, 512)).total
    assert peak_live_bytes(run, known) == pytest.approx(expected, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["mamba2", "qwen3_next", pytest.param("kimi_linear", marks=pytest.mark.slow)]
)
def test_a_layer_stores_no_more_than_its_input(family: str) -> None:
    """The convolutions before a recurrence are run with it: what is between them is several times as wide."""
    model = build(family)
    planned = streambp_fx.explain(model, seq_len=256, chunk=64, loss_chunk=64)
    recurrent = [s for s in planned.segments if any(m.node.target is RECURRENCE for m in s.mixings)]
    widths = {sum(s.saved.values()) for s in recurrent}
    assert widths == {4 * model.config.hidden_size}, widths
