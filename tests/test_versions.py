"""Which versions are refused, and how."""

import copy
import logging
import re
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from streambp_fx.versions import (
    MINIMUM,
    TESTED,
    UnsupportedVersionError,
    check_versions,
    differences,
    release,
    require,
)

PAGE = Path(__file__).parents[1] / "docs" / "versions.md"


@pytest.mark.parametrize(
    ("found", "minimum"),
    [
        ("2.9", "2.9"),
        ("2.9.0", "2.9"),
        ("2.9", "2.9.0"),
        ("2.10.1", "2.9"),
        ("2.13.0+cpu", "2.9"),
        ("3.0.0.dev20261101+cu130", "2.9"),
        ("2.9.0a0+git123", "2.9"),
        ("5.0.0rc1", "5"),
        ("3.10.13", "3.10"),
        ("v5.1", "5"),
    ],
)
def test_new_enough(found, minimum):
    require("torch", found, minimum)


@pytest.mark.parametrize(
    ("name", "found", "minimum"),
    [
        ("torch", "2.8.1", "2.9"),
        ("torch", "1.13", "2.9"),
        ("transformers", "4.57.0", "5"),
        ("python", "3.9.18", "3.10"),
    ],
)
def test_too_old(name, found, minimum):
    with pytest.raises(UnsupportedVersionError, match=rf">= {re.escape(minimum)}.*found {re.escape(found)}"):
        require(name, found, minimum)


def test_the_message_names_the_tested_version():
    with pytest.raises(
        ImportError, match=r"needs PyTorch >= 2\.11 \(tested with 2\.11 to 2\.15\), but found 2\.10\.0"
    ):
        require("torch", "2.10.0", MINIMUM["torch"])


def test_missing_and_unreadable():
    with pytest.raises(UnsupportedVersionError, match="not installed"):
        require("transformers", None, "5")
    with pytest.raises(UnsupportedVersionError, match="unknown"):
        require("torch", "unknown", "2.9")


def test_this_environment_is_supported():
    check_versions()
    assert MINIMUM.keys() == TESTED.keys()


def test_what_was_tested_is_what_the_page_shows():
    rows = re.findall(r"^\| (\d[\d.]+) \| ([\d.]+) \| ([\d.]+) \|", PAGE.read_text(), re.M)
    for name, column in zip(("python", "torch", "transformers"), zip(*rows, strict=True), strict=True):
        versions = sorted({release(v)[:2] for v in column})
        first, last = (".".join(map(str, v)) for v in (versions[0], versions[-1]))
        assert TESTED[name] == f"{first} to {last}"


def test_check_names_what_is_too_old(monkeypatch):
    monkeypatch.setitem(MINIMUM, "transformers", "999")
    with pytest.raises(UnsupportedVersionError, match="transformers >= 999"):
        check_versions()


@pytest.mark.parametrize("difference", differences.DIFFERENCES, ids=lambda d: d.name)
def test_what_differs_has_not_outlived_its_versions(difference):
    """Fails where the oldest version that is supported has what only newer ones had: the old way can go."""
    assert hasattr(differences, difference.name)
    oldest = release(MINIMUM[difference.library])
    assert oldest < release(difference.since), (
        f"{difference.name}: only the way of {difference.since} is left"
    )


class Masked(nn.Module):
    """Rows under the mask of a recurrence, which is asked for as models of transformers up to 5.12 do."""

    def _update_mamba_mask(self, mask, before):
        behind = isinstance(before, torch.Tensor) and before[0] > 0
        return None if behind or (mask is not None and torch.all(mask == 1)) else mask

    def forward(self, rows, mask, before):
        used = self._update_mamba_mask(mask, before)
        return rows if used is None else rows * used[..., None]


POSITIONS = {"no cache": None, "first positions": torch.arange(5), "later positions": torch.arange(3, 8)}
MASKS = {"none": None, "ones": torch.ones(2, 5), "padding": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])}


