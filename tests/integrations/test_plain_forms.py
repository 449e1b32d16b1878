"""The plain forms of other libraries' kernels compute what the kernels do, gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from trl.kernels import ChunkedLogProbFunction
from trl.trainer.utils import add_fused_lm_head

import streambp_fx
from streambp_fx.models.plain_forms import in_plain_pytorch
from streambp_fx.models.plain_forms.trl import ALL, PlainKernel, statistics_of_tokens

HEADS = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


def operands(bias: bool) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, offset = (
        torch.randn(size, generator=generator, requires_grad=True) for size in ((23, 8), (61, 8), (61,))
    )
    targets = torch.randint(61, (23,), generator=generator)
    return [hidden, weight, offset if bias else None, targets]


@pytest.mark.parametrize("wanted", [("log_probs",), ("entropy", "is_top1"), ALL], ids="-".join)
@pytest.mark.parametrize(
    ("bias", "temperature", "cap", "scale"),
    [(False, 1.0, None, 1.0), (True, 0.7, None, 0.5), (True, 1.3, 5.0, 2.0)],
)
def test_statistics(
    bias: bool, temperature: float, cap: float | None, scale: float, wanted: tuple[str, ...]
) -> None:
    results = []
    for function in (statistics_of_tokens, ChunkedLogProbFunction.apply):
        given = operands(bias)
        found = function(*given, temperature, 16, cap, scale, wanted)
        parts = [found[0].cos().sum(), *([found[1].square().sum()] if found[1] is not None else [])]
        leaves = [g for g in given[:3] if g is not None]
        results.append((found, torch.autograd.grad(sum(parts), leaves)))
    (ours, our_gradients), (theirs, gradients) = results
    for got, want in zip((*ours, *our_gradients), (*theirs, *gradients), strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(got, want)
    assert [t is not None and t.requires_grad for t in ours] == [
        t is not None and t.requires_grad for t in theirs
    ]


def calls_the_kernel(*args: Any) -> Any:
    return ChunkedLogProbFunction.apply(*args)


def test_only_what_names_a_kernel_is_made_again() -> None:
    made = in_plain_pytorch(calls_the_kernel)
    assert made is not calls_the_kernel and made.__globals__["ChunkedLogProbFunction"] is PlainKernel
    assert calls_the_kernel.__globals__["ChunkedLogProbFunction"] is ChunkedLogProbFunction
    assert in_plain_pytorch(operands) is operands and in_plain_pytorch(len) is len


def test_a_kernel_below_an_adapter_stays_where_it_is() -> None:
    """The forward of a wrapped model is not made again, so a call that asks for its kernel is left to it."""
    model = LlamaForCausalLM(LlamaConfig(vocab_size=61, hidden_size=16, intermediate_size=32, **HEADS))
    wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]))
    wrapped = streambp_fx.transform(wrapped.train(), chunk=8)
    add_fused_lm_head(wrapped.get_base_model())
    ids = torch.randint(61, (2, 21))
    output = wrapped(input_ids=ids, labels=ids, fused_lm_head=True)
    output.loss.backward()
    inner = [streambp_fx.schedule(m) for m in wrapped.modules() if m is not wrapped]
    assert any(s is not None and any(p.kind == "layer" and p.chunked for p in s.segments) for s in inner)
