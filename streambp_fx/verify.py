"""`verify`: one real step, eager and streamed, and every claim of the analysis tried on its tensors."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from .backend import compile_graph
from .errors import CaptureError, StreamBPWarning, VerificationError
from .options import LOSS_CHUNK, Options
from .passes.graph.facts import Facts
from .probing.probe import IndependenceProbe, check_not_random
from .probing.tried_claims import summarize
from .runtime.step_counts import StepCounts
from .schedule import Schedule
from .streamed_forward import StreamedForward
from .transform import restore, transform
from .verifying.result import GradientCheck, LossCheck, Verification
from .verifying.untouched_model import buffers_put_back, left_as_it_was

# What sums taken in another order may change, relative to the norm. Models compute norms, softmax and the
# loss in float32 whatever their weights are, so float64 weights alone do not give float64 gradients. In
# bfloat16 a rounding turns a ReLU on or off: gradients of two right steps differ by several percent.
RTOL = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 0.1}

# Share of the norm of the whole gradient below which that of a parameter is no scale of its own.
VANISHING = 1e-3


def verify(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    chunk: int | str | None = None,
    rtol: float | None = None,
    rows: Sequence[int] | None = None,
    **options: Any,
) -> Verification:
    """Run one training step eager and streamed, compare them, and try the claims of the analysis.

    The independence probe replaces rows of the operands of every streamed op by NaN (by large random numbers
    where a mask hides them): rows after r must leave all rows up to r finite and the same, bit for bit.

    The model is left exactly as it was: weights, gradients, modes, buffers, random state, transformed or not.
    Dropout is off in both steps, since two steps draw different masks; a note in the result says so.

    Args:
        model: a causal language model, transformed or not.
        batch: keyword arguments of its forward, `labels` among them; the sequence is dim 1 of `input_ids` or
            `inputs_embeds`.
        chunk: rows of a chunk of a layer, or "auto". None: that of a transformed model if it makes several
            chunks here, else a quarter of the sequence.
        rtol: relative tolerance of the loss and of each gradient in the L2 norm. None: 1e-4 for float32
            weights, 1e-6 for float64, 2e-2 for float16, 0.1 for bfloat16 (prefer float32 weights to verify).
        rows: rows r to try in every layer, from 0 to the sequence length - 2. None: the first, the last but
            one, those on both sides of a chunk border, and one at random; and in layers that are identical to
            an earlier one, one of these in turn.
        options: the other fields of `Options`; those of a transformed model are the default.

    Returns:
        what was found; `ok` is True if everything agrees. One copy of the gradients is held meanwhile.

    Raises:
        ValueError: an option, `rtol` or `rows` has a value that is not allowed.
        VerificationError: the batch has no labels, the model no trainable parameters, its own forward fails
            on the batch, or it draws random numbers that are no dropout.
        CaptureError: the model is no causal language model, or cannot be captured as one graph.
        CompileError: a pass failed.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile(model) wraps
    if not isinstance(model, nn.Module):
        raise CaptureError(f"verify needs a torch.nn.Module, not {type(model).__name__}")
    length, batch_size = _check_batch(batch)
    parsed = _options(model, chunk, options, length)
    tolerance = _tolerance(model, rtol)
    tried = _rows(rows, length, parsed)
    with left_as_it_was(model) as switched_off, torch.enable_grad(), _own_warnings() as said:
        restore(transform(model))  # raises if it is no causal language model
        recorder = _Recorder(tried, everywhere=rows is not None)
        with buffers_put_back(model):
            eager_loss, eager = _eager_step(model, batch)
        _prepare(model, parsed, recorder)
        notes = [f"dropout is off in both steps: {', '.join(switched_off)}"] if switched_off else []
        loss, gradients = _streamed_step(model, batch, eager_loss, eager, tolerance, recorder, notes)
    probe = recorder.probe
    if probe is None:
        notes.append("nothing is streamed, so nothing is claimed" + "".join(f"; {text}" for text in said))
    return Verification(
        model=type(model).__name__,
        batch_size=batch_size,
        seq_len=length,
        chunk=parsed.chunk,
        loss_chunk=parsed.loss_rows(batch_size),
        rtol=tolerance,
        rows=tried,
        loss=loss,
        gradients=tuple(gradients),
        probes=tuple(probe.probes) if probe else (),
        not_claimed=tuple(probe.not_claimed) if probe else (),
        segments=tuple(summarize(probe.facts, probe.probes)) if probe else (),
        notes=tuple(notes),
    )


