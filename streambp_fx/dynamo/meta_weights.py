"""Models on the meta device, captured as on another: the code of a model asks where its tensors are."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.meta_utils import MetaTensorDescriber


@contextlib.contextmanager
def meta_tensors_on(device: torch.device) -> Iterator[None]:
    """Within: the fake tensors that Dynamo makes of tensors on the meta device are on this one.

    A model may choose an op by `x.device.type`, and meta tensors are nowhere. What is captured must not run.
    """
    describe = MetaTensorDescriber.describe_tensor

    def described(self: MetaTensorDescriber, t: torch.Tensor, **options: Any) -> Any:
        found = describe(self, t, **options)
        return dataclasses.replace(found, device=device) if found.device.type == "meta" else found

    MetaTensorDescriber.describe_tensor = described  # type: ignore[method-assign]
    try:
        yield
    finally:
        MetaTensorDescriber.describe_tensor = describe  # type: ignore[method-assign]
