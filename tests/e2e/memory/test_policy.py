"""What is kept and where: saved attention, every k-th input, offloading. Always exact, and as predicted."""

from __future__ import annotations

import functools
import gc
import time
import weakref
from typing import Any

import pytest
import torch
from e2e_check import check_exact, compare, in_double, pair, step
from e2e_memory import BATCHES, live
from e2e_models import build, padded, plain, sample

import streambp_fx
from streambp_fx.errors import OffloadError
from streambp_fx.passes.graph.facts import Facts
from streambp_fx.passes.s3_cut.policy import Policy, candidates
from streambp_fx.runtime import offload

# Host memory of a CPU, and budgets that nothing fits: both are said, and both run.
pytestmark = [
    pytest.mark.filterwarnings("ignore:offload=.host. does nothing:streambp_fx.StreamBPWarning"),
    pytest.mark.filterwarnings("ignore:memory=1 does not fit:streambp_fx.StreamBPWarning"),
]

WIDE = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 97, "max_position_embeddings": 2048}
POLICIES: dict[str, dict[str, Any]] = {
    "attention": {"save": "attention"},
    "every 2": {"every": 2},
    "every 2, attention": {"every": 2, "save": "attention"},
    "more than there are": {"every": 5},
    "disk": {"offload": "disk"},
    "disk, attention, every 2": {"offload": "disk", "save": "attention", "every": 2},
    "host": {"offload": "host"},
}


def facts_of(model: Any) -> Facts:
    found = streambp_fx.schedule(model)
    assert found is not None
    return found.facts


ALL_OF_THEM = "disk, attention, every 2"


@pytest.mark.parametrize("policy", sample(POLICIES, ALL_OF_THEM))
def test_exact(policy: str) -> None:
    factory = functools.partial(build, "llama", num_hidden_layers=3)
    check_exact(factory, BATCHES, **POLICIES[policy])


OTHERS = ["gemma3_text", "mistral", "opt", "bloom", "gpt2", "falcon"]


@pytest.mark.parametrize("family", sample(OTHERS))
def test_exact_for_other_kinds_of_attention(family: str) -> None:
    """Windows, biases, positions added to scores, no kernel at all."""
    factory = functools.partial(build, family)
    batches = {n: BATCHES[n] for n in ("T=67", "padded")}
    check_exact(factory, batches, save="attention", every=2, offload="disk")


@pytest.mark.slow
def test_exact_where_the_data_decides_how_far_rows_read() -> None:
    """A finite mask added to the scores: rows that see nothing attend to all; of those nothing is kept."""
    batches = {
        "T=67": plain(2, 67),
        "left": padded(67, "left"),
        "all of a chunk": padded(67, "left", (29, 0)),
    }
    check_exact(functools.partial(build, "falcon_alibi"), batches, save="attention")


KERNEL = "scaled_dot_product_attention_default: "
SAVED = {
    "sdpa": {f"{KERNEL}logaddexp.default", f"{KERNEL}add.Tensor"},
    "eager": {"contiguous: clone.default"},
}


@pytest.mark.parametrize("impl", sample(list(SAVED), "sdpa"))
def test_what_is_saved_of_attention(impl: str) -> None:
    """Of a kernel the output and the log-sum-exp; of products the output, as the weights are too many."""
    model = build("qwen3", impl)
    streambp_fx.transform(model, chunk=16, loss_chunk=8, save="attention")
    step(model, plain(2, 40))
    schedule = streambp_fx.schedule(model)
    layers = [s for s in schedule.segments if s.segment.mixings]
    assert [set(s.saved) - {n.name for n in s.segment.rows} for s in layers] == [SAVED[impl]] * len(layers)


@pytest.mark.slow
def test_attention_is_not_computed_again() -> None:
    """Forward kernels: one a block in the forward, and none in the backward."""
    calls = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        only_observes = True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    found = {}
    for save in ("inputs", "attention"):
        model = build("qwen3")
        streambp_fx.transform(model, chunk=16, loss_chunk=8, save=save)
        step(model, plain(2, 64))
        calls.clear()
        with Count():
            loss = model(**plain(2, 64)).loss
            forward = sum("flash_attention_for_cpu.default" in c for c in calls)
            loss.backward()
        both = sum("flash_attention_for_cpu.default" in c for c in calls)
        found[save] = (forward, both - forward)
    assert found["attention"] == (found["inputs"][0], 0) and found["inputs"][1] == found["inputs"][0] > 0