@contextlib.contextmanager
def _own_warnings() -> Iterator[list[str]]:
    """Within: warnings about what runs unchunked are collected, as the result says it; others pass."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StreamBPWarning)
        try:
            yield said
        finally:
            said += [str(w.message) for w in caught if issubclass(w.category, StreamBPWarning)]
    for other in caught:
        if not issubclass(other.category, StreamBPWarning):
            warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)


# ---- what was asked for


def _check_batch(batch: Any) -> tuple[int, int]:
    """Sequence length and batch size.

    Raises:
        VerificationError: it is no batch to train on.
    """
    if not isinstance(batch, Mapping):
        raise VerificationError(
            f"the batch must be a dict of the arguments of the model's forward, not {type(batch).__name__}"
        )
    name = "input_ids" if batch.get("input_ids") is not None else "inputs_embeds"
    tokens = batch.get(name)
    if not isinstance(tokens, Tensor) or tokens.dim() < 2:
        raise VerificationError(
            "the batch has no input_ids (or inputs_embeds) of batch size x sequence length; it has "
            + (", ".join(sorted(map(str, batch))) or "nothing")
        )
    if batch.get("labels") is None:
        raise VerificationError(
            "the batch has no labels, so the step has no loss; for a language model give "
            "labels=input_ids (and -100 where no token is to be predicted)"
        )
    if tokens.shape[1] < 2 or tokens.shape[0] < 1:
        raise VerificationError(
            f"the batch must hold at least one sequence of two tokens, not {tuple(tokens.shape)}"
        )
    return int(tokens.shape[1]), int(tokens.shape[0])


def _options(model: nn.Module, chunk: int | str | None, given: dict[str, Any], length: int) -> Options:
    streamed = vars(model).get("forward")
    own = streamed.options if isinstance(streamed, StreamedForward) else None
    quarter = -(-length // 4)
    base = own or replace(Options(), loss_chunk=min(LOSS_CHUNK, quarter))
    if chunk is None:
        several = own is not None and own.chunk != "auto" and own.rows < length
        chunk = base.chunk if several else quarter
    Options.parse({"chunk": chunk, **given})  # names the nearest of a name that is unknown
    return replace(base, **{"check": "never", "on_error": "raise", "chunk": chunk, **given})


def _tolerance(model: nn.Module, rtol: float | None) -> float:
    if rtol is not None:
        if isinstance(rtol, bool) or not isinstance(rtol, (int, float)) or not 0 < rtol < 1:
            raise ValueError(f"rtol must be a number between 0 and 1, not {rtol!r}")
        return float(rtol)
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad} & set(RTOL)
    for device in {p.device.type for p in model.parameters()}:
        if torch.is_autocast_enabled(device):
            dtypes.add(torch.get_autocast_dtype(device))
    return max((RTOL[d] for d in dtypes if d in RTOL), default=RTOL[torch.float32])


def _rows(rows: Sequence[int] | None, length: int, options: Options) -> tuple[int, ...]:
    last = length - 2
    if rows is None:
        generator = torch.Generator().manual_seed(length)
        somewhere = int(torch.randint(0, last + 1, (), generator=generator, device="cpu"))
        return tuple(
            sorted({0, *(r for r in (options.rows - 1, options.rows) if r <= last), somewhere, last})
        )
    wrong = [r for r in rows if isinstance(r, bool) or not isinstance(r, int) or not 0 <= r <= last]
    if wrong or not rows:
        raise ValueError(
            f"rows must be ints from 0 to {last} (the sequence has {length} tokens), not {list(rows)!r}"
        )
    return tuple(sorted(set(rows)))


# ---- the two steps


class _Recorder:
    """Tries the claims of a graph on its inputs before it runs it."""

    def __init__(self, rows: tuple[int, ...], everywhere: bool) -> None:
        self.rows, self.everywhere = rows, everywhere
        self.schedules: list[Schedule] = []
        self.probe: IndependenceProbe | None = None

    def lower(
        self, owner: StreamedForward, module: GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        run = compile_graph(
            module,
            example_inputs,
            owner.options,
            self.schedules.append,
            owner.sequence_dims,
            counts=StepCounts(),
        )

        def call(*inputs: Any) -> Any:
            if self.schedules and self.schedules[-1].segments:
                self._try(self.schedules[-1].facts, inputs)
            return run(*inputs)

        return call

    def _try(self, facts: Facts, inputs: Sequence[Any]) -> None:
        check_not_random(facts)
        probe = IndependenceProbe(facts, inputs, self.rows, self.everywhere)
        probe.run()
        self.probe = probe


def _prepare(model: nn.Module, options: Options, recorder: _Recorder) -> None:
    transform(model)
    streamed = vars(model)["forward"]
    streamed.options = options
    streamed._compiled = streamed._compile(recorder.lower)


def _inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch as tensor objects of their own: compiling marks its inputs, and a backward fills `grad`."""
    return {
        k: v.detach().requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v
        for k, v in batch.items()
    }


