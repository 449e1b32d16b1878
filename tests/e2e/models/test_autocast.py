"""Autocast, gradient scaling, default dtypes and mixed weights: as eager under the same context."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from e2e_check import assert_close_grads, grads, total_error
from e2e_models import CHUNK, DEVICE, LOSS_CHUNK, build, padded, plain, sample
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

import streambp_fx

OPTIONS = {"chunk": CHUNK, "loss_chunk": LOSS_CHUNK}
DOORS: dict[str, Callable[[Any], Any]] = {
    "compile": lambda m: torch.compile(m, backend="streambp", options=OPTIONS),
    "transform": lambda m: streambp_fx.transform(m, **OPTIONS),
}


pytestmark = pytest.mark.filterwarnings("error::streambp_fx.StreamBPWarning")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def gradients(model: Any, call: Any, batch: dict[str, Any], dtype: torch.dtype, scale: float = 1.0) -> Any:
    model.zero_grad()
    with torch.autocast(DEVICE.type, dtype):
        loss = call(**batch).loss
    (loss * scale).backward()
    found = grads(model)
    if call is not model or "forward" in vars(model):
        left = [s.reason for s in streambp_fx.schedule(model).segments if not s.chunked]
        assert not left, left
    return {n: None if g is None else g / scale for n, g in found.items()}


def errors(family: str, impl: str, dtype: torch.dtype, door: str, scale: float = 1.0) -> tuple[float, float]:
    """L2 distances from float32 of the compiled step and of eager, both under autocast."""
    eager = build(family, impl, dtype=torch.float32)
    exact, model = copy.deepcopy(eager), copy.deepcopy(eager)
    call = DOORS[door](model)
    runs: list[tuple[Any, Any]] = []
    theirs: list[tuple[Any, Any]] = []
    for seed in range(4):
        batch = plain(2, 67, seed)
        exact.zero_grad()
        exact(**batch).loss.backward()
        truth = grads(exact)
        runs.append((gradients(model, call, batch, dtype, scale), truth))
        theirs.append((gradients(eager, eager, batch, dtype, scale), truth))
    assert all(g.dtype == torch.float32 for g in runs[0][0].values() if g is not None)
    return total_error(runs), total_error(theirs)


WAYS = [(f, i, d) for f, i in (("llama", "sdpa"), ("gemma2", "eager"), ("gpt_neox", "sdpa")) for d in DOORS]


@pytest.mark.parametrize(("family", "impl", "door"), sample(WAYS, WAYS[-1]))
def test_bfloat16(family: str, impl: str, door: str) -> None:
    ours, theirs = errors(family, impl, torch.bfloat16, door)
    assert 0 < ours <= 1.1 * theirs, f"{ours:.4e} against eager's {theirs:.4e}"


@pytest.mark.slow
@pytest.mark.parametrize("impl", sample(["sdpa", "eager"], "sdpa"))
def test_heads_that_are_repeated_before_a_cast_are_stored_once(impl: str) -> None:
    """Rotated keys are float32, repeated, and then cast."""
    model = streambp_fx.transform(build("llama", impl, dtype=torch.float32), **OPTIONS)
    gradients(model, model, padded(67, "left", (29, 0)), torch.bfloat16)
    projections = model.model.layers[0].self_attn
    width = projections.k_proj.out_features
    assert width < projections.q_proj.out_features
    for segment in streambp_fx.schedule(model).segments:
        of_two = 2 * width * torch.bfloat16.itemsize  # samples
        assert all(size == of_two for size in segment.carried_state.values()), segment.carried_state


@pytest.mark.parametrize("scale", sample([1.0, 2.0**14], 2.0**14))
def test_float16(scale: float) -> None:
    """Without a scale eager's small gradients vanish; ours must not be worse, with or without."""
    ours, theirs = errors("llama", "sdpa", torch.float16, "compile", scale)
    assert 0 < ours <= 1.1 * theirs, f"{ours:.4e} against eager's {theirs:.4e}"


@pytest.mark.slow
def test_bfloat16_is_nearly_bitwise_where_nothing_is_summed_apart() -> None:
    """One chunk holds everything: what is left is the order of sums in float32."""
    eager = build("llama", dtype=torch.float32)
    model = copy.deepcopy(eager)
    call = torch.compile(model, backend="streambp", options={"chunk": 128, "loss_chunk": 128})
    want = gradients(eager, eager, plain(2, 37), torch.bfloat16)
    got = gradients(model, call, plain(2, 37), torch.bfloat16)
    assert_close_grads(got, want, 2e-2)


