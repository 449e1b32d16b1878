"""How many rows were selected by their values: no chunk knows it, and what comes before is streamed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from e2e_models import build
from torch import Tensor, nn

import streambp_fx
from streambp_fx import StreamBPWarning
from streambp_fx.backend import schedules_of


class Counted(nn.Module):
    """A loss that is divided by how many labels count, as Python sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build("llama", num_hidden_layers=2)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits, labels = self.model(input_ids=input_ids).logits[:, :-1], input_ids[:, 1:]
        keep = labels % 4 != 0
        loss: Tensor = F.cross_entropy(logits[keep], labels[keep], reduction="sum") / keep.nonzero().shape[0]
        return loss


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield


def trained(call: Callable[..., Tensor], model: nn.Module) -> tuple[list[float], list[Tensor], list[str]]:
    """Losses, gradients and warnings of steps of three lengths."""
    torch.manual_seed(0)
    losses = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch, length in ((2, 33), (3, 21), (1, 40)):
            loss = call(torch.randint(1, 50, (batch, length)))
            loss.backward()
            losses.append(float(loss))
    said = [str(w.message) for w in caught if issubclass(w.category, StreamBPWarning)]
    return losses, [p.grad for p in model.parameters() if p.grad is not None], said


@pytest.mark.parametrize("door", ["compile", "one graph", "transform"])
def test_a_loss_divided_by_how_many_count(door: str) -> None:
    eager = Counted().double().train()
    model: nn.Module = copy.deepcopy(eager)
    call: Callable[..., Tensor] = model
    if door == "transform":
        streambp_fx.transform(model, chunk=8)
    else:
        options = {"chunk": 8}
        call = torch.compile(model, backend="streambp", options=options, fullgraph=door == "one graph")
    losses, gradients, _ = trained(eager, eager)
    found_losses, found, said = trained(call, model)
    torch.testing.assert_close(found_losses, losses, rtol=1e-9, atol=0)
    torch.testing.assert_close(found, gradients, rtol=1e-9, atol=1e-12)
    chunked = [s.chunked for schedule in schedules_of(model) for s in schedule.facts.segments]
    if door == "compile":
        assert sum(chunked) >= 4, "the layers, whose graph ends where labels are counted"
        assert any("runs unstreamed" in line for line in said)
    else:
        assert not chunked and any("a number is taken from the values of a tensor" in line for line in said)
