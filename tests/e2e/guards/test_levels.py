"""Several attentions in one segment, as where no cut between them is cheap: states are made of states."""

from __future__ import annotations

import functools
import importlib

import pytest
import torch
from e2e_check import check_exact
from e2e_models import build, padded, plain, sample

import streambp_fx
from streambp_fx import StreamBPWarning

LEVELS = [("llama", "sdpa"), ("gemma2", "eager"), ("bloom", "eager"), ("mistral", "sdpa")]


@pytest.mark.parametrize(("family", "impl"), sample(LEVELS))
def test_all_layers_in_one_segment(family: str, impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left padding makes some of these masks see later rows: the segment runs unchunked then."""
    torch._dynamo.reset()
    monkeypatch.setattr(importlib.import_module("streambp_fx.passes.s3_cut.segment"), "EXPENSIVE", -1.0)
    batches = {
        "T=67": plain(2, 67),
        "T=11": plain(2, 11),
        "right": padded(65, "right"),
        "left": padded(65, "left"),
    }
    _, model = check_exact(functools.partial(build, family, impl), batches)
    segments = streambp_fx.schedule(model).segments
    assert any(s.chained and s.chunked and len(s.mixings) > 1 for s in segments)


class TwoLevels(torch.nn.Module):
    """A causal attention on top of one that is not; no cut between them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build("llama")

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> object:
        return self.model(input_ids=input_ids, labels=labels, attention_mask=_prefix_mask(input_ids))


def _prefix_mask(ids: torch.Tensor) -> torch.Tensor:
    """Rows see what comes before them and three rows of what comes after."""
    position = torch.arange(ids.shape[1])
    return (position[None, :] <= position[:, None] + 3)[None, None]


def test_levels_that_see_later_rows_run_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(importlib.import_module("streambp_fx.passes.s3_cut.segment"), "EXPENSIVE", -1.0)
    with pytest.warns(StreamBPWarning, match="levels of mixing that cannot be cut apart"):
        check_exact(TwoLevels, {"T=67": plain(2, 67)}, rtol=1e-7, unchunked=None)
