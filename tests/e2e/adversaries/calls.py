"""Signatures of a forward, and ways to call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from e2e_adversary import WHATEVER, Cases, Record, tokens, total
from e2e_subject import Subject
from torch import Tensor

CASES = Cases("calls")


class Labelled(Subject):
    """Hidden states and a loss of labels; what is called how is up to those below."""

    def loss_of(self, ids: Tensor, labels: Tensor | None, scale: float = 1.0) -> Any:
        x = self.embed(ids)
        x = x + self.attend(self.norm(x)) * scale
        logits = self.head(x)
        if labels is None:
            return logits.logsumexp(-1).mean()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def calls(model: type[Labelled], want: Any, *made: Callable[[Any, Tensor], Any]) -> None:
    """A case for each way of calling."""
    for number, call_it in enumerate(made):

        def run(m: Any, call: Any, record: Record, call_it: Any = call_it) -> None:
            for length in (33, 20):
                m.zero_grad()
                output = call_it(call, tokens(2, length))
                total(output).backward()
                record("output", output)
                record.state(m)

        CASES.scenario(want, make=lambda door: model(), name=f"{model.__name__}, call {number}")(run)


class ExplicitNone(Labelled):
    def forward(self, input_ids: Tensor, labels: Any = "ids", scale: Any = 0.5) -> Any:
        labels = input_ids if isinstance(labels, str) else labels
        return self.loss_of(input_ids, labels, 2.0 if scale is None else scale)


calls(
    ExplicitNone,
    WHATEVER,
    lambda f, ids: f(ids),
    lambda f, ids: f(ids, None),
    lambda f, ids: f(input_ids=ids, labels=None, scale=None),
    lambda f, ids: f(input_ids=ids, labels=ids, scale=0.25),
    lambda f, ids: f(ids, ids, 3.0),
)


class AnotherName(Labelled):
    """The keyword that callers use is an alias."""

    def forward(self, input_ids: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any) -> Any:
        ids = kwargs.get("ids", input_ids)
        return self.loss_of(ids, kwargs.get("targets", labels), kwargs.get("scale", 1.0))


calls(
    AnotherName,
    WHATEVER,
    lambda f, ids: f(ids=ids),
    lambda f, ids: f(input_ids=ids, targets=ids.flip(1)),
    lambda f, ids: f(ids, targets=None, labels=ids),
    lambda f, ids: f(ids, scale=0.1),
    lambda f, ids: f(ids, scale=2, unknown=None),
)


class KeywordNamedKwargs(Labelled):
    def forward(self, input_ids: Tensor, kwargs: Any = None, **more: Any) -> Any:
        return self.loss_of(input_ids, (kwargs or {}).get("labels"), more.get("scale", 1.0))


calls(
    KeywordNamedKwargs,
    WHATEVER,
    lambda f, ids: f(ids, {"labels": ids}),
    lambda f, ids: f(ids, kwargs={"labels": ids.flip(1)}, scale=0.5),
)


class PositionalOnly(Labelled):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None, /, scale: float = 1.0) -> Any:
        return self.loss_of(input_ids, labels, scale)


calls(PositionalOnly, WHATEVER, lambda f, ids: f(ids), lambda f, ids: f(ids, ids, scale=0.5))


class Variadic(Labelled):
    def forward(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.loss_of(input_ids, args[0] if args else kwargs.get("labels"), *args[1:])


calls(
    Variadic,
    WHATEVER,
    lambda f, ids: f(ids),
    lambda f, ids: f(ids, ids),
    lambda f, ids: f(ids, ids, 0.5),
    lambda f, ids: f(input_ids=ids, labels=ids),
)


class KeywordOnly(Labelled):
    def forward(self, *, labels: Tensor | None = None, input_ids: Tensor, scale: float | None = 0.3) -> Any:
        return self.loss_of(input_ids, labels, 1.0 if scale is None else scale)


calls(
    KeywordOnly,
    WHATEVER,
    lambda f, ids: f(input_ids=ids, labels=ids),
    lambda f, ids: f(labels=None, input_ids=ids, scale=None),
)


class IdsSecond(Labelled):
    def forward(self, scale: float, input_ids: Tensor) -> Any:
        return self.loss_of(input_ids, input_ids, scale)


calls(IdsSecond, WHATEVER, lambda f, ids: f(0.5, ids), lambda f, ids: f(input_ids=ids, scale=2))


class WithFlags(Labelled):
    def forward(self, input_ids: Tensor, return_dict: bool = True, mode: str = "lm", keep: int = 0) -> Any:
        loss = self.loss_of(input_ids[:, keep:], input_ids[:, keep:])
        loss = loss * 2 if mode == "twice" else loss
        return {"loss": loss} if return_dict else (loss,)


calls(
    WithFlags,
    WHATEVER,
    lambda f, ids: f(ids, False),
    lambda f, ids: f(ids, return_dict=True, mode="twice"),
    lambda f, ids: f(ids, keep=3),
    lambda f, ids: f(ids, keep=ids.shape[1] - 5),
)


class WithContainers(Labelled):
    def forward(self, input_ids: Tensor, extra: Any = None) -> Any:
        extra = extra or {}
        return self.loss_of(input_ids, extra.get("labels"), sum(extra.get("scales", [1.0])))


calls(
    WithContainers,
    WHATEVER,
    lambda f, ids: f(ids, {"labels": ids, "scales": [0.5, 0.25]}),
    lambda f, ids: f(ids, extra={"labels": ids, "scales": [torch.tensor(0.5), 2]}),
)


class Keeping(Subject):
    """`logits_to_keep`, as in transformers."""

    def forward(self, input_ids: Tensor, logits_to_keep: Any = 0) -> Any:
        x = self.embed(input_ids)
        x = x + self.attend(self.norm(x))
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return self.head(x[:, rows]).logsumexp(-1).mean()


calls(
    Keeping,  # type: ignore[arg-type]
    WHATEVER,
    lambda f, ids: f(ids, logits_to_keep=0),
    lambda f, ids: f(ids, logits_to_keep=5),
    lambda f, ids: f(ids, logits_to_keep=ids.shape[1] // 2),
    lambda f, ids: f(ids, logits_to_keep=torch.tensor([0, 3, 7])),
)