@pytest.mark.parametrize("policy", sample(POLICIES))
def test_predicted_peak_is_what_is_live(policy: str) -> None:
    model = build("llama", dtype=torch.float32, num_hidden_layers=6, **WIDE)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    streambp_fx.transform(model, chunk=64, loss_chunk=64, **POLICIES[policy])
    model(**plain(2, 80)).loss.backward()
    found = streambp_fx.schedule(model)
    assert found is not None
    for tokens in (256, 517):
        predicted = found.cost.peak(found.cost.sizes(tokens)).total
        assert live(model, plain(2, tokens)) == pytest.approx(predicted, rel=0.08), tokens
    expression = found.cost.peak_expression(2)
    assert expression.free_symbols, "a policy has an expression as well"


@pytest.mark.slow
def test_policies_hold_less_where_they_should() -> None:
    def peak(layers: int, **policy: Any) -> int:
        model = build("llama", dtype=torch.float32, num_hidden_layers=layers, **WIDE)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        streambp_fx.transform(model, chunk=32, loss_chunk=32, **policy)
        model(**plain(2, 80)).loss.backward()
        return live(model, plain(2, 512))

    one_input = 2 * 512 * WIDE["hidden_size"] * 4
    peaks = {name: peak(9, **policy) for name, policy in {"default": {}, **POLICIES}.items()}
    assert peaks["every 2"] < 0.8 * peaks["default"] < 0.8 * peaks["attention"]
    assert peaks["disk"] < 0.6 * peaks["default"]
    assert peaks["host"] == peaks["default"], "the CPU's memory is the host's"
    assert peaks["default"] - peak(6) == 3 * one_input, "an input a layer"
    assert peaks["disk"] == peak(6, offload="disk"), "none, however many layers there are"


@pytest.mark.slow
def test_the_policy_is_chosen_for_the_memory() -> None:
    """Much memory: all is saved. Less: inputs alone. Too little: what takes least. Always exact."""
    factory = functools.partial(build, "llama", num_hidden_layers=6, **WIDE)
    given: dict[str, Any] = {"chunk": 64, "loss_chunk": 64}
    with in_double(factory):
        cost = streambp_fx.explain(factory(), 512, **given).cost
        inputs = cost.peak(cost.sizes(512)).total
        expected = {10**12: ("100%", 1), inputs: ("store inputs", 1), 1: ("store inputs of every", 2)}
        for memory, (saved, every) in expected.items():
            torch._dynamo.reset()
            eager, streamed = pair(factory, **given, policy="auto", memory=memory)
            compare(eager, streamed, {"T=512": plain(1, 512)}, 1e-9)
            found = streambp_fx.schedule(streamed)
            assert found is not None
            assert saved in str(found.policy) and found.options.every == every, (memory, found.policy)
            assert "(chosen)" in str(found)
        compare(eager, streamed, {"short": plain(1, 9)}, 1e-9)


def test_candidates_go_from_least_work_to_least_memory() -> None:
    names = [str(p) for p in candidates(Policy(offload="host"))]
    assert names[:4] == [
        "store inputs and attention outputs",
        "store inputs",
        "store inputs and attention outputs, in host memory",
        "store inputs, in host memory",
    ]
    assert len(names) == len(set(names)) == 16 and len(candidates(Policy())) == 8


