"""Models whose sequences lie on several devices: what one process runs of a case, and its like on one."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import transformers
from distributed_cases import unchunked_attention, with_adapters
from in_processes import called
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import streambp_fx
from benchmarks.families.configs import make_config
from streambp_fx.measure.in_float64 import true_double
from streambp_fx.runtime.segments import segment_function

VOCABULARY = 97
STEPS = 2
KINDS = {"all-gather": "gather", "reduce-scatter": "scatter", "all-reduce": "reduce", "send": "send"}
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}


@dataclass(frozen=True)
class Case:
    """A model that is trained for some steps, its sequences on several devices, or on one.

    Attributes:
        model, objective: names in `MODELS` and `OBJECTIVES`.
        tokens: of a sequence; one fewer in each further step.
        padding: "", "left" or "right"; "documents": several in a sequence, whose positions begin anew.
        options: of `transform`; of several `chunk`s each device takes its own.
        data: devices along which the batch is distributed, besides those of the sequence.
        engine: "" or a name in `ENGINES`, over the data devices.
        accumulate: batches of a step.
        door: "transform" or "compile".
    """

    model: str = "dense"
    objective: str = "labels"
    tokens: int = 61
    padding: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    data: int = 1
    engine: str = ""
    accumulate: int = 1
    door: str = "transform"

    def __str__(self) -> str:
        more = [f"{k}={v}" for k, v in self.options.items()]
        more += [f"{self.accumulate} batches"] * (self.accumulate > 1) + ["compiled"] * (
            self.door == "compile"
        )
        words = [self.model, self.objective, str(self.tokens), self.padding, self.engine, *more]
        return " ".join(w for w in words if w)


@dataclass
class Trained:
    """What came of it.

    Attributes:
        losses: of the steps.
        gradients: of the last one, by name.
        collectives: of all steps, by kind.
        sent: bytes of what is gathered or summed, by kind.
        chunked, segments: how many segments run by chunks, of how many.
        planned: by kind, how many collectives the cost model says there are, and their bytes.
        printed: the schedule.
    """

    losses: list[float]
    gradients: dict[str, Tensor | None]
    collectives: dict[str, int]
    sent: dict[str, int] = field(default_factory=dict)
    chunked: int = 0
    segments: int = 0
    planned: dict[str, tuple[int, int]] = field(default_factory=dict)
    printed: str = ""


# ---- models


def _dense(**changes: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **changes}))


def _tied() -> nn.Module:
    return _dense(tie_word_embeddings=True)


def _eager_attention() -> nn.Module:
    return _dense(attn_implementation="eager")


def _window() -> nn.Module:
    config = transformers.Gemma2Config(**SIZES, head_dim=8, sliding_window=9)
    return transformers.Gemma2ForCausalLM(config)


def _experts() -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        **SIZES,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        output_router_logits=True,
    )
    model = transformers.Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("batched_mm")
    return model


def _recurrent() -> nn.Module:
    config = transformers.Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_heads=8,
        head_dim=8,
        state_size=16,
        n_groups=1,
        chunk_size=8,
        num_hidden_layers=2,
        use_cache=False,
    )
    return transformers.Mamba2ForCausalLM(config)


def _hybrid() -> nn.Module:
    config = transformers.Qwen3NextConfig(
        **SIZES,
        head_dim=8,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    )
    model = transformers.Qwen3NextForCausalLM(config)
    model.set_experts_implementation("batched_mm")
    return model


def _selecting() -> nn.Module:
    """Each row attends to columns that an indexer selects among all of them."""
    config = make_config("deepseek_v32")
    config.vocab_size, config.index_topk = VOCABULARY, 8
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.set_experts_implementation("batched_mm")
    return model


class _Gate(nn.Module):
    """Between two layers: rows are multiplied by what is made of all of them, which no chunk can do."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.weight = layer, nn.Parameter(torch.ones(1))

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        made = self.layer(hidden, *args, **kwargs)
        return made * (1 + self.weight * torch.linalg.vector_norm(hidden, dim=1, keepdim=True).tanh())


def _unchunked() -> nn.Module:
    model = _dense()
    model.model.layers[1] = _Gate(model.model.layers[1])
    return model


class _Asked(nn.Module):
    """Experts that run only if some row has chosen them; the last one is never chosen."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router, self.experts = (
            nn.Linear(width, 4),
            nn.ModuleList(nn.Linear(width, width) for _ in range(4)),
        )
        with torch.no_grad():
            self.router.bias[3] = -1e4

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(rows).softmax(-1).topk(2, -1)
        out = torch.zeros_like(rows)
        for e in range(4):
            row, choice = torch.where(chosen == e)
            if row.numel() == 0:
                continue
            out.index_add_(0, row, self.experts[e](rows[row]).tanh() * weights[row, choice, None])
        return out.view_as(x)


def _asked() -> nn.Module:
    model = _dense()
    model.model.layers[1].mlp = _Asked(model.config.hidden_size)
    return model


class _LastButOne(nn.Module):
    """A loss on the logits without the last row, in the model's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _dense()

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Any:
        logits = self.inner(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss)


