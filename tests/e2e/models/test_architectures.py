"""Experts, sinks, latents, convolutions and recurrences of transformers: exact, and streamed whole.

All causal language models of transformers are for `make test-all`; `python -m benchmarks.families` makes a
table of them.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from e2e_check import assert_all_chunked, compare, in_double, step, total_error, transform
from e2e_models import DEVICE, perturb, sample
from torch import Tensor
from transformers.integrations.moe import use_experts_implementation
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import streambp_fx
from benchmarks.families.configs import build, families
from benchmarks.families.worker import PADS, plain_experts
from benchmarks.families.worker import batch as families_batch
from streambp_fx.models.experts import declare_experts

# What has to be streamed whole: by architecture, one of each by default.
EXPERTS = (
    "qwen3_moe",
    "mixtral",
    "qwen2_moe",
    "olmoe",
    "granitemoe",
    "deepseek_v3",
    "gpt_oss",
    "llama4_text",
)
GROUPED = ("qwen3_moe", "mixtral", "qwen2_moe", "gpt_oss")  # several heads of queries a head of keys
OTHERS = ("lfm2", "minicpm3", "deepseek_v2", "axk1")
# Each row attends to columns that an indexer selects; batches are longer and shorter than their number.
SELECTING = ("deepseek_v32", "glm_moe_dsa", "hy_v4", "axk2", "dots3_note_text")
RECURRENT = (
    "mamba2",
    "mamba",
    "jamba",
    "bamba",
    "falcon_h1",
    "nemotron_h",
    "granitemoehybrid",
    "qwen3_next",
    "qwen3_5_text",
    "olmo_hybrid",
    "kimi_linear",
)


def batch(*given: Any) -> dict[str, Tensor]:
    return {name: value.to(DEVICE) for name, value in families_batch(*given).items()}


BATCHES = {f"padding: {side}": batch(67, pads, side) for side, pads in PADS.items()}
BATCHES["less than a chunk"] = batch(11, (0, 0, 0))
BATCHES["a tail of one row"] = batch(65, (0, 0))


def model_of(family: str, dtype: torch.dtype = torch.float64) -> Any:
    model = build(family).to(DEVICE, dtype)
    perturb(model, 1)
    return model


@pytest.mark.parametrize("family", sample([*EXPERTS, *OTHERS, *SELECTING, *RECURRENT], "qwen3_moe"))
def test_streamed_whole(family: str) -> None:
    streamed = exact_and_streamed_whole(family, BATCHES)
    if family in GROUPED:
        assert_heads_are_stored_once(streamed)


def exact_and_streamed_whole(family: str, batches: Mapping[str, Any], **options: Any) -> Any:
    """A streamed model, compared with eager in float64, all of which ran by chunks."""
    with in_double(functools.partial(model_of, family)):
        streamed = model_of(family)
        eager = copy.deepcopy(streamed)
        plain_experts(eager)
        transform(streamed, **options)
        compare(eager, streamed, batches, 1e-9)
        assert_all_chunked(streamed, at_least=4)
    return streamed


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["qwen3_moe", "gpt_oss", "deepseek_v3", "mamba2", "qwen3_next", "falcon_h1"]
)
def test_rows_between_layers_on_disk(family: str) -> None:
    """Of experts, sinks, latents and recurrences as of any segment."""
    streamed = exact_and_streamed_whole(family, BATCHES, offload="disk", offload_rows=True)
    text = str(streambp_fx.schedule(streamed).program)
    assert text.count(", on disk\n") >= 4, text


# Attentions of which the difference is taken, and an attention beside a recurrence.
BESIDE = [("diffllama", "sdpa", True), ("falcon_h1", "sdpa", True), ("falcon_h1", "eager", False)]


@pytest.mark.parametrize(("family", "impl", "together"), sample(BESIDE))
def test_levels_side_by_side(family: str, impl: str, together: bool) -> None:
    """Their layers store what goes in. Not where rows that see nothing would run a recurrence unchunked."""
    with in_double(functools.partial(model_of, family)):
        streamed = model_of(family)
        streamed.set_attn_implementation(impl)
        eager = copy.deepcopy(streamed)
        transform(streamed)
        compare(eager, streamed, {k: BATCHES[k] for k in ("padding: left", "a tail of one row")}, 1e-9)
        assert_all_chunked(streamed, at_least=4)
    layers = [s for s in streambp_fx.schedule(streamed).segments if s.index and s.kind == "layer"]
    width = 2 * streamed.config.hidden_size * torch.float64.itemsize
    most = max(sum(s.saved.values()) for s in layers)
    assert most == width if together else most > 2 * width, [s.saved for s in layers]


def assert_heads_are_stored_once(model: Any) -> None:
    """Keys and values that several heads of queries share are the state as they are projected."""
    attention = model.model.layers[0].self_attn
    width, samples = attention.k_proj.out_features, 2
    assert width < attention.q_proj.out_features
    states = [s.carried_state for s in streambp_fx.schedule(model).segments if s.carried_state]
    assert states, "no layer carries keys and values"
    for state in states:
        assert sum(state.values()) == 2 * samples * width * torch.float64.itemsize, state


FORMS = [
    (form, family) for form in ("eager", "batched_mm") for family in ("qwen3_moe", "gpt_oss", "deepseek_v3")
]


@pytest.mark.parametrize(("form", "family"), sample(FORMS))
def test_other_forms_of_experts(form: str, family: str) -> None:
    """A loop over the experts that are hit has no graph, and is captured as the product that it equals."""
    with in_double(functools.partial(model_of, family)):
        streamed = model_of(family)
        eager = copy.deepcopy(streamed)
        plain_experts(eager)
        for module in streamed.modules():
            if hasattr(getattr(module, "config", None), "_experts_implementation"):
                module.config._experts_implementation = form
        transform(streamed)
        compare(eager, streamed, BATCHES, 1e-9)
    assert_all_chunked(streamed, at_least=4)


@use_experts_implementation
class OthersExperts(Qwen3MoeExperts):
    """Somebody's experts: their loop is another function than the products by the same name."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        loop = Qwen3MoeExperts.forward.__wrapped__  # type: ignore[attr-defined]
        return 2 * loop(self, hidden_states, top_k_index, top_k_weights)


