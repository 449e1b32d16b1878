"""What a step is measured to hold, by cause, is what is predicted, and no less than the floor."""

import itertools

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import streambp_fx
from benchmarks.cases import CASES, shrunk
from benchmarks.causes import HEAD, LAYER, held, least, main
from benchmarks.gpu_steps import make_model
from streambp_fx.cost.held_bytes import BODIES, HIDDEN, KEPT, LOSS, STATE, STATE_GRADIENTS, STORED
from streambp_fx.measure.live_bytes import peak_live_bytes
from streambp_fx.passes.s5_lower.lower import Lowered


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dense", {}),
        pytest.param("dense", {"save": "attention", "loss_chunk": 70}, marks=pytest.mark.slow),
        pytest.param("gemma3", {"loss_chunk": 300}, marks=pytest.mark.slow),
        pytest.param("gpt_neox", {"save": "attention"}, marks=pytest.mark.slow),
    ],
)
def test_measured_is_predicted(name, options):
    workload = shrunk(CASES[name]).workload
    model = make_model(workload.config, "cpu", torch.float32)
    found = {each.where: each for each in held(model, workload, options)}
    assert set(found) == {LAYER, HEAD}
    for each in found.values():
        total = each.measured.total
        for cause in {*each.measured.bytes, *each.predicted.bytes}:
            measured, predicted = (m.bytes.get(cause, 0) for m in (each.measured, each.predicted))
            assert measured == pytest.approx(predicted, abs=0.01 * total), (each.where, cause)
        for cause in {*each.floor} - {STORED, HIDDEN}:
            assert each.measured.bytes.get(cause, 0) >= each.floor[cause], (each.where, cause)
        # Of the hidden state and its gradient a backward needs only one; an embedding need not be stored.
        layers = workload.config["num_hidden_layers"]
        assert each.measured.bytes[HIDDEN] * 2 == each.floor[HIDDEN]
        assert each.measured.bytes[STORED] >= each.floor[STORED] * (layers - 1) // layers
    layer, head = found[LAYER], found[HEAD]
    assert layer.measured.bytes[STATE] == layer.measured.bytes[STATE_GRADIENTS] > 0
    assert (KEPT in layer.measured.bytes) == ("save" in options)
    assert BODIES in layer.floor and LOSS in head.floor and STATE not in head.measured.bytes


@pytest.mark.slow
def test_the_larger_moment_is_the_peak():
    workload = shrunk(CASES["dense"]).workload
    model = make_model(workload.config, "cpu", torch.float32)
    most = max(each.measured.total for each in held(model, workload, {}))
    ids = torch.arange(workload.tokens)[None] % workload.config["vocab_size"]
    streambp_fx.transform(model, chunk=workload.chunk)

    def step():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    step()
    known = [t for p in model.parameters() for t in (p, p.grad)]
    assert most == pytest.approx(peak_live_bytes(step, [*known, *model.buffers(), ids]), rel=0.001)


def _brute_force(graph):
    """The least peak of all orders of a small graph without views."""
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    output = next(n for n in graph.nodes if n.op == "output")
    best = None
    for order in itertools.permutations(nodes):
        place = {n: k for k, n in enumerate(order)}
        if any(place[o] > place[n] for n in order for o in n.all_input_nodes if o in place):
            continue
        last = {n: max([place[n], *(place.get(u, len(order)) for u in n.users)]) for n in order}
        size = {n: n.meta["val"].numel() * n.meta["val"].element_size() for n in order}
        peak = max(sum(size[n] for n in order[: k + 1] if last[n] >= k) for k in range(len(order)))
        best = peak if best is None else min(best, peak)
    assert best is not None and output is not None
    return best


def _chain(x):
    return x.cos().sin().exp()


def _diamond(x):
    return x.cos() * x.sin().exp() + x.sum()


def _wide(x):
    wide = x @ x.new_ones(4, 50)
    return (wide * wide.tanh()).sum(1)


@pytest.mark.parametrize("function", [_chain, _diamond, _wide])
def test_no_order_goes_below_the_floor_and_one_reaches_it(function):
    module = make_fx(function, tracing_mode="fake")(torch.ones(6, 4))
    floor, best = least(Lowered(module.forward, module), {}), _brute_force(module.graph)
    assert floor == best > 0


@pytest.mark.slow
def test_the_model_is_left_as_it_was():
    workload = shrunk(CASES["llama"]).workload
    model = make_model(workload.config, "cpu", torch.float32)
    own = type(model).forward
    held(model, workload, {})
    assert model.forward.__func__ is own and streambp_fx.schedule(model) is None
    assert isinstance(model, nn.Module)


@pytest.mark.slow
def test_the_tables(capsys, monkeypatch):
    monkeypatch.setattr("benchmarks.causes.peak_of_process", lambda workload, mode, meter: 2**30)
    assert main(["--case", "dense", "--tiny"]) == 0
    said = capsys.readouterr().out
    for text in ("in a layer", "in the loss head", "stored inputs", "state gradients", "1,024.0 MiB"):
        assert text in said
