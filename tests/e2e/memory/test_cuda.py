"""On a GPU: kernels in half precision, memory by the allocator, the host's memory, random numbers, streams.

Skipped without one. What else runs there: `STREAMBP_TEST_DEVICE=cuda python -m pytest tests/e2e/models`.
"""

from __future__ import annotations

import contextlib
import copy
import gc
from typing import Any

import pytest
import torch
from e2e_check import assert_all_chunked, grads, total_error, transform
from e2e_models import build
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import streambp_fx
from streambp_fx.backend import streambp
from streambp_fx.versions.differences import offload_ops

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

VOCAB = 512
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
}
HALVES = (torch.bfloat16, torch.float16)


def batch_of(length: int, pads: tuple[int, ...] = (0, 0), side: str = "right") -> dict[str, torch.Tensor]:
    """On the device; with padding, a mask."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(3, VOCAB, (len(pads), length), generator=generator)
    mask = torch.ones_like(ids)
    for row, count in enumerate(pads):
        if count:
            mask[row, slice(length - count, None) if side == "right" else slice(0, count)] = 0
    given = {"input_ids": ids.masked_fill(mask == 0, 0), "labels": ids.masked_fill(mask == 0, -100)}
    if any(pads):
        given["attention_mask"] = mask
    return {name: value.cuda() for name, value in given.items()}


#: Names that a family spells in its own way, or does without.
LEFT_OUT = {
    "gpt2": tuple(name for name in SIZES if name != "vocab_size"),
    "falcon": ("num_key_value_heads", "intermediate_size"),
}


def make(family: str = "llama", impl: str = "sdpa", dtype: torch.dtype = torch.float32, **over: Any) -> Any:
    sizes = {k: v for k, v in SIZES.items() if k not in LEFT_OUT.get(family, ())}
    return build(family, impl, **{**sizes, **over}).cuda().to(dtype)


def gradients(model: Any, given: dict[str, torch.Tensor], call: Any = None) -> Any:
    model.zero_grad(set_to_none=True)
    loss = (call or model)(**given).loss
    loss.backward()
    return loss.detach(), grads(model)


def norm(found: Any) -> float:
    return total_error([(found, {n: torch.zeros_like(g) for n, g in found.items()})])


def check(
    eager: Any,
    batches: dict[str, dict[str, torch.Tensor]],
    within: float = 1.1,
    chunk: int = 192,
    **options: Any,
) -> Any:
    """No further from the gradients in a wider dtype than `within` times eager in its own."""
    half = next(eager.parameters()).dtype in HALVES
    exact = copy.deepcopy(eager).to(torch.float32 if half else torch.float64)
    streamed = transform(copy.deepcopy(eager), chunk=chunk, loss_chunk=100, **options)
    runs, theirs = [], []
    for given in batches.values():
        _, truth = gradients(exact, given)
        runs.append((gradients(streamed, given)[1], truth))
        theirs.append((gradients(eager, given)[1], truth))
    ours, other = total_error(runs), total_error(theirs)
    assert 0 < ours <= within * other, f"{ours:.4e} against eager's {other:.4e}"
    return streamed


ALL = (
    {
        "T=1000": batch_of(1000),
        "T=769": batch_of(769, (0,)),
        "T=100": batch_of(100),
        "right": batch_of(701, (0, 300)),
        "left": batch_of(701, (250, 0), "left"),
    }
    if torch.cuda.is_available()
    else {}
)
PLAIN = {name: given for name, given in ALL.items() if name.startswith("T=")}
BACKENDS = {
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
    "math": [SDPBackend.MATH],
}


@pytest.mark.parametrize("save", ["inputs", "attention"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels(backend: str, dtype: torch.dtype, save: str) -> None:
    """Grouped heads, several lengths, padding on both sides, one program for all of them."""
    with sdpa_kernel([*BACKENDS[backend], SDPBackend.MATH]):
        streamed = check(make(dtype=dtype), ALL, 2 if dtype == torch.float32 else 1.1, save=save)
    assert_all_chunked(streamed)


@pytest.mark.parametrize("heads", [(8, 8), (8, 1), (4, 4), (16, 4)])
@pytest.mark.parametrize("dtype", HALVES)
def test_heads(heads: tuple[int, int], dtype: torch.dtype) -> None:
    own, shared = heads
    assert_all_chunked(check(make(dtype=dtype, num_attention_heads=own, num_key_value_heads=shared), ALL))


FAMILIES = {
    "mistral": {"sliding_window": 150},
    "gemma3_text": {"sliding_window": 150, "head_dim": 32},
    "gemma2": {"sliding_window": 150, "head_dim": 32},
    "falcon": {},
    "gpt2": {"n_positions": 2048},
}


@pytest.mark.parametrize("impl", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_other_attention(family: str, impl: str) -> None:
    if (family, impl) == ("gemma2", "sdpa"):
        pytest.skip("it has no such attention")
    assert_all_chunked(check(make(family, impl, torch.bfloat16, **FAMILIES[family]), ALL))


@pytest.mark.parametrize(
    "options",
    [
        {"offload": "host"},
        {"offload": "host", "save": "attention"},
        {"offload": "host", "every": 2},
        {"offload": "disk"},
        {"order": "chunks"},
        {"policy": "auto", "memory": "1GiB"},
    ],
    ids=str,
)
def test_policies(options: dict[str, Any]) -> None:
    """Twice the same: what was sent away comes back as it was."""
    skip_without_offload(options)
    batches = {name: ALL[name] for name in ("T=1000", "right", "left")}
    for dtype in (torch.float32, torch.bfloat16):
        model = make(dtype=dtype, num_hidden_layers=4)
        within = 2 if dtype == torch.float32 else 1.1
        assert_all_chunked(check(model, {**batches, "again": ALL["T=1000"]}, within, **options))


def skip_without_offload(options: dict[str, Any]) -> None:
    if options.get("offload") == "host" and offload_ops() is None:
        pytest.skip("this PyTorch cannot offload to the host")


def peak(model: Any, given: dict[str, torch.Tensor]) -> int:
    """Bytes of the allocator over what is there before; gradients are."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model(**given).loss.backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


