"""What happens around steps of a sharded model: each function is what one process runs, and asserts."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from distributed_cases import BATCHES, ENGINES, MODELS, Case, fsdp1, full, train
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict

import streambp_fx
from streambp_fx.sharding.fsdp2 import FSDP2Group


def sharded(model: str = "dense", streamed: bool = True, **options: Any) -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    made = ENGINES["fsdp2"](MODELS[model]().to(torch.float64).train())
    return streambp_fx.transform(made, **{"chunk": 8, **options}) if streamed else made


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [p.grad.full_tensor() for p in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    return found


def step(model: nn.Module, rank: int, number: int = 0) -> list[torch.Tensor]:
    model(**BATCHES["ragged"](rank, number)).loss.backward()
    return gradients(model)


def is_right(model: nn.Module, rank: int, number: int = 0) -> None:
    expected = step(sharded(streamed=False), rank, number)
    torch.testing.assert_close(step(model, rank, number), expected, rtol=1e-9, atol=1e-12)


def one_rank_streams(rank: int) -> None:
    """The other one runs the hooks of FSDP2: both call the same collectives in the same order."""
    is_right(sharded(streamed=rank == 0), rank)


def ranks_with_other_options(rank: int) -> None:
    is_right(sharded(chunk=5 + 30 * rank, save=["inputs", "attention"][rank]), rank)


def not_captured(rank: int) -> None:
    """A model that cannot be captured runs as it is, with its hooks."""
    model = sharded()
    model.model.layers[1].register_forward_hook(lambda *_: torch._dynamo.graph_break())
    with pytest.warns(streambp_fx.StreamBPWarning):
        found = step(model, rank)
    torch.testing.assert_close(found, step(sharded(streamed=False), rank), rtol=1e-9, atol=1e-12)


def an_error_in_between(rank: int) -> None:
    """A caught error leaves nothing behind: the next step is right."""
    model = sharded()
    step(model, rank)
    real = FSDP2Group.give_back

    def fails(group: FSDP2Group) -> None:
        if group.name.endswith("layers.1"):
            raise RuntimeError("on purpose")
        real(group)

    FSDP2Group.give_back = fails  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="on purpose"):
        step(model, rank)
    FSDP2Group.give_back = real  # type: ignore[method-assign]
    is_right(model, rank)


def evaluation_in_between(rank: int) -> None:
    model = sharded()
    step(model, rank)
    model.eval()
    with torch.no_grad():
        found = model(**BATCHES["ragged"](rank, 1)).logits
        expected = sharded(streamed=False).eval()(**BATCHES["ragged"](rank, 1)).logits
    torch.testing.assert_close(found, expected)
    model.train()
    is_right(model, rank)


def two_forwards(rank: int) -> None:
    """Two forwards before one backward, as a trainer with pairs does."""

    def pair(model: nn.Module) -> list[torch.Tensor]:
        losses = [model(**BATCHES["ragged"](rank, k)).loss for k in range(2)]
        (losses[0] - 0.5 * losses[1]).backward()
        return gradients(model)

    torch.testing.assert_close(pair(sharded()), pair(sharded(streamed=False)), rtol=1e-9, atol=1e-12)


def logits(rank: int) -> None:
    """A loss of somebody's own on the logits; and logits that are read late."""

    def own(model: nn.Module) -> list[torch.Tensor]:
        ids = BATCHES["ragged"](rank, 0)["input_ids"]
        model(input_ids=ids).logits.log_softmax(-1)[:, :-1].pow(2).mean().backward()
        return gradients(model)

    torch.testing.assert_close(own(sharded()), own(sharded(streamed=False)), rtol=1e-9, atol=1e-12)
    model = sharded(logits="lazy")
    before = model(**BATCHES["ragged"](rank, 0))
    expected = sharded(streamed=False)(**BATCHES["ragged"](rank, 0)).logits
    torch.testing.assert_close(before.logits + 0, expected)
    before.loss.backward()
    after = model(**BATCHES["ragged"](rank, 0))
    after.loss.backward()
    if rank == 0:  # the weights lie in pieces again, and the other device is elsewhere
        with pytest.raises(RuntimeError, match="in pieces on several devices"):
            after.logits + 0
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match="have been changed"):
        after.logits + 0


