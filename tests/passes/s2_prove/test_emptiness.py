"""Names of what is true somewhere: equal ones mean the same, tried on numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from streambp_fx.passes.s2_prove.branch_bodies import is_certain
from streambp_fx.passes.s2_prove.emptiness import Somewhere, is_one_of_distinct

EXPERTS = 4
Asked = Callable[[Tensor, Tensor], Tensor]
# All of these ask whether some row has chosen expert 2.
ONE_EXPERT: dict[str, Asked] = {
    "equal": lambda chosen, weights: chosen == 2,
    "equal, any of a row": lambda chosen, weights: (chosen == 2).any(-1),
    "any, keeping the dim": lambda chosen, weights: (chosen == 2).any(0, keepdim=True),
    "one hot": lambda chosen, weights: F.one_hot(chosen, EXPERTS).permute(2, 1, 0)[2],
    "one hot from the end": lambda chosen, weights: F.one_hot(chosen, EXPERTS)[..., -2],
    "one hot, summed": lambda chosen, weights: F.one_hot(chosen, EXPERTS).sum(1)[:, 2] > 0,
    "one hot, transposed": lambda chosen, weights: (
        F.one_hot(chosen, EXPERTS).transpose(0, 2)[2].transpose(0, 1)
    ),
    "hits": lambda chosen, weights: (F.one_hot(chosen, EXPERTS).sum((0, 1)) > 0)[2],
    "hits, not zero": lambda chosen, weights: (F.one_hot(chosen, EXPERTS).sum((0, 1)) != 0)[2],
    "counts": lambda chosen, weights: torch.bincount(chosen.flatten(), minlength=EXPERTS)[2] >= 1,
    "a mask in floats": lambda chosen, weights: (chosen == 2).to(torch.float64).sum(-1).unsqueeze(0) > 0,
    "not none": lambda chosen, weights: ((chosen == 2).sum() == 0).logical_not(),
    "flat": lambda chosen, weights: (chosen.reshape(-1) == 2).view(-1, 1),
    "wider": lambda chosen, weights: chosen.to(torch.int64) == 2,
}
# These look alike, and ask something else.
OTHERS: dict[str, Asked] = {
    "another expert": lambda chosen, weights: chosen == 1,
    "all of a row": lambda chosen, weights: (chosen == 2).all(-1),
    "more than one": lambda chosen, weights: F.one_hot(chosen, EXPERTS).sum((0, 1))[2] > 1,
    "at least two": lambda chosen, weights: F.one_hot(chosen, EXPERTS).sum((0, 1))[2] >= 2,
    "the first choice": lambda chosen, weights: chosen[:, 0] == 2,
    "the first row": lambda chosen, weights: F.one_hot(chosen, EXPERTS)[0, :, 2],
    "a sum with signs": lambda chosen, weights: ((chosen == 2) * weights).sum() > 0,
    "weights": lambda chosen, weights: weights * (chosen == 2) > 0,
    "above zero": lambda chosen, weights: weights > 0,
    "not zero": lambda chosen, weights: weights != 0,
    "not equal": lambda chosen, weights: (chosen == 2).logical_not(),
    "none": lambda chosen, weights: (chosen == 2).sum() == 0,
    "weighted counts": lambda chosen, weights: torch.bincount(chosen.flatten(), weights.flatten(), 4)[2] > 0,
    "shifted": lambda chosen, weights: chosen + 1 == 2,
    "halved": lambda chosen, weights: chosen // 2 == 1,
    "in half of the bits": lambda chosen, weights: (chosen * 128).to(torch.int8) == 2,
    "less": lambda chosen, weights: chosen < 2,
    "another class": lambda chosen, weights: F.one_hot(chosen, EXPERTS)[:, 1, 2],
    "a sum that overflows": lambda chosen, weights: (chosen == 2).repeat(128, 1).sum(dtype=torch.int8) > 0,
    "a fraction": lambda chosen, weights: (chosen == 2).sum() > 0.5,
    "squeezed away": lambda chosen, weights: F.one_hot(chosen[:1], EXPERTS).squeeze(0)[:, 2],
}
CASES = {**ONE_EXPERT, **OTHERS}


def drawn(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = 1 + seed % 3
    weights = torch.randn(rows, 2, dtype=torch.float64, generator=generator)
    return torch.randint(0, EXPERTS, (rows, 2), generator=generator), weights


def test_equal_names_mean_the_same() -> None:
    functions = list(CASES.values())
    traced = make_fx(lambda *given: [f(*given) for f in functions], pre_dispatch=True)(*drawn(2))
    known = Somewhere(traced.graph)
    names = [known.name(n) for n in traced.graph.output_node().args[0]]  # type: ignore[union-attr, arg-type]
    answers = [[bool(f(*drawn(seed)).any()) for seed in range(200)] for f in functions]
    for (a, one), (b, two) in itertools.combinations(enumerate(CASES), 2):
        assert names[a] != names[b] or answers[a] == answers[b], f"{one!r} and {two!r}"
    assert len(set(names[: len(ONE_EXPERT)])) == 1, dict(zip(ONE_EXPERT, names, strict=False))
    assert names[0] not in names[len(ONE_EXPERT) :]


DISTINCT: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "topk": (lambda x: x.topk(2, -1).indices == 1, True),
    "topk, one hot": (lambda x: F.one_hot(x.topk(2, -1).indices, EXPERTS).permute(2, 1, 0)[1], True),
    "sort": (lambda x: x.sort(-1, descending=True).indices == 1, True),
    "argsort": (lambda x: x.argsort(-1) == 1, True),
    "topk along rows": (lambda x: x.topk(2, 0).indices == 1, False),
    "divided": (lambda x: x.topk(2, -1).indices // 2 == 1, False),
    "joined": (lambda x: torch.cat((x.topk(1, -1).indices, x.argmax(-1, keepdim=True)), -1) == 1, False),
    "values": (lambda x: x.round().topk(2, -1).values == 1, False),
    "at most": (lambda x: x.topk(2, -1).indices <= 1, False),
    "narrowed": (lambda x: (x.topk(2, -1).indices * 128).to(torch.int8) == -128, False),
    "all experts": (lambda x: F.one_hot(x.topk(2, -1).indices, EXPERTS)[:, 0], False),
}


@pytest.mark.parametrize("name", DISTINCT)
def test_masks_that_are_true_once_in_a_row(name: str) -> None:
    function, expected = DISTINCT[name]
    traced = make_fx(function, pre_dispatch=True)(torch.randn(5, EXPERTS))
    (node,) = traced.graph.output_node().all_input_nodes
    assert is_one_of_distinct(node) is expected


# Which experts are asked about, what of, and whether one of them is chosen in any case.
CERTAIN: dict[str, tuple[Callable[[Tensor], Tensor], range, bool]] = {
    "topk": (lambda x: x.topk(2, -1).indices, range(EXPERTS), True),
    "argmax": (lambda x: x.argmax(-1), range(EXPERTS), True),
    "the first": (lambda x: x.topk(2, -1).indices[:, 0], range(EXPERTS), True),
    "wider": (lambda x: x.argsort(-1).to(torch.int64), range(EXPERTS), True),
    "some": (lambda x: x.topk(2, -1).indices, range(EXPERTS - 1), False),
    "a part of the rows": (lambda x: x.topk(2, -1).indices[7:], range(EXPERTS), False),
    "along rows": (lambda x: x.topk(2, 0).indices, range(EXPERTS), False),
    "shifted": (lambda x: x.topk(2, -1).indices + 1, range(EXPERTS), False),
    "values": (lambda x: x.round().topk(2, -1).values, range(EXPERTS), False),
}


@pytest.mark.parametrize("name", CERTAIN)
def test_one_of_all_entries_is_chosen(name: str) -> None:
    function, asked, expected = CERTAIN[name]
    traced = make_fx(lambda x: [function(x) == e for e in asked], pre_dispatch=True)(torch.randn(5, EXPERTS))
    known = Somewhere(traced.graph)
    names = [known.name(n) for n in traced.graph.output_node().args[0]]  # type: ignore[union-attr, arg-type]
    assert is_certain(known, names) is expected
    assert not is_certain(known, names[1:])
