"""Plans of several devices: what each holds and sends, how long a step takes, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import streambp_fx
from streambp_fx import PlanError
from streambp_fx.cli import main
from streambp_fx.cost import eager_step
from streambp_fx.cost.held_bytes import GATHERED, Moment
from streambp_fx.cost.step import StepCost
from streambp_fx.explain import captured
from streambp_fx.passes.cost.work import Work, total
from streambp_fx.passes.s6_schedule.collectives import Collective, CollectiveKind
from streambp_fx.plan import Planner, model_on_meta
from streambp_fx.planning.compute_rates import GPUS, LAUNCH, PROGRAM, ComputeRates
from streambp_fx.planning.engines import Engine
from streambp_fx.planning.rates import Rates, rates, rates_for
from streambp_fx.planning.timing import step_time
from streambp_fx.runtime.executor import Executor

ROOT = Path(__file__).parents[2]
LAYERS = 4
CONFIG = LlamaConfig(
    vocab_size=900,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1 << 17,
)
COMPUTE = ComputeRates(1e9, 1e9, 1e9, 1e9, 0.0, 0.0, ("a device",))  # a GFLOP/s
RATES = Rates(COMPUTE, "a link", 2e6, 0.5)  # a MB/s


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def planners(model: torch.nn.Module) -> dict[str, Planner]:
    """Of one captured graph, whose programs are traced once."""
    schedule, nodes = captured(model, 4096, 1, {"chunk": 1024})
    known: list[StepCost] = []

    def copied(*_: Any) -> Any:
        return dataclasses.replace(schedule, facts=dataclasses.replace(schedule.facts)), nodes

    def cost(facts: Any, options: Any) -> StepCost:
        programs = known[0].executor.programs if known else None
        known.append(
            StepCost(facts, options, Executor(facts, options, programs), known[0] if known else None)
        )
        return known[-1]

    engines = {
        "fsdp2": Engine("fsdp2", 8),
        "kept": Engine("fsdp2", 8, reshard=False),
        "ddp": Engine("ddp", 8),
        "zero3": Engine("zero3", 8),
        "zero2": Engine("zero2", 8),
    }
    pcie = rates(interconnect="pcie")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["streambp_fx.plan"], "captured", copied)
        patch.setattr(sys.modules["streambp_fx.plan"], "StepCost", cost)
        made = {name: Planner(model, engine=own, rates=pcie) for name, own in engines.items()}
        return {"one": Planner(model), **made}


@pytest.fixture(scope="module")
def plans(planners: dict[str, Planner]) -> dict[str, streambp_fx.Plan]:
    return {name: p.plan("tiny", 4000, chunk=512, optimizer="adamw") for name, p in planners.items()}


# ---- memory


@pytest.mark.slow
def test_what_each_device_holds(plans: dict[str, streambp_fx.Plan], model: torch.nn.Module) -> None:
    full = sum(p.numel() * 2 for p in model.parameters())
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    pieces = full / 8
    for name in ("fsdp2", "kept", "zero3"):
        plan = plans[name]
        assert plan.weights_bytes - buffers == pytest.approx(pieces, rel=0.01)
        bucket = 2 * 500_000_000 if name == "zero3" else 0
        assert plan.gradients_bytes == plan.weights_bytes - buffers + bucket
    assert plans["ddp"].weights_bytes == plans["one"].weights_bytes == full + buffers
    assert plans["ddp"].gradients_bytes == 2 * plans["one"].gradients_bytes, "the buckets"
    assert plans["fsdp2"].optimizer_bytes == pytest.approx(2 * pieces, rel=0.01)
    assert plans["ddp"].optimizer_bytes == 2 * full
    # float32 weights and two states of a piece
    assert plans["zero3"].optimizer_bytes == pytest.approx(3 * 2 * pieces, rel=0.01)


@pytest.mark.slow
def test_gathered_parameters_are_those_of_two_layers_and_the_rest(
    planners: dict[str, Planner], model: torch.nn.Module
) -> None:
    layer = sum(p.numel() * 2 for p in model.model.layers[0].parameters())
    rest = sum(p.numel() * 2 for p in model.parameters()) - LAYERS * layer
    most = {}
    for name in ("fsdp2", "kept", "zero3", "ddp"):
        cost = planners[name].cost
        moments = cost.timeline(cost.sizes(4000, 512))
        most[name] = max(m.bytes.get(GATHERED, 0) for m in moments)
    assert most["ddp"] == 0
    assert 2 * layer + rest <= most["fsdp2"] <= 2 * layer + rest + 8 * 64 * 2
    assert LAYERS * layer + rest <= most["kept"] <= (LAYERS + 1) * layer + rest + 8 * 64 * 2
    ends = 900 * 64 * 2  # the embedding, and the head
    assert most["zero3"] == max(2 * layer, layer + ends, 2 * ends + 64 * 2), "and the next one on its way"


@pytest.mark.slow
def test_the_longest_sequence_counts_them(planners: dict[str, Planner]) -> None:
    for name in ("fsdp2", "ddp", "zero3"):
        planner = planners[name]
        memory = 2**30 if name == "zero3" else 64 * 2**20  # whose bucket alone takes most of it
        found = planner.plan("tiny", memory=memory, optimizer="adamw")
        budget = memory - found.weights_bytes - found.gradients_bytes - found.optimizer_bytes
        assert found.peak_bytes <= memory and found.fits
        assert planner.activation_peak(found.seq_len + 1, found.chunk) > budget
    shorter = planners["kept"].plan("tiny", memory="64MiB").max_seq_len
    assert shorter < planners["fsdp2"].plan("tiny", memory="64MiB").max_seq_len  # type: ignore[operator]


# ---- what is sent


def test_bytes_on_the_wire(plans: dict[str, streambp_fx.Plan], model: torch.nn.Module) -> None:
    full = sum(p.numel() * 2 for p in model.parameters())
    fsdp2, kept, ddp, zero2 = (plans[n].devices for n in ("fsdp2", "kept", "ddp", "zero2"))
    assert fsdp2 is not None and kept is not None and ddp is not None and zero2 is not None
    kinds = {t.kind: t.count for t in fsdp2.traffic}
    assert kinds == {"all-gather": 2 * LAYERS + 1, "reduce-scatter": LAYERS + 1}
    assert {t.kind: t.count for t in kept.traffic} == dict.fromkeys(kinds, LAYERS + 1)
    for own in (fsdp2, kept, ddp):
        assert (
            own.sent_bytes == sum(t.sent_bytes for t in own.traffic) == sum(g.sent_bytes for g in own.groups)
        )
    layer, rest = fsdp2.groups[1], fsdp2.groups[0]
    assert (layer.gathers, rest.gathers, len(fsdp2.groups)) == (2, 1, LAYERS + 1)
    assert layer.sent_bytes == 3 * layer.bytes * 7 // 8 and rest.sent_bytes == 2 * (rest.bytes * 7 // 8)
    assert [(t.kind, t.bytes) for t in ddp.traffic] == [("all-reduce", full)]
    assert ddp.sent_bytes == 2 * full * 7 // 8
    zero3 = plans["zero3"].devices
    assert zero3 is not None  # embedding, layers, norm, head, twice; one bucket
    assert [(t.kind, t.count) for t in zero3.traffic] == [
        ("all-gather", 2 * (LAYERS + 3)),
        ("reduce-scatter", 1),
    ]
    assert zero3.traffic[1].bytes == full
    # summed as a whole, then the changed weights are gathered
    assert zero2.after_step_bytes == pytest.approx(full, rel=0.01)
    assert zero2.sent_bytes == pytest.approx(3 * full * 7 / 8, rel=0.01)


@pytest.mark.slow
def test_adapters_alone_are_summed(model: torch.nn.Module) -> None:
    peft = pytest.importorskip("peft")
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)
        settings = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
        adapted = peft.get_peft_model(plain, settings)
    found = streambp_fx.plan(adapted, 1000, gpus=8, shard="fsdp2").devices
    assert found is not None
    counts = {t.kind: (t.count, t.bytes) for t in found.traffic}
    trained = sum(p.numel() * p.element_size() for p in adapted.parameters() if p.requires_grad)
    assert counts["reduce-scatter"][0] == LAYERS, "the rest has nothing that is trained"
    assert trained <= counts["reduce-scatter"][1] <= 2 * trained < counts["all-gather"][1] / 10


# ---- time


def moments(*steps: Any) -> list[Moment]:
    """From pairs of a segment and its operations, and collectives with their segment."""
    found = []
    for segment, what in steps:
        if isinstance(what, Collective):
            found.append(Moment("forward", segment, None, what.kind.value, {}, collective=what))
        else:
            found.append(Moment("forward", segment, 0, "forward", {}, Work(products=what)))
    return found


def gather(megabytes: int, ahead: bool = True) -> Collective:
    """Of two devices: half of it is sent."""
    return Collective(CollectiveKind.ALL_GATHER, "layer", 2, 2 * megabytes * 10**6, ahead)


def sum_of(megabytes: int) -> Collective:
    return Collective(CollectiveKind.REDUCE_SCATTER, "layer", 2, 2 * megabytes * 10**6, True)


def test_a_gather_runs_beside_the_part_before() -> None:
    """Seconds: 1 gather, 3 computing beside 2 of the next gather, 3 computing."""
    found = step_time(moments((0, gather(1)), (0, 3e9), (1, gather(2)), (1, 3e9)), RATES)
    assert found.seconds == pytest.approx(7) and found.waited_seconds == pytest.approx(1)
    assert [p.hidden for p in found.parts] == [True, True]
    assert found.parts[0].link_seconds == pytest.approx(2) and found.parts[0].sent_bytes == 2 * 10**6
    slow = step_time(moments((0, gather(1)), (0, 3e9), (1, gather(5)), (1, 3e9)), RATES)
    assert slow.seconds == pytest.approx(9) and slow.parts[1].waited_seconds == pytest.approx(2)
    assert [p.hidden for p in slow.parts] == [False, True]


def test_an_engine_that_does_not_gather_ahead_waits() -> None:
    found = step_time(moments((0, gather(1, False)), (0, 3e9), (1, gather(2, False)), (1, 3e9)), RATES)
    assert found.seconds == pytest.approx(9) and found.waited_seconds == pytest.approx(3)


def test_a_sum_runs_beside_the_part_after_and_the_last_one_beside_none() -> None:
    found = step_time(moments((1, 3e9), (1, sum_of(2)), (0, 3e9), (0, sum_of(1))), RATES)
    assert found.seconds == pytest.approx(7) and found.parts[1].link_seconds == pytest.approx(2)


def test_one_link_is_used_by_one_collective_at_a_time() -> None:
    """The sum of the first part and the gather for the third are both beside the second."""
    before = (2, 3e9), (2, sum_of(2)), (1, gather(0)), (1, 3e9)
    found = step_time(moments(*before, (1, sum_of(1)), (0, gather(2)), (0, 3e9)), RATES)
    assert found.parts[1].link_seconds == pytest.approx(4) and not found.parts[1].hidden
    assert found.seconds == pytest.approx(3 + 4 + 3) and found.link_seconds == pytest.approx(5)


def test_time_of_a_plan(plans: dict[str, streambp_fx.Plan]) -> None:
    assert plans["one"].time is None
    for name in ("fsdp2", "zero3", "ddp", "zero2"):
        plan, time = plans[name], plans[name].time
        assert time is not None and plan.devices is not None
        least = plan.flops / (0.85 * GPUS["H100"].half)
        assert least < time.compute_seconds, "bytes are moved, and attention is slower than products"
        assert time.link_seconds == pytest.approx(plan.devices.sent_bytes / (0.8 * 64e9))
        assert time.seconds == pytest.approx(time.compute_seconds + time.waited_seconds)
        assert 0 < time.waited_seconds <= time.link_seconds * 1.001
        assert time.tokens_per_second == pytest.approx(8 * 4000 / time.seconds)
        assert sum(p.seconds for p in time.parts) == pytest.approx(time.compute_seconds)
    fsdp2, zero3 = plans["fsdp2"].time, plans["zero3"].time
    assert fsdp2 is not None and zero3 is not None
    assert zero3.waited_seconds > fsdp2.waited_seconds, "one bucket there, summed at the end"


def test_one_device_has_a_time_if_it_is_named(
    planners: dict[str, Planner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planners["one"], "rates", rates_for(False, None, None, 1e12, 0.25, "bfloat16"))
    found = planners["one"].plan("tiny", 1000)
    assert found.devices is None and found.time is not None
    moments = planners["one"].cost.timeline(planners["one"].cost.sizes(1000, found.chunk))
    seconds = 0.0
    for _, own in itertools.groupby(moments, key=lambda m: (m.phase, m.segment)):
        work = total(m.work for m in own)
        bytes_moved = work.product_bytes + work.bytes
        computing = work.flops / 0.25e12 + bytes_moved / (0.65 * GPUS["H100"].memory)
        seconds += max(computing, work.calls * LAUNCH + work.programs * PROGRAM)
    assert found.flops == sum(m.flops for m in moments) and found.time.seconds == pytest.approx(seconds)
    assert "as given, 1 TFLOP/s, of which 25% are assumed" in found.time.assumed


# ---- the command line


def test_on_the_command_line(
    plans: dict[str, streambp_fx.Plan], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {}

    def planned(*_: Any, **given: Any) -> streambp_fx.Plan:
        asked.update(given)
        return plans["fsdp2"]

    monkeypatch.setattr(sys.modules["streambp_fx.plan"], "plan", planned)
    argv = ["plan", "qwen3-8b", "--gpus", "8", "--gpu-memory", "64MiB", "--shard", "fsdp2", "--no-reshard"]
    assert main([*argv, "--interconnect", "ib400", "--flops", "1e15"]) == 0
    wanted = {"gpus": 8, "shard": "fsdp2", "wrap": "layers", "reshard_after_forward": False}
    assert {**wanted, "interconnect": "ib400", "flops": 1e15}.items() <= asked.items()
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "8 GPUs, fsdp2 (each layer, then the model)",
        "all-gather",
        "model.layers.0 to 3, each",
        "Predicted, not measured",
        "PCIe of a H100",
        "989.5 TFLOP/s, of which products get 85%, attention 65% and backwards 55%",
        "hidden",
    ):
        assert words in text, words
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"]["traffic"][0]["count"] == 2 * LAYERS + 1
    assert {"seconds", "waited_seconds", "assumed"} <= set(found["time"])
    assert all("hidden" in part for part in found["time"]["parts"])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gpus": 8}, "give shard, one of ddp"),
        ({"shard": "fsdp2"}, "give gpus"),
        ({"gpus": 8, "shard": "zero4"}, "zero4"),
        ({"gpus": 0, "shard": "ddp"}, "at least 1"),
        ({"gpus": 8, "shard": "ddp", "wrap": "model"}, "settings of fsdp2"),
        ({"gpus": 8, "shard": "fsdp2", "wrap": "nothing"}, "layers, model"),
        ({"gpus": 8, "shard": "fsdp2", "context_parallel": 3}, "must divide gpus"),
        ({"gpus": 8, "shard": "zero2", "context_parallel": 2}, "ddp and fsdp2"),
        ({"context_parallel": 2}, "give gpus and shard"),
        ({"wrap": "model"}, "for several devices"),
        ({"gpus": 8, "shard": "fsdp2", "interconnect": "string"}, "GB/s"),
        ({"gpus": 8, "shard": "fsdp2", "interconnect": "-3"}, "GB/s"),
        ({"gpus": 8, "shard": "fsdp2", "gpu": "L40S", "interconnect": "nvlink"}, "no NVLink"),
        ({"interconnect": "pcie"}, "for several devices"),
        ({"gpu": "Z80"}, "Z80"),
        ({"flops": -1.0}, "positive"),
        ({"gpu": "A100", "efficiency": 2}, "efficiency"),
        ({"gpu": "here", "flops": 1e12}, "leave out flops"),
        ({"gpus": 8, "shard": "ddp", "gpu": "here"}, "give interconnect"),
        ({"gpus": 8, "shard": "ddp", "gpu": "here", "interconnect": "pcie"}, "give GB/s"),
        ({"gpu_memory": "8GiB", "memory": "8GiB"}, "give one of them"),
        ({"flops": "fast"}, "a positive number, not 'fast'"),
        ({"dtype": "int8"}, "dtype must be one of float32"),
        ({"lora_rank": 4}, "given by name"),
    ],
)
def test_what_is_refused(given: dict[str, Any], words: str, model: torch.nn.Module) -> None:
    with pytest.raises(PlanError, match=words):
        streambp_fx.plan(model, 1000, **given)


def test_a_dtype_without_a_known_rate() -> None:
    with pytest.raises(PlanError, match="give flops"):
        rates("H100", "float64", "pcie")
    assert rates("H100", "float64", 25.0, flops=1e12).bandwidth == pytest.approx(0.8 * 25e9)
    assert rates("L40S", "float32", "pcie").compute.products == 0.85 * GPUS["L40S"].float32


# ---- the page


@pytest.mark.slow
def test_numbers_of_the_page() -> None:
    """What docs/distributed.md says of Qwen3-8B on 8 GPUs, against what the example prints."""
    page = (ROOT / "docs" / "distributed.md").read_text()
    script = ROOT / "examples" / "distributed" / "planning.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    (tokens,) = re.findall(r"Longest sequence: ([\d,]+) tokens", done.stdout)
    (seconds,) = re.findall(r"not measured: ([\d,.]+) s a step", done.stdout)
    assert f"| this plan | {tokens} tokens on each GPU |" in page
    assert f"| 80.00 GiB, predicted | {float(seconds):.0f}, predicted |" in page
    assert "all-gather" in done.stdout and re.search(r"│ peak +│ +80\.00 │", done.stdout)
    given: dict[str, Any] = {"gpus": 8, "gpu_memory": "80GiB", "shard": "fsdp2", "optimizer": "adamw"}
    host = streambp_fx.plan("Qwen3-8B", **given, offload="host")
    assert host.time is not None
    assert (
        f"| {host.seq_len:,} tokens on each GPU |" in page
        and f"| {host.time.seconds:,.0f}, predicted |" in page
    )
    assert f"and {host.offloaded_bytes / 2**30:.0f} GiB of host memory" in page
    along = streambp_fx.plan("Qwen3-8B", **given, context_parallel=8)
    assert along.time is not None
    assert f"| {along.seq_len:,} tokens over 8 GPUs | 1 sequence |" in page
    assert f"| 80.00 GiB, predicted | {along.time.seconds:,.0f}, predicted |" in page


@pytest.mark.slow
def test_a_published_step_takes_what_is_predicted() -> None:
    """1,048,576 tokens in 380 s on 8 H100, with gradient checkpointing: each layer's forward runs twice."""
    cost = Planner(model_on_meta("Qwen3-8B")).cost
    sizes = cost.sizes(1_048_576, 2048)
    seconds = rates("H100").seconds(eager_step.work(cost, sizes, checkpointing=True)) / 8
    page = " ".join((ROOT / "docs" / "distributed.md").read_text().split())
    assert f"{seconds:.0f} seconds at these rates" in page
    assert 0.75 * 380 < seconds < 380, "what devices exchange is not in it"


@pytest.mark.slow
def test_a_sequence_on_several_devices_takes_less_of_each() -> None:
    """Of hidden states each has its share; of a layer's keys and values all rows, and of parameters."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=36,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    model = AutoModelForCausalLM.from_config(config)
    peaks = {}
    for devices in (1, 4):
        found = streambp_fx.plan(
            model, 16384, gpus=4, shard="ddp", context_parallel=devices, chunk=512, loss_chunk=64
        )
        assert found.devices is not None and found.devices.context_parallel == devices
        peaks[devices] = found.activation_peak_bytes
        kinds = {t.kind: t.count for t in found.devices.traffic}
        gathers = 36 * 2 * 2 + 1 if devices > 1 else 0
        assert (kinds.get("all-gather", 0), kinds.get("reduce-scatter", 0)) == (gathers, gathers // 2)
        assert found.time is not None
    assert peaks[4] <= 0.30 * peaks[1]
