"""The printed program: it runs, alone, and gives the runtime's loss and gradients."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import pytest
import torch
from e2e_check import assert_close_grads, assert_close_loss, grads, step, transform
from e2e_models import CHUNK, build, padded, plain, sample, tokens, true_double
from test_architectures import BATCHES, model_of
from test_objectives import WithObjective
from torch import Tensor, nn

import streambp_fx
from streambp_fx.passes.s6_schedule import kept_states
from streambp_fx.passes.step.row_chunks import split_rows
from streambp_fx.passes.step.saving import ATTENTION, Piece, Price, Saving

SMALL = {"chunk": CHUNK, "loss_chunk": 8}
OP = re.compile(r"^    (?:[\w, ()]+ = .*|\w+\.\w+_\(.*)  # \[.*\] (?:float|int|bool|bfloat)\w*$")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


class Flip(nn.Module):
    """Mixes rows in a way that the compiler does not stream."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).flip(1)


def flipped() -> Any:
    """A layer that runs unchunked, one of which only one weight is trained, and tied embeddings."""
    model = build("qwen3_tied")
    model.model.layers[1].mlp = Flip(model.model.layers[1].mlp)
    for name, parameter in model.model.layers[0].named_parameters():
        parameter.requires_grad_("q_proj" in name)
    return model


def run(code: str, model: nn.Module, inputs: Mapping[str, Any], **more: Any) -> tuple[Any, dict[str, Tensor]]:
    """Execute a printed program on a model's weights."""
    namespace: dict[str, Any] = {}
    exec(compile(code, "printed.py", "exec"), namespace)
    weights = {
        "parameters": dict(model.named_parameters(remove_duplicate=False)),
        "buffers": dict(model.named_buffers(remove_duplicate=False)),
    }
    return namespace["step"](**inputs, **weights, **more)


def check_readable(code: str) -> None:
    """Each op has its shape beside it and stands under a line of the model; no line is long."""
    where, located = "", 0
    for line in code.splitlines():
        assert len(line) <= 110, line
        if not line.strip():
            continue
        if not line.startswith(" "):
            where = ""
        comment = re.match(r"    # (?:backward of )?(\S+\.py:\d+: .*)", line)
        where = comment.group(1) if comment else where
        if OP.match(line):
            assert where, f"no line of the model above {line!r}"
            located += 1
    assert located > 100


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "sliding window, soft capping": (lambda: build("gemma2"), plain(2, 67)),
    "gpt_neox, one sequence": (lambda: build("gpt_neox", num_hidden_layers=1), plain(1, 50)),
    "attention kept": (lambda: build("mistral"), plain(2, 67)),
    "chosen values saved": (lambda: build("gemma3_text"), plain(2, 67)),
    "rows and what is kept elsewhere": (lambda: build("llama"), plain(2, 67)),
    "two sweeps": (lambda: WithObjective("llama", "preference"), plain(2, 67)),
    "unchunked region, tied and frozen": (flipped, plain(2, 37)),
}
OFTEN = ("two sweeps",)
PIECES = (Piece(Fraction(1, 5), None), Piece(Fraction(3, 5), ATTENTION), Piece(Fraction(1), Price(60, 128)))
OPTIONS: dict[str, dict[str, Any]] = {
    "attention kept": {"save": "attention", "every": 2},
    "chosen values saved": {"save": Saving(((), PIECES) * 5)},
    "rows and what is kept elsewhere": {"save": "attention", "offload": "disk", "offload_rows": True},
}


@pytest.mark.parametrize("name", sample(CASES, *OFTEN))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_printed_code_gives_the_runtimes_gradients(name: str) -> None:
    factory, batch = CASES[name]
    eager = factory()
    options = OPTIONS.get(name, {})
    streamed = transform(copy.deepcopy(eager), **options)
    with true_double(eager):
        want_loss, want = step(eager, batch)
        loss, runtime = step(streamed, batch)
        code = streambp_fx.schedule(streamed).code()
    got_loss, got = run(code, eager, batch)
    got = {n: got.get(n) for n in runtime}
    assert_close_loss(got_loss, loss, 1e-12, name)
    assert_close_grads(got, runtime, 1e-12, f"{name}, against the runtime")
    assert_close_loss(got_loss, want_loss, 1e-9, name)
    assert_close_grads(got, want, 1e-9, f"{name}, against eager")
    check_readable(code)
    assert ("saved_1 = segment_1_forward(" in code) == bool(options)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mamba2", "qwen3_next"])
