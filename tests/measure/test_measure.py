"""Measuring a step: known allocations are seen, and a process of its own reports what it did."""

import itertools
import json
import subprocess
import sys
import threading
import time

import pytest
import torch

from streambp_fx.measure.gradients import largest_difference
from streambp_fx.measure.live_bytes import LiveBytes
from streambp_fx.measure.step import (
    Measurement,
    MeasurementError,
    StepSpec,
    WorkerError,
    measure_step,
    run_isolated,
    turn,
)
from streambp_fx.measure.worker import summary

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from Linux")
MIB = 2**20
TINY = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


def _spec(source, **fields):
    return StepSpec(
        **{"source": source, "mode": "eager", "seq_len": 24, "chunk": 8, "threads": 1, "dtype": "float64"}
        | fields
    )


@linux
def test_an_allocation_of_known_size_is_seen():
    size = 256 * MIB

    def step():
        block = torch.ones(size, dtype=torch.uint8)
        del block

    measured = measure_step(step)
    assert abs(measured.peak_bytes - size) < 8 * MIB
    assert measured.seconds > 0


@linux
def test_the_peak_is_over_the_level_before_the_step():
    kept = torch.ones(128 * MIB, dtype=torch.uint8)
    assert measure_step(lambda: None).peak_bytes < 8 * MIB
    assert kept.numel() == 128 * MIB


@linux
def test_each_step_has_a_peak_of_its_own():
    measure_step(lambda: torch.ones(128 * MIB, dtype=torch.uint8))
    assert measure_step(lambda: torch.ones(32 * MIB, dtype=torch.uint8)).peak_bytes < 48 * MIB


def test_a_device_without_a_meter_is_refused():
    with pytest.raises(MeasurementError, match="meta"):
        measure_step(lambda: None, "meta")


def test_another_system_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(MeasurementError, match="Linux only, not darwin"):
        measure_step(lambda: None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mode", "fast"),
        ("dtype", "int8"),
        ("seq_len", 1),
        ("chunk", 0),
        ("loss_chunk", 0),
        ("batch_size", 0),
        ("steps", 0),
        ("threads", -1),
        ("warmup_len", 1),
        ("warmup_len", 25),
    ],
)
def test_a_bad_field_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        _spec("smollm2", **{field: value})


def test_what_to_measure_is_checked_before_a_process_is_started():
    with pytest.raises(ValueError, match="must be one of"):
        run_isolated(_spec("smollm2"), "energy")
    with pytest.raises(ValueError, match="two steps"):
        run_isolated(_spec("smollm2"), "both")


@pytest.mark.parametrize(
    ("what", "seconds", "peak"), [("time", 2.0, 30), ("peak", 2.0, 30), ("both", 2.5, 10)]
)
def test_a_run_for_both_takes_the_peak_from_the_first_step_only(what, seconds, peak):
    results = [(1.0, Measurement(1.0, 10)), (0.9, Measurement(2.0, 30)), (0.8, Measurement(3.0, 20))]
    assert summary(results, what) == {"seconds": seconds, "peak_bytes": peak, "losses": [1.0, 0.9, 0.8]}


@pytest.mark.slow
@linux
def test_the_worker_returns_json(config):
    spec = {"source": config, "mode": "eager", "seq_len": 8, "chunk": 8, "threads": 1}
    command = [
        sys.executable,
        "-m",
        "streambp_fx.measure.worker",
        "--what",
        "time",
        "--json",
        json.dumps(spec),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [e["event"] for e in events] == ["loaded", "warm", "step", "done"]
    assert events[-1]["seconds"] > 0 and len(events[-1]["losses"]) == 1


@pytest.mark.slow
@linux
def test_modes_share_weights_and_batch_and_training_lowers_the_loss(config, tmp_path):
    seen = []
    files = {mode: str(tmp_path / f"{mode}.pt") for mode in ("eager", "checkpointing")}
    eager = run_isolated(
        _spec(config, gradients_file=files["eager"], steps=3, learning_rate=1e-2), "both", seen.append
    )
    plain = run_isolated(_spec(config, mode="checkpointing", gradients_file=files["checkpointing"]), "peak")
    assert [e["event"] for e in seen] == ["loaded", "warm", "step", "step", "step", "done"]
    assert eager.losses[0] == pytest.approx(plain.losses[0], rel=1e-12)
    assert eager.losses[2] < eager.losses[1] < eager.losses[0]
    assert any("random" in note for note in eager.notes)
    assert largest_difference(files["eager"], files["checkpointing"]).relative < 1e-12


@pytest.mark.slow
def test_the_error_of_the_process_is_told(tmp_path):
    with pytest.raises(WorkerError, match="no such file or directory"):
        run_isolated(_spec(str(tmp_path / "missing")), "time")


def test_largest_difference(tmp_path):
    def save(name, **gradients):
        torch.save({k: torch.tensor(v) for k, v in gradients.items()}, tmp_path / name)
        return tmp_path / name

    a = save("a", w=[3.0, 4.0], b=[0.0])
    assert largest_difference(a, save("b", w=[3.0, 4.5], b=[0.0])).relative == pytest.approx(0.1)
    assert largest_difference(a, save("c", w=[3.0, 4.0], b=[1e-9])).relative == float("inf")
    assert largest_difference(a, save("d", w=[3.0, float("nan")], b=[0.0])).parameter == "w"
    with pytest.raises(ValueError, match="one file only: b"):
        largest_difference(a, save("e", w=[3.0, 4.0]))


@pytest.mark.slow
@linux
def test_options_reach_transform_and_another_worker_can_run_the_steps(config):
    with pytest.raises(WorkerError, match="unknown option 'evry'"):
        run_isolated(_spec(config, mode="streamed", options={"evry": 2}), "time")
    with pytest.raises(WorkerError, match="No module named"):
        run_isolated(_spec(config), "time", worker=(sys.executable, "-m", "no_such_worker"))


def test_turns_are_taken_one_after_the_other(tmp_path):
    """Nobody is in a turn while somebody else is, and nobody has two before the others have one."""
    found = []

    def work(name):
        for _ in range(3):
            with turn(str(tmp_path / "turns")):
                begun = time.perf_counter()
                time.sleep(0.02)
                found.append((begun, time.perf_counter(), name))

    workers = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(found))
    rounds = [{name for *_, name in found[k : k + 3]} for k in (0, 6)]
    assert len(found) == 9 and rounds == [set("abc")] * 2


def test_a_storage_that_grows_counts_as_it_grows():
    with LiveBytes() as meter:
        place = torch.empty(0)
        torch.mm(torch.ones(10, 4), torch.ones(4, 100), out=place)
        grown = meter.live
        place.resize_(0)  # keeps its memory
        kept = meter.live
        del place
    assert grown >= 4 * 1000 and kept == grown and meter.live <= grown - 4 * 1000
    assert meter.widest == 1000
