"""Models, engines and batches of the tests with several processes: what one process runs of a case."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import transformers
from in_processes import counted
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)

import streambp_fx

STEPS = 3
VOCABULARY = 97


@dataclass(frozen=True)
class Case:
    """One training of a model, with an engine, streamed and not.

    Attributes:
        model, engine: names in `MODELS` and `ENGINES`.
        transformed: "before" or "after" the engine has wrapped it.
        batch: a name in `BATCHES`.
        accumulate: batches of a step; gradients are summed over the devices with the last one.
        options: of `transform`.
        tolerance: of losses and parameters, relative.
    """

    model: str = "dense"
    engine: str = "fsdp2"
    transformed: str = "after"
    batch: str = "even"
    accumulate: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-9

    def __str__(self) -> str:
        more = [f"{self.accumulate} batches"] * (self.accumulate > 1)
        more += [f"{k}={v}" for k, v in self.options.items()]
        return " ".join([self.model, self.engine, self.transformed, self.batch, *more])


# ---- models


def _llama(**changes: Any) -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        **{**sizes, "vocab_size": VOCABULARY, "num_key_value_heads": 2, "use_cache": False, **changes}
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def _window() -> nn.Module:
    config = transformers.MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=6,
        use_cache=False,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def _experts() -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        use_cache=False,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.set_experts_implementation("batched_mm")  # PyTorch's grouped product takes no float64
    return model


def with_adapters(model: nn.Module) -> nn.Module:
    """The model with LoRA."""
    import peft

    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, settings)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


class Gate(nn.Module):
    """An attention whose gates read all rows, which is no causal mixing: it runs unchunked."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention, self.weight = attention, nn.Parameter(torch.ones(1))

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        made, weights = self.attention(hidden_states, **kwargs)
        reading = torch.linalg.vector_norm(hidden_states, dim=1, keepdim=True)
        return made * (1 + self.weight * reading.tanh()), weights


def unchunked_attention(model: nn.Module) -> nn.Module:
    """The same model, with an attention in its second layer that runs unchunked; what follows does not."""
    layer: Any = model.model.layers[1]
    layer.self_attn = Gate(layer.self_attn)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dense": _llama,
    "tied": lambda: _llama(tie_word_embeddings=True),
    "wide": lambda: _llama(hidden_size=128, intermediate_size=256),  # more than a bucket of one MiB
    "window": _window,
    "experts": _experts,
    "lora": lambda: with_adapters(_llama()),
    "unchunked attention": lambda: unchunked_attention(_llama()),
}


def _layers(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__.endswith("DecoderLayer")]


# ---- engines


def _fsdp2(model: nn.Module, **settings: Any) -> nn.Module:
    for layer in _layers(model):
        fully_shard(layer, **settings)
    return fully_shard(model, **settings)


def _root_only(model: nn.Module) -> nn.Module:
    return fully_shard(model)


def _layers_only(model: nn.Module) -> nn.Module:
    for layer in _layers(model):
        fully_shard(layer)
    return model


def _parts(model: nn.Module) -> nn.Module:
    """Parts of layers, embedding and head by themselves."""
    for layer in _layers(model):
        fully_shard(layer.mlp)
        fully_shard(layer)
    fully_shard(model.model.embed_tokens)
    fully_shard([model.model.norm, model.lm_head])
    return fully_shard(model)


def _embedding_once(model: nn.Module) -> nn.Module:
    """As torchtitan does: the backward of an embedding does not read it."""
    embedding = model.get_input_embeddings()
    fully_shard(embedding)
    _fsdp2(model)
    embedding.set_unshard_in_backward(False)
    return model


def _kept(model: nn.Module) -> nn.Module:
    return _fsdp2(model, reshard_after_forward=False)


def _mixed(model: nn.Module) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    return _fsdp2(model, mp_policy=policy)


def _offloaded(model: nn.Module) -> nn.Module:
    """Pieces of parameters, their gradients and the optimizer are in host memory."""
    return _fsdp2(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


def _replicated(model: nn.Module) -> nn.Module:
    """Each half of the devices has all pieces (HSDP)."""
    shape = (2, dist.get_world_size() // 2)
    return _fsdp2(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "pieces")))


def fsdp1(model: nn.Module, **settings: Any) -> nn.Module:
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"), **settings)


def _ddp(model: nn.Module, **settings: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, **settings)