def test_a_loop_of_somebody_else_stays_a_loop() -> None:
    model = model_of("qwen3_moe")
    plain_experts(model)
    declare_experts(model.modules())
    own, other = (layer.mlp.experts for layer in model.model.layers)
    own.__class__ = OthersExperts
    # the product would call it, and the loop does not
    other._apply_gate = types.MethodType(lambda self, both: 5 * both.chunk(2, -1)[1], other)
    eager = copy.deepcopy(model)
    assert not declare_experts([own, other])
    with pytest.warns(streambp_fx.StreamBPWarning, match="runs unstreamed"):
        transform(model)
        (_, got), (_, want) = (step(m, batch(37, (0, 0))) for m in (model, eager))
    assert total_error([(got, want)]) < 1e-12


@pytest.mark.slow
def test_experts_in_bfloat16() -> None:
    """PyTorch's own grouped product, which in a captured graph takes bfloat16 alone."""
    exact = model_of("qwen3_moe", torch.float32)
    plain_experts(exact)
    eager, streamed = (copy.deepcopy(exact).to(torch.bfloat16) for _ in range(2))
    for module in streamed.modules():
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            module.config._experts_implementation = "grouped_mm"
    transform(streamed)
    given = batch(67, (0, 0))
    (_, want), (_, rounded), (_, got) = (step(m, given) for m in (exact, eager, streamed))
    assert total_error([(got, want)]) < 1.5 * total_error([(rounded, want)])
    products = [
        n for s in streambp_fx.schedule(streamed).segments for n in s.nodes if "grouped_mm" in str(n.target)
    ]
    assert {str(n.target) for n in products} == {"aten._grouped_mm.default"}
    assert_all_chunked(streamed, at_least=4)


# Families that have no graph, and why: they run as they are, with a warning.
NOT_CAPTURED = {"longcat_flash": "a loop over experts, in no other form, whose length depends on data"}


@pytest.mark.slow
@pytest.mark.parametrize("family", families())
@pytest.mark.filterwarnings("ignore::streambp_fx.StreamBPWarning")
def test_never_wrong(family: str) -> None:
    """Whatever is streamed of it."""
    from benchmarks.families.worker import exactness

    try:
        build(family)
    except Exception as error:
        pytest.skip(f"transformers cannot build it so small: {error}")
    if family in NOT_CAPTURED:
        with pytest.warns(streambp_fx.StreamBPWarning, match="could not be captured as one graph"):
            found = exactness(family, on_error="eager")
    else:
        found = exactness(family)
    for side, error in found.items():
        assert isinstance(error, str) or error < 1e-9, f"{side}: {error}"
