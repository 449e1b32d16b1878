"""The scripts of `examples/recipes/`, run by the command at toy size, with the losses of unstreamed runs."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_runs import TIMES, build, tokenizer, words
from transformers import TrainerCallback

import streambp_fx
from benchmarks import recipes as predicted
from streambp_fx.cli import main
from streambp_fx.commands.recipe import PACKAGE, RECIPES, find
from streambp_fx.integrations import StreamBPCallback

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "recipes"
CHUNK, STEPS, TOKENS = 16, 2, 64
# What transformers 5.23 has renamed is not in the scripts.
pytestmark = pytest.mark.filterwarnings("error:.gradient_checkpointing. is deprecated")
NAMES = [recipe.name for recipe in RECIPES]


# ---- a model, data and runs


def row(fields: tuple[str, ...], k: int) -> dict[str, Any]:
    """A line of data with these fields."""
    if fields == ("messages",):
        roles = {"user": words(12 + k, k), "assistant": words(40, 50 + k)}
        return {"messages": [{"role": r, "content": text} for r, text in roles.items()]}
    lengths = {"prompt": 10 + k % 3}
    made = {f: words(lengths.get(f, 40 + 3 * k), 100 * n + k) for n, f in enumerate(fields)}
    return {**made, **({"prompt": made["prompt"] + " "} if "prompt" in made else {}), **_answer(fields, k)}


def _answer(fields: tuple[str, ...], k: int) -> dict[str, str]:
    """A digit, with which a completion of random words may end."""
    return {"answer": str(k % 10)} if "answer" in fields else {}


def data_for(name: str, folder: Path, kind: int = 0) -> Path:
    """A file with 20 lines of one of the forms that a recipe reads."""
    path = folder / f"{name}.jsonl"
    fields = find(name).fields[kind]
    path.write_text("".join(json.dumps(row(fields, k)) + "\n" for k in range(20)))
    return path


@pytest.fixture(scope="module")
def toy(tmp_path_factory: Any) -> Path:
    """A folder with a model of two layers and its tokenizer."""
    folder = tmp_path_factory.mktemp("toy")
    build().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@dataclass
class Run:
    """What a run leaves: entries of the log that have a loss, and the schedule of the last step."""

    log: list[dict[str, Any]]
    schedule: Any
    trainer: Any


class Unstreamed(TrainerCallback):
    """Takes the options of streaming, and does nothing."""

    def __init__(self, **options: Any) -> None:
        pass


def run(name: str, model: Path, folder: Path, patch: Any, streamed: bool = True, kind: int = 0) -> Run:
    """Run a recipe by the command, and keep what it makes."""
    torch._dynamo.reset()
    kept: dict[str, Any] = {}

    class Recording(StreamBPCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            kept["schedule"] = streambp_fx.schedule(model)

    module = importlib.import_module(f"{PACKAGE}.{name.replace('-', '_')}")
    train = module.train

    @functools.wraps(train)
    def keep(*args: Any, **settings: Any) -> Any:
        torch.manual_seed(0)
        kept["trainer"] = train(*args, **settings)
        return kept["trainer"]

    output = folder / ("streamed" if streamed else "unstreamed")
    with patch.context() as patched:
        patched.setattr(module, "StreamBPCallback", Recording if streamed else Unstreamed)
        patched.setattr(module, "train", keep)
        given = ["--model", str(model), "--data", str(data_for(name, folder, kind)), "--output", str(output)]
        sizes = ["--seq-len", str(TOKENS), "--chunk", str(CHUNK), "--max-steps", str(STEPS)]
        assert main(["recipe", name, *given, *sizes]) == 0
    assert any(output.glob("*.safetensors"))
    log = [entry for entry in kept["trainer"].state.log_history if "loss" in entry]
    return Run(log, kept.get("schedule"), kept["trainer"])


# ---- they run, streamed, and learn what they would unstreamed


def assert_streamed(got: Run) -> None:
    assert len(got.log) == STEPS and all(entry["streambp/chunk"] == CHUNK for entry in got.log)
    assert all(s.chunked for s in got.schedule.segments), str(got.schedule)
    assert sum(s.kind == "layer" for s in got.schedule.segments) == 2


def check(name: str, toy: Path, folder: Path, patch: Any, kind: int = 0) -> Run:
    got = run(name, toy, folder, patch, kind=kind)
    assert_streamed(got)
    want = run(name, toy, folder, patch, streamed=False, kind=kind)
    for found, expected in zip(got.log, want.log, strict=True):
        for key in ("loss", "grad_norm"):
            assert abs(found[key] - expected[key]) <= 1e-5 * (1 + abs(expected[key])), (key, found, expected)
        assert set(expected) <= set(found) | set(TIMES)
    assert any(entry["grad_norm"] > 1e-3 for entry in got.log), "nothing to learn"
    return got


@pytest.mark.slow
def test_continued_pretraining(toy: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    got = check("continued-pretraining", toy, tmp_path, monkeypatch)
    assert "store inputs, on disk" in str(got.schedule)
    plan = predicted.planner(case_of("continued-pretraining"), toy, "float32")
    assert_predicted(plan, got, streambp_fx.Options(offload="disk").stored)
    shown = capsys.readouterr().out
    assert "2 steps, loss 4." in shown and f"streamed in chunks of {CHUNK}, activations" in shown


@pytest.mark.slow
def test_sft_lora(toy: Path, tmp_path: Path, monkeypatch: Any) -> None:
    got = check("sft-lora", toy, tmp_path, monkeypatch)
    assert (tmp_path / "streamed" / "adapter_config.json").is_file()
    assert_predicted(predicted.planner(case_of("sft-lora"), toy, "float32"), got)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [("sft-lora", 1), ("sft-lora", 2), ("full-finetune", 0), ("full-finetune", 1), ("full-finetune", 2)],
)
def test_forms_of_the_data(name: str, kind: int, toy: Path, tmp_path: Path, monkeypatch: Any) -> None:
    check(name, toy, tmp_path, monkeypatch, kind)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", "grpo"])
def test_preferences_and_rewards(name: str, toy: Path, tmp_path: Path, monkeypatch: Any) -> None:
    got = check(name, toy, tmp_path, monkeypatch)
    if name == "dpo":  # of GRPO each step has another length
        assert_predicted(predicted.planner(case_of(name), toy, "float32"), got)


@pytest.mark.slow
def test_full_finetune_in_mixed_precision(toy: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """As on a GPU: float32 weights under autocast. TRL's own loss head runs then, planned as streamed."""
    module = importlib.import_module(f"{PACKAGE}.full_finetune")
    made, over = module.SFTConfig, {"bf16": True, "use_cpu": True}
    monkeypatch.setattr(module, "SFTConfig", lambda *args, **given: made(*args, **{**given, **over}))
    got = run("full-finetune", toy, tmp_path, monkeypatch)
    assert sum(s.kind == "layer" and s.chunked for s in got.schedule.segments) == 2
    planned = predicted.planner(case_of("full-finetune", mixed=True), toy).activation_peak(TOKENS, CHUNK)
    assert max(entry["streambp/peak_bytes"] for entry in got.log) <= planned


