"""How much of the time of collectives is hidden behind computation: `python -m benchmarks.overlap`.

Two processes on a CPU with gloo train a small Llama. Each collective takes 20 ms longer than it does: one
that blocks sleeps, of another one nothing is known until then. What is slept through is exposed, the rest of
the 20 ms was hidden behind something else. What collectives take by themselves is not counted, nor what one
process waits for the other.

Gathers of the forward and of the backward and sums of gradients stand in lines of their own; the last two
lines of a mode leave out the first gather and the last sum of each step, which nothing can hide. `ahead` is
FSDP2 as it can be told to gather ahead of time on a CPU: `set_modules_to_forward_prefetch`, and gathers that
return.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig

import streambp_fx

GATHERS = ("all_gather_into_tensor", "all_gather_single")
SUMS = ("reduce_scatter_tensor", "reduce_scatter_single", "all_reduce")
ENGINES = ("fsdp2", "ahead", "ddp", "zero3")
PROCESSES, WARM, STEPS = 2, 2, 3


@dataclass
class Call:
    """A collective: its kind, when it began and when somebody waited for it, in seconds."""

    kind: str
    start: float
    waited_from: float | None = None

    def hidden(self, delay: float) -> float:
        """Seconds of the delay that passed before anybody waited."""
        assert self.waited_from is not None
        return min(max(self.waited_from - self.start, 0.0), delay)


class LateWork(dist.Work):
    """Work that is done `delay` seconds after its start, or later."""

    def __init__(self, work: Any, call: Call, delay: float) -> None:
        super().__init__()
        self.work, self.call, self.delay = work, call, delay

    def wait(self, *given: Any) -> bool:
        """Sleep for what is left of the delay."""
        now = time.perf_counter()
        if self.call.waited_from is None:
            self.call.waited_from = now
        time.sleep(max(self.call.start + self.delay - now, 0.0))
        return bool(self.work.wait(*given))


@contextlib.contextmanager
def late(delay: float) -> Iterator[list[Call]]:
    """Within: collectives take `delay` seconds longer; those that were called."""
    calls: list[Call] = []
    before = {name: getattr(dist, name) for name in (*GATHERS, *SUMS) if hasattr(dist, name)}

    def delayed(name: str) -> Callable[..., Any]:
        kind = "gather" if name in GATHERS else "sum"

        def collective(*args: Any, async_op: bool = False, **settings: Any) -> Any:
            backward = torch._C._current_graph_task_id() != -1
            with undelayed():  # one function may call another one
                own = before[name](*args, async_op=True, **settings)
            call = Call(f"{kind}, {'backward' if backward else 'forward'}", time.perf_counter())
            calls.append(call)
            if async_op:
                return LateWork(own, call, delay)
            call.waited_from = call.start
            time.sleep(delay)
            own.wait()
            return None

        return collective

    @contextlib.contextmanager
    def undelayed() -> Iterator[None]:
        own = {name: getattr(dist, name) for name in before}
        for name, function in before.items():
            setattr(dist, name, function)
        try:
            yield
        finally:
            for name, function in own.items():
                setattr(dist, name, function)

    for name in before:
        setattr(dist, name, delayed(name))
    try:
        yield calls
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


def late_bucket(calls: list[Call], delay: float) -> Callable[[Any, Any], Any]:
    """A hook of DDP's that sums a bucket, and takes `delay` seconds longer. DDP waits at the end, for all."""

    def hook(state: Any, bucket: Any) -> Any:
        calls.append(Call("sum, backward", time.perf_counter()))
        mean = bucket.buffer().div_(dist.get_world_size())
        work = dist.distributed_c10d._get_default_group().allreduce([mean])
        done: Any = torch.futures.Future()
        threading.Timer(delay, lambda: (work.wait(), done.set_result(mean))).start()
        return done

    return hook