@pytest.mark.slow
def test_a_grad_scaler_takes_the_same_steps() -> None:
    eager = build("llama", dtype=torch.float32)
    model = copy.deepcopy(eager)
    call = DOORS["compile"](model)
    losses: dict[str, list[float]] = {}
    for name, own, run in (("eager", eager, eager), ("compiled", model, call)):
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**10)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
        losses[name] = []
        for seed in range(3):
            optimizer.zero_grad()
            with torch.autocast(DEVICE.type, torch.float16):
                loss = run(**plain(2, 67, seed)).loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses[name].append(float(loss.detach()))
        assert scaler.get_scale() == 2.0**10, "no step overflowed"
    assert losses["compiled"] == pytest.approx(losses["eager"], rel=2e-3)


@pytest.mark.slow
def test_on_and_off_in_turns_and_backward_inside() -> None:
    eager = build("llama", dtype=torch.float32, num_hidden_layers=1)
    model = copy.deepcopy(eager)
    call = DOORS["compile"](model)
    for enabled, batch in ((True, plain(2, 37)), (False, plain(2, 37)), (True, padded(41, "left"))):
        for own, run in ((eager, eager), (model, call)):
            own.zero_grad()
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=enabled):
                run(**batch).loss.backward()
        assert_close_grads(grads(model), grads(eager), 5e-2 if enabled else 1e-5)


@pytest.mark.slow
def test_autocast_inside_a_function() -> None:
    eager = build("llama", dtype=torch.float32)
    model = copy.deepcopy(eager)

    def step(m: Any, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            logits = m(input_ids=ids).logits
        return logits.float().log_softmax(-1)[..., 3].mean()

    call = torch.compile(lambda ids: step(model, ids), backend="streambp", options=OPTIONS)
    ids = plain(2, 67)["input_ids"]
    step(eager, ids).backward()
    call(ids).backward()
    assert_close_grads(grads(model), grads(eager), 5e-2)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Region(nn.Module):
    """In float32 whatever is around it: ops that the compiler writes in another form, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(61, 24), nn.Linear(24, 61)
        self.keys, self.values, self.mixed = (nn.Linear(24, n) for n in (12, 4, 24))
        self.filter = nn.Parameter(torch.randn(24, 1, 3) / 3)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        with torch.autocast(DEVICE.type, enabled=False):
            x = self.embed(input_ids)
            x = x + torch.einsum("btd,ed->bte", x, self.mixed.weight)
            x = x + F.conv1d(F.pad(x.mT, (2, 0)), self.filter, groups=24).mT
            queries = x.unflatten(-1, (2, 12)).transpose(1, 2)
            keys = self.keys(x)[:, None].repeat_interleave(2, 1)
            values = self.values(x)[:, None].repeat_interleave(2, 1)
            mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
            x = x + F.pad(mixed.transpose(1, 2).flatten(2), (0, 16))
            scores = self.head(x)[:, :-1]
            loss = F.cross_entropy(scores.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return CausalLMOutput(loss=loss)


@pytest.mark.parametrize("door", sample(DOORS, "compile"))
def test_a_region_without_autocast(door: str) -> None:
    """A step under autocast, of a model that is out of it: as without autocast."""
    torch.manual_seed(0)
    eager = Region().to(DEVICE)
    model = copy.deepcopy(eager)
    call = DOORS[door](model)
    batch = {name: value.clamp(max=60) for name, value in plain(2, 67).items() if name != "attention_mask"}
    found = gradients(model, call, batch, torch.bfloat16)
    eager(**batch).loss.backward()
    assert_close_grads(found, grads(eager), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_default_dtype(family: str) -> None:
    with default_dtype(torch.float64):
        eager = build(family, dtype=torch.float64)
        model = copy.deepcopy(eager)
        call = DOORS["compile"](model)
        for batch in (plain(2, 67), padded(41, "right")):
            for own, run in ((eager, eager), (model, call)):
                own.zero_grad()
                run(**batch).loss.backward()
            assert_close_grads(grads(model), grads(eager), 1e-6)


@pytest.mark.slow
def test_weights_of_several_dtypes() -> None:
    """Norms in float32 among bfloat16 weights, as mixed recipes keep them, under autocast."""
    eager = build("llama", dtype=torch.bfloat16)
    for name, parameter in eager.named_parameters():
        if "norm" in name or "embed" in name:
            parameter.data = parameter.data.float()
    model = copy.deepcopy(eager)
    call = DOORS["compile"](model)
    want = gradients(eager, eager, plain(2, 67), torch.bfloat16)
    got = gradients(model, call, plain(2, 67), torch.bfloat16)
    assert {g.dtype for g in got.values()} == {torch.float32, torch.bfloat16}
    assert_close_grads(got, want, 5e-2)