def _loss(model: nn.Module, output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(output, tuple) and output:
        loss = output[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise VerificationError(
            f"the forward of {type(model).__name__} gave no loss that can be differentiated for these labels"
        )
    return loss


def _eager_step(model: nn.Module, batch: Mapping[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the model as it is."""
    if not any(p.requires_grad for p in model.parameters()):
        raise VerificationError(f"{type(model).__name__} has no trainable parameter, so there is no gradient")
    try:
        inputs = {"use_cache": False, **_inputs(batch)} if _caches(model) else _inputs(batch)
        loss = _loss(model, model(**inputs))
        loss.backward()
    except VerificationError:
        raise
    except Exception as error:
        raise VerificationError(
            f"the model's own training step failed on this batch: {type(error).__name__}: {error}"
        ) from error
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    if not bool(loss.isfinite()):
        raise VerificationError(
            f"the model's own loss is {float(loss.detach())}, so there is nothing to compare with. "
            "Is any label other than -100?"
        )
    for parameter in model.parameters():
        parameter.grad = None
    return float(loss.detach()), gradients


def _caches(model: nn.Module) -> bool:
    """True if the model makes a cache of keys and values unless it is told not to."""
    return hasattr(getattr(model, "config", None), "use_cache")


def _streamed_step(
    model: nn.Module,
    batch: Mapping[str, Any],
    eager_loss: float,
    eager: dict[str, Tensor],
    rtol: float,
    recorder: _Recorder,
    notes: list[str],
) -> tuple[LossCheck | None, list[GradientCheck]]:
    """The streamed step, its gradients compared one by one as they are finished.

    A wrong analysis may make it fail; what the probe found is then worth more than the error.
    """
    comparison = _Comparison(eager, rtol)
    try:
        loss = _loss(model, model(**_inputs(batch)))
        with comparison.of(model):
            loss.backward()
    except Exception as error:
        if recorder.probe is None or all(p.ok for p in recorder.probe.probes):
            raise
        notes.append(f"the streamed step failed: {type(error).__name__}: {error}")
        return None, []
    return LossCheck(eager_loss, float(loss.detach()), rtol), comparison.finish(model)


class _Comparison:
    """Eager's gradients, each given up as soon as the streamed one has come.

    NOTE [gradients that vanish]: a gradient that is exactly 0 in theory (a bias of keys under softmax) is
    noise in eager too. A difference is measured by no less than `VANISHING` of the norm of all gradients.
    """

    def __init__(self, eager: dict[str, Tensor], rtol: float) -> None:
        self.eager, self.rtol = eager, rtol
        self.total = sum(_norm(g) ** 2 for g in eager.values()) ** 0.5
        self.found: dict[str, GradientCheck] = {}

    @contextlib.contextmanager
    def of(self, model: nn.Module) -> Any:
        """Within: a gradient that is finished in a backward is compared and dropped."""
        handles = [
            p.register_post_accumulate_grad_hook(functools.partial(self._compare, n))
            for n, p in model.named_parameters()
            if p.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _compare(self, name: str, parameter: Tensor) -> None:
        streamed, parameter.grad = parameter.grad, None
        self._add(name, self.eager.pop(name, None), streamed)

    def _add(self, name: str, expected: Tensor | None, streamed: Tensor | None) -> None:
        """No gradient counts as zero: eager has none where the streamed step may have zeros."""
        given = [g for g in (expected, streamed) if g is not None]
        half = any(g.dtype in (torch.float16, torch.bfloat16) for g in given)
        wide = [g.float() if half else g for g in given]
        gap = _norm(wide[0] - wide[1]) if len(wide) == 2 else sum(map(_norm, wide))
        norm = 0.0 if expected is None else _norm(expected)
        self.found[name] = GradientCheck(name, norm, gap, max(norm, VANISHING * self.total), self.rtol)

    def finish(self, model: nn.Module) -> list[GradientCheck]:
        """All comparisons in the order of the parameters; what is left of eager's has no counterpart."""
        for name, left in self.eager.items():
            self._add(name, left, None)
        return [self.found[n] for n, _ in model.named_parameters() if n in self.found]


def _norm(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value, dtype=torch.float64))