def wrapped(model: nn.Module, engine: str, calls: list[Call], delay: float) -> nn.Module:
    """The model in the hands of an engine."""
    if engine == "ddp":
        ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=2)
        hook = late_bucket(calls, delay)
        ddp.register_comm_hook(None, lambda state, bucket: hook(state, bucket))  # DDP reads annotations
        return ddp
    if engine == "zero3":
        import deepspeed

        layer = sum(p.numel() for p in model.model.layers[0].parameters())  # type: ignore[index, union-attr]
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": 3,
                "stage3_param_persistence_threshold": 0,
                "stage3_max_live_parameters": 2 * layer,  # by default all of a model this small
                "stage3_max_reuse_distance": 0,
                "stage3_prefetch_bucket_size": layer,
                "reduce_bucket_size": layer,
            },
        }
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        return deepspeed.initialize(model=model, config=config, optimizer=optimizer)[0]
    layers: Any = model.model.layers  # type: ignore[union-attr]
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    if engine == "ahead":
        model._set_unshard_async_op(True)  # type: ignore[operator]
        model.set_modules_to_forward_prefetch([layers[0]])  # type: ignore[operator]
        for layer, following in itertools.pairwise(layers):
            layer.set_modules_to_forward_prefetch([following])
    return model


def run(rank: int, folder: str, given: argparse.Namespace, streamed: bool) -> None:
    """What one process does; the first one leaves the calls of each step."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(PROCESSES), DS_ACCELERATOR="cpu")
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", PROCESSES), rank=rank, world_size=PROCESSES
    )
    torch.manual_seed(0)
    sizes = {"hidden_size": given.hidden, "intermediate_size": 4 * given.hidden, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": given.layers}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads, use_cache=False)).train()
    if streamed:
        streambp_fx.transform(model, chunk=given.tokens // 4, check="never", on_error="raise")
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    found: list[list[Call]] = []
    with late(given.delay) as calls:
        trained: Any = wrapped(model, given.engine, calls, given.delay)
        tokens = torch.randint(0, 512, (1, given.tokens))
        for _ in range(WARM + STEPS):
            dist.barrier()
            calls.clear()
            loss = trained(input_ids=tokens, labels=tokens).loss
            trained.backward(loss) if given.engine == "zero3" else loss.backward()
            end = max(call.start for call in calls)
            for call in calls:
                call.waited_from = end if call.waited_from is None else call.waited_from
            found.append(list(calls))
            trained.zero_grad()
    if rank == 0:
        torch.save(found[WARM:], f"{folder}/calls.pt")
    dist.barrier()
    dist.destroy_process_group()


def shares(steps: list[list[Call]], delay: float) -> dict[str, tuple[int, float]]:
    """By kind: calls of a step, and the share of their delay that was hidden."""
    kinds = dict.fromkeys(call.kind for step in steps for call in step)
    groups = {kind: [[c for c in step if c.kind == kind] for step in steps] for kind in kinds}
    groups["gathers but the first"] = [[c for c in step if c.kind.startswith("gather")][1:] for step in steps]
    groups["sums but the last"] = [[c for c in step if c.kind.startswith("sum")][:-1] for step in steps]
    found = {}
    for name, lists in groups.items():
        hidden = [call.hidden(delay) for own in lists for call in own]
        found[name] = len(hidden) // len(steps), sum(hidden) / (delay * max(len(hidden), 1))
    return found


def main() -> None:
    """Print the shares, unstreamed and streamed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engine", choices=ENGINES, default="fsdp2")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--delay", type=float, default=0.02, help="seconds of each collective")
    parser.add_argument("--modes", default="unstreamed,streamed")
    given = parser.parse_args()
    for mode in given.modes.split(","):
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(run, args=(folder, given, mode == "streamed"), nprocs=PROCESSES)
            steps = torch.load(f"{folder}/calls.pt", weights_only=False)
        for kind, (calls, hidden) in shares(steps, given.delay).items():
            if calls == 0:
                continue
            print(f"{given.engine:8} {mode:12} {kind:34} {calls:4} calls {hidden:6.1%} hidden", flush=True)


if __name__ == "__main__":
    main()