@pytest.mark.slow
def test_pretraining_in_mixed_precision(toy: Path, tmp_path: Path, monkeypatch: Any) -> None:
    module = importlib.import_module(f"{PACKAGE}.continued_pretraining")
    made, over = module.TrainingArguments, {"bf16": True, "use_cpu": True}
    monkeypatch.setattr(module, "TrainingArguments", lambda *args, **given: made(*args, **{**given, **over}))
    got = run("continued-pretraining", toy, tmp_path, monkeypatch)
    plan = predicted.planner(case_of("continued-pretraining", mixed=True), toy)
    assert_predicted(plan, got, streambp_fx.Options(offload="disk").stored, 0.04)


# ---- what is predicted of them


def case_of(name: str, mixed: bool = False) -> Any:
    """The case of the table. On a CPU recipes are in mixed precision only where a test asks for it."""
    return replace(next(case for case in predicted.CASES if case.recipe == name), mixed=mixed)


def assert_predicted(planner: Any, got: Run, stored: Any = None, within: float = 0.02) -> None:
    """The plan from a model without weights is what the callback logs while the recipe runs."""
    peak = (planner if stored is None else planner.use(stored)).activation_peak(TOKENS, CHUNK)
    logged = max(entry["streambp/peak_bytes"] for entry in got.log)
    assert abs(peak - logged) <= within * logged, (peak, logged)