ENGINES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fsdp2": _fsdp2,
    "root": _root_only,
    "layers": _layers_only,
    "parts": _parts,
    "kept": _kept,
    "embedding_once": _embedding_once,
    "mixed": _mixed,
    "offloaded": _offloaded,
    "replicated": _replicated,
    "fsdp1": fsdp1,
    "ddp": lambda model: _ddp(model, bucket_cap_mb=0.02),
    "ddp_buckets": lambda model: _ddp(model, bucket_cap_mb=1),
    "ddp_unused": lambda model: _ddp(model, find_unused_parameters=True),
    "ddp_static": lambda model: _ddp(model, static_graph=True),
}

# ---- batches


def _even(rank: int, number: int, rows: int = 2, length: int = 33) -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(1000 * rank + number)
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=numbers)
    return {"input_ids": ids, "labels": ids.clone()}


def _ragged(rank: int, number: int) -> dict[str, torch.Tensor]:
    return _even(rank, number, rows=1 + rank, length=17 + 12 * rank + 5 * number)


def _padded(rank: int, number: int) -> dict[str, torch.Tensor]:
    """Padding on one device alone, and from the second step on."""
    batch = _even(rank, number)
    if rank == 1 and number > 0:
        mask = torch.ones_like(batch["input_ids"])
        mask[0, 20:] = 0
        batch["labels"][mask == 0] = -100
        batch["attention_mask"] = mask
    return batch


def _ignored(rank: int, number: int) -> dict[str, torch.Tensor]:
    """One device has nothing to learn."""
    batch = _even(rank, number)
    if rank == 1:
        batch["labels"][:] = -100
    return {**batch, "num_items_in_batch": torch.tensor(50)}  # type: ignore[dict-item]


BATCHES: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "even": _even,
    "64 tokens": lambda rank, number: _even(rank, number, length=64),
    "ragged": _ragged,
    "padded": _padded,
    "ignored": _ignored,
}

# ---- what a process runs


def train(case: Case, rank: int, streamed: bool) -> dict[str, Any]:
    """Losses, collectives of each step, and parameters at the end."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MODELS[case.model]().to(torch.float64).train()
    if streamed and case.transformed == "before":
        streambp_fx.transform(model, **{"chunk": 8, **case.options})
    wrapped = ENGINES[case.engine](model)
    if streamed and case.transformed == "after":
        streambp_fx.transform(model, **{"chunk": 8, **case.options})
    optimizer = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.1)
    losses, collectives, number = [], [], 0
    for _ in range(STEPS):
        with counted() as found:
            for k in range(case.accumulate):
                last = k == case.accumulate - 1
                losses.append(_accumulate(wrapped, BATCHES[case.batch](rank, number), last))
                number += 1
        collectives.append(dict(found))
        optimizer.step()
        optimizer.zero_grad()
    parameters = {n: full(p) for n, p in model.named_parameters() if p.requires_grad}
    return {"losses": losses, "collectives": collectives, "parameters": parameters, "model": model}


def _accumulate(model: nn.Module, batch: dict[str, Any], last: bool) -> float:
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model.require_backward_grad_sync = last
    elif hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    loss = model(**batch).loss
    loss.backward()
    return float(loss.detach())


def full(parameter: torch.Tensor) -> torch.Tensor:
    value = parameter.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value.clone()


def run(rank: int, cases: list[Case]) -> list[dict[str, Any]]:
    """Each case, streamed and not: how far they are from one another, and what was called."""
    found = []
    for case in cases:
        expected = train(case, rank, streamed=False)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            got = train(case, rank, streamed=True)
        schedule = streambp_fx.schedule(got["model"])
        pairs = [(got["parameters"][n], p) for n, p in expected["parameters"].items()]
        found.append(
            {
                "loss": max(
                    abs(a - b) / max(abs(b), 1e-30)
                    for a, b in zip(got["losses"], expected["losses"], strict=True)
                ),
                "parameters": max(float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in pairs),
                "collectives": got["collectives"],
                "expected": expected["collectives"],
                "chunked": None if schedule is None else [s.chunked for s in schedule.segments],
                "program": None if schedule is None else str(schedule.program),
                "checked": None if schedule is None else str(schedule),
                "warned": [
                    str(w.message) for w in said if issubclass(w.category, streambp_fx.StreamBPWarning)
                ],
            }
        )
        dist.barrier()
    return found


def alone(case: Case, world: int) -> dict[str, torch.Tensor]:
    """The parameters after the same steps of one process, which has all batches."""
    torch.manual_seed(0)
    model = MODELS[case.model]().to(torch.float64).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    number = 0
    for _ in range(STEPS):
        for _ in range(case.accumulate):
            for rank in range(world):
                (model(**BATCHES[case.batch](rank, number)).loss / world).backward()
            number += 1
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
