"""Situations: threads, checkpoints, short and empty sequences, sizes that change."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from e2e_adversary import REFUSED, UNSTREAMED, WARNED, WHATEVER, Cases, Record, tokens
from e2e_subject import VOCAB, WIDTH, Subject, heads, joined, token_loss
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CASES = Cases("situations")


def plain(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + m.lin(x)


# ---- inputs


class FromEmbeddings(Subject):
    def forward(self, input_ids: Tensor | None = None, inputs_embeds: Tensor | None = None) -> Any:
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        x = x + self.attend(self.norm(x))
        return self.head(x).logsumexp(-1).mean()


@CASES.scenario(WHATEVER, make=lambda door: FromEmbeddings())
def embeddings_with_a_gradient(m: Any, call: Any, record: Record) -> None:
    for length in (33, 20):
        given = m.table[tokens(2, length)].detach().requires_grad_()
        m.zero_grad()
        call(inputs_embeds=given).backward()
        record("gradient", given.grad)
        record.state(m)


@CASES.scenario(WHATEVER, make=lambda door: FromEmbeddings())
def embeddings_of_a_graph(m: Any, call: Any, record: Record) -> None:
    """Soft prompts: learned rows before the embedded tokens, made outside of the model."""
    for length in (33, 20):
        ids = tokens(2, length)
        given = torch.cat([m.table[:4].expand(2, -1, -1), m.embed(ids)], 1)
        m.zero_grad()
        call(inputs_embeds=given).backward()
        record.state(m)


class Crossing(Subject):
    """Cross attention to rows of an encoder."""

    def forward(self, input_ids: Tensor, encoded: Tensor) -> Any:
        x = self.embed(input_ids)
        x = x + self.attend(self.norm(x))
        q, k, v = heads(self.lin(x)), heads(self.lin2(encoded)), heads(self.v(encoded))
        x = x + joined(F.scaled_dot_product_attention(q, k, v))
        return token_loss(self, x, input_ids)


def _crossing(*lengths: tuple[int, int]) -> Callable[..., None]:
    def run(m: Any, call: Any, record: Record) -> None:
        for rows, columns in lengths:
            encoded = m.table[:columns].detach().expand(2, -1, -1).clone().requires_grad_()
            m.zero_grad()
            loss = call(tokens(2, rows), encoded)
            loss.backward()
            record("loss", loss)
            record("gradient of the encoded rows", encoded.grad)
            record.state(m)

    return run


for _name, _lengths in {
    "of one length": ((33, 33), (20, 20)),
    "of other lengths": ((33, 17), (20, 9)),
    "of one length at first": ((33, 33), (20, 33), (33, 17)),
    "of other lengths at first": ((33, 17), (20, 20), (12, 33)),
}.items():
    CASES.scenario(WHATEVER, make=lambda door: Crossing(), name=f"cross attention {_name}")(
        _crossing(*_lengths)
    )


class Aligned(Subject):
    """A second input with a row for each token, or for each of one less."""

    def forward(self, input_ids: Tensor, weights: Tensor) -> Any:
        x = self.embed(input_ids)
        x = x + self.attend(self.norm(x))
        each = F.cross_entropy(self.head(x).transpose(1, 2), input_ids, reduction="none")
        return (each[:, : weights.shape[1]] * weights).mean()


@CASES.scenario(WHATEVER, make=lambda door: Aligned())
def weights_that_become_shorter(m: Any, call: Any, record: Record) -> None:
    for rows, columns in ((33, 33), (20, 19), (33, 33), (12, 7)):
        record.step(m, call, tokens(2, rows), torch.linspace(0, 1, 2 * columns).double().view(2, columns))


def _lengths(*sizes: tuple[int, int]) -> Callable[..., None]:
    def run(m: Any, call: Any, record: Record) -> None:
        for batch, length in sizes:
            record.step(m, call, tokens(batch, length))

    return run


SIZES = {
    "batch of one": ((1, 33), (1, 20), (2, 33)),
    "one sequence later": ((3, 33), (1, 33), (1, 9)),
    "shorter than a chunk": ((2, 5), (2, 33), (2, 3)),
    "two tokens": ((2, 2), (2, 33), (2, 2)),
    "a row over": ((2, 33), (2, 9), (2, 17), (2, 8), (2, 16)),
    "as wide as the model": ((2, WIDTH), (3, 3), (4, VOCAB), (12, 12), (2, 4)),
    "as many samples as tokens": ((9, 9), (10, 9), (9, 10)),
    "longer later": ((2, 9), (2, 70), (2, 33)),
}
for _name, _sizes in SIZES.items():
    CASES.scenario(WHATEVER, block=plain, name=_name)(_lengths(*_sizes))


def finite(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """A sum, which has a gradient for no row as well."""
    return m.head(x).logsumexp(-1).sum()


EMPTY = {
    "one token": ((2, 1), (2, 33), (2, 1)),
    "one token of one": ((1, 1), (1, 33)),
    "one token later": ((2, 33), (2, 1)),
    "no token": ((2, 0), (2, 33)),
    "no token later": ((2, 33), (2, 0)),
    "no sample": ((0, 33), (2, 33)),
    "no sample later": ((2, 33), (0, 33), (2, 20)),
    "nothing": ((0, 0), (2, 33)),
}
for _name, _sizes in EMPTY.items():
    CASES.scenario(WHATEVER, make=lambda door: Subject(plain, finite), name=_name)(_lengths(*_sizes))


# ---- threads, checkpoints, wrappers, copies


@CASES.scenario(WHATEVER, block=plain)
def two_threads(m: Any, call: Any, record: Record) -> None:
    """Each trains the model once at a time; then the main thread does."""
    errors: list[BaseException] = []
    turn = threading.Lock()

    def train(length: int) -> None:
        try:
            with turn:
                call(tokens(2, length)).backward()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(n,)) for n in (33, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    record.step(m, call, tokens(2, 12))


@CASES.scenario(WHATEVER, block=plain)
def two_models_in_two_threads(m: Any, call: Any, record: Record) -> None:
    """At once, each a model of its own, the first steps included."""
    other = copy.deepcopy(m) if call is m else None
    losses: dict[str, Any] = {}

    def train(name: str, run: Any) -> None:
        try:
            for length in (33, 20):
                loss = run(tokens(2, length))
                loss.backward()
                losses[f"{name} {length}"] = float(loss.detach())
        except BaseException as error:
            losses[name] = error

    if other is None:  # a wrapper of torch.compile has no copy of its own
        other = call
    threads = [threading.Thread(target=train, args=a) for a in (("first", call), ("second", other))]
    if other is call:
        threads = threads[:1]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [v for v in losses.values() if isinstance(v, BaseException)]
    assert not errors, errors
    record.step(m, call, tokens(2, 12))


@CASES.scenario(WHATEVER, block=plain)
def checkpoint_around_the_model(m: Any, call: Any, record: Record) -> None:
    for reentrant in (False, True):
        m.zero_grad()
        weight = torch.ones((), dtype=torch.float64, requires_grad=True)
        loss = checkpoint(lambda w, ids: call(ids) * w, weight, tokens(2, 33), use_reentrant=reentrant)
        loss.backward()
        record("loss", loss)
        record("weight", weight.grad)
        record.state(m)


@CASES.block(WHATEVER)
def checkpoint_within(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + checkpoint(lambda y: m.lin(y).tanh(), x, use_reentrant=False)


def _with_a_mean() -> dict[str, Any]:
    return {"mean": torch.zeros(WIDTH, dtype=torch.float64), "bn": nn.BatchNorm1d(WIDTH)}


@CASES.block(WARNED, _with_a_mean)
def a_buffer_changed_in_a_checkpoint(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Eager changes it twice."""

    def region(y: Tensor) -> Tensor:
        y = m.lin(y)
        with torch.no_grad():
            m.mean.lerp_(y.mean((0, 1)), 0.1)
        return y - m.mean

    return x + checkpoint(region, x, use_reentrant=False)


