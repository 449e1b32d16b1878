"""What a transformed model must leave as it was: inference, files, names, copies."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e_check import compare, in_double, restore, step, transform
from e2e_models import build, padded, plain, sample
from transformers import AutoModelForCausalLM

import streambp_fx

LLAMA = functools.partial(build, "llama")
RTOL = 1e-9


def trained_once(family: str = "llama", **over: Any) -> tuple[Any, Any]:
    """(original, streamed), the streamed one after a step, its gradients cleared."""
    original = build(family, **over)
    streamed = transform(copy.deepcopy(original))
    step(streamed, plain(2, 67))
    streamed.zero_grad(set_to_none=True)
    return original, streamed


@pytest.mark.parametrize("family", sample(["llama", "gemma2", "opt"], "llama"))
def test_inference_is_bitwise_the_original(family: str) -> None:
    original, streamed = trained_once(family, dtype=torch.float32)
    for batch in (plain(2, 67), padded(67, "left"), plain(1, 1)):
        with torch.no_grad():  # in training mode
            want, got = original(**batch), streamed(**batch)
        assert got.logits.equal(want.logits)
        assert got.loss.equal(want.loss) or (got.loss.isnan() and want.loss.isnan())
        for mode in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
            with mode:
                want, got = original.eval()(**batch), streamed.eval()(**batch)
            assert got.logits.equal(want.logits) and type(got) is type(want)
        original.train()
        streamed.train()


@pytest.mark.slow
def test_eval_trains_like_the_original() -> None:
    """eval() with gradients is the original forward: bitwise the same gradients."""
    original, streamed = trained_once()
    want_loss, want = step(original.eval(), plain(2, 67))
    with pytest.warns(streambp_fx.StreamBPWarning, match=r"evaluation mode.*model\.train\(\)"):
        got_loss, got = step(streamed.eval(), plain(2, 67))
    assert got_loss.equal(want_loss)
    for name, g in want.items():
        assert got[name].equal(g), name


TEXTS = [(family, training) for family in ("llama", "gemma2", "gpt2") for training in (True, False)]


@pytest.mark.parametrize(("family", "training"), sample(TEXTS))
def test_generate_is_bitwise_the_original(family: str, training: bool) -> None:
    original, streamed = trained_once(family, dtype=torch.float32)
    ids = plain(2, 20)["input_ids"]
    settings = {
        "max_new_tokens": 5,
        "min_new_tokens": 5,
        "do_sample": False,
        "use_cache": True,
        "output_scores": True,
        "return_dict_in_generate": True,
        "attention_mask": torch.ones_like(ids),
    }
    ends = [m.train(training).generate(ids, **settings) for m in (original, streamed)]
    assert ends[0].sequences.shape == (2, 25)
    assert ends[1].sequences.equal(ends[0].sequences)
    for got, want in zip(ends[1].scores, ends[0].scores, strict=True):
        assert got.equal(want)


@pytest.mark.slow
def test_training_after_inference() -> None:
    with in_double(LLAMA):
        eager, streamed = LLAMA(), transform(LLAMA())
        for _ in range(2):
            compare(eager, streamed, {"T=67": plain(2, 67)}, RTOL)
            with torch.no_grad():
                streamed(**plain(2, 67))
            streamed.eval().generate(plain(1, 8)["input_ids"], max_new_tokens=2, use_cache=True)
            streamed.train()


@pytest.mark.slow
def test_names_and_order() -> None:
    original, streamed = trained_once()
    assert list(streamed.state_dict()) == list(original.state_dict())
    assert [n for n, _ in streamed.named_parameters()] == [n for n, _ in original.named_parameters()]
    assert [n for n, _ in streamed.named_buffers()] == [n for n, _ in original.named_buffers()]
    names = [(n, type(m)) for n, m in original.named_modules()]
    assert [(n, type(m)) for n, m in streamed.named_modules()] == names
    assert isinstance(streamed, type(original)) and repr(streamed) == repr(original)
    for name, tensor in original.state_dict().items():
        assert streamed.state_dict()[name].equal(tensor), name


@pytest.mark.slow
def test_parameters_stay_the_same_objects() -> None:
    model = LLAMA()
    before = list(model.parameters())
    transform(model)
    step(model, plain(2, 67))
    restore(model)
    assert all(p is q for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.slow
def test_save_pretrained(tmp_path: Path) -> None:
    original, streamed = trained_once()
    original.save_pretrained(tmp_path / "original")
    streamed.save_pretrained(tmp_path / "streamed")
    files = sorted(p.name for p in (tmp_path / "original").iterdir())
    assert "model.safetensors" in files
    assert sorted(p.name for p in (tmp_path / "streamed").iterdir()) == files
    for name in files:
        assert (tmp_path / "streamed" / name).read_bytes() == (tmp_path / "original" / name).read_bytes(), (
            name
        )
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "streamed", dtype=torch.float64)
    assert list(again.state_dict()) == list(original.state_dict())
    for name, tensor in original.state_dict().items():
        assert again.state_dict()[name].equal(tensor), name


@pytest.mark.slow
def test_load_state_dict_into_a_transformed_model() -> None:
    with in_double(LLAMA):
        other, streamed = build("llama", seed=9), transform(LLAMA())
        step(streamed, plain(2, 67))
        streamed.load_state_dict(other.state_dict())
        compare(other, streamed, {"loaded": plain(2, 67)}, RTOL)


@pytest.mark.slow
def test_change_of_dtype() -> None:
    """`.float()` and `.double()` after the transformation."""
    with in_double(LLAMA):
        eager, streamed = LLAMA(), transform(LLAMA())
        compare(eager, streamed, {"double": plain(2, 67)}, RTOL)
        eager.float(), streamed.float()
        compare(eager, streamed, {"float": plain(2, 67)}, 1e-5)


# -- copies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("used", sample([True, False]))
def test_deepcopy_trains_exactly_and_by_itself(used: bool) -> None:
    with in_double(LLAMA):
        eager, streamed = LLAMA(), transform(LLAMA())
        if used:
            step(streamed, plain(2, 67))
            streamed.zero_grad(set_to_none=True)
        twin = copy.deepcopy(streamed)
        mine = {p.data_ptr() for p in streamed.parameters()}
        assert mine.isdisjoint(p.data_ptr() for p in twin.parameters())
        compare(eager, twin, {"the copy": plain(2, 67)}, RTOL)
        assert all(p.grad is None for p in streamed.parameters())
        with torch.no_grad():
            for p in twin.parameters():
                p.mul_(1.1)
        compare(eager, streamed, {"the first, after the copy changed": plain(2, 67)}, RTOL)
        with torch.no_grad():
            for p in eager.parameters():
                p.mul_(1.1)
        compare(eager, twin, {"the changed copy": plain(2, 67)}, RTOL)


@pytest.mark.slow
def test_the_copy_is_streamed_too() -> None:
    twin = copy.deepcopy(transform(LLAMA()))
    assert twin(**plain(2, 67)).logits is None
    restore(twin)
    assert twin(**plain(2, 67)).logits is not None


@pytest.mark.parametrize("how", sample(["pickle", "torch.save"]))
def test_pickle_works_or_says_why_not(how: str) -> None:
    with in_double(LLAMA):
        eager, streamed = LLAMA(), transform(LLAMA())
        step(streamed, plain(2, 67))
        streamed.zero_grad(set_to_none=True)
        file = io.BytesIO()
        try:
            pickle.dump(streamed, file) if how == "pickle" else torch.save(streamed, file)
        except Exception as refusal:
            assert any(word in str(refusal).lower() for word in ("streambp", "restore")), repr(refusal)
            return
        file.seek(0)
        again = pickle.load(file) if how == "pickle" else torch.load(file, weights_only=False)
        compare(eager, again, {"unpickled": plain(2, 67)}, RTOL)


# -- transform and restore -----------------------------------------------------------------------------


@pytest.mark.parametrize("used", sample([True, False], True))
def test_restore_leaves_nothing_behind(used: bool) -> None:
    model = LLAMA()
    before = {n: set(vars(m)) for n, m in model.named_modules()}
    assert transform(model) is model
    if used:
        step(model, plain(2, 67))
    restore(model)
    assert {n: set(vars(m)) for n, m in model.named_modules()} == before
    assert model.forward.__func__ is type(model).forward
    original = LLAMA()
    want_loss, want = step(original, plain(2, 67))
    got_loss, got = step(model, plain(2, 67))
    assert got_loss.equal(want_loss)
    for name, g in want.items():
        assert got[name].equal(g), name


@pytest.mark.slow
def test_transform_streams_and_restore_stops_it() -> None:
    model = transform(LLAMA())
    assert model(**plain(2, 67)).logits is None
    restore(model)
    assert model(**plain(2, 67)).logits.shape == (2, 67, 97)


@pytest.mark.slow
def test_transform_twice_the_second_options_win() -> None:
    model, eager = LLAMA(), LLAMA()
    before = set(vars(model))
    with in_double(LLAMA):
        transform(model)
        assert model(**plain(2, 67)).logits is None
        transform(model, logits="keep", chunk=24)
        assert model(**plain(2, 67)).logits is not None
        compare(eager, model, {"again": plain(2, 67)}, RTOL)
    restore(model)
    assert set(vars(model)) == before


def test_restore_twice_is_harmless() -> None:
    model = transform(LLAMA())
    restore(model)
    before = set(vars(model))
    restore(model)
    assert set(vars(model)) == before
    assert model(**plain(2, 67)).logits is not None


def test_restore_of_a_model_never_transformed_is_harmless() -> None:
    model = LLAMA()
    before = set(vars(model))
    restore(model)
    assert set(vars(model)) == before


@pytest.mark.slow
def test_an_instance_forward_comes_back() -> None:
    """A model whose `forward` somebody set on the instance keeps that one after restore."""
    model = LLAMA()
    plain_forward = model.forward

    def mine(*args: Any, **kwargs: Any) -> Any:
        return plain_forward(*args, **kwargs)

    model.forward = mine
    transform(model)
    step(model, plain(2, 67))
    restore(model)
    assert vars(model)["forward"] is mine


@pytest.mark.slow
def test_other_models_of_the_class_are_untouched() -> None:
    bystander, forward = LLAMA(), type(LLAMA()).forward
    step(transform(LLAMA()), plain(2, 67))
    assert type(bystander).forward is forward and "forward" not in vars(bystander)
    assert bystander(**plain(2, 67)).logits is not None


def test_the_same_step_twice_is_bitwise_the_same() -> None:
    streamed = transform(LLAMA())
    first_loss, first = step(streamed, plain(2, 67))
    step(streamed, plain(2, 97))
    again_loss, again = step(streamed, plain(2, 67))
    assert again_loss.equal(first_loss)
    for name, g in first.items():
        assert again[name].equal(g), name
