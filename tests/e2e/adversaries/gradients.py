"""Gradients that eager leaves None, sparse gradients, frequencies, ties, frozen and odd parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from e2e_adversary import STREAMED, WHATEVER, Cases, Record, tokens, total
from e2e_subject import VOCAB, WIDTH, Subject, token_loss
from torch import Tensor, nn

CASES = Cases("gradients")


def second_head() -> dict[str, Any]:
    return {"head2": nn.Linear(WIDTH, VOCAB), "value": nn.Linear(WIDTH, 1)}


def two_heads(m: Subject, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
    return {"loss": token_loss(m, x, ids), "other": m.head2(x).logsumexp(-1).mean()}


def _of(names: tuple[str, ...]) -> Any:
    def run(m: Any, call: Any, record: Record) -> None:
        for length in (33, 20):
            m.zero_grad()
            output = call(tokens(2, length))
            sum(total(output[n]) for n in names).backward()
            record("output", output)
            record.state(m)

    return run


def outputs(names: tuple[str, ...], name: str, want: str = STREAMED) -> Any:
    def note(loss: Any) -> Any:
        make = lambda door: Subject(loss=loss, parts=second_head)  # noqa: E731
        CASES.scenario(want, make=make, name=name)(_of(names))
        return loss

    return note


outputs(("loss",), "the first of two heads")(two_heads)
outputs(("other",), "the second of two heads")(two_heads)
outputs(("loss", "other"), "both of two heads")(two_heads)


@outputs(("value",), "an output beside the loss alone", WHATEVER)
@outputs(("loss",), "the loss beside an output", WHATEVER)
@outputs(("loss", "value"), "the loss and an output", WHATEVER)
def with_values(m: Subject, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
    return {"loss": token_loss(m, x, ids), "value": m.value(x)[..., 0]}  # type: ignore[operator]


@outputs(("loss",), "the first of two outputs of what runs unchunked", WHATEVER)
@outputs(("value",), "the second of two outputs of what runs unchunked", WHATEVER)
def whole_with_two(m: Subject, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
    w = m.scores(x).flip(-1).sigmoid()  # every row reads every row
    return {"loss": token_loss(m, m.weighted(x, w), ids), "value": w.mean(1)}


@outputs(("a",), "the first of two outputs by rows", WHATEVER)
@outputs(("b",), "the second of two outputs by rows", WHATEVER)
def with_two_rows(m: Subject, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
    both = m.lin(x) * m.lin2(x)
    return {"a": m.value(x) + both, "b": m.head2(x).tanh() + m.lin2(x).sum(-1, True)}  # type: ignore[operator]


@outputs(("pooled",), "a pooled output alone", WHATEVER)
@outputs(("loss",), "a loss beside a pooled output", WHATEVER)
def with_pooled(m: Subject, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
    return {"loss": token_loss(m, x, ids), "pooled": m.value(x[:, -1]).tanh()}  # type: ignore[operator]


@outputs(("loss",), "a loss beside hidden states", WHATEVER)
@outputs(("hidden",), "hidden states beside a loss", WHATEVER)
def with_hidden(m: Subject, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
    return {"loss": token_loss(m, x, ids), "hidden": x, "detached": m.head2(x).detach().mean()}  # type: ignore[operator]


@outputs(("early",), "an early exit alone", WHATEVER)
@outputs(("loss",), "a loss beside an early exit", WHATEVER)
def with_early_exit(m: Subject, x: Tensor, ids: Tensor) -> dict[str, Tensor]:
    early = token_loss(m, x, ids)
    x = x + m.attend(m.lin(x))
    loss = F.cross_entropy(m.head2(x).flatten(0, 1), ids.flatten())  # type: ignore[operator]
    return {"loss": loss, "early": early}


@CASES.block()
def unused_by_a_zero(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Eager has zeros here and not None."""
    return x + m.lin(x) * 0


