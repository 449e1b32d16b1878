"""torch.compile(model, backend="streambp"): found by name, exact, and compiled as rarely as it says."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from e2e_check import assert_close_grads, assert_close_loss, grads, in_double
from e2e_models import CHUNK, LOSS_CHUNK, build, padded, plain, sample

import streambp_fx
from streambp_fx import StreamBPWarning, backend
from streambp_fx.versions.differences import checkpoint_layers

OPTIONS = {"chunk": CHUNK, "loss_chunk": LOSS_CHUNK}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield


@pytest.fixture
def analysed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry for each graph that is analysed, streamed or not."""
    found: list[Any] = []
    real = backend.analyze

    def analyze(*args: Any) -> Any:
        found.append(real(*args))
        return found[-1]

    monkeypatch.setattr(backend, "analyze", analyze)
    return found


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend="streambp", options={**OPTIONS, **options})


def check(eager: Any, model: Any, call: Any, batch: dict[str, Any], rtol: float = 1e-9) -> Any:
    """One step of both, compared; the output of the compiled one."""
    eager.zero_grad()
    want = eager(**batch).loss
    want.backward()
    model.zero_grad()
    output = call(**batch)
    output.loss.backward()
    assert_close_loss(output.loss.detach(), want.detach(), rtol)
    assert_close_grads(grads(model), grads(eager), rtol)
    return output


def check_function(loss: Any, eager: Any, model: Any, call: Any, lengths: tuple[int, ...]) -> None:
    """Gradients of `loss(eager, ids)` and of the compiled `call(ids)`, compared at each length."""
    for length in lengths:
        ids = plain(2, length)["input_ids"]
        eager.zero_grad()
        loss(eager, ids).backward()
        model.zero_grad()
        call(ids).backward()
        assert_close_grads(grads(model), grads(eager), 1e-9)


@pytest.mark.parametrize("family", sample(["llama", "gemma2", "gpt_neox"], "llama"))
def test_lengths_in_a_row(family: str, analysed: list[Any]) -> None:
    """One compiled model, four lengths and one shorter than a chunk: one graph."""
    with in_double(functools.partial(build, family)):
        eager = build(family)
        model = copy.deepcopy(eager)
        call = compiled(model)
        for length in (67, 80, 33, 129, 9):
            check(eager, model, call, plain(2, length))
        assert len(analysed) == 1
        left = [s.reason for s in streambp_fx.schedule(call).segments if not s.chunked]
    assert not left, left


@pytest.mark.slow
def test_a_mask_and_a_batch_as_long_as_the_sequence(analysed: list[Any]) -> None:
    eager = build("llama")
    model = copy.deepcopy(eager)
    call = compiled(model)
    check(eager, model, call, padded(67, "right"))
    check(eager, model, call, padded(67, "left"))
    assert len(analysed) == 1
    torch._dynamo.reset()
    call = compiled(model, seq_dim={"input_ids": 1, "labels": 1})
    check(eager, model, call, plain(17, 17))
    assert len(analysed) == 2 and all(s.chunked for s in analysed[1].segments)


@pytest.mark.slow
def test_batch_sizes(analysed: list[Any]) -> None:
    """One graph for all, but for a single sequence, for which PyTorch compiles once more."""
    eager = build("llama")
    model = copy.deepcopy(eager)
    call = compiled(model)
    counters = torch._dynamo.utils.counters
    traced = []
    for batch in (2, 3, 4, 5, 2, 7, 1, 9):
        check(eager, model, call, plain(batch, 35 + batch))
        traced.append((counters["stats"]["unique_graphs"], len(analysed)))
    graphs = traced[0][0]
    assert traced[5] == (graphs, 1) and traced[-1] == (graphs + 1, 2), f"graphs and analyses: {traced}"


ACCEPTED = [(True, "default"), (False, "default"), (None, "reduce-overhead")]


@pytest.mark.slow
@pytest.mark.parametrize(("dynamic", "mode"), sample(ACCEPTED, ACCEPTED[-1]))
def test_dynamic_and_mode_are_accepted(dynamic: bool | None, mode: str) -> None:
    eager = build("llama")
    model = copy.deepcopy(eager)
    kwargs: dict[str, Any] = {"mode": mode} if mode != "default" else {"options": OPTIONS}
    call = torch.compile(model, backend="streambp", dynamic=dynamic, **kwargs)
    for length in (37, 41):
        check(eager, model, call, plain(2, length))
    assert streambp_fx.schedule(model) is not None


@pytest.mark.slow
def test_in_place() -> None:
    eager = build("llama")
    model = copy.deepcopy(eager)
    model.compile(backend="streambp", options=OPTIONS)
    check(eager, model, model, plain(2, 37))
    assert len(streambp_fx.schedule(model).segments) == 4


def test_the_user_s_tensors_are_left_alone() -> None:
    model = compiled(build("llama"))
    batch = plain(2, 37)
    before = {k: set(vars(v)) for k, v in batch.items()}
    model(**batch).loss.backward()
    assert {k: set(vars(v)) for k, v in batch.items()} == before


