"""What offloading moves in a step, and how long it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import streambp_fx
from streambp_fx.commands.plan import print_plan
from streambp_fx.cost.held_bytes import Moment
from streambp_fx.cost.transfers import Transfers, transfers
from streambp_fx.passes.cost.work import Work
from streambp_fx.planning import place_rates
from streambp_fx.planning.compute_rates import GPUS, ComputeRates
from streambp_fx.planning.place_rates import PlaceRates, disk_here
from streambp_fx.planning.rates import Rates, rates_for
from streambp_fx.planning.several import time_plan
from streambp_fx.runtime.offload import DiskStore

LAYERS, HIDDEN = 3, 32
CONFIG = LlamaConfig(
    vocab_size=97,
    hidden_size=HIDDEN,
    intermediate_size=48,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
)
COMPUTE = ComputeRates(1e9, 1e9, 1e9, 1e9, 0.0, 0.0, ("a device",))  # a GFLOP/s


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32)


def moved(model: torch.nn.Module, tokens: int, **options: Any) -> Transfers:
    found = streambp_fx.explain(model, tokens, chunk=16, loss_chunk=8, **options)
    return transfers(found.cost, found.cost.sizes(tokens))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"every": 2}, *(pytest.param(o, marks=pytest.mark.slow) for o in ({}, {"save": "attention"}))]
)
def test_what_is_kept_goes_and_comes_back_once(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """As many bytes as the runtime sends and receives."""
    out, back = [], []
    send, receive = DiskStore.send, DiskStore.receive

    def sending(self: DiskStore, stored: Any, tensor: torch.Tensor) -> None:
        out.append(tensor.nbytes)
        send(self, stored, tensor)

    def receiving(self: DiskStore, arriving: Any) -> torch.Tensor:
        back.append((tensor := receive(self, arriving)).nbytes)
        return tensor

    monkeypatch.setattr(DiskStore, "send", sending)
    monkeypatch.setattr(DiskStore, "receive", receiving)
    streambp_fx.transform(model, chunk=16, loss_chunk=8, offload="disk", check="never", **options)
    ids = torch.randint(0, 97, (1, 43))
    model(input_ids=ids, labels=ids).loss.backward()
    streambp_fx.restore(model)
    expected = moved(model, 43, offload="disk", **options)
    assert sum(out) == expected.out > 0 and sum(back) == expected.back


@pytest.mark.slow
def test_rows_come_for_each_program_that_reads_them(model: torch.nn.Module) -> None:
    """Those of the embedding and of each layer leave once, and their gradients; that of the loss is scaled.

    Rows are read by the next layer or the loss, and where states are made again and differentiated.
    """
    found = moved(model, 40, offload="disk", offload_rows=True)
    rows = 40 * HIDDEN * 4
    assert found.out == (LAYERS + 1 + LAYERS + 1 + 1) * rows
    assert found.back == (LAYERS + 1 + 1 + 3 * LAYERS + 1) * rows
    assert moved(model, 40) == Transfers()


@pytest.mark.parametrize(("seconds", "step"), [(2.0, 5.0), (7.0, 7.0)])
def test_a_step_takes_as_long_as_the_longer_of_the_two(seconds: float, step: float) -> None:
    moments = [Moment("forward", 0, None, None, {}, Work(5e9))]
    place = PlaceRates(2.0, 4.0, False, "a disk")
    found = time_plan(moments, Rates(COMPUTE, place=place), 100, moved=Transfers(seconds, 2 * seconds))
    assert found.moved_seconds == seconds and found.seconds == step and found.compute_seconds == 5.0
    assert found.waited_seconds == step - 5.0 and found.tokens_per_second == 100 / step
    assert found.assumed[-1] == "a disk"
    both = PlaceRates(2.0, 4.0, True, "")
    assert both.seconds(Transfers(2, 20)) == 5.0, "each direction for itself"
    unknown = time_plan(moments, Rates(COMPUTE), 100, moved=Transfers(1, 1))
    assert unknown.moved_seconds is None and unknown.seconds == 5.0
    assert time_plan(moments, Rates(COMPUTE), 100).moved_seconds == 0.0


def test_a_disk_is_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(place_rates, "SAMPLE", 2**20)
    first = disk_here()
    assert first is not None and min(first.out, first.back) > 0 and "measured: writes" in first.words
    assert disk_here() == first
    monkeypatch.setattr(place_rates, "SAMPLE", 2**60)
    assert disk_here() == first and disk_here(again=True) is None, "there is not so much room"


def test_places_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory is reached by PCIe; what disk another machine has is not known."""
    given = (False, "L40S", None, None, None, "bfloat16")
    host = rates_for(*given, offload="host")
    assert host is not None and host.place is not None
    assert host.place.out == host.place.back == pytest.approx(0.8 * GPUS["L40S"].pcie)
    for offload in ("none", "disk"):
        found = rates_for(*given, offload=offload)
        assert found is not None and found.place is None


@pytest.mark.slow
def test_said_in_a_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    CONFIG.save_pretrained(tmp_path)
    found = streambp_fx.plan(tmp_path, 40, chunk=16, gpu="L40S", offload="host")
    print_plan(found)
    shown = capsys.readouterr().out
    assert found.time is not None and found.time.moved_seconds
    assert (
        "go there and" in shown and "come back in a step." in shown and "What is offloaded moves in" in shown
    )
    print_plan(streambp_fx.plan(tmp_path, 40, chunk=16, gpu="L40S", offload="disk"))
    assert "How long it takes to move what is offloaded is not known" in capsys.readouterr().out