MEMORY = {
    "inputs": {},
    "attention": {"save": "attention"},
    "every": {"every": 2},
    "host": {"offload": "host"},
    "chunks": {"order": "chunks"},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("policy", MEMORY)
def test_the_peak_is_as_predicted(policy: str, dtype: torch.dtype) -> None:
    """By the allocator, whose blocks are multiples of 512 bytes; kernels have memory of their own."""
    skip_without_offload(MEMORY[policy])
    sizes = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 6, "vocab_size": 8192}
    model = make(dtype=dtype, **sizes)
    checkpointed = copy.deepcopy(model)
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    streamed = transform(model, chunk=512, loss_chunk=256, check="never", **MEMORY[policy])
    peak(streamed, batch_of(2000, (0,)))
    found = streambp_fx.schedule(streamed)
    for tokens in (6000, 12000):
        given = batch_of(tokens, (0,))
        predicted, measured = found.cost.peak(found.cost.sizes(tokens)).total, peak(streamed, given)
        theirs = peak(checkpointed, given)
        figures = [round(b / 2**20, 1) for b in (predicted, measured, theirs)]
        print(f"PEAK {policy} {dtype} T={tokens}: predicted, measured, checkpointing {figures} MiB")
        assert measured == pytest.approx(predicted, rel=0.05), tokens
        assert measured < theirs / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout(dtype: torch.dtype) -> None:
    """The same seed gives the same step, and the backward leaves the generator as it was."""
    model = transform(make(dtype=dtype, attention_dropout=0.1), chunk=192, loss_chunk=100)
    given, found = batch_of(701), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        model.zero_grad(set_to_none=True)
        loss = model(**given).loss
        torch.rand(1000, device="cuda")
        state = torch.cuda.get_rng_state()
        loss.backward()
        assert torch.cuda.get_rng_state().equal(state)
        found.append((loss.detach(), grads(model)))
    assert found[0][0].equal(found[1][0]) and not found[0][0].equal(found[2][0])
    same, other = (total_error([(found[0][1], found[k][1])]) for k in (1, 2))
    assert same < 1e-3 * other, (same, other)
    assert_all_chunked(model)


def test_experts() -> None:
    """PyTorch's grouped product, in half precision."""
    from test_architectures import model_of

    exact = model_of("qwen3_moe", torch.float32).cuda()
    eager, streamed = (copy.deepcopy(exact).bfloat16() for _ in range(2))
    transform(streamed, chunk=64, loss_chunk=64)
    given = {"input_ids": batch_of(300)["input_ids"] % 97, "labels": batch_of(300)["labels"] % 97}
    (_, want), (_, rounded), (_, got) = (gradients(m, given) for m in (exact, eager, streamed))
    assert total_error([(got, want)]) < 1.5 * total_error([(rounded, want)])
    assert_all_chunked(streamed)