def test_the_table_is_of_the_recipes() -> None:
    """Each recipe has a line, with the sizes that the script says, and it is predicted to fit."""
    lines = predicted.section().splitlines()
    assert len(lines) == 2 + len(predicted.CASES) + 2
    assert {case.recipe for case in predicted.CASES} == set(NAMES)
    for case, line in zip(predicted.CASES, lines[2:], strict=False):
        assert f"`{case.recipe}" in line and f"{case.seq_len:,} |" in line and "too much" not in line
        peak, left = map(float, line.split("|")[5].removesuffix("GiB ").split(" of "))
        assert 0 < peak < left == float(predicted.LEFT[case.gpu].removesuffix("GiB"))


@pytest.mark.slow
def test_the_table_is_what_is_predicted() -> None:
    assert predicted.section().splitlines() == predicted.table(predicted.plans())


# ---- the scripts as files


def test_scripts_and_their_entries_belong_together() -> None:
    assert {recipe.file for recipe in RECIPES} == {f.name for f in FOLDER.glob("*.py")} - {"__init__.py"}
    page = (ROOT / "docs" / "recipes.md").read_text()
    for recipe in RECIPES:
        text = (FOLDER / recipe.file).read_text()
        assert recipe.text() == text, "the one that is run is the one that people read"
        assert len(text.splitlines()) <= 72, "of one screen"
        doc = ast.get_docstring(ast.parse(text)) or ""
        assert all(f'"{field}"' in doc for fields in recipe.fields for field in fields), recipe.name
        imported = {
            a.module.split(".")[0] for a in ast.walk(ast.parse(text)) if isinstance(a, ast.ImportFrom)
        }
        known = {"streambp_fx", "transformers", "torch", "collections", "typing"}
        assert imported - known <= set(recipe.packages)
        assert f"{{literalinclude}} ../examples/recipes/{recipe.file}" in page


