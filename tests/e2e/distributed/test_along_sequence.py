"""Sequences on several devices: losses and gradients are those of one process that runs all of it."""

from pathlib import Path

import pytest
import torch
from along_sequence import Case, Trained, built, by_one, order, refused, shared
from in_processes import in_processes

from streambp_fx import Options

TOLERANCE = 1e-9


def _compare(found: Trained, expected: Trained) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    assert found.gradients.keys() == expected.gradients.keys()
    largest = max(float(g.abs().max()) for g in expected.gradients.values() if g is not None)
    for name, wanted in expected.gradients.items():
        own = found.gradients[name]
        assert (own is None) == (wanted is None), name
        if own is not None and wanted is not None:
            near = TOLERANCE * max(float(wanted.abs().max()), 1e-6 * largest)
            torch.testing.assert_close(own, wanted, rtol=TOLERANCE, atol=near)


def _of_all(found: Trained) -> dict[str, int]:
    """What all devices do together; states in turn are sent from one to the next."""
    return {kind: count for kind, count in found.collectives.items() if kind != "send"}


def _check(case: Case, world: int, folder: Path) -> list[Trained]:
    expected = by_one(case)
    found = in_processes(folder, world, shared, world, case)
    for own in found:
        _compare(own, expected)
        assert _of_all(own) == _of_all(found[0])
    whole = int(case.model.startswith("unchunked"))
    assert found[0].segments - found[0].chunked == whole
    return found


@pytest.mark.parametrize(
    "case", [Case(padding="left"), pytest.param(Case("recurrent"), marks=pytest.mark.slow)], ids=str
)
def test_two_devices(case: Case, tmp_path: Path) -> None:
    found = _check(case, 2, tmp_path)
    first_words = {line.split()[0] for line in found[0].printed.splitlines()}
    listed = first_words & {"all-gather", "reduce-scatter", "all-reduce", "send"}
    assert "collectives between 2 devices" in found[0].printed
    assert "figures are those of one of them" in found[0].printed
    assert "unchecked: what several devices exchange" in found[0].printed
    if case.model == "recurrent":  # the first device hands states on, the second one their gradients
        sends, sent = (sum(getattr(own, what)["send"] for own in found) for what in ("collectives", "sent"))
        assert found[0].planned["send"] == (sends, sent) and sends > 0
        assert listed >= {"send", "all-reduce"}
    else:
        assert listed == {"all-gather", "reduce-scatter", "all-reduce"}


SLOW = [
    Case("tied", padding="right"),
    Case("eager", padding="left"),
    Case("window", padding="right"),
    Case("experts"),
    Case("alibi", padding="left"),
    Case("lora", options={"every": 2}),
    Case("asked", padding="right"),
    Case(accumulate=2, padding="left"),
    Case("window", door="compile"),
    Case(padding="documents"),
    Case("window", padding="documents"),
    Case("hybrid"),
    Case("selecting", padding="left"),
    Case("unchunked"),
    Case("unchunked attention"),
    Case("unchunked attention", engine="fsdp2 over the sequence"),
    Case("last but one"),
    Case(objective="outside"),
    Case("shown", "hidden"),
    Case(objective="embedded"),
    Case(options={"save": "attention", "every": 2}),
    Case(options={"offload": "disk"}),
    Case("hybrid", options={"every": 2}),
    Case(options={"chunk": "auto", "policy": "auto"}),
    Case(tokens=3),
    Case("tied", engine="fsdp2 over the sequence"),
    Case(options={"exchange": "gather"}),
    Case("tied", options={"exchange": "gather", "every": 3}),
    Case("tied", options={"exchange": "blocks", "every": 2, "accumulate": "weights"}),
    Case("experts", options={"exchange": "blocks", "chunk": 5}),
    Case(tokens=41, options={"exchange": "blocks", "chunk": [8, 5]}),  # gathered: they have other turns
    Case(tokens=9, options={"exchange": "blocks", "chunk": 1}),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_of_each_kind(case: Case, tmp_path: Path) -> None:
    _check(case, 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("tied", padding="left"),
        Case(tokens=59, padding="right", options={"chunk": 3}),
        Case("window", tokens=43),
        Case("hybrid", tokens=42, padding="right"),
        Case("dense", data=2, engine="ddp"),
        Case("dense", data=2, engine="fsdp2"),
        Case("hybrid", data=2, engine="fsdp2"),
    ],
    ids=str,
)
def test_four_devices(case: Case, tmp_path: Path) -> None:
    _check(case, 4, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1000, 16, 2])
