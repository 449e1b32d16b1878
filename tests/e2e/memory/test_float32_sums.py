"""Products of half precision that are added to float32 sums in one op, as on a GPU; emulated on a CPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from e2e_check import step, total_error, transform
from e2e_models import build, plain, sample
from transformers import LlamaConfig, LlamaForCausalLM

import streambp_fx
from streambp_fx.options import LOSS_CHUNK, fewest_tokens
from streambp_fx.passes.s5_lower import accumulate
from streambp_fx.plan import Planner

HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture
def calls() -> Iterator[list[tuple[int, ...]]]:
    """The shapes of sums, of an op that PyTorch has no kernel of for CPUs. What it demands is asserted."""
    library, found = torch.library.Library("aten", "IMPL", "CPU"), list[tuple[int, ...]]()

    def added(own: Any, a: Any, b: Any, dtype: Any, *, beta: Any = 1, alpha: Any = 1, out: Any) -> Any:
        assert own.data_ptr() == out.data_ptr() and own.stride() == out.stride()
        assert a.dtype == b.dtype and a.dtype in HALVES and out.dtype == dtype == torch.float32
        found.append(tuple(out.shape))
        return out.mul_(beta).add_(a.float() @ b.float(), alpha=alpha)

    library.impl("addmm.dtype_out", added)
    yield found
    library._destroy()


def takes_all(buffer: torch.Tensor, dtype: torch.dtype) -> bool:
    return buffer.dtype == torch.float32 and dtype in HALVES


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"),
    sample([("qwen3_tied", torch.bfloat16), ("gpt2", torch.float16)], ("qwen3_tied", torch.bfloat16)),
    ids=str,
)
def test_as_near_as_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, calls: list, family: str, dtype: torch.dtype
) -> None:
    """No product of a weight is rounded before it is added: the error is that of factors in float32."""
    eager = build(family, dtype=dtype)
    exact, other = copy.deepcopy(eager).float(), copy.deepcopy(eager)
    batch = plain(2, 67)
    _, want = step(exact, batch)
    _, on_cpu = step(transform(other), batch)
    assert not calls
    monkeypatch.setattr(accumulate, "adds_in_float32", takes_all)
    model = transform(copy.deepcopy(eager))
    _, got = step(model, batch)
    matrices = {p.shape for p in model.parameters() if p.dim() == 2}
    turned = {torch.Size(reversed(s)) for s in matrices}
    found = {torch.Size(s) for s in calls}
    assert found <= matrices | turned and len(found) >= 4
    assert total_error([(got, want)]) == pytest.approx(total_error([(on_cpu, want)]), rel=1e-2)
    assert total_error([(got, on_cpu)]) < 0.1 * total_error([(got, want)])


@pytest.mark.slow
def test_under_autocast(monkeypatch: pytest.MonkeyPatch, calls: list) -> None:
    """The gradient of a float32 weight whose product is in half precision: no rounding in between."""
    monkeypatch.setattr(accumulate, "adds_in_float32", takes_all)
    eager = build("llama", dtype=torch.float32)
    exact, model = copy.deepcopy(eager), copy.deepcopy(eager)
    batch = plain(2, 67)
    _, want = step(exact, batch)
    transform(model)
    found = []
    for own in (eager, model):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(total_error([(step(own, batch)[1], want)]))
    assert calls and found[1] <= 1.05 * found[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "hidden", "accumulate", "expected"),
    sample(
        [
            (torch.float32, 4096, "float32", LOSS_CHUNK),
            (torch.bfloat16, 4096, "float32", 1024),
            (torch.bfloat16, 4096, "weights", LOSS_CHUNK),
            (torch.float16, 2048, "float32", 512),
            (torch.bfloat16, 512, "float32", LOSS_CHUNK),
            (torch.bfloat16, 8192, "float32", 1024),
        ],
        (torch.float16, 2048, "float32", 512),
    ),
    ids=str,
)
def test_rows_of_a_loss_chunk(dtype: torch.dtype, hidden: int, accumulate: str, expected: int) -> None:
    """A plan counts with as many as a step takes at least."""
    config = LlamaConfig(
        vocab_size=9000,
        hidden_size=hidden,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=8,
    )
    with torch.device("meta"):
        built = LlamaForCausalLM(config).to(dtype)
    found = streambp_fx.explain(built, 300, accumulate=accumulate)
    assert found.options.loss_rows(1) == expected
    assert found.options.loss_rows(4) == expected // 4
    assert fewest_tokens(found.facts, accumulate == "float32") == expected
    if accumulate == "float32":
        assert Planner(built, 2).loss_chunk == expected // 2
        assert Planner(built, 2, loss_chunk=7).loss_chunk == 7


@pytest.mark.slow
def test_few_rows_where_memory_is_short() -> None:
    """As many as the head would have, unless the step then needs more than there is."""
    config = LlamaConfig(
        vocab_size=12000,
        hidden_size=2048,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=1,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    planner = Planner(model)
    assert (planner.loss_chunk, planner.least_loss_chunk) == (512, LOSS_CHUNK)
    few, many = (planner.activation_peak(600, 600, n) for n in (256, 512))
    assert few < 0.98 * many
    resident = planner.weights + planner.gradients
    ids = plain(1, 600)["input_ids"]
    for budget, expected in ((many, 512), (few, 256)):
        plan = planner.plan("model", 600, resident + budget, 600)
        assert plan.fits and plan.loss_chunk == expected, budget
        transform(model, chunk=600, loss_chunk="auto", memory=budget, check="never")
        model(input_ids=ids, labels=ids).loss.backward()
        rows = streambp_fx.schedule(model).loss_rows
        assert rows == expected if expected == LOSS_CHUNK else rows >= expected, budget
        streambp_fx.restore(model)
