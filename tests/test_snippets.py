"""The pieces of code in README and docs run exactly as they are printed, one after the other on each page."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import runpy
import shlex
import shutil
import sys
import textwrap
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks.cases import BATCH, CASES

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
    vocabulary = {word: k for k, word in enumerate(["[UNK]", "[END]", *dict.fromkeys(words)])}
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
    ends = {"unk_token": "[UNK]", "eos_token": "[END]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends).save_pretrained(folder)
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


# ---- what is typed in a shell

BLOCK = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$|((?:^    .*\n|^\n)+)", re.M | re.S)
SHELLS = ("", "bash", "sh")
PROGRAMS = ("streambp-fx", "make", "python", "torchrun")


def typed() -> list[tuple[str, str]]:
    """Pages, and commands in blocks of them, as they are typed: without comment and redirection."""
    found = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for language, fenced, indented in BLOCK.findall(page.read_text()):
            for line in (fenced or indented).splitlines() if language in SHELLS else ():
                words = re.split(r"\s+[#>]\s", line.strip())[0]
                if words.split(" ")[0] in PROGRAMS:
                    found.append((str(page.relative_to(ROOT)), words))
    return found


def test_commands_can_be_typed() -> None:
    """Each is a command that there is, with arguments that it takes."""
    from streambp_fx.cli import build_parser

    parser, makefile = build_parser(), (ROOT / "Makefile").read_text()
    commands = typed()
    for page, line in commands:
        program, *given = shlex.split(line)
        if program == "streambp-fx":
            parser.parse_args(given)  # exits if it does not know them
        elif program == "make":
            assert re.search(rf"^{given[0]}:", makefile, re.M), (page, line)
        elif given[:1] == ["-m"]:
            assert importlib.util.find_spec(given[1]) is not None, (page, line)
        else:
            scripts = [g for g in given if g.endswith(".py") and "/" in g]
            assert all((ROOT / s).is_file() for s in scripts), (page, line)
    assert {p for _, line in commands for p in [line.split(" ")[0]]} == set(PROGRAMS)
    assert sum(line.startswith("streambp-fx") for _, line in commands) >= 8


class Taken(Exception):
    """Arguments were taken apart, and nothing was run."""


@pytest.mark.parametrize(
    "line", sorted({c for _, c in typed() if re.match(r"make bench|python -m benchmarks\.", c)})
)
def test_benchmarks_take_their_arguments(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[argparse.Namespace] = []
    parse = argparse.ArgumentParser.parse_args

    def parse_args(self: argparse.ArgumentParser, *given: Any) -> Any:
        taken.append(parse(self, *given))
        raise Taken

    program, *given = shlex.split(line)
    if program == "make":
        name, arguments = "benchmarks", shlex.split(given[1].removeprefix("ARGS=") if given[1:] else "")
    else:
        name, arguments = given[1], given[2:]
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(Taken):
        runpy.run_module(name, run_name="__main__")
    cases = getattr(taken[0], "case", None) or []
    assert ({cases} if isinstance(cases, str) else set(cases)) <= {*CASES, BATCH}


@pytest.mark.slow
@pytest.mark.parametrize("line", sorted({c for _, c in typed() if re.match("streambp-fx (plan|explain)", c)}))
def test_plans_as_printed(
    line: str, a_reader: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from streambp_fx.cli import main

    shutil.copy(tmp_path / "path" / "to" / "model" / "config.json", tmp_path / "path" / "to")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main(shlex.split(line)[1:]) == 0
    said = capsys.readouterr().out
    assert "tokens" in said or "wrote" in said


@pytest.mark.slow
@pytest.mark.parametrize("line", sorted({c for _, c in typed() if c.startswith("streambp-fx recipe")}))
def test_recipes_as_printed(
    line: str, a_reader: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a model and data of the reader's own, at the sequence length of the recipe."""
    from streambp_fx.cli import main

    lines = [{"prompt": "a long text ", "completion": "of a step " * n} for n in (3, 5, 40)]
    (tmp_path / "examples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert main(shlex.split(line)[1:]) == 0
    said = capsys.readouterr().out
    if "--model" in line:
        assert "train_runtime" in said
        assert list(tmp_path.rglob("adapter_model.safetensors"))
    elif "--show" in line:
        compile(said, line, "exec")
    else:
        assert "sft-lora" in said


def test_a_module_for_verl_as_printed(a_reader: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its page says to put in a module, beside an engine of the same shape: that of verl needs a GPU."""
    import streambp_fx

    class FSDPEngine:
        def _build_module(self) -> torch.nn.Module:
            return transformers.AutoModelForCausalLM.from_pretrained("path/to/model")

    for name in ("verl", "verl.workers", "verl.workers.engine", "verl.workers.engine.fsdp"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["verl.workers.engine.fsdp"].transformer_impl = types.SimpleNamespace(FSDPEngine=FSDPEngine)  # type: ignore[attr-defined]
    text = (ROOT / "docs" / "frameworks" / "verl.md").read_text()
    (printed,) = re.findall(r"\n((?:    .*\n|\n)*    from verl.*\n(?:    .*\n|\n)*)", text)
    exec(compile(textwrap.dedent(printed), "verl.md", "exec"), {})
    built = FSDPEngine()._build_module()
    assert "forward" in vars(built) and streambp_fx.status(built).door == "transform"