def test_states_of_recurrences_are_kept(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_states, "SMALL", Fraction(1000))
    model, given = model_of(family), BATCHES["a tail of one row"]
    streamed = transform(copy.deepcopy(model))
    _, want = step(streamed, given)
    code = streambp_fx.schedule(streamed).code()
    _, got = run(code, model, given)
    assert_close_grads({n: got.get(n) for n in want}, want, 1e-12, "against the runtime")
    check_readable(code)
    assert re.search(r"_state_\d,?\s*\)? = (\(\s*)?segment_\d_forward\(", code)


@pytest.mark.slow
def test_one_program_for_all_layers_and_other_lengths() -> None:
    model = build("llama")
    streamed = transform(copy.deepcopy(model))
    with true_double(model):
        schedule = streambp_fx.explain(model, seq_len=67, batch_size=2, **SMALL)
        code = schedule.code()
    assert schedule.code() is code, "it is traced and printed once"
    assert "Segments 1-2, forwards." in code and "def segment_2_" not in code
    assert code.count('"model.layers.1.self_attn.q_proj.weight"') == 1
    for words in ("query_states = ", "grad_lm_head_weight", "hidden_states.narrow(1, start, rows)"):
        assert words in code
    check_readable(code)
    printed: dict[str, Any] = {}
    exec(code, printed)
    for total, chunk in ((3000, 512), (110_000, 2048), (67, 16)):
        assert printed["split_rows"](total, chunk) == split_rows(total, chunk), "cut as the runtime does"
    for length in (67, 83):
        batch = plain(2, length)
        with true_double(model):
            want_loss, want = step(model, batch)
            runtime_loss, runtime = step(streamed, batch)
        loss, gradients = run(code, model, batch)
        assert_close_loss(loss, runtime_loss, 1e-12)
        assert_close_grads(gradients, runtime, 1e-12, f"T={length}, against the runtime")
        assert_close_loss(loss, want_loss, 1e-9)
        assert_close_grads(gradients, want, 1e-9, f"T={length}, against eager")
    with pytest.raises(ValueError, match="no program was printed for 1 rows after 0 of 1"):
        run(code, model, {k: v[:, :1] for k, v in plain(2, 9).items()})


@pytest.mark.slow
def test_what_the_data_decides_is_asked_by_the_program() -> None:
    """A finite mask: a row that sees nothing attends evenly to all rows. One program serves both."""
    eager = build("llama", "eager", num_hidden_layers=1)
    streamed = transform(copy.deepcopy(eager))
    batches = {"padded": padded(37, "left"), "unpadded": padded(37, "left", (0, 0))}
    with true_double(eager):
        want = {k: step(streamed, b) for k, b in batches.items()}
        exact = {k: step(eager, b) for k, b in batches.items()}
        code = streambp_fx.schedule(streamed).code()
    assert "_of_all_rows(" in code
    for name, batch in batches.items():
        loss, gradients = run(code, eager, batch)
        assert_close_loss(loss, want[name][0], 1e-12, name)
        assert_close_grads(gradients, want[name][1], 1e-12, name)
        assert_close_loss(loss, exact[name][0], 1e-9, name)
        assert_close_grads(gradients, exact[name][1], 1e-9, name)


@pytest.mark.slow
def test_weights_need_not_exist() -> None:
    """The text of a model on meta names its sizes and runs on real weights."""
    model = build("llama", num_hidden_layers=1)
    empty = copy.deepcopy(model).to("meta")
    code = streambp_fx.explain(empty, seq_len=67, batch_size=2, **SMALL).code()
    assert "for 67 tokens" in code and re.search(r"\[(2|B), rows, 32\] float64", code)
    loss, gradients = run(code.replace('torch.device("meta")', 'torch.device("cpu")'), model, plain(2, 67))
    want_loss, want = step(model, plain(2, 67))
    assert_close_loss(loss, want_loss, 1e-6)
    assert_close_grads(gradients, want, 1e-6)


