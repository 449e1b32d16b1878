"""share: segments that are the same up to their inputs get one signature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from golden import check_golden
from golden_graphs import ids, sections, source, stages
from torch import Tensor, nn

from streambp_fx.passes.graph.sources import path

Layer = Callable[[nn.Linear, Tensor, int], Tensor]


class Stack(nn.Module):
    """Three layers that are a function of (weights, hidden states, number of the layer), and a head."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))
        self.layer = layer

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for number, weights in enumerate(self.layers):
            x = x + self.layer(weights, x, number)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def attention(weights: nn.Linear, x: Tensor, **options: Any) -> Tensor:
    q = weights(x).view(2, -1, 2, 4).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, **options).transpose(1, 2).flatten(2)


def classes(layer: Layer, name: str, frozen: tuple[int, ...] = ()) -> str:
    """Compare which segments of three layers are alike with the golden file: a letter for each signature."""
    model = Stack(layer)
    for number in frozen:
        model.layers[number].weight.requires_grad_(False)
    segments = stages(model, ids()).facts.segments
    letters = {s: "ABCDEFGH"[k] for k, s in enumerate(dict.fromkeys(s.signature for s in segments))}
    lines = [
        f"segment {s.index} ({s.kind}): {letters[s.signature]}, of {', '.join(map(path, s.constants))}"
        for s in segments
    ]
    note = f"# without gradients: the weights of layer {frozen[0]}" if frozen else ""
    check_golden(sections(source(layer), note, "\n".join(lines)), __file__, f"share_{name}")
    return "".join(letters[s.signature] for s in segments)


def alike(weights: nn.Linear, x: Tensor, number: int) -> Tensor:
    return attention(weights, x, is_causal=True)


def test_layers_with_other_weights_are_alike() -> None:
    assert classes(alike, "alike") == "ABBBC"


def test_a_layer_whose_weights_are_frozen_is_another() -> None:
    assert classes(alike, "frozen", frozen=(1,)) == "ABCBD"


def another_scale(weights: nn.Linear, x: Tensor, number: int) -> Tensor:
    return attention(weights, x, is_causal=True, scale=0.5 if number == 2 else 0.25)


def test_a_layer_with_another_number_in_it_is_another() -> None:
    assert classes(another_scale, "another_scale") == "ABBCD"


def alternating(weights: nn.Linear, x: Tensor, number: int) -> Tensor:
    place = torch.arange(x.shape[1])
    distance = place.unsqueeze(1) - place
    mask = (distance >= 0) & (distance < (99 if number == 1 else 4))
    return attention(weights, x, attn_mask=mask)


def test_layers_with_masks_of_their_own_are_others() -> None:
    """Even where both were proved to be alike: what was proved was proved of one of them."""
    assert classes(alternating, "masks_of_their_own") == "ABCDE"