@CASES.block()
def detached_parameter(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + F.linear(x, m.lin.weight.detach(), m.lin.bias)


@CASES.block()
def detached_result(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + m.lin(x).detach() + m.lin2(x.detach())


@CASES.block()
def used_without_grad(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    with torch.no_grad():
        gate = m.lin(x).sigmoid()
    return x * gate + m.lin2(x)


# Ops that may return the very value that they are given, where autograd sees nothing.
RETURNED: dict[str, Any] = {
    "to its dtype": lambda h: h.to(h.dtype),
    "contiguous": lambda h: h.contiguous(),
    "type_as itself": lambda h: h.type_as(h),
    "real": torch.real,
    "conj": torch.conj,
    "dropout of nothing in place": lambda h: F.dropout(h.double(), 0.0, True, inplace=True),
    "a norm": lambda h: F.layer_norm(h, (WIDTH,)),
    "atleast_3d": torch.atleast_3d,
}


def returned(make: Any) -> Any:
    def block(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
        h = m.lin(x)
        with torch.no_grad():
            gate = make(h).sigmoid()
        return x * gate + h * m.scale + m.lin2(h)

    return block


CASES.blocks({f"{name}, without gradients": returned(make) for name, make in RETURNED.items()})


@CASES.block()
def only_by_its_sign(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Ops that have no derivative: eager gives zeros, or None where the graph ends."""
    return x * m.lin(x).sign() + (m.lin2(x) > 0).to(x.dtype) * m.scale


@CASES.block()
def by_its_shape(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Ops that give an operand no gradient: eager leaves its parameters None."""
    return x.view_as(m.lin(x)) + torch.zeros_like(m.lin2(x)) + x.expand_as(m.q(x)) * x.type_as(m.unused(x))


@CASES.block()
def rounded(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + m.lin(x).round() + m.lin2(x).floor().detach()


@CASES.block()
def by_argmax(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + m.table[m.lin(x).argmax(-1)]


@CASES.block()
def by_an_integer(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + m.table[(m.lin(x) * 3).long().sum(-1) % 100]


def embedded(name: str, want: str = STREAMED, **settings: Any) -> None:
    parts = lambda: {"embed2": nn.Embedding(VOCAB, WIDTH, **settings)}  # noqa: E731
    CASES.block(want, parts=parts, name=name)(lambda m, x, ids: x + m.lin(m.embed2(ids)))


embedded("padding_idx", padding_idx=3)
embedded("padding_idx from the end", padding_idx=-2)
embedded("scale_grad_by_freq", WHATEVER, scale_grad_by_freq=True)
embedded("scale_grad_by_freq and padding_idx", WHATEVER, scale_grad_by_freq=True, padding_idx=4)
embedded("sparse", WHATEVER, sparse=True)
embedded("sparse with padding_idx", WHATEVER, sparse=True, padding_idx=1)


@CASES.block(WHATEVER)
def embedding_bag(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    windows = torch.stack([ids, ids.roll(1, 1) * (torch.arange(x.shape[1]) > 0)], -1)
    y = F.embedding_bag(windows.flatten(0, 1), m.embed.weight, mode="mean")
    return x + y.view(x.shape)


@CASES.block(WHATEVER)
def one_hot_product(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + F.one_hot(ids, VOCAB).to(x.dtype) @ m.embed.weight


@CASES.loss()
def tied_head(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy((x @ m.embed.weight.T)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _tied() -> nn.Module:
    model = Subject(lambda m, x, ids: x + m.lin(x))
    model.head.weight = model.embed.weight
    model.lin.weight = model.q.weight
    return model


CASES.add("tied parameters", lambda door: _tied(), STREAMED)


@CASES.block()
def one_module_twice(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    x = x + m.lin(x).tanh()
    x = x + m.attend(m.norm(x))
    return x + m.lin(x)


@CASES.block()
def a_transposed_weight(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + (x @ m.lin.weight) @ m.lin.weight.T


def _changed(change: Any) -> Any:
    def make(door: str) -> nn.Module:
        model = Subject(lambda m, x, ids: x + m.lin(x) * m.scale)
        change(model)
        return model

    return make


def _not_contiguous(m: Subject) -> None:
    m.lin.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).double().T * 0.3)
    m.head.weight = nn.Parameter(torch.randn(WIDTH, VOCAB).double().T * 0.3)
    m.embed.weight = nn.Parameter(torch.randn(WIDTH, VOCAB).double().T)
    m.norm.weight = nn.Parameter(torch.randn(2 * WIDTH).double()[::2])


def _expanded(m: Subject) -> None:
    m.scale = nn.Parameter(torch.tensor(1.5).double().expand(WIDTH))


def _strided(m: Subject) -> None:
    m.lin.weight = nn.Parameter(torch.randn(WIDTH, 3 * WIDTH).double()[:, ::3] * 0.3)
    m.q.weight = nn.Parameter(torch.randn(2 * WIDTH, WIDTH).double()[1::2] * 0.3)


def _frozen(m: Subject) -> None:
    for module in (m.embed, m.lin, m.q, m.k):
        module.requires_grad_(False)


def _only_one(m: Subject) -> None:
    m.requires_grad_(False)
    m.scale.requires_grad_(True)


def _head_only(m: Subject) -> None:
    m.requires_grad_(False)
    m.head.requires_grad_(True)


CASES.add("parameters that are not contiguous", _changed(_not_contiguous), STREAMED)
CASES.add("strided parameters", _changed(_strided), STREAMED)
CASES.add("an expanded parameter", _changed(_expanded), WHATEVER)
CASES.add("frozen parts", _changed(_frozen), STREAMED)
CASES.add("one parameter alone", _changed(_only_one), STREAMED)
CASES.add("the head alone", _changed(_head_only), WHATEVER)


@CASES.scenario(STREAMED, block=lambda m, x, ids: x + m.lin(x))
def frozen_after_a_step(m: Any, call: Any, record: Record) -> None:
    record.step(m, call, tokens(2, 33))
    m.lin.requires_grad_(False)
    record.step(m, call, tokens(2, 33))
    m.lin.requires_grad_(True)
    m.embed.requires_grad_(False)
    record.step(m, call, tokens(2, 33))


@CASES.scenario(STREAMED, block=lambda m, x, ids: x + m.lin(x))
def accumulation(m: Any, call: Any, record: Record) -> None:
    for length in (33, 20, 12):
        (call(tokens(2, length)) / 3).backward()
    record.state(m)


@CASES.scenario(STREAMED, block=lambda m, x, ids: x + m.lin(x))
def weight_decay(m: Any, call: Any, record: Record) -> None:
    optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.5)
    for length in (33, 20, 12):
        optimizer.zero_grad()
        call(tokens(2, length)).backward()
        optimizer.step()
        record.state(m)


@CASES.scenario(STREAMED, make=lambda door: Subject(loss=two_heads, parts=second_head))
def weight_decay_with_an_unused_head(m: Any, call: Any, record: Record) -> None:
    optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.5)
    for length in (33, 20):
        optimizer.zero_grad()
        call(tokens(2, length))["loss"].backward()
        optimizer.step()
        record.state(m)


@CASES.scenario(WHATEVER, block=lambda m, x, ids: x + m.lin(x))
def autograd_grad(m: Any, call: Any, record: Record) -> None:
    loss = call(tokens(2, 33))
    wanted = (m.lin.weight, m.unused.weight, m.embed.weight)
    record("gradients of some", list(torch.autograd.grad(loss, wanted, allow_unused=True)))
    record.state(m)


@CASES.scenario(WHATEVER, block=lambda m, x, ids: x + m.lin(x))
def backward_to_some_inputs(m: Any, call: Any, record: Record) -> None:
    call(tokens(2, 33)).backward(inputs=[m.lin.weight, m.embed.weight])
    record.state(m)


@CASES.block(parts=lambda: {"experts": nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])})
def experts_densely(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    top = m.lin(x)[..., :4].topk(2, -1)
    gate = torch.zeros_like(m.lin(x)[..., :4]).scatter(-1, top.indices, top.values.softmax(-1))
    return x + sum(gate[..., e, None] * expert(x) for e, expert in enumerate(m.experts))


@CASES.block(WHATEVER, parts=lambda: {"experts": nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])})
def experts_by_index_add(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    """Rows of each expert are picked and put back: their number depends on the data."""
    flat, chosen = x.flatten(0, 1), m.lin(x).flatten(0, 1)[:, :3].argmax(-1)
    out = torch.zeros_like(flat)
    for e, expert in enumerate(m.experts):
        rows = (chosen == e).nonzero()[:, 0]
        out.index_add_(0, rows, expert(flat[rows]))
    return x + out.view(x.shape)


@CASES.block(WHATEVER, parts=lambda: {"experts": nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])})
def experts_that_nobody_chose(m: Any, x: Tensor, ids: Tensor) -> Tensor:
    """Eager leaves the gradient of an expert without rows None."""
    out = x
    for e in range(3):
        if e < x.shape[0] - 1:
            out = out + m.experts[e](x) * (ids % 3 == e)[..., None]
    return out


@CASES.block()
def a_stacked_parameter_by_index(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    for row in m.table[:2]:
        x = x * row + m.table[5]
    return x


@CASES.block()
def a_split_parameter(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    a, b = m.table.split(50)
    u, _, w = m.lin.weight.chunk(3)
    return x + a[:12].mean(0) + F.linear(x, torch.cat([u, w, u])) + b.max() * 0.1


# ---- gradients that lie in memory as no value does


def _spread(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Rows with several dims behind them."""
    return m.lin2(x).unflatten(-1, (3, -1))


def _reduced_by_the_user(reduce: Any) -> Any:
    def run(m: Any, call: Any, record: Record) -> None:
        for batch, length in ((2, 33), (3, 20), (1, 8)):
            m.zero_grad()
            reduce(call(tokens(batch, length))).backward()
            record.state(m)

    return run


REDUCED = {
    "sum over a dim": lambda y: y.sum(2).square().mean(),
    "sum": lambda y: y.sum(),
    "mean over samples": lambda y: y.mean(0).square().sum(),
    "transposed": lambda y: (y.transpose(0, 1).contiguous() * 1.5).square().mean(),
    "channels first": lambda y: y.permute(0, 3, 2, 1).softmax(1).square().sum(),
}
for _name, _reduce in REDUCED.items():
    CASES.scenario(WHATEVER, make=lambda door: Subject(loss=_spread), name=f"{_name} of rows with dims")(
        _reduced_by_the_user(_reduce)
    )


@CASES.loss(WHATEVER)
def reduced_in_the_graph(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return _spread(m, x, ids).sum((1, 2)).square().mean()


@CASES.loss(WHATEVER)
def rows_first(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    logits, targets = m.head(x).transpose(0, 1).flatten(0, 1), ids.T.flatten()
    each = F.cross_entropy(logits, targets, reduction="none")
    return each.view(x.shape[1], -1).sum(0).square().mean()


@CASES.scenario(STREAMED, block=lambda m, x, ids: x + m.lin(x), against="none")
def several_gradients_at_once(m: Any, call: Any, record: Record) -> None:
    """Refused in words where it is streamed; what comes after is right."""
    loss = call(tokens(2, 33))
    if call is m:
        return
    try:
        torch.autograd.grad(loss, [m.lin.weight], torch.eye(2, dtype=loss.dtype)[0], is_grads_batched=True)
    except RuntimeError as error:
        assert "is_grads_batched" in str(error), error
    else:
        raise AssertionError("it was not refused")
