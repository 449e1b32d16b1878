"""What memory buys, measured: points, which of them are beaten, groups that fit, and a run in toy size."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks import frontier
from benchmarks.__main__ import main
from benchmarks.build import KEPT, PeerSpec, build
from benchmarks.cases import CASES, shrunk
from benchmarks.frontier import Point, beside, groups, ours, peers
from benchmarks.measuring import Result
from benchmarks.modes import MODES
from benchmarks.plots import draw_frontier
from streambp_fx.models.loading import load_model

WORK = shrunk(CASES["dense"]).workload
MIB = 2**20


def point(name: str, peak: float, time: float | None) -> Point:
    mode = {m.name: m for m in (*MODES.values(), *peers(), *ours(10 * MIB, 640 * MIB, 6))}[name]
    return Point(Result(WORK, mode, peak_bytes=int(peak * MIB)), time)


def test_budgets_of_ours_go_evenly_from_the_least_to_the_most() -> None:
    found = ours(10 * MIB, 640 * MIB, 6)
    assert [m.options["memory"] for m in found] == [f"{n}MiB" for n in (20, 40, 80, 160, 320, 640)]
    assert all(m.ours and m.options["policy"] == "auto" for m in found)
    assert len(ours(1 * MIB, 2 * MIB)) == 2, "equal ones are one"


def test_peers_are_all_there() -> None:
    names = [m.name for m in peers()]
    assert len(names) == len(set(names)) and not any(m.ours for m in peers())
    assert sum(n.startswith("compile-") for n in names) == 10
    assert {"eager", "checkpointing", "selective-attention", "checkpointing-offload"} <= set(names)


def test_each_peer_is_beside_the_fastest_of_ours_in_no_more_memory() -> None:
    points = [
        point("checkpointing", 100, 1.0),
        point("eager", 200, 0.75),
        point("compile-0.1", 20, 0.7),
        point("streamed", 30, 0.9),
        point("streamed-160", 90, 0.8),
        point("streamed-320", 190, 0.76),
    ]
    found = {p.result.mode.name: other for p, other in beside(points)}
    assert found["compile-0.1"] is None
    assert found["checkpointing"] is points[4] and points[0].is_beaten_by(points[4])
    assert found["eager"] is points[5] and points[1].is_beaten_by(points[5]), "but for noise"
    assert not points[1].is_beaten_by(points[4]) and not points[4].is_beaten_by(points[0])
    assert not point("eager", 200, 0.7).is_beaten_by(points[5])


def test_groups_fit_into_memory() -> None:
    peer, *others = (
        Result(WORK, MODES[name], peak_bytes=size * MIB)
        for name, size in (("checkpointing", 100), ("eager", 5000), ("streamed", 10), ("compile-0.5", 900))
    )
    found = list(groups([peer, *others], peer, free=4 * 2**30))
    assert all(g[0] is peer for g in found)
    assert [[r.mode.name for r in g[1:]] for g in found] == [["streamed"], ["compile-0.5"], ["eager"]]
    assert [len(g) for g in groups([peer, *others], peer, free=2**40)] == [4]


@pytest.mark.parametrize("kept", KEPT)
def test_selective_checkpointing_is_the_same_step(kept: str, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(WORK.config))
    found: dict[str, Any] = {}
    for mode, options in (("chunked-loss", {"keep": kept}), ("chunked-loss", {}), ("eager", {})):
        model = load_model(str(config), torch.float32).model
        spec = PeerSpec(str(config), mode, 64, 16, loss_chunk=24, options=options)
        ids = torch.randint(0, 500, (1, 64), generator=torch.Generator().manual_seed(0))
        loss = build(model, spec)(ids)
        found[f"{mode} {options}"] = loss, [p.grad for p in model.parameters()]
    (loss, gradients), *others = found.values()
    for other, expected in others:
        assert loss == pytest.approx(other, rel=1e-5)
        assert all(torch.allclose(g, e, atol=1e-5) for g, e in zip(gradients, expected, strict=True))


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    points = [point("checkpointing", 100, 1.0), point("compile-0.1", 20, 0.7), point("streamed", 30, 0.9)]
    (file,) = draw_frontier("title", points, tmp_path / "frontier", (".svg",))
    assert "streamed, memory=" in file.read_text() and "compile" in file.read_text()
    assert draw_frontier("title", [Point(p.result) for p in points], tmp_path / "none") == []


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peaks are read from Linux")
def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontier, "PEERS", ("eager", "checkpointing", "checkpointing-offload"))
    monkeypatch.setattr(frontier, "BUDGETS", (0.5,))
    monkeypatch.setattr(frontier, "POINTS", 2)
    arguments = ["--frontier", "--tiny", "--threads", "1", "--steps", "1", "--out", str(tmp_path)]
    console = Console(width=200, record=True)
    assert main(arguments, console) == 0
    found = json.loads((tmp_path / "results.json").read_text())["frontiers"]["dense"]["points"]
    names = [p["mode"] for p in found]
    assert len(names) == len(set(names)) and {"eager", "checkpointing", "compile-0.5", "streamed"} <= set(
        names
    )
    assert {p["mode"]: p["time"] for p in found}["checkpointing"] == 1.0
    assert all(p["time"] > 0 and p["peak_bytes"] > 0 for p in found)
    assert "Peers, and the fastest of ours in no more memory" in console.export_text()