@pytest.mark.slow
def test_the_notebook(tmp_path: Path, monkeypatch: Any) -> None:
    """All cells run one after the other, and print what the file shows of the schedule."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(FOLDER / "schedule.ipynb", 4)
    kept = shown_by(notebook)
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
    shown = shown_by(notebook)
    assert shown.split("stored for the backward")[0] == kept.split("stored for the backward")[0]
    assert "MiB unstreamed" in shown and (tmp_path / "schedule.html").stat().st_size > 10_000


def shown_by(notebook: Any) -> str:
    """What the code cells of a notebook have printed."""
    outputs = [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]
    return "".join(o.text for o in outputs if o.output_type == "stream" and o.name == "stdout")


# ---- the command


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["nothing"], "no recipe is called 'nothing': there are sft-lora, full-finetune"),
        (["dpo"], "give the folder of one with --model PATH"),
        (["dpo", "--model", "nowhere"], "--model nowhere: no such folder (models are not downloaded)"),
        (["dpo", "--model", "EMPTY"], "the folder holds no config.json, no weights, no tokenizer"),
        (
            ["dpo", "--model", "TOY"],
            '{"prompt": ..., "chosen": ..., "rejected": ...}: give a file with --data',
        ),
        (["dpo", "--model", "TOY", "--data", "nowhere.jsonl"], "--data nowhere.jsonl: no such file"),
        (["dpo", "--model", "TOY", "--data", "TEXTS"], 'fields text; wanted: {"prompt": ..., "chosen": ...'),
        (["dpo", "--model", "TOY", "--data", "WORDS"], "line 1 is no JSON"),
        (["dpo", "--model", "TOY", "--data", "NUMBER"], "line 2 is no object, but of type int; wanted"),
        (["dpo", "--model", "TOY", "--data", "LATER"], "line 3 has the fields chosen, prompt; wanted"),
        (["sft-lora", "--model", "TOY", "--data", "MIXED"], "as in the lines before: {text}"),
        (["dpo", "--model", "TOY", "--data", "BLANK"], "the file has no line; wanted"),
        (["dpo", "--model", "TOY", "--data", "SEVEN"], "line 1 has chosen of type int, and not str or list"),
        (["sft-lora", "--model", "TOY", "--data", "SAID"], "line 1 has messages of type str, and not list"),
        (["dpo", "--model", "TOY", "--data", "PAIRS", "--output", "TEXTS"], "TEXTS is a file, not a folder"),
        (["dpo", "--model", "TOY", "--data", "PAIRS", "--output", "/proc/x"], "/proc cannot be written"),
        (["continued-pretraining", "--model", "TOY", "--data", "TEXTS", "--gpu", "24GB"], "has no --gpu"),
        (["sft-lora", "--model", "TOY", "--data", "TEXTS", "--gpu", "8GB"], "settings for 24GB, 48GB, 80GB"),
    ],
)
def test_bad_input(
    argv: list[str], said: str, toy: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    (tmp_path / "empty").mkdir()
    pair = '{"prompt": "w1", "chosen": "w2", "rejected": "w3"}\n'
    texts = {"TEXTS": '{"text": "w1 w2"}\n', "WORDS": "w1 w2\n", "NUMBER": "\n7\n", "BLANK": "\n\n"}
    texts["LATER"] = f'{pair}{pair}{{"prompt": "w1", "chosen": "w2"}}\n'
    texts["MIXED"] = '{"text": "w1"}\n{"prompt": "w1", "completion": "w2"}\n'
    texts["SEVEN"], texts["PAIRS"] = '{"prompt": "w1", "chosen": 7, "rejected": "w3"}\n', pair
    texts["SAID"] = '{"messages": "w1"}\n'
    places = {"TOY": str(toy), "EMPTY": str(tmp_path / "empty")}
    for name, text in texts.items():
        places[name] = str(tmp_path / name)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path / "empty")
    assert main(["recipe", *(places.get(a, a) for a in argv)]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and "Traceback" not in captured.err and captured.out == ""
    assert not list((tmp_path / "empty").iterdir())


def test_a_missing_package(toy: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    argv = ["recipe", "dpo", "--model", str(toy), "--data", str(data_for("dpo", tmp_path))]
    assert main(argv) == 2
    assert "dpo needs packages that are not installed" in capsys.readouterr().err


def test_an_older_transformers(toy: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "5.10.4")
    argv = ["recipe", "dpo", "--model", str(toy), "--data", str(data_for("dpo", tmp_path))]
    assert main(argv) == 2
    assert "the recipes need transformers 5.23 or later, and 5.10.4 is installed" in capsys.readouterr().err


def test_more_tokens_than_positions(toy: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    class Nothing:
        state = TrainerCallback()

    module = importlib.import_module(f"{PACKAGE}.dpo")
    Nothing.state.log_history = []  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "train", functools.wraps(module.train)(lambda *args, **settings: Nothing))
    assert main(["recipe", "dpo", "--model", str(toy), "--data", str(data_for("dpo", tmp_path))]) == 0
    captured = capsys.readouterr()
    assert "config has 256 positions, and sequences may have 65,536 tokens" in captured.err
    assert "no step was logged" in captured.out and "written to dpo-output" in captured.out


def test_listed_and_shown(capsys: Any) -> None:
    assert main(["recipe"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in NAMES) and "--model PATH --data FILE" in listed
    assert main(["recipe", "sft_lora.py", "--show"]) == 0
    assert capsys.readouterr().out == (FOLDER / "sft_lora.py").read_text()