@pytest.mark.slow
def test_random_numbers_come_from_the_seed() -> None:
    model = build("llama", num_hidden_layers=1, attention_dropout=0.3)
    code = streambp_fx.explain(model, seq_len=37, batch_size=2, **SMALL).code()
    losses = [run(code, model, plain(2, 37), seed=seed)[0] for seed in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]


def test_a_part_of_a_model() -> None:
    """A graph without a loss takes the gradients of its outputs."""
    layer = build("llama").model.layers[0].mlp
    hidden = torch.randn(2, 33, 32, dtype=torch.float64, requires_grad=True)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp, self.query = layer, nn.Linear(32, 32, dtype=torch.float64)

        def forward(self, hidden: Tensor) -> Tensor:
            heads = self.query(hidden).view(2, -1, 4, 8).transpose(1, 2)
            mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
            return hidden + self.mlp(mixed.transpose(1, 2).reshape(hidden.shape))

    module = Mixed()
    compiled = torch.compile(module, backend="streambp", options=SMALL)
    cotangent = torch.randn_like(hidden)
    output = compiled(hidden)
    output.backward(cotangent)
    schedule = streambp_fx.schedule(compiled)
    assert schedule is not None
    (printed,), gradients = run(schedule.code(), module, {"hidden": hidden.detach()}, cotangents=[cotangent])
    assert torch.equal(printed, output)
    want = {**grads(module), "hidden": hidden.grad}
    assert_close_grads(gradients, want, 1e-12)


@pytest.mark.slow
def test_two_models_with_parameters_of_the_same_name() -> None:
    """The names tell the models apart; the reference has no gradient."""
    policy = build("llama", num_hidden_layers=1)
    reference = build("llama", num_hidden_layers=1, seed=3).requires_grad_(False)

    @torch.compile(backend="streambp", options=SMALL)
    def objective(policy: nn.Module, reference: nn.Module, ids: Tensor) -> Tensor:
        ours, theirs = (m(input_ids=ids, use_cache=False).logits for m in (policy, reference))
        return (ours.log_softmax(-1) - theirs.log_softmax(-1)).square().mean()

    want_loss = objective(policy, reference, tokens(2, 37))
    want_loss.backward()
    schedule = streambp_fx.schedule(policy)
    assert schedule is not None
    both = nn.ModuleDict({"policy": policy, "reference": reference})
    loss, gradients = run(schedule.code(), both, {"ids": tokens(2, 37)})
    assert_close_loss(loss, want_loss.detach(), 1e-12)
    assert_close_grads(gradients, {f"policy.{n}": g for n, g in grads(policy).items()}, 1e-12)


def test_what_cannot_be_printed_is_said() -> None:
    """A model's own autograd function is an object: the text says so and raises where it is called."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.flip(1)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return 2 * gradient.flip(1)

    class Own(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return Scaled.apply(self.inner(x))

    model = build("llama", num_hidden_layers=1)
    model.model.layers[0].mlp = Own(model.model.layers[0].mlp)
    with pytest.warns(streambp_fx.StreamBPWarning):
        code = streambp_fx.explain(model, seq_len=37, batch_size=2, **SMALL).code()
    assert "# Not printed: " in code and "is no op of PyTorch" in code
    with pytest.raises(NotImplementedError, match="cannot be printed"):
        run(code, model, plain(2, 37))


@pytest.mark.slow
def test_a_logits_output_that_is_lazy_is_left_out() -> None:
    model = build("llama", num_hidden_layers=1)
    ids = tokens(2, 37)
    batch = {"input_ids": ids, "labels": ids.clone()}
    compiled = torch.compile(copy.deepcopy(model), backend="streambp", options=SMALL)
    want_loss, _ = step(compiled, batch)
    schedule = streambp_fx.schedule(compiled)
    assert schedule is not None
    code = schedule.code()
    assert "(lazy) is computed when somebody reads it: not printed" in code
    loss, gradients = run(code, model, batch)
    assert_close_loss(loss, want_loss, 1e-6)
    assert_close_grads(gradients, step(model, batch)[1], 1e-6)
    schedule.facts.segments.clear()
    schedule._code = None
    with pytest.raises(ValueError, match="runs unstreamed: there is no program to print"):
        schedule.code()