def test_chunks_change_no_collective(chunk: int, tmp_path: Path) -> None:
    """Of a layer: keys and values, forwards and backwards, and their gradients; then its parameters.

    How many bytes that is stands in docs/decisions/0030-rows-on-several-devices.md.
    """
    case = Case(tokens=64, options={"chunk": chunk, "exchange": "gather"})
    found = _check(case, 2, tmp_path)
    layers, steps, devices, samples, number = 3, 2, 2, 2, 8
    agreed, head = steps, steps
    assert found[0].collectives == {
        "gather": 2 * 2 * layers * steps + agreed + head,
        "scatter": 2 * layers * steps,
        "reduce": (layers + 2) * steps,
    }
    rows = 64  # the second step has 63; a device that has one fewer than the other sends one of zeros
    state = 2 * samples * rows * 16 * number  # keys and values of two heads of eight
    losses, inputs = samples * rows * number, devices * 5 * 8
    parameters = sum(p.numel() for p in built(case).parameters()) * number
    planned = found[0].planned
    assert planned["gather"][0] == found[0].collectives["gather"] - agreed
    assert planned["scatter"][0] == found[0].collectives["scatter"]
    assert planned["reduce"] == (found[0].collectives["reduce"], found[0].sent["reduce"])
    longest = state * layers + state * layers * 63 // 64  # of the second step without what is padding
    assert planned["scatter"][1] == longest
    assert found[0].sent == {
        "gather": (2 * state * layers + losses + inputs) * steps,
        "scatter": state * layers * steps,
        "reduce": parameters * steps,
    }


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1000, 16, 5])
def test_collectives_by_blocks(chunk: int, tmp_path: Path) -> None:
    """Keys and values come once forwards and twice backwards, and their gradients go back once.

    How many bytes that is stands in docs/decisions/0030-rows-on-several-devices.md.
    """
    found = _check(Case(tokens=64, options={"chunk": chunk, "exchange": "blocks"}), 2, tmp_path)
    layers, steps, devices, samples, number, rows = 3, 2, 2, 2, 8, 64
    turns = -(-rows // (2 * devices) // chunk)
    state = samples * rows * 2 * 16 * number  # keys and values of two heads of eight
    once = 3 * turns * state // 2
    losses, inputs = (
        samples * rows * number,
        devices * 5 * 8,
    )  # the second step has a row of zeros for the 64th
    for own in found:
        assert own.sent["gather"] == (3 * once * layers + losses + inputs) * steps
        assert own.sent["scatter"] == once * layers * steps
        assert own.planned["gather"][0] == own.collectives["gather"] - steps
        assert own.planned["scatter"] == (own.collectives["scatter"], own.sent["scatter"])
        assert own.collectives["reduce"] == (layers + 2) * steps


@pytest.mark.slow
def test_gradients_are_summed_layer_by_layer(tmp_path: Path) -> None:
    for found in in_processes(tmp_path, 2, order, 2):
        assert found == ["sum", "segment 3", "sum", "segment 2", "sum", "segment 1", "sum", "sum"]


@pytest.mark.slow
def test_what_is_refused(tmp_path: Path) -> None:
    for every, exchange, numbers, shapes, weights, draws, logits in in_processes(tmp_path, 2, refused, 2):
        assert "every or exchange" in every and "every or exchange" in exchange
        assert "same batch" in numbers and "Numbers in the inputs differ" in numbers
        assert "Weights differ" in weights and "torch.manual_seed" in draws
        assert "Shapes of inputs differ between device 0 and device 1" in shapes
        assert 'logits="keep"' in logits


@pytest.mark.parametrize(
    ("options", "words"),
    [({"mesh": 2}, "mesh must be a DeviceMesh"), ({"mesh": "cp"}, "mesh must be a DeviceMesh")],
)
def test_bad_meshes(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Options.parse(options)
