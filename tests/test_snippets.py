"""The pieces of code in README and docs run exactly as they are printed, one after the other on each page."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/index.md", "docs/guide.md", "docs/trainers.md")
OFTEN = ("README.md",)  # the others take two minutes
TRAINED = ("README.md", "docs/trainers.md")


def snippets(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)


@pytest.fixture
def a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder with a model of the reader's own, and a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["a", "step", "of", "a", "long", "text", "is", "made", "of", "chunks", "of", "rows"]
    vocabulary = {word: k for k, word in enumerate(["[UNK]", *dict.fromkeys(words)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1 << 17,
    }
    folder = tmp_path / "path" / "to" / "model"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    (tmp_path / "long.txt").write_text(" ".join(words * 200))
    monkeypatch.chdir(tmp_path)


def test_no_page_is_forgotten() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "frameworks").glob("*.md")]
    found = {str(page.relative_to(ROOT)) for page in pages if "```python\n" in page.read_text()}
    assert found == set(PAGES)


@pytest.mark.parametrize(
    "page", [p if p in OFTEN else pytest.param(p, marks=pytest.mark.slow) for p in PAGES]
)
def test_as_printed(page: str, a_reader: None, capsys: pytest.CaptureFixture[str]) -> None:
    import streambp_fx

    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", streambp_fx.StreamBPWarning)
        for number, snippet in enumerate(snippets(page)):
            exec(compile(snippet, f"{page}, snippet {number}", "exec"), names)
    model, said = names["model"], capsys.readouterr().out
    if page == "README.md":
        assert streambp_fx.schedule(names["compiled"]) is not None, "the backend by its name streams"
    if page in TRAINED:
        assert re.search(r"train_runtime", said), "the trainers trained"
    if page == "docs/index.md":
        assert str(streambp_fx.schedule(model)).count("layer") >= 1
        assert all(p.grad is not None for p in model.parameters())
    if page == "docs/guide.md":
        assert "agree" in said and names["loss"].isfinite()
        assert all(Path(file).exists() for file in ("schedule.html", "memory.png", "schedule.dot"))