@pytest.mark.parametrize("before", POSITIONS.values(), ids=POSITIONS)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_masks_of_recurrences_are_not_asked_for_values(monkeypatch, before, mask):
    monkeypatch.setattr(differences, "TRANSFORMERS", (5, 12))
    model = type("Masked", (Masked,), {"__module__": "transformers.models.toy", **_own(Masked)})()
    method, rows = type(model)._update_mamba_mask, torch.randn(2, 5, 3)
    want = model(rows, mask, before)
    assert differences.masks_are_not_asked([type(model)], lambda: True)
    assert not differences.masks_are_not_asked([type(model)], lambda: True), "each is changed once"
    assert model._update_mamba_mask(mask, before) is method(model, mask, before), "outside of a trace"
    torch._dynamo.reset()
    found = torch.compile(model, backend="eager", fullgraph=True)(rows, mask, before)
    assert torch.equal(found, want)


def test_modules_whose_values_are_recorded_keep_their_forward(monkeypatch):
    monkeypatch.setattr(differences, "TRANSFORMERS", (5, 1))
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    model.config = types.SimpleNamespace(output_router_logits=False)
    recorder = types.SimpleNamespace(target_class=nn.Linear)
    recorded = {str(nn.Sequential): {"router_logits": recorder, "attentions": [nn.Tanh]}}
    own = types.SimpleNamespace(_CAN_RECORD_REGISTRY=recorded)
    monkeypatch.setitem(sys.modules, "transformers.utils.generic", own)
    differences.keep_forwards(model)
    assert not any("forward" in vars(m) for m in model.modules()), "nothing is asked for"
    model.config.output_router_logits = True
    differences.keep_forwards(model)
    assert ["forward" in vars(m) for m in model] == [True, False]
    x = torch.randn(2, 3)
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    newer = nn.Sequential(nn.Linear(3, 3))
    newer.config = model.config
    monkeypatch.setattr(differences, "TRANSFORMERS", (5, 2))
    differences.keep_forwards(newer)
    assert not any("forward" in vars(m) for m in newer.modules()), "newer versions need no such thing"


@pytest.mark.parametrize("torch_logs", [None, "+dynamo"])
def test_graphs_of_scans_are_not_printed(monkeypatch, torch_logs):
    logger = logging.getLogger("torch._higher_order_ops.partitioner")
    monkeypatch.setattr(logger, "filters", [])
    monkeypatch.setattr(differences, "TORCH", (2, 11))
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    if torch_logs is not None:
        monkeypatch.setenv("TORCH_LOGS", torch_logs)
    differences.quiet_partitioner()
    levels = (logging.DEBUG, logging.WARNING)
    shown = [bool(logger.filter(logger.makeRecord("", n, "", 0, "", (), None))) for n in levels]
    assert shown == [torch_logs is not None, True]


OLD_CHECKPOINT = """
def checkpoint(function, hooks):
    gen = hooks()
    next(gen)
    function()
    next(gen)
"""


def test_an_error_ends_its_checkpoints(monkeypatch):
    monkeypatch.setattr(differences, "TORCH", (2, 11))
    names = {}
    exec(compile(OLD_CHECKPOINT, torch.utils.checkpoint.__file__, "exec"), names)
    checkpoint, ends = names["checkpoint"], []

    def hooks(name):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            try:
                yield
            finally:
                ends.append(name)

    def fails():
        raise KeyError("from within")

    def active():
        return torch._C._autograd._top_saved_tensors_default_hooks(True)

    with pytest.raises(KeyError, match="from within") as held, differences.ending_checkpoints():
        checkpoint(lambda: checkpoint(fails, lambda: hooks("inner")), lambda: hooks("outer"))
    assert ends == ["inner", "outer"] and active() is None and held.value is not None


def _own(cls):
    return {n: f for n, f in vars(cls).items() if n in ("_update_mamba_mask", "forward")}


@pytest.mark.parametrize("own", [True, False], ids=["newer", "of others"])
def test_masks_of_others_and_of_newer_versions_are_left_alone(monkeypatch, own):
    monkeypatch.setattr(differences, "TRANSFORMERS", (5, 12) if not own else (5, 13))
    module = "transformers.models.toy" if own else "models.toy"
    cls = type("Masked", (Masked,), {"__module__": module, **_own(Masked)})
    assert not differences.masks_are_not_asked([cls], lambda: True)
    assert cls._update_mamba_mask is Masked._update_mamba_mask