class _Shown(nn.Module):
    """A model that returns its last hidden state beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _dense()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        hidden = self.inner.model(input_ids=input_ids).last_hidden_state
        logits = self.inner.lm_head(hidden)
        loss = self.inner.loss_function(logits=logits, labels=labels, vocab_size=VOCABULARY)
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, hidden_states=hidden)


def _alibi() -> nn.Module:
    """Positions are biases of the scores."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4, "use_cache": False}
    return transformers.BloomForCausalLM(transformers.BloomConfig(**sizes))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dense": _dense,
    "alibi": _alibi,
    "lora": lambda: with_adapters(_dense()),
    "tied": _tied,
    "eager": _eager_attention,
    "window": _window,
    "experts": _experts,
    "recurrent": _recurrent,
    "hybrid": _hybrid,
    "selecting": _selecting,
    "unchunked": _unchunked,
    "unchunked attention": lambda: unchunked_attention(_dense()),
    "last but one": _LastButOne,
    "asked": _asked,
    "shown": _Shown,
}


# ---- objectives


def _labels(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def _outside(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A loss that is made of the logits outside of the model."""
    given = {k: v for k, v in batch.items() if k != "labels"}
    logits = model(**given).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def _hidden(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss and what is made of a hidden state that the model returns."""
    found = model(**batch)
    return found.loss + (found.hidden_states**2).mean()


def _embedded(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Embeddings are given, and have a gradient themselves."""
    given = {k: v for k, v in batch.items() if k != "input_ids"}
    return model(inputs_embeds=model.get_input_embeddings()(batch["input_ids"]), **given).loss


OBJECTIVES: dict[str, Callable[[nn.Module, dict[str, Tensor]], Tensor]] = {
    "labels": _labels,
    "outside": _outside,
    "hidden": _hidden,
    "embedded": _embedded,
}


# ---- training


def built(case: Case) -> nn.Module:
    """The model, in float64, the same in each process."""
    torch.manual_seed(0)
    return MODELS[case.model]().double().train()


def batch(case: Case, step: int, rows: int) -> dict[str, Tensor]:
    """Inputs of a step, for so many samples."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (rows, case.tokens - step), generator=generator)
    found = {"input_ids": ids, "labels": ids.clone()}
    if case.padding == "documents":
        lengths = (13, 1, 20, case.tokens - step - 34)
        positions = torch.cat([torch.arange(n) for n in lengths])
        found["position_ids"] = positions.expand(rows, -1).contiguous()
    elif case.padding:
        mask = torch.ones_like(ids)
        mask[0, -5:] = 0
        mask = mask.flip(1) if case.padding == "left" else mask
        found["labels"][mask == 0] = -100
        found["attention_mask"] = mask
    return found


def trained(case: Case, model: nn.Module, part: slice) -> Trained:
    """Train for some steps on a part of each batch.

    Args:
        part: of the samples, two for each data device.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = Trained([], {}, {})
    with true_double(model), called() as calls:
        for step in range(STEPS):
            optimizer.zero_grad()
            for number in range(step, step + case.accumulate):
                inputs = {k: v[part] for k, v in batch(case, number, 2 * case.data).items()}
                loss = OBJECTIVES[case.objective](model, inputs)
                loss.backward()
                found.losses.append(loss.item())
            optimizer.step()
    for name, parameter in model.named_parameters():
        found.gradients[name] = None if parameter.grad is None else _full(parameter.grad).clone()
    found.collectives = dict(Counter(kind for kind, _ in calls))
    for kind, size in calls:
        found.sent[kind] = found.sent.get(kind, 0) + size
    return found


def _full(value: Tensor) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def by_one(case: Case) -> Trained:
    """The same training by one process, unstreamed."""
    return trained(case, built(case), slice(None))


def shared(rank: int, world: int, case: Case) -> Trained:
    """What one of the processes runs."""
    mesh = init_device_mesh("cpu", (case.data, world // case.data), mesh_dim_names=("dp", "cp"))
    model = built(case)
    if case.engine:
        ENGINES[case.engine](model, mesh)
    options = {"chunk": 8, "loss_chunk": 8, "on_error": "raise", **case.options}
    if isinstance(options["chunk"], list):
        options["chunk"] = options["chunk"][rank]
    with warnings.catch_warnings():
        if not case.model.startswith("unchunked"):
            warnings.simplefilter("error", streambp_fx.StreamBPWarning)
        run: Any = model
        if case.door == "compile":
            given = {k: v for k, v in options.items() if k != "on_error"}
            run = torch.compile(model, backend="streambp", options={"mesh": mesh["cp"], **given})
        else:
            streambp_fx.transform(model, mesh=mesh["cp"], **options)
        mine = mesh["dp"].get_local_rank()
        if case.engine == "ddp":
            run = nn.parallel.DistributedDataParallel(model, process_group=mesh["dp"].get_group())
        found = trained(case, run, slice(2 * mine, 2 * mine + 2))
    found.gradients = {
        k.removeprefix("module.").removeprefix("_orig_mod."): v for k, v in found.gradients.items()
    }
    schedule = streambp_fx.schedule(model)
    assert schedule is not None
    found.chunked = sum(s.chunked for s in schedule.segments)
    found.segments = len(schedule.segments)
    if not case.engine:
        cost = schedule.cost
        found.printed = str(schedule)
        for step in range(STEPS):
            for moment in cost.timeline(cost.sizes(case.tokens - step)):
                if moment.collective is not None:
                    kind = KINDS[moment.collective.kind.value]
                    count, size = found.planned.get(kind, (0, 0))
                    calls = moment.collective.calls
                    found.planned[kind] = count + calls, size + moment.collective.bytes
    losses = torch.tensor(found.losses, dtype=torch.float64)
    dist.all_reduce(losses, group=mesh["dp"].get_group())
    found.losses = (losses / case.data).tolist()
    return found


def _fsdp2(model: nn.Module, mesh: DeviceMesh, over: str = "dp") -> None:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh[over])
    fully_shard(model, mesh=mesh[over])


ENGINES: dict[str, Callable[[nn.Module, DeviceMesh], None]] = {
    "fsdp2": _fsdp2,
    "fsdp2 over the sequence": lambda model, mesh: _fsdp2(model, mesh, "cp"),
    "ddp": lambda model, mesh: None,  # it is put over the transformed model
}


def order(rank: int, world: int) -> list[str]:
    """The segments that run backwards in a step and the sums of gradients, in order."""
    model, found = built(Case()), []
    streambp_fx.transform(model, chunk=8, loss_chunk=8, mesh=init_device_mesh("cpu", (world,)))
    ids = torch.arange(2 * 33).reshape(2, 33) % VOCABULARY
    model(input_ids=ids, labels=ids).loss.backward()
    backward, reduce = segment_function.StreamedSegment._gradients, dist.all_reduce

    def noted(ctx: Any, gradients: Any) -> tuple:
        found.append(f"segment {ctx.runner.segment.index}")
        return backward(ctx, gradients)

    segment_function.StreamedSegment._gradients = staticmethod(noted)
    dist.all_reduce = lambda *a, **k: found.append("sum") or reduce(*a, **k)
    model(input_ids=ids, labels=ids).loss.backward()
    return found


def refused(rank: int, world: int) -> list[str]:
    """What is said of options that differ; of batches, in numbers, then in shapes; of weights; of logits."""
    mesh = init_device_mesh("cpu", (world,))
    found = []
    for options in ({"every": 1 + rank}, {"exchange": ["gather", "blocks"][rank]}):
        model = streambp_fx.transform(built(Case()), chunk=8, mesh=mesh, **options)
        try:
            model(**batch(Case(), 0, 2))
        except streambp_fx.InputError as error:
            found.append(str(error))
    for ids in (torch.full((2, 20), rank), torch.zeros(2, 20 + rank, dtype=torch.long)):
        model = streambp_fx.transform(built(Case()), chunk=8, mesh=mesh)
        try:
            model(input_ids=ids, labels=ids)
        except streambp_fx.InputError as error:
            found.append(str(error))
    ids = torch.zeros(2, 20, dtype=torch.long)
    others = built(Case())
    with torch.no_grad():
        others.lm_head.weight[3, 4] += rank
    drawing = _dense(attention_dropout=0.1).double().train()
    torch.manual_seed(rank)
    for model in (others, drawing):
        try:
            streambp_fx.transform(model, chunk=8, mesh=mesh)(input_ids=ids, labels=ids)
        except streambp_fx.InputError as error:
            found.append(str(error))
    model = streambp_fx.transform(built(Case()), chunk=8, mesh=mesh, logits="lazy")
    ids = batch(Case(), 0, 2)["input_ids"]
    try:
        model(input_ids=ids, labels=ids).logits.sum()
    except RuntimeError as error:
        found.append(str(error))
    return found
