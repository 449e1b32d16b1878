"""Options of the compiler, under the same names everywhere: keyword, key of `options`, command line flag."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from .passes.graph.facts import Facts, sum_dtype, tensors_of
from .passes.s3_cut.policy import Policy
from .passes.step.saving import Saving
from .units import CHOICES, did_you_mean, parse_bytes

# Tokens of a loss chunk, of all sequences together: logits of 256 tokens stay small, and the head's weight
# gradient (vocabulary x hidden size) is not rewritten too often. Products of more are faster, so these are
# tried where the chunk is to be chosen.
LOSS_CHUNK = 256
LOSS_CHUNK_SIZES = range(320, 1025, 64)
AUTO_CHUNK = 2048
# Rows of a chunk that are tried where the chunk is to be chosen. Below the smallest, kernels lose time.
CHUNK_SIZES = (2048, 1024, 512)
# Fewer that are tried where a memory is named, and nothing fits it with more.
FEW_ROWS = (256, 128, 64)
# Rows of longer chunks for GPUs, see NOTE [longer chunks on GPUs], the most first.
LONGER_CHUNKS = (8192, 4096)
# With several sequences kernels have more to do at once: smaller chunks are tried as well, to this.
FEWEST_ROWS = 128


@dataclass(frozen=True)
class Options:
    """How a model is streamed.

    Attributes:
        chunk: rows of the sequence in a chunk of a layer, or "auto".
        loss_chunk: rows of the sequence in a chunk of the loss head, or "auto": so many that all sequences
            together have 256 tokens, or more where the head's gradient is summed in float32 (see
            `fewest_tokens`) and memory is not short; in a training step up to 1024, if that does not raise
            the step's peak.
        memory: what activations may take, for what is to be chosen: bytes, or text such as "8GiB". None: a
            share of what is free on the device at the first step of a length.
        logits: what becomes of outputs as wide as the vocabulary when a loss is an output as well: "drop"
            (None; the default of `transform`), "lazy" (a tensor that is computed when somebody reads it; the
            default of `torch.compile`) or "keep".
        seq_dim: which dim of an input is the sequence, by the input's name, where the graph does not tell.
        save: what a layer keeps for the backward: "inputs" (its input rows; the rest is computed again) or
            "attention" (also the output and the log-sum-exp of attention, which then is not computed again).
            What `policy="auto"` has chosen to save stands here as well.
        every: only every k-th layer keeps its inputs; those between are computed again first.
        offload: where what is kept lies between forward and backward: "none" (the device), "host" (host
            memory, for models on a GPU, with PyTorch 2.12 or later) or "disk".
        offload_rows: with `offload`: the rows between layers, and their gradients, lie there all the time,
            and come to the device chunk by chunk. What stays of all rows is what later rows read of the
            layer that runs (keys and values). It needs one read and one write of them more a layer.
        order: "layers" (all chunks go through a layer before the next one begins), "chunks" (a chunk goes
            through all layers before the next one begins; kept is then what later chunks read of each layer,
            such as keys and values, and not the rows between layers: less memory where that is less), or
            "auto" (one of the two where the policy is chosen, and else "layers").
        policy: "given" (by `save`, `every`, `offload` and `order`), or "auto": those of them are chosen that
            fit `memory` with the least work; `offload` then is where things may go, an `order` that is named
            is kept, and the others are not given. None: "auto" where `memory` is given, and none of `save`,
            `every`, `offload` and `order="chunks"` is, and else "given".
        accumulate: in which dtype gradients are summed over the chunks of a layer where weights are in half
            precision: "float32", or "weights" for their own, which needs less memory and loses digits.
        body: how chunk programs run: "eager" (PyTorch's own kernels) or "inductor" (compiled by Inductor).
        check: when a compiled graph is checked on a short sequence against the graph as it was captured:
            "first" (before its first result), "always" (before every step, for debugging) or "never".
        mesh: a `torch.distributed` device mesh of one dim, over whose devices the rows of each sequence are
            distributed (context parallelism): each is given the whole batch, the same on all. None: one
            device has all rows.
        exchange: with `mesh`: how a device comes by keys and values of others. "gather": it has those of all
            rows of the layer that runs. "blocks": they come block by block while a chunk runs, and are let
            go; a device holds those of its own rows alone, and more is sent (docs/distributed.md). "auto":
            by blocks where the keys and values of a layer would take a good part of what a device holds.
            What cannot be read by blocks is gathered.
        on_error: what an internal error of the compiler, or a self-check that fails, leads to: "eager" (a
            warning, and the graph runs unstreamed) or "raise" (`CompileError`).
        head_tokens: not to be given. Tokens of a chunk of the loss head where they are chosen, at least; see
            `for_graph`.

    Raises:
        ValueError: an option is none of its choices, no such number, or not to be given beside another.
    """

    chunk: int | str = "auto"
    loss_chunk: int | str = "auto"
    memory: int | str | None = None
    logits: str = "drop"
    seq_dim: Mapping[str, int] | None = None
    save: str | Saving = "inputs"
    every: int = 1
    offload: str = "none"
    offload_rows: bool = False
    order: str = "auto"
    policy: str | None = None
    accumulate: str = "float32"
    body: str = "eager"
    check: str = "first"
    mesh: Any = None
    exchange: str = "auto"
    on_error: str = "eager"
    head_tokens: int = field(default=LOSS_CHUNK, repr=False, metadata={"internal": True})

    def __post_init__(self) -> None:
        if self.chunk != "auto":
            _positive("chunk", self.chunk, ' or "auto"')
        if self.loss_chunk != "auto":
            _positive("loss_chunk", self.loss_chunk, ' or "auto"')
        _positive("every", self.every)
        if self.memory is not None:
            try:
                parse_bytes(self.memory)
            except ValueError as error:
                raise ValueError(f"memory: {error}") from None
        for name, allowed in CHOICES.items():
            chosen = name == "save" and isinstance(self.save, Saving)
            left_open = name == "policy" and self.policy is None
            if getattr(self, name) not in allowed and not chosen and not left_open:
                values = ", ".join(f'"{v}"' for v in allowed)
                raise ValueError(f"{name} must be one of {values}, not {getattr(self, name)!r}")
        if self.policy == "auto" and (self.save, self.every) != ("inputs", 1):
            raise ValueError('policy="auto" chooses save and every itself: give the one or the others')
        if self.order == "chunks" and self.stored != Policy(order="chunks"):
            raise ValueError(
                'order="chunks" keeps what later chunks read: it goes with save="inputs", every=1 and '
                'offload="none"'
            )
        if self.order == "chunks" and self.mesh is not None:
            raise ValueError('order="chunks" runs on one device: give it without a mesh')
        if not isinstance(self.offload_rows, bool):
            raise ValueError(f"offload_rows must be True or False, not {self.offload_rows!r}")
        if self.offload_rows and (self.offload == "none" or self.mesh is not None):
            raise ValueError('offload_rows=True goes with offload="host" or "disk", and without a mesh')
        if self.exchange != "auto" and self.mesh is None:
            raise ValueError(f"exchange={self.exchange!r} says what several devices do: give a mesh as well")
        _names_to_dims("seq_dim", self.seq_dim)
        if self.mesh is not None:
            _check_mesh(self.mesh, self.body)

    @property
    def memory_bytes(self) -> int | None:
        """The budget in bytes."""
        return None if self.memory is None else parse_bytes(self.memory)

    @property
    def chooses(self) -> bool:
        """True if the memory policy is to be chosen."""
        left_open = self.policy is None and self.memory is not None and self.stored == Policy()
        return self.policy == "auto" or left_open

    @property
    def stored(self) -> Policy:
        """What is kept for the backward, and where."""
        order = "chunks" if self.order == "chunks" else "layers"
        return Policy(self.save, self.every, self.offload, order, self.offload_rows)

    def storing(self, policy: Policy) -> Options:
        """The same options with this policy."""
        return replace(
            self,
            policy="given",
            save=policy.save,
            every=policy.every,
            offload=policy.offload,
            order=policy.order,
            offload_rows=policy.offload_rows,
        )

    @property
    def rows(self) -> int:
        """Rows of a chunk as a number, where memory is plenty."""
        return AUTO_CHUNK if self.chunk == "auto" else int(self.chunk)

    def loss_rows(self, samples: int) -> int:
        """Rows of a chunk of the loss head, for a number of sequences; where they are chosen, at least."""
        return self._head_rows(self.head_tokens, samples)

    def least_loss_rows(self, samples: int) -> int:
        """Rows of a chunk of the loss head where memory is short."""
        return self._head_rows(LOSS_CHUNK, samples)

    def _head_rows(self, tokens: int, samples: int) -> int:
        return max(1, tokens // max(1, samples)) if self.loss_chunk == "auto" else int(self.loss_chunk)

    def for_graph(self, facts: Facts) -> Options:
        """The same options for a graph, whose head has `fewest_tokens` in a chunk, or more."""
        return replace(self, head_tokens=fewest_tokens(facts, self.accumulate == "float32"))

    def more_loss_rows(self, samples: int) -> list[int]:
        """More rows of a chunk of the loss head that may be chosen, the fewest first."""
        if self.loss_chunk != "auto":
            return []
        return [rows for n in LOSS_CHUNK_SIZES if (rows := n // samples) > self.loss_rows(samples)]

    @staticmethod
    def parse(given: dict[str, Any]) -> Options:
        """Options from keywords; an unknown name is an error that names the nearest valid one.

        Raises:
            ValueError: an unknown option, or a value that is not allowed.
        """
        valid = [f.name for f in fields(Options) if not f.metadata.get("internal")]
        for name in given:
            if name not in valid:
                hint = ELSEWHERE.get(name) or did_you_mean(name, valid)
                raise ValueError(f"unknown option {name!r}; valid options: {', '.join(valid)}.{hint}")
        return Options(**given)


#: Names that are no options, and what they are.
ELSEWHERE = {
    "verbose": " verbose is an argument of transform alone; print(streambp_fx.schedule(model)) says as much.",
    "options": " Give options as keywords: transform(model, chunk=2000).",
}


def fewest_tokens(facts: Facts, wide: bool) -> int:
    """Tokens of a chunk of the loss head where they are chosen, at least.

    NOTE [rows for a gradient in float32]: where weights are in half precision, each chunk reads and writes
    the float32 sum of the head's gradient, four bytes a weight. With 256 rows that takes longer than the
    product itself: a step of 16,384 tokens, 8 layers of Qwen3-8B's sizes, takes 1.07 s, and 0.94 s with 1024
    rows (one H100). A row of logits and of what the loss makes of them takes some ten bytes a word, so a
    quarter of the hidden size in rows takes less than the sum does.

    Args:
        facts: of the graph.
        wide: gradients of weights in half precision are summed in float32.
    """
    if not wide:
        return LOSS_CHUNK
    heads = [s for s in facts.segments if s.chunked and not s.mixings]
    trained = [v for s in heads for n in s.constants if n in facts.needs_grad for v in tensors_of(n)]
    widths = [int(min(v.shape)) for v in trained if v.dim() == 2 and sum_dtype(v.dtype) != v.dtype]
    quarter = max(widths, default=0) // 256 * 64
    return max(LOSS_CHUNK, min(quarter, LOSS_CHUNK_SIZES[-1]))


def chunk_sizes(samples: int) -> tuple[int, ...]:
    """Rows of a chunk that are tried for a number of sequences, the most first."""
    sizes = list(CHUNK_SIZES)
    while sizes[-1] > FEWEST_ROWS and sizes[-1] // 2 * samples >= CHUNK_SIZES[-1]:
        sizes.append(sizes[-1] // 2)
    return tuple(sizes)


def _names_to_dims(name: str, value: object) -> None:
    if value is None:
        return
    pairs = value.items() if isinstance(value, Mapping) else [(None, None)]
    if not all(isinstance(k, str) and type(d) is int for k, d in pairs):
        raise ValueError(f'{name} must give a dim for each input name, as in {{"labels": 1}}, not {value!r}')


def _check_mesh(mesh: object, body: str) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise ValueError(f'mesh must be a DeviceMesh of one dim, such as mesh["cp"], not {mesh!r}')
    if body != "eager":
        raise ValueError('mesh needs body="eager": kernels of Inductor take rows to lie together')


def _positive(name: str, value: object, extra: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive int{extra}, not {value!r}")
