"""Bytes counted without memory are those of a step that runs."""

import pytest
import torch

import streambp_fx
from benchmarks.counted import counted, main
from benchmarks.gpu_models import TINY
from benchmarks.gpu_steps import make_model
from streambp_fx.measure.live_bytes import peak_live_bytes

CONFIG = {**TINY, "vocab_size": 5000}


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        {"save": "inputs"},
        pytest.param({"save": "attention"}, marks=pytest.mark.slow),
        pytest.param({"offload": "disk"}, marks=pytest.mark.slow),
    ],
    ids=lambda policy: next(iter(policy.values())),
)
def test_the_same_as_of_a_step_that_runs(policy):
    options = {"chunk": 64, "loss_chunk": 16, **policy}
    model = make_model({**CONFIG, "num_hidden_layers": 2}, "meta", torch.bfloat16)
    found = counted(streambp_fx.explain(model, 300, **options), 300)
    model = model.to_empty(device="cpu").train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
        parameter.grad = torch.zeros_like(parameter)
    for module in model.modules():  # what `to_empty` left without values
        if hasattr(module, "inv_freq"):
            module.inv_freq.fill_(0.5)
    streambp_fx.transform(model, **options)
    ids = torch.arange(300)[None] % 97

    def step():
        model(input_ids=ids, labels=ids).loss.backward()

    step()
    known = [t for p in model.parameters() for t in (p, p.grad)]
    live = peak_live_bytes(step, [*known, *model.buffers(), ids])
    assert found == pytest.approx(live, rel=0.01) and live > 2**20


@pytest.mark.slow
def test_the_table(capsys, monkeypatch):
    monkeypatch.setattr("benchmarks.counted.DENSE", CONFIG)
    assert main(["--layers", "1", "--tokens", "200", "--chunk", "64"]) == 0
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("| 1 | 200 | ") and row.endswith("%) |")
