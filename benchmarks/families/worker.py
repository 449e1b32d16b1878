"""One family in a process of its own: `python -m benchmarks.families.worker FAMILY` prints a line of JSON."""

from __future__ import annotations

import contextlib
import copy
import json
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import streambp_fx
from streambp_fx.measure.in_float64 import true_double
from streambp_fx.measure.live_bytes import peak_live_bytes

from .configs import VOCAB, build

LENGTH, CHUNK = 1024, 64
SHORT = 67
PADS = {"none": (0, 0), "right": (0, 13), "left": (13, 0)}
#: Families with a mask in the default dtype of the lowest number of the model's own dtype. In a float64 model
#: that number is infinite there, and NaN where the mask hides nothing: eager gives NaN for padded batches.
MASKS_IN_DEFAULT_DTYPE = ("prophetnet",)


def batch(length: int, pads: tuple[int, ...] = (0, 0), side: str = "none") -> dict[str, Tensor]:
    """Ids, labels and, with padding, a mask; int64, (len(pads), length)."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(3, VOCAB, (len(pads), length), generator=generator)
    labels, mask = ids.clone(), torch.ones_like(ids)
    for row, count in enumerate(pads):
        if count:
            mask[row, slice(length - count, None) if side == "right" else slice(0, count)] = 0
    labels[:, 3::5] = -100
    labels = labels.masked_fill(mask == 0, -100)
    given = {"input_ids": ids.masked_fill(mask == 0, 0), "labels": labels}
    return given if side == "none" else {**given, "attention_mask": mask}


def perturb(model: Any) -> None:
    """Move every parameter off 0 and 1, so that no wrong gradient hides behind a zero."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype), alpha=0.05)


def plain_experts(model: Any, how: str = "eager") -> None:
    """Experts in a loop, or as transformers calls it: the default has no kernel for float64 in eager."""
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            module.config._experts_implementation = how


def step(model: Any, given: dict[str, Tensor]) -> Tensor:
    """The loss of one step, which leaves its gradients to the parameters, that have none before."""
    model.zero_grad(set_to_none=True)
    loss = model(**given, use_cache=False).loss
    loss.backward()
    return loss.detach()


def gradients(model: Any, given: dict[str, Tensor]) -> tuple[Tensor, list[Tensor | None]]:
    """Loss and gradients of one step from clean gradients."""
    loss = step(model, given)
    return loss, [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def difference(got: Any, want: Any) -> float:
    """The greater of the relative errors of loss and gradient; infinite where only one has a gradient."""
    if any((a is None) != (b is None) for a, b in zip(got[1], want[1], strict=True)):
        return float("inf")
    pairs = [(a, b) for a, b in zip(got[1], want[1], strict=True) if b is not None]
    error = sum(float((a - b).square().sum()) for a, b in pairs) ** 0.5
    total = sum(float(b.square().sum()) for _, b in pairs) ** 0.5
    return max(error / total, abs(float(got[0] - want[0])) / abs(float(want[0])))


@contextlib.contextmanager
def experts_in_double() -> Iterator[None]:
    """Within: experts of a float64 model that runs as it is take the product that a captured graph has."""
    forms: Any = sys.modules.get("transformers.integrations.moe")
    usual = getattr(forms, "_can_use_grouped_mm", None)
    if usual is None:
        yield
        return
    forms._can_use_grouped_mm = lambda rows, weight, ends: (
        weight.dtype != torch.float64 and usual(rows, weight, ends)
    )
    try:
        yield
    finally:
        forms._can_use_grouped_mm = usual


@contextlib.contextmanager
def masks_in_double(family: str) -> Iterator[None]:
    """Within: masks of a family that makes them in the default dtype are float64, as the model is."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if family in MASKS_IN_DEFAULT_DTYPE else usual)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


def exactness(family: str, on_error: str = "raise") -> dict[str, float | str]:
    """Error by kind of padding, float64 throughout, no self-check.

    Args:
        on_error: the option of that name: "eager" for a family that cannot be captured.
    """
    model = build(family).double()
    perturb(model)
    eager = copy.deepcopy(model)
    plain_experts(eager)
    found: dict[str, float | str] = {}
    with true_double(model), experts_in_double(), masks_in_double(family):
        streamed = streambp_fx.transform(model, chunk=16, loss_chunk=16, check="never", on_error=on_error)
        for side, pads in PADS.items():
            given = batch(SHORT, pads, side)
            try:
                want = gradients(eager, given)
            except Exception as error:
                found[side] = f"eager: {type(error).__name__}"
                continue
            found[side] = difference(gradients(streamed, given), want)
    return found


def live(family: str) -> dict[str, Any]:
    """Live bytes of a step, checkpointed and streamed, and what is streamed."""
    given = batch(LENGTH, (0,))
    model = build(family)
    known = [*model.parameters(), *model.buffers(), *given.values()]
    result: dict[str, Any] = {}
    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except ValueError:
        result["no checkpointing"] = True
    step(model, given)
    model.zero_grad(set_to_none=True)
    start = time.process_time()
    result["checkpointing"] = peak_live_bytes(lambda: step(model, given), known)
    result["checkpointing seconds"] = time.process_time() - start
    del model
    model = build(family)
    known = [*model.parameters(), *model.buffers(), *given.values()]
    streambp_fx.transform(model, chunk=CHUNK, loss_chunk=CHUNK, check="never")
    start = time.process_time()
    step(model, given)
    result["first step seconds"] = time.process_time() - start
    result["gradients"] = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    model.zero_grad(set_to_none=True)
    start = time.process_time()
    result["streamed"] = peak_live_bytes(lambda: step(model, given), known)
    result["streamed seconds"] = time.process_time() - start
    schedule = streambp_fx.schedule(model)
    segments = [] if schedule is None else schedule.segments
    result["segments"] = len(segments)
    result["chunked"] = sum(s.chunked for s in segments)
    return result


def main(family: str) -> None:
    """Print what was found, or the error."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"family": family}
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("always")
        for name, part in (("live", live), ("exact", exactness)):
            torch._dynamo.reset()
            try:
                found[name] = part(family)
            except Exception as error:
                found[f"{name} error"] = f"{type(error).__name__}: {error}"[:1500]
    ours = [str(w.message) for w in caught if issubclass(w.category, streambp_fx.StreamBPWarning)]
    found["warnings"] = list(dict.fromkeys(ours))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