@CASES.block(WARNED, _with_a_mean)
def batch_norm_in_a_checkpoint(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    return x + checkpoint(lambda y: m.bn(m.lin(y).mT).mT, x, use_reentrant=True)


@CASES.block(WARNED)
def a_checkpoint_that_is_given_no_gradient(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """Its parameters get none from eager."""
    return x + m.lin2(x) + checkpoint(lambda y: m.lin(y), x.detach(), use_reentrant=True)


@CASES.block(WHATEVER)
def a_checkpoint_that_is_given_no_gradient_beside_a_hook(m: Subject, x: Tensor, ids: Tensor) -> Tensor:
    """The hook is why the graph is not streamed; run as it is, it would make that gradient all the same."""
    h = m.lin2(x)
    h.register_hook(lambda g: 2 * g)
    return x + h + checkpoint(lambda y: m.lin(y), x.detach(), use_reentrant=True)


@CASES.scenario(WHATEVER, block=plain)
def a_wrapper_around_the_call(m: Any, call: Any, record: Record) -> None:
    class Wrapper(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            return call(ids) * 2 + m.scale.sum()

    wrapper = Wrapper()
    for length in (33, 20):
        record.step(m, wrapper, tokens(2, length))


@CASES.scenario(WHATEVER, block=plain)
def a_part_of_a_larger_loss(m: Any, call: Any, record: Record) -> None:
    for length in (33, 20):
        m.zero_grad()
        loss = call(tokens(2, length)).exp() + call(tokens(2, length, 1)) ** 2 + m.scale.square().sum()
        loss.backward()
        record("loss", loss)
        record.state(m)


@CASES.scenario(WHATEVER, block=plain)
def forwards_before_backwards_in_another_order(m: Any, call: Any, record: Record) -> None:
    losses = [call(tokens(2, n)) for n in (33, 20, 12)]
    for loss in losses:
        loss.backward()
    record.state(m)


@CASES.scenario(WHATEVER, block=plain)
def some_steps_without_grad(m: Any, call: Any, record: Record) -> None:
    record.step(m, call, tokens(2, 33))
    with torch.no_grad():
        record("without grad", call(tokens(2, 33)))
    with torch.inference_mode():
        record("inference", float(call(tokens(2, 33))))
    record.step(m, call, tokens(2, 20))


@CASES.scenario(WHATEVER, block=plain)
def another_dtype_later(m: Any, call: Any, record: Record) -> None:
    record.step(m, call, tokens(2, 33))
    m.float()
    for p in m.parameters():
        p.grad = None
    loss = call(tokens(2, 33))
    loss.backward()
    record("dtype", (loss.dtype, m.lin.weight.grad.dtype))
    m.double()
    for p in m.parameters():
        p.grad = None
    record.step(m, call, tokens(2, 33))


@CASES.scenario(WHATEVER, block=plain)
def parameters_exchanged(m: Any, call: Any, record: Record) -> None:
    record.step(m, call, tokens(2, 33))
    m.lin.weight = nn.Parameter(m.lin.weight.detach() * 2)
    m.scale = nn.Parameter(m.scale.detach().clone(), requires_grad=False)
    record.step(m, call, tokens(2, 33))
    m.lin.bias = None
    record.step(m, call, tokens(2, 20))


# What was compiled is found by the model's own parameters, of which none was read.
@CASES.scenario({"compile": "silent", "transform": WHATEVER}, block=plain)
def functional_call(m: Any, call: Any, record: Record) -> None:
    """Parameters handed over for one call."""
    given = {n: (p.detach() * 1.5).requires_grad_() for n, p in m.named_parameters()}
    target = m if call is m else call
    names = dict(given)
    if hasattr(target, "_orig_mod"):
        names = {f"_orig_mod.{n}": t for n, t in given.items()}
    loss = torch.func.functional_call(target, names, (tokens(2, 33),))
    loss.backward()
    record("loss", loss)
    record("gradients", {n: t.grad for n, t in given.items()})


@CASES.scenario(WHATEVER, block=plain)
def ids_of_other_kinds(m: Any, call: Any, record: Record) -> None:
    record.step(m, call, tokens(2, 33).contiguous())
    record.step(m, call, tokens(33, 2).T)
    record.step(m, call, tokens(4, 66)[::2, ::2])
    record.step(m, call, tokens(1, 33).expand(3, -1))


@CASES.scenario(WHATEVER, block=lambda m, x, ids: x + m.lin(x) * (2 if m.training else 1) * m.factor)
def attributes_that_change(m: Any, call: Any, record: Record) -> None:
    for factor in (1.0, 0.5, 3):
        m.factor = factor
        record.step(m, call, tokens(2, 33))


class Branching(Subject):
    """What is computed depends on the length, on a number in Python and on data."""

    def forward(self, input_ids: Tensor) -> Any:
        x = self.embed(input_ids)
        x = x + self.attend(self.norm(x))
        if input_ids.shape[1] > 25:
            x = x + self.lin(x)
        if input_ids.shape[0] == input_ids.shape[1]:
            x = x * 2
        return token_loss(self, x, input_ids) * (1 + input_ids.shape[1] / 50)


@CASES.scenario(WHATEVER, make=lambda door: Branching())
def branches_by_sizes(m: Any, call: Any, record: Record) -> None:
    for batch, length in ((2, 33), (2, 20), (9, 9), (2, 26), (2, 25)):
        record.step(m, call, tokens(batch, length))


class Sorted(Subject):
    def forward(self, input_ids: Tensor) -> Any:
        x = self.embed(input_ids)
        x = x + self.attend(self.norm(x))
        if input_ids.sum() % 2 == 0:
            x = x + self.lin(x)
        return token_loss(self, x, input_ids)


@CASES.scenario({"compile": WHATEVER, "transform": f"{UNSTREAMED}|{REFUSED}"}, make=lambda door: Sorted())
def branches_by_data(m: Any, call: Any, record: Record) -> None:
    for seed in range(3):
        record.step(m, call, tokens(2, 33, seed))


# ---- what is done with the model and its outputs


class WithLogits(Subject):
    def forward(self, input_ids: Tensor) -> Any:
        x = self.embed(input_ids)
        logits = self.head(x + self.attend(self.norm(x)))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def _logits_used(use: Callable[[Any], Any], name: str) -> None:
    def run(m: Any, call: Any, record: Record) -> None:
        for length in (33, 20):
            m.zero_grad()
            output = call(tokens(2, length))
            (output["loss"] + use(output["logits"])).backward()
            record.state(m)

    make, lazy = (lambda door: WithLogits()), {"logits": "lazy"}
    CASES.scenario(WHATEVER, make=make, name=f"logits {name}", options=lazy)(run)


def _seen_without_gradients(logits: Tensor) -> Tensor:
    with torch.no_grad():
        best = logits.argmax(-1)
    return logits.logsumexp(-1).square().mean() + best.sum()


_logits_used(_seen_without_gradients, "first read without gradients")
_logits_used(lambda x: x.float().sum() + x.mul_(2).exp().mean() + x.sum(), "changed after a cast")
