"""What stays of a model when its owner lets it go: nothing, without a reset of Dynamo."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from e2e_models import build, plain, sample

import streambp_fx

LLAMA = functools.partial(build, "llama", num_hidden_layers=1, dtype=torch.float32)


def transformed() -> Any:
    model = streambp_fx.transform(LLAMA(), chunk=16, loss_chunk=8)
    model(**plain(2, 67)).loss.backward()
    return model


def restored() -> Any:
    return streambp_fx.restore(transformed())


def compiled() -> Any:
    model = LLAMA()
    call = torch.compile(model, backend="streambp", options={"chunk": 16, "loss_chunk": 8})
    call(**plain(2, 67)).loss.backward()
    return model


def explained() -> Any:
    model = LLAMA()
    streambp_fx.explain(model, 67, chunk=16)
    return model


def verified() -> Any:
    model = LLAMA()
    assert streambp_fx.verify(model, plain(1, 41), chunk=16).ok
    return model


WAYS = [transformed, restored, compiled, explained, verified]


@pytest.mark.parametrize("way", sample(WAYS, transformed), ids=lambda f: f.__name__)
def test_weights_go_with_the_model(way: Callable[[], Any]) -> None:
    model = way()
    held = [weakref.ref(p) for p in model.parameters()]
    assert len(held) > 5 and all(ref() is not None for ref in held)
    del model
    gc.collect()
    assert not any(ref() is not None for ref in held)


@pytest.mark.slow
def test_graphs_go_with_the_model() -> None:
    """Those of a first model aside, which PyTorch may keep for others of its class."""

    def graphs() -> weakref.WeakSet[Any]:
        return weakref.WeakSet(o for o in gc.get_objects() if type(o) is torch.fx.Graph)

    transformed()
    before = graphs()
    model = transformed()
    new = graphs() - before
    assert len(new) > 5
    del model
    gc.collect()
    gc.collect()  # a collected code object runs hooks that let go of what it called
    assert len(new) == 0
