"""A default device or dtype that a user sets (`torch.set_default_device`) is not for our tensors.

The default device here is "meta": no machine can compute with a tensor that we make on it by mistake.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_check import assert_all_chunked, assert_close_grads, grads, in_double
from e2e_models import CHUNK, LOSS_CHUNK, build, padded, plain, sample
from torch import nn

import streambp_fx
from streambp_fx import passes

OPTIONS = {"chunk": CHUNK, "loss_chunk": LOSS_CHUNK, "check": "first", "on_error": "raise"}
CASES = [
    ("llama", {}),
    ("llama", {"save": "attention", "offload": "disk"}),
    ("llama", {"order": "chunks"}),
    ("gpt2", {"policy": "auto"}),
]
SITUATIONS = [(family, door, more) for family, more in CASES for door in ("transform", "compile")]


def streamed(door: str, model: nn.Module, **more: Any) -> Any:
    if door == "transform":
        return streambp_fx.transform(model, **OPTIONS, **more)
    return torch.compile(model, backend="streambp", options={**OPTIONS, **more})


@pytest.mark.slow
@pytest.mark.parametrize(("family", "door", "more"), sample(SITUATIONS, SITUATIONS[1]))
def test_steps(family: str, door: str, more: dict[str, Any]) -> None:
    """The self-check among them: it makes a short step of its own."""
    with in_double(lambda: build(family)):
        eager = build(family)
        model = copy.deepcopy(eager)
        batches = [plain(2, 67), plain(1, 50)]
        with torch.device("meta"):
            call = streamed(door, model, **more)
            for batch in batches:
                for own, run in ((eager, eager), (model, call)):
                    own.zero_grad()
                    run(**batch).loss.backward()
                assert_close_grads(grads(model), grads(eager), 1e-9)
        assert_all_chunked(model)  # here: Dynamo forgets graphs of code that is replaced


@pytest.mark.slow
def test_dropout_and_padding() -> None:
    """The same seed is the same step with a default device and without."""
    found = []
    for default in ("meta", "cpu"):
        model = build("gpt2", resid_pdrop=0.1, attn_pdrop=0.1)
        batch = padded(50, "left")
        with torch.device(default):
            call = streambp_fx.transform(model, **OPTIONS)
            torch.manual_seed(3)
            call(**batch).loss.backward()
        found.append(grads(model))
    assert_close_grads(found[0], found[1], 1e-12)


@pytest.fixture
def bfloat16() -> Iterator[None]:
    """As training scripts set it, to make weights in it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("door", sample(["transform", "compile"]))
def test_a_default_dtype(door: str) -> None:
    """Places of the sequence that the self-check cuts out are beyond 256, where bfloat16 counts by twos."""
    with in_double(lambda: build("llama")):
        eager = build("llama", max_position_embeddings=2048)
        model = copy.deepcopy(eager)
        call = streamed(door, model)
        for batch in (padded(1007, "right", (0, 600)), padded(50, "left")):
            for own, run in ((eager, eager), (model, call)):
                own.zero_grad()
                run(**batch).loss.backward()
            assert_close_grads(grads(model), grads(eager), 1e-9)
        assert_all_chunked(model)


@pytest.mark.slow
def test_verify() -> None:
    model, batch = build("llama"), plain(2, 67)
    with torch.device("meta"):
        report = streambp_fx.verify(model, batch, chunk=CHUNK)
    assert report.ok, report


#: What makes a tensor on the default device where none is named: of the torch functions that have `device`.
#: Most of them make it in the default dtype, too.
FACTORIES = {
    schema.name.removeprefix("aten::")
    for schema in torch._C._jit_get_all_schemas()
    if schema.name.startswith("aten::")
    and any(a.name == "device" for a in schema.arguments)
    and not any(isinstance(a.type, torch._C.TensorType) for a in schema.arguments)
    and schema.name != "aten::Generator"
} | {"tensor"}
INTEGERS = {"arange", "randint", "randperm", "tensor", "tril_indices", "triu_indices"}
FLOATS = {name: set() if name in INTEGERS else {"dtype"} for name in FACTORIES}


def unnamed(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        made = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        names = {k.arg for k in node.keywords}
        if made and node.func.attr in FACTORIES and not ({"device"} | FLOATS[node.func.attr] <= names):
            yield f"{path}:{node.lineno}: {ast.unparse(node)}"


def test_all_that_we_make_names_its_device_and_its_dtype() -> None:
    assert {"arange", "zeros", "randn", "empty"} <= FACTORIES
    folders = (Path(streambp_fx.__file__).parent, Path(passes.__file__).parent)
    found = [line for folder in folders for path in folder.rglob("*.py") for line in unnamed(path)]
    assert not found, "\n".join(found)