@pytest.mark.slow
def test_random_ops_are_drawn_again() -> None:
    """Dropout under every policy: two steps with the same seed are alike, and differ from none."""
    found = []
    for policy in ({}, POLICIES[ALL_OF_THEM]):
        model = build("llama", attention_dropout=0.3)
        streambp_fx.transform(model, chunk=16, loss_chunk=8, **policy)
        step(model, plain(2, 40))
        torch.manual_seed(3)
        found.append(step(model, plain(2, 40)))
    for loss, gradients in found[1:]:
        assert torch.equal(loss, found[0][0])
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, found[0][1][name], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_trained_parameters_are_those_that_were_chosen() -> None:
    factory = functools.partial(build, "llama", num_hidden_layers=3)

    def frozen() -> Any:
        model = factory()
        for name, p in model.named_parameters():
            p.requires_grad_(".layers.0." not in name and "embed" not in name)
        return model

    for policy in ({"every": 3, "offload": "disk", "save": "attention"},):
        check_exact(frozen, {"T=67": plain(2, 67)}, **policy)


@pytest.mark.slow
@pytest.mark.parametrize("every", sample([3, 4, 5], 3))
@pytest.mark.parametrize("shown", sample([1, 2, 3], 2))
def test_a_hidden_state_that_is_returned_from_within_a_group(every: int, shown: int) -> None:
    """What follows it in the group is made again of it, and not of what was not made again."""

    class Shown(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = build("llama", num_hidden_layers=4)

        def forward(self, input_ids: Any, labels: Any) -> tuple[Any, Any]:
            found = self.model(input_ids=input_ids, labels=labels, output_hidden_states=True)
            return found.loss, found.hidden_states[shown]

    def run(model: Any, batch: Any) -> list[Any]:
        loss, hidden = model(batch["input_ids"], labels=batch["labels"])
        (loss + hidden.sin().mean()).backward()
        return [loss, *(p.grad for p in model.parameters())]

    model, batch = Shown(), plain(2, 37)
    want = run(model, batch)
    model.zero_grad()
    options: dict[str, Any] = {"chunk": 16, "loss_chunk": 8, "every": every, "check": "never"}
    found = run(streambp_fx.transform(model, **options), batch)
    for got, expected in zip(found, want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("policy", sample(["every 2", "disk", "attention", ALL_OF_THEM]))
def test_retained_graph_and_no_grad(policy: str) -> None:
    """A graph that is kept can be gone through again, and evaluation keeps nothing."""
    factory = functools.partial(build, "llama", num_hidden_layers=3)
    eager, streamed = pair(factory, logits="keep", **POLICIES[policy])
    with in_double(factory):
        batch = {"input_ids": plain(2, 40)["input_ids"]}
        found = []
        for model in (eager, streamed):
            model.zero_grad()
            total = model(**batch).logits.square().mean()
            total.backward(retain_graph=True)
            total.backward()
            found.append({n: p.grad for n, p in model.named_parameters()})
        for name, gradient in found[0].items():
            torch.testing.assert_close(found[1][name], gradient, rtol=1e-8, atol=1e-12)
        compare(eager, streamed, {"after": plain(2, 40)}, 1e-9)
        with torch.no_grad():
            assert streamed(**batch).logits.shape == (2, 40, 97)


@pytest.mark.slow
def test_the_schedule_names_the_policy() -> None:
    model = build("llama", num_hidden_layers=4)
    text = str(streambp_fx.explain(model, 300, chunk=64, save="attention", every=2, offload="disk"))
    assert "store inputs and attention outputs of every 2nd segment, on disk" in text
    assert str(Policy()) == "store inputs"
    found = streambp_fx.explain(model, 300, chunk=64, save="attention")
    saved = found.segments[1].saved
    assert sum(saved.values()) == 32 * 8 + 4 * (8 * 8 + 8) and len(saved) == 3, saved


def gone(store: weakref.ref[Any], seconds: float = 10.0) -> bool:
    """True if it is let go; the thread that wrote may need a moment to let go of its last work."""
    end = time.monotonic() + seconds
    while store() is not None and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    return store() is None


@pytest.mark.slow
def test_disk_file_is_gone_with_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the backward, although the loss is still held; and with the loss, if there is no backward."""
    stores: list[weakref.ref[Any]] = []
    written: list[int] = []
    make, send = offload.DiskStore.__init__, offload.DiskStore.send

    def made(self: Any, resident: Any) -> None:
        make(self, resident)
        stores.append(weakref.ref(self))

    def sent(self: Any, stored: Any, tensor: Any) -> None:
        send(self, stored, tensor)
        written.append(self.end)

    monkeypatch.setattr(offload.DiskStore, "__init__", made)
    monkeypatch.setattr(offload.DiskStore, "send", sent)
    model = build("llama")
    streambp_fx.transform(model, chunk=16, loss_chunk=8, offload="disk", check="never")
    loss = model(**plain(2, 40)).loss
    assert stores[0]() is not None and written[-1] > 0
    loss.backward()
    assert gone(stores[0])
    loss = model(**plain(2, 40)).loss
    del loss
    assert len(stores) == 2 and gone(stores[1])


@pytest.mark.parametrize("what", sample(["a weight", "an input"], "a weight"))
def test_what_is_changed_in_place_before_the_backward_is_an_error(what: str) -> None:
    """As without offloading: what stays on the device is what the forward has read, or there is an error."""
    model = streambp_fx.transform(build("llama"), chunk=16, loss_chunk=8, offload="disk")
    embeds = model.get_input_embeddings()(plain(2, 37)["input_ids"]).detach()
    loss = model(inputs_embeds=embeds, labels=plain(2, 37)["labels"]).loss
    with torch.no_grad():
        (embeds if what == "an input" else model.model.layers[1].mlp.up_proj.weight).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation: a tensor of shape"):
        loss.backward()


@pytest.mark.slow
def test_no_room_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    model = build("llama")
    streambp_fx.transform(model, chunk=16, loss_chunk=8, offload="disk")
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    monkeypatch.setattr(offload.os, "pwrite", full)
    with pytest.raises(OffloadError, match=r"No space left.*TMPDIR"):
        model(**plain(2, 67)).loss.backward()
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    monkeypatch.undo()
    step(model, plain(2, 67))


@pytest.mark.parametrize(
    ("name", "value"),
    [("save", "everything"), ("every", 0), ("every", True), ("offload", "cloud"), ("policy", "best")],
)
def test_bad_options(name: str, value: Any) -> None:
    model = build("llama")
    with pytest.raises(ValueError, match=name):
        streambp_fx.transform(model, **{name: value})
    with pytest.raises(ValueError, match="give the one or the others"):
        streambp_fx.transform(model, policy="auto", every=2)
    assert "forward" not in vars(model)


@pytest.mark.slow
def test_memory_alone_leaves_the_policy_to_be_chosen() -> None:
    """And what is given beside it is kept."""
    chosen = streambp_fx.Options(memory="1GiB")
    assert chosen.chooses and not streambp_fx.Options().chooses
    for given in ({"save": "attention"}, {"every": 2}, {"offload": "disk"}, {"policy": "given"}):
        assert not streambp_fx.Options(memory="1GiB", **given).chooses
    assert not streambp_fx.Options(memory="1GiB", order="chunks").chooses
    factory = functools.partial(build, "llama", num_hidden_layers=2)
    with in_double(factory):
        eager, streamed = pair(factory, chunk=16, loss_chunk=16, memory="1GiB")
        compare(eager, streamed, {"T=67": plain(1, 67)}, 1e-9)
    assert "spare 100% of the recompute (chosen)" in str(streambp_fx.schedule(streamed))


@pytest.mark.slow
def test_chunks_first_is_chosen_where_the_state_is_small() -> None:
    """Eight layers with one key head of eight: the other order needs less memory, for little work."""
    sizes = {**WIDE, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 1}

    def factory() -> Any:
        model = build("llama", **sizes)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("q_proj" in name)
        return model

    given: dict[str, Any] = {"chunk": 16, "loss_chunk": 16}
    with in_double(factory):
        least = {}
        for order in ("layers", "chunks"):
            cost = streambp_fx.explain(factory(), 512, **given, order=order).cost
            least[order] = cost.peak(cost.sizes(512)).total
        assert least["chunks"] < 0.9 * least["layers"]
        torch._dynamo.reset()
        eager, streamed = pair(factory, **given, memory=(least["chunks"] + least["layers"]) // 2)
        compare(eager, streamed, {"T=512": plain(1, 512)}, 1e-9)
    assert "memory policy: chunks first" in str(streambp_fx.schedule(streamed))