def frozen_and_not_any_more(rank: int) -> None:
    """Parameters that are trained from a later step on."""

    def unfrozen(model: nn.Module) -> list[torch.Tensor]:
        layers = [*model.model.layers[:2].parameters(), *model.model.embed_tokens.parameters()]
        for switched in (False, True, False, True):
            for parameter in layers:
                parameter.requires_grad_(switched)
            model(**BATCHES["ragged"](rank, 0)).loss.backward()
            assert all((p.grad is not None) == switched for p in layers)
            found = [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
        return found

    torch.testing.assert_close(unfrozen(sharded()), unfrozen(sharded(streamed=False)), rtol=1e-9, atol=1e-12)


def weights_changed_in_between(rank: int) -> None:
    model = sharded()
    step(model, rank)
    loss = model(**BATCHES["ragged"](rank, 0)).loss
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    with pytest.raises(RuntimeError, match="between the forward and the backward"):
        loss.backward()


def without_hooks(rank: int) -> None:
    """A forward that is called by itself: the error is FSDP2's own, and no memory is read that is away."""
    model = sharded()
    step(model, rank)
    with pytest.raises(RuntimeError, match="DTensor"), pytest.warns(streambp_fx.StreamBPWarning):
        model.forward(**BATCHES["ragged"](rank, 0))


def full_parameters(rank: int) -> None:
    """How many layers are there in full size at once: in the forward one, in the backward two."""
    model, most = sharded(), {"forward": 0, "backward": 0}
    groups = [state for state in _states(model) if state is not model._get_fsdp_state()]
    phase = "forward"
    real = torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.wait_for_unshard

    def counting(group: Any) -> None:
        real(group)
        there = sum(any(g.is_unsharded for g in s._fsdp_param_groups) for s in groups)
        most[phase] = max(most[phase], there)

    step(model, rank)
    kind: Any = torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup
    kind.wait_for_unshard = counting
    loss = model(**BATCHES["ragged"](rank, 0)).loss
    phase = "backward"
    loss.backward()
    kind.wait_for_unshard = real
    assert most["forward"] == 1 and most["backward"] <= 2, most


def _states(model: nn.Module) -> list[Any]:
    return [m._get_fsdp_state() for m in model.modules() if hasattr(m, "_get_fsdp_state")]


def saved(rank: int, folder: str) -> None:
    """A checkpoint of a transformed model is that of the model."""
    model = sharded()
    step(model, rank)
    state = get_model_state_dict(model)
    assert list(state) == list(get_model_state_dict(sharded(streamed=False)))
    checkpoint.save(state, checkpoint_id=str(Path(folder) / "saved"))
    other = sharded()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    empty = get_model_state_dict(other)
    checkpoint.load(empty, checkpoint_id=str(Path(folder) / "saved"))
    torch.testing.assert_close(step(other, rank), step(model, rank))


def mixed_precision(rank: int) -> None:
    """bfloat16 parameters, sums in float32: the casts of FSDP2's hooks are in the graph."""

    def mixed(streamed: bool) -> tuple[list[float], Any]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        policy = torch.distributed.fsdp.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
        inner = dataclasses.replace(policy, output_dtype=torch.bfloat16)
        model = MODELS["dense"]().train()
        for layer in model.model.layers:
            torch.distributed.fsdp.fully_shard(layer, mp_policy=inner)
        torch.distributed.fsdp.fully_shard(model, mp_policy=policy)
        if streamed:
            streambp_fx.transform(model, chunk=8)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for number in range(3):
            loss = model(**BATCHES["even"](rank, number)).loss
            loss.backward()
            assert all(p.grad.dtype == torch.float32 for p in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses, model

    found, model = mixed(True)
    schedule = streambp_fx.schedule(model)
    assert schedule is not None and all(s.chunked for s in schedule.segments)
    torch.testing.assert_close(found, mixed(False)[0], rtol=1e-3, atol=0)


def no_model_is_kept(rank: int) -> None:
    """What PyTorch keeps of a compiled graph does not keep the model."""
    import gc
    import weakref

    model = sharded()
    step(model, rank)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def compiled(rank: int) -> None:
    """With `torch.compile` each layer is streamed by itself, and `status` and `schedule` find the layers."""
    model = sharded(streamed=False)
    wrapped = torch.compile(model, backend="streambp", options={"chunk": 8})
    with pytest.warns(streambp_fx.StreamBPWarning):
        computed = step(wrapped, rank)
    found = streambp_fx.status(model)
    assert found.door == "torch.compile" and found.streamed_steps >= len(model.model.layers)
    schedule = streambp_fx.schedule(model)
    assert schedule is not None and all(s.chunked for s in schedule.segments)
    # The norms compute in float32, and a gradient that is cut at a layer is rounded there.
    for one, other in zip(computed, step(sharded(streamed=False), rank), strict=True):
        assert (one - other).norm() < 1e-6 * other.norm()


def _in_steps(model: nn.Module, rank: int, batch: str, steps: int = 2) -> list[torch.Tensor]:
    """Losses of a few steps, and each device's piece of the parameters after them."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for number in range(steps):
        loss = model(**BATCHES[batch](rank, number)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *map(full, model.parameters())]


def _engine(name: str, model: str = "dense") -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    made = MODELS[model]().to(torch.float64).train()
    return made if name == "none" else ENGINES[name](made)


def ranks_that_differ(rank: int) -> None:
    """Four of them, in all that may differ."""
    options = ({"chunk": 5}, {"chunk": 64, "save": "attention"}, {"offload": "disk", "loss_chunk": 3}, None)
    batches = ("ragged", "ignored", "padded", "64 tokens")
    found = []
    for streamed in (True, False):
        model, own = _engine("fsdp2"), options[rank]
        if streamed and own is not None:
            streambp_fx.transform(model, **{"chunk": 8, **own})
        found.append(_in_steps(model, rank, batches[rank], steps=3))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


def compiled_ddp(rank: int) -> None:
    """`torch.compile` over the wrapper, with Dynamo told not to cut the graph at buckets."""
    expected = _in_steps(_engine("ddp"), rank, "ragged")
    wrapped = _engine("ddp")
    with torch._dynamo.config.patch(optimize_ddp=False):
        compiled = torch.compile(wrapped, backend="streambp", options={"chunk": 8})
        torch.testing.assert_close(_in_steps(compiled, rank, "ragged"), expected, rtol=1e-9, atol=1e-12)
    schedule = streambp_fx.schedule(wrapped.module)
    assert schedule is not None and all(s.chunked for s in schedule.segments)


def cut_at_buckets(rank: int) -> None:
    """Without that it is an error on each device, and not a process that waits."""
    compiled = torch.compile(_engine("ddp_buckets", "wide"), backend="streambp", options={"chunk": 8})
    with pytest.raises(Exception, match="optimize_ddp = False"):
        compiled(**BATCHES["even"](rank, 0))


def _says_why(wrapped: Callable[[nn.Module], nn.Module], rank: int, words: str) -> None:
    """A model that an engine has wrapped runs unstreamed, with a warning."""
    expected = _in_steps(wrapped(_engine("none")), rank, "ragged")
    model = _engine("none")
    run = wrapped(model)
    streambp_fx.transform(model, chunk=8)
    with pytest.warns(streambp_fx.StreamBPWarning, match=words):
        found = _in_steps(run, rank, "ragged")
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def tensor_parallel(rank: int) -> None:
    """It is not streamed, and says so."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))

    def wrapped(model: nn.Module) -> nn.Module:
        for layer in model.model.layers:
            parallelize_module(layer, mesh, plan)
        return model

    _says_why(wrapped, 0, "tensor parallelism")


def fsdp1_layers(rank: int) -> None:
    """Neither are layers that FSDP1 wraps."""
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    def wrapped(model: nn.Module) -> nn.Module:
        return fsdp1(model, auto_wrap_policy=ModuleWrapPolicy({type(model.model.layers[0])}))

    _says_why(wrapped, rank, "fully_shard")


SITUATIONS = (
    one_rank_streams,
    ranks_with_other_options,
    not_captured,
    an_error_in_between,
    evaluation_in_between,
    two_forwards,
    frozen_and_not_any_more,
    weights_changed_in_between,
    without_hooks,
    logits,
    full_parameters,
    mixed_precision,
    no_model_is_kept,
    compiled,
    compiled_ddp,
    cut_at_buckets,
    tensor_parallel,
    fsdp1_layers,
)
OF_FOUR = (ranks_that_differ,)


def run_situations(rank: int, names: list[str], folder: str) -> dict[str, str]:
    """What went wrong in each, in words; "" if nothing did."""
    known = {f.__name__: f for f in (*SITUATIONS, *OF_FOUR)}
    found = {}
    for name in names:
        warnings.simplefilter("default")
        try:
            saved(rank, folder) if name == "saved" else known[name](rank)
            found[name] = ""
        except (Exception, pytest.fail.Exception) as error:
            import traceback

            found[name] = "".join(traceback.format_exception(error))[-3000:]
            break  # the other process may wait for something else now
        dist.barrier()
    return found


def parameters_after(rank: int, case: Case) -> Any:
    """For the comparison with one process."""
    return train(case, rank, streamed=True)["parameters"]


def goes_on(rank: int, folder: str, first: int, last: int) -> dict[str, torch.Tensor]:
    """Steps of a training that all devices do with the same batches: from a checkpoint on, or up to one.

    Returns:
        the parameters, in full.
    """
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def state() -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    if first > 0:
        loaded = state()
        checkpoint.load(loaded, checkpoint_id=folder)
        own = {"model_state_dict": loaded["model"], "optim_state_dict": loaded["optimizer"]}
        set_state_dict(model, optimizer, **own)
    _steps_of_all(model, optimizer, range(first, last))
    if first == 0:
        checkpoint.save(state(), checkpoint_id=folder)
    return {n: p.detach().full_tensor() for n, p in model.named_parameters()}  # type: ignore[attr-defined]


def goes_on_alone(first: int, last: int) -> dict[str, torch.Tensor]:
    """The same by one process, unstreamed and without a checkpoint."""
    torch.manual_seed(0)
    model = MODELS["dense"]().to(torch.float64).train()
    _steps_of_all(model, torch.optim.AdamW(model.parameters(), lr=0.01), range(first, last))
    return {n: p.detach() for n, p in model.named_parameters()}


def _steps_of_all(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        model(**BATCHES["ragged"](0, number)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