def test_evaluation_is_bitwise_the_original() -> None:
    eager = build("llama").eval()
    call = compiled(copy.deepcopy(eager))
    with torch.no_grad():
        want, got = eager(**plain(2, 37)), call(**plain(2, 37))
    assert torch.equal(want.loss, got.loss) and torch.equal(want.logits, got.logits)
    assert type(got.logits) is torch.Tensor


def test_found_by_name_without_an_import() -> None:
    code = """
import sys, torch
assert "streambp_fx" not in sys.modules
assert "streambp" in torch._dynamo.list_backends(), torch._dynamo.list_backends()
linear = torch.compile(torch.nn.Linear(3, 4), backend="streambp", options={"chunk": 7})
linear(torch.ones(2, 3)).sum().backward()
assert "streambp_fx" in sys.modules
print("found")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "found", done.stderr


@pytest.mark.slow
def test_a_float_that_changes(analysed: list[Any]) -> None:
    """A weight of the loss: a constant in the first call, then a number that may change."""
    eager = build("llama")
    model = copy.deepcopy(eager)

    def loss(m: Any, ids: torch.Tensor, weight: float) -> torch.Tensor:
        return m(input_ids=ids, labels=ids).loss * (weight * 2.0)

    call = torch.compile(functools.partial(loss, model), backend="streambp", options=OPTIONS)
    ids = plain(2, 37)["input_ids"]
    for weight in (0.5, 0.25, 3.0, 7.0):
        eager.zero_grad()
        loss(eager, ids, weight).backward()
        model.zero_grad()
        call(ids, weight).backward()
        assert_close_grads(grads(model), grads(eager), 1e-9)
    assert len(analysed) == 2


@pytest.mark.slow
def test_tokens_and_labels_of_one_input(analysed: list[Any]) -> None:
    """The sequence that is streamed is a token shorter than the input."""
    eager = build("llama")
    model = copy.deepcopy(eager)

    def loss(m: Any, ids: torch.Tensor) -> torch.Tensor:
        logits = m(input_ids=ids[:, :-1]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    call = torch.compile(functools.partial(loss, model), backend="streambp", options=OPTIONS)
    check_function(loss, eager, model, call, (67, 34, 17, 5))
    assert len(analysed) == 1 and all(s.chunked for s in analysed[0].segments)


def test_checkpointing_is_taken_over() -> None:
    """Regions that the model checkpoints are streamed like any other; nothing is recomputed twice."""
    eager = build("llama")
    model = copy.deepcopy(eager)
    checkpoint_layers(model)
    check(eager, model, compiled(model), plain(2, 67))
    segments = streambp_fx.schedule(model).segments
    assert [s.kind for s in segments] == ["unchunked", "layer", "layer", "rows"]
    assert all(s.chunked for s in segments)


# ---- options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"chnk": 16}, ["unknown option 'chnk'", "'chunk'", "loss_chunk"]),
        ({"chunk": 0}, ["chunk", "positive"]),
        ({"logits": "maybe"}, ["logits", '"lazy"', "'maybe'"]),
        ({"body": "fast"}, ["body", '"inductor"']),
        ({"on_error": "ignore"}, ["on_error", '"eager"']),
        ({"seq_dim": 1}, ["seq_dim", "input name"]),
        ({"seq_dim": {"ids": "one"}}, ["seq_dim"]),
    ],
)
def test_wrong_options(options: dict[str, Any], words: list[str]) -> None:
    model = torch.compile(build("llama"), backend="streambp", options=options)
    with pytest.raises(Exception) as caught:
        model(**plain(2, 20))
    for word in words:
        assert word in str(caught.value), str(caught.value)


# ---- graphs of all kinds


def test_a_graph_without_a_sequence() -> None:
    mlp = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 3)).double()
    call = torch.compile(mlp, backend="streambp")
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    with pytest.warns(StreamBPWarning, match="no op of the graph reads along"):
        torch.testing.assert_close(call(x), mlp(x))
    (got,) = torch.autograd.grad(call(x).sum(), x)
    (want,) = torch.autograd.grad(mlp(x).sum(), x)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("frozen", [False, True])
def test_graphs_that_train_no_more_than_a_table_are_no_cause_for_a_warning(frozen: bool) -> None:
    """A lookup, a loss, a frozen part: a line in the log is enough."""
    head = torch.nn.Linear(5, 7).double().requires_grad_(not frozen)
    table = torch.nn.Embedding(9, 5).double()
    x = torch.compile(table, backend="streambp")(torch.arange(8).view(2, 4))
    loss = torch.compile(lambda y: torch.nn.functional.mse_loss(y, torch.zeros_like(y)), backend="streambp")
    loss(x).backward()
    assert table.weight.grad is not None
    if frozen:
        torch.compile(head, backend="streambp")(x.detach())


def test_a_function_around_a_model_with_a_graph_break() -> None:
    """A metric that Dynamo cannot trace lies between model and loss: both parts run, and exactly.

    The second has no op that reads along the sequence, and a warning says so.
    """
    eager = build("llama")
    model = copy.deepcopy(eager)
    seen: list[float] = []

    def step(m: Any, ids: torch.Tensor) -> torch.Tensor:
        hidden = m.model(input_ids=ids).last_hidden_state
        torch._dynamo.graph_break()
        seen.append(hidden.detach().mean().item())
        return m.lm_head(hidden).square().mean()

    call = torch.compile(functools.partial(step, model), backend="streambp", options=OPTIONS)
    with pytest.warns(streambp_fx.StreamBPWarning, match="what comes behind the graph break"):
        check_function(step, eager, model, call, (37, 50))
    assert any(s.mixings for s in streambp_fx.schedule(model.model.layers).segments)


def attention_block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    q, k, v = (x @ weight).unsqueeze(1).chunk(3, -1)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)


def test_hidden_states_alone(analysed: list[Any]) -> None:
    """A fragment has no names to go by: here the sequence is dim 0 of one input and dim 1 of the other."""

    def fragment(x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return attention_block(x.transpose(0, 1) * scale[:, None], weight)

    weight = torch.randn(8, 24, dtype=torch.float64, requires_grad=True)
    call = torch.compile(fragment, backend="streambp", options=OPTIONS)
    for length in (37, 53, 8):
        x = torch.randn(length, 3, 8, dtype=torch.float64, requires_grad=True)
        scale = torch.randn(length, dtype=torch.float64)
        want = torch.autograd.grad(fragment(x, scale, weight).square().sum(), (x, weight))
        got = torch.autograd.grad(call(x, scale, weight).square().sum(), (x, weight))
        torch.testing.assert_close(got, want)
    assert len(analysed) == 1 and any(s.chunked and s.mixings for s in analysed[0].segments)


def test_queries_keys_and_values_alone(analysed: list[Any]) -> None:
    """The state of the segment is an input of the graph."""

    def fragment(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v.exp(), is_causal=True).sin()

    call = torch.compile(fragment, backend="streambp", options=OPTIONS)
    for length, data in ((37, 3), (53, 3), (37, 1), (12, 1)):
        make = functools.partial(torch.randn, 2, 3, length, 8, dtype=torch.float64)
        q, k, v = (make(requires_grad=i < data) for i in range(3))
        wanted = [x for x in (q, k, v) if x.requires_grad]
        want = torch.autograd.grad(fragment(q, k, v).square().sum(), wanted)
        got = torch.autograd.grad(call(q, k, v).square().sum(), wanted)
        torch.testing.assert_close(got, want)
    assert len(analysed) == 2 and all(s.chunked for facts in analysed for s in facts.segments)


def test_ambiguity_is_said_and_seq_dim_decides(analysed: list[Any]) -> None:
    """`other` is square and nothing ties it to the attention but its length."""

    def fragment(x: torch.Tensor, weight: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return attention_block(x, weight).square().mean() + (other @ other).mean()

    weight = torch.randn(8, 24, dtype=torch.float64, requires_grad=True)
    x = torch.randn(3, 37, 8, dtype=torch.float64, requires_grad=True)
    other = torch.randn(37, 37, dtype=torch.float64)
    want = torch.autograd.grad(fragment(x, weight, other), (x, weight))
    call = torch.compile(fragment, backend="streambp", options=OPTIONS)
    with pytest.warns(streambp_fx.StreamBPWarning, match=r"(?s)'?other'?.*seq_dim"):
        loss = call(x, weight, other)
    torch.testing.assert_close(torch.autograd.grad(loss, (x, weight)), want)
    assert not analysed
    torch._dynamo.reset()
    call = torch.compile(fragment, backend="streambp", options={**OPTIONS, "seq_dim": {"x": 1}})
    torch.testing.assert_close(torch.autograd.grad(call(x, weight, other), (x, weight)), want)
    assert any(s.chunked and s.mixings for s in analysed[0].segments)


def test_seq_dim_of_an_input_that_is_not_there() -> None:
    weight = torch.randn(8, 24, requires_grad=True)
    call = torch.compile(attention_block, backend="streambp", options={"seq_dim": {"hidden": 1}})
    why = r"the graph runs unstreamed: seq_dim names 'hidden', but the inputs of this graph are x, weight"
    with pytest.warns(streambp_fx.StreamBPWarning, match=f"^{why}$") as said:
        call(torch.randn(3, 37, 8), weight)
    assert len(said) == 1, "in one sentence"


def test_seq_dim_that_does_not_exist() -> None:
    weight = torch.randn(8, 24, requires_grad=True)
    call = torch.compile(attention_block, backend="streambp", options={"seq_dim": {"x": 5}})
    with pytest.raises(Exception, match=r"seq_dim\['x'\] is 5, but the input has the shape \(3, 37, 8\)"):
        call(torch.randn(3, 37, 8), weight)