@pytest.mark.parametrize("door", ["transform", "compile"])
@pytest.mark.parametrize("dtype", HALVES)
def test_autocast(dtype: torch.dtype, door: str) -> None:
    exact = make()
    eager, model = copy.deepcopy(exact), copy.deepcopy(exact)
    options = {"chunk": 192, "loss_chunk": 100}
    call = (
        transform(model, **options)
        if door == "transform"
        else torch.compile(model, backend=streambp, options=options)  # by name only where it is installed
    )
    runs, theirs = [], []
    for given in ALL.values():
        _, truth = gradients(exact, given)
        for own, run, into in ((model, call, runs), (eager, eager, theirs)):
            own.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype):
                loss = run(**given).loss
            (loss * 2.0**8).backward()
            into.append(({n: g / 2.0**8 for n, g in grads(own).items()}, truth))
    assert 0 < total_error(runs) <= 1.1 * total_error(theirs)


def test_on_a_stream_of_its_own() -> None:
    model = transform(make(), chunk=192, loss_chunk=100)
    given = batch_of(1000)
    loss, want = gradients(model, given)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        again, got = gradients(model, given)
    torch.cuda.synchronize()
    assert again.equal(loss)
    assert total_error([(got, want)]) <= 1e-5 * norm(want)


def test_inductor() -> None:
    streamed = check(make(dtype=torch.bfloat16), {n: ALL[n] for n in ("T=1000", "T=100")}, body="inductor")
    assert_all_chunked(streamed)


def test_a_chunk_for_the_memory_there_is() -> None:
    """`chunk="auto"` asks the device how much is free."""
    eager = make(dtype=torch.bfloat16)
    streamed = check(eager, PLAIN, chunk="auto")
    assert_all_chunked(streamed)


def test_the_self_check_agrees() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        model = transform(make(dtype=dtype), chunk=192, loss_chunk=100)
        gradients(model, batch_of(701))
        found = streambp_fx.schedule(model).check
        assert found is not None and found.status == "agrees", found


def test_inputs_on_another_device() -> None:
    """As eager: an error, and the next call is right."""
    model = transform(make(), chunk=192, loss_chunk=100)
    loss, _ = gradients(model, batch_of(300))
    with pytest.raises(Exception, match="device"):
        model(**{n: v.cpu() for n, v in batch_of(300).items()})
    assert gradients(model, batch_of(300))[0].equal(loss)


def test_moved_between_devices() -> None:
    """A model that was streamed on the CPU is streamed on the GPU, and back."""
    eager = make().double()
    streamed = transform(copy.deepcopy(eager), chunk=192, loss_chunk=100)
    for device in ("cpu", "cuda", "cpu"):
        eager, streamed = eager.to(device), streamed.to(device)
        given = {n: v.to(device) for n, v in batch_of(300).items()}
        (_, want), (_, got) = gradients(eager, given), gradients(streamed, given)
        assert total_error([(got, want)]) <= 1e-9 * norm(want)
        assert_all_chunked(streamed)


class Halves(nn.Module):
    """The lookup on the CPU, the layers on the GPU."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        model.model.embed_tokens.cpu()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        embeds = self.model.model.embed_tokens(input_ids.cpu()).cuda()
        return self.model(inputs_embeds=embeds, labels=labels)


@pytest.mark.filterwarnings("ignore::streambp_fx.StreamBPWarning")
def test_parts_on_two_devices() -> None:
    eager = Halves(make().double())
    streamed = transform(copy.deepcopy(eager), chunk=192, loss_chunk=100)
    given = {k: v for k, v in batch_of(300).items() if k != "attention_mask"}
    (_, want), (_, got) = gradients(eager, given), gradients(streamed, given)
    assert total_error([(got, want)]) <= 1e-9 * norm(want)


def test_deterministic_algorithms() -> None:
    with contextlib.ExitStack() as stack:
        stack.callback(torch.use_deterministic_algorithms, False)
        torch.use_deterministic_algorithms(True, warn_only=True)
        model = transform(make(dtype=torch.bfloat16), chunk=192, loss_chunk=100)
        one, two = (gradients(model, batch_of(701)) for _ in range(2))
    assert one[0].equal(two[0])
    assert all(one[1][n].equal(two[1][n]) for n in one[1])


def test_out_of_memory_leaves_a_model_that_works() -> None:
    """After an error of the allocator the next, shorter step is right."""
    model = transform(make(), chunk=192, loss_chunk=100)
    loss, want = gradients(model, batch_of(300))
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**25) / whole)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            gradients(model, batch_of(16000, (0,) * 16))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    again, got = gradients(model, batch_of(300))
    assert again.equal(loss)
    assert total_error([(got, want)]) <= 1e-5 * norm(want)
