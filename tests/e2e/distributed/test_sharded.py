"""Several processes: losses, parameters and collectives of sharded models, streamed and not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_cases import BATCHES, Case, alone, run
from distributed_errors import wrapped
from distributed_situations import SITUATIONS, goes_on, goes_on_alone, parameters_after, run_situations
from in_processes import events, in_processes

OFTEN = [
    Case(transformed="before", batch="ragged", accumulate=2),
    Case("lora", "embedding_once", batch="ignored", options={"every": 2}),
]
ROWS_ON_DISK = {"offload": "disk", "offload_rows": True}
OPTIONS = ({"every": 2}, {"save": "attention"}, {"offload": "disk"}, ROWS_ON_DISK)
SELDOM = [
    Case("tied", "ddp"),
    Case("experts", batch="padded"),
    *(Case(engine=e) for e in ("fsdp2", "root", "layers", "parts", "kept", "ddp_unused", "ddp_static")),
    Case(engine="mixed", tolerance=1e-5),
    Case(engine="offloaded", batch="ragged", accumulate=2),
    *(Case(engine="fsdp1", transformed=order) for order in ("before", "after")),
    *(Case(batch="64 tokens", options={"chunk": chunk}) for chunk in (64, 16, 1)),
    *(
        Case(model, "ddp", batch=b)
        for model, b in (("window", "ragged"), ("lora", "ignored"), ("experts", "even"))
    ),
    Case(engine="ddp", transformed="before", batch="ragged", accumulate=2),
    *(Case(model) for model in ("tied", "window", "lora")),
    *(Case(batch=b) for b in ("ragged", "padded", "ignored")),
    *(Case("lora", batch=b, accumulate=2) for b in ("ragged", "ignored")),
    *(Case(options=o) for o in OPTIONS),
    Case(options={"logits": "keep"}),
    *(Case(options={"chunk": c}) for c in (3, 33)),
    Case(options={"chunk": "auto", "policy": "auto"}),
    Case("unchunked attention"),
    Case("unchunked attention", "parts", options={"save": "attention"}),
    Case(engine="embedding_once"),
    *(Case(engine=e, options=ROWS_ON_DISK) for e in ("embedding_once", "root", "ddp")),
]


def check(cases: list[Case], world: int, folder: Path) -> None:
    by_rank = in_processes(folder, world, run, cases)
    for number, case in enumerate(cases):
        for rank, found in enumerate(own[number] for own in by_rank):
            what = f"{case}, rank {rank}: {found['warned']}"
            assert found["loss"] <= case.tolerance and found["parameters"] <= case.tolerance, what
            assert found["collectives"] == found["expected"], what
            whole = int(case.model == "unchunked attention")  # the feed-forward part behind it runs in chunks
            assert found["chunked"] and found["chunked"].count(False) == whole, what
            assert len(found["warned"]) == whole, what
            assert "agrees" in found["checked"], what


def test_often(tmp_path: Path) -> None:
    check(OFTEN, 2, tmp_path)


FORWARD = """
begin model, wait model, begin 0, wait 0,
begin 1, forward of segment 1, wait 1,
begin 2, forward of segment 2, wait 2,
forward of segment 3, forward of segment 4"""
BACKWARD = """
begin 2, wait 2,
begin 1, backward of segment 3, sum 2, wait 1,
begin 0, backward of segment 2, sum 1, wait 0,
backward of segment 1, sum 0, sum model"""


def test_order(one_process: None) -> None:
    """The gather of a layer is begun before the layer before it computes, its sum before the next one does.

    So they run meanwhile, on whatever device. `python -m benchmarks.overlap` measures shares of time.
    """
    model, _ = wrapped("fsdp2")
    model(**BATCHES["even"](0, 0)).loss.backward()
    model.zero_grad()
    with events() as found:
        loss = model(**BATCHES["even"](0, 0)).loss
        assert found == FORWARD.strip().replace("\n", " ").split(", ")
        found.clear()
        loss.backward()
        assert found == BACKWARD.strip().replace("\n", " ").split(", ")


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(SELDOM), 6))
def test_seldom(first: int, tmp_path: Path) -> None:
    check(SELDOM[first : first + 6], 2, tmp_path)


@pytest.mark.slow
def test_four_processes(tmp_path: Path) -> None:
    replicated = Case("tied", "replicated", batch="ragged", accumulate=2)
    check([Case(batch="ragged"), Case("tied", batch="padded"), replicated], 4, tmp_path)


@pytest.mark.slow
def test_four_processes_that_differ(tmp_path: Path) -> None:
    """In lengths, padding, chunks, what is saved and where; one has nothing to learn, one is not streamed."""
    assert not situations(["ranks_that_differ"], tmp_path, world=4)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (1, 2)])
def test_a_checkpoint_for_other_devices(before: int, after: int, tmp_path: Path) -> None:
    """Saved by so many devices and loaded by others: the next steps are those of one that has gone on."""
    found: dict[str, Any] = {}
    for name, world, first, last in (("saved", before, 0, 2), ("loaded", after, 2, 4)):
        (tmp_path / name).mkdir()
        found, *_ = in_processes(tmp_path / name, world, goes_on, str(tmp_path / "state"), first, last)
    expected = goes_on_alone(0, 4)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case(), Case("tied", batch="even", accumulate=2)], ids=str)
def test_as_one_process(case: Case, tmp_path: Path) -> None:
    """Parameters after three steps of two processes are those of one that has both batches."""
    found, _ = in_processes(tmp_path, 2, parameters_after, case)
    for name, expected in alone(case, 2).items():
        torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-12)


def situations(names: list[str], folder: Path, world: int = 2) -> dict[str, Any]:
    """What went wrong, by name."""
    found = in_processes(folder, world, run_situations, names, str(folder))
    return {name: words for own in found for name, words in own.items() if words}


@pytest.mark.slow
def test_situations(tmp_path: Path) -> None:
    assert not situations(["one_rank_streams", "full_parameters"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(f.__name__ for f in SITUATIONS), "saved"])
def test_each_situation(name: str, tmp_path: Path) -> None:
    assert not situations([name], tmp_path)
