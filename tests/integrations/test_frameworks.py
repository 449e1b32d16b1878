"""The scripts of `examples/frameworks/`, streamed and unstreamed, where the framework is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from trainer_runs import build, tokenizer, words

import streambp_fx
from streambp_fx.integrations import StreamBPCallback

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "frameworks"
PAGES = ROOT / "docs" / "frameworks"


def script(name: str, needs: str) -> ModuleType:
    """A script as a module, or the test is skipped."""
    pytest.importorskip(needs, reason=f"{needs} is not installed")
    spec = importlib.util.spec_from_file_location(f"framework_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _fresh() -> None:
    """accelerate remembers the precision of the first Accelerator in a process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def assert_same_losses(module: ModuleType, capsys: Any, within: float = 1e-5, **how: Any) -> None:
    torch._dynamo.reset()
    want = module.train(streamed=False, **how)
    got = module.train(streamed=True, **how)
    assert len(got) == 8 and want[0] != want[-1], "nothing was trained"
    assert max(abs(a - b) for a, b in zip(got, want, strict=True)) <= within * want[0], (got, want)
    shown = capsys.readouterr().out
    assert "8 streamed, 0 unstreamed" in shown and "chunk 128" in shown


# ---- accelerate


def test_accelerate(capsys: Any) -> None:
    assert_same_losses(script("accelerate_loop", "accelerate"), capsys)


@pytest.mark.slow
def test_accelerate_in_mixed_precision(capsys: Any) -> None:
    assert_same_losses(script("accelerate_loop", "accelerate"), capsys, 2e-3, mixed_precision="bf16")


@pytest.mark.slow
def test_accelerate_after_transform_stores_no_cache() -> None:
    """Its wrapper casts what the forward returns, and means nothing else by the arguments."""
    from accelerate import Accelerator
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, **sizes)).train()
    streambp_fx.transform(model, chunk=16)
    prepared = Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
    ids = torch.randint(0, 97, (1, 45))
    prepared(input_ids=ids, labels=ids).loss.backward()
    assert streambp_fx.schedule(model).stored_bytes_per_row() <= 2 * 32 * 4


@pytest.mark.slow
@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_accelerate_transformed_after_prepare(mixed_precision: str, capsys: Any, monkeypatch: Any) -> None:
    from accelerate import Accelerator

    module = script("accelerate_loop", "accelerate")
    transform = module.streambp_fx.transform
    prepare, asked = Accelerator.prepare, []
    monkeypatch.setattr(module, "streambp_fx", _Later(transform, asked, module.streambp_fx.status))

    def prepared(self: Any, model: Any, *others: Any) -> Any:
        made = prepare(self, model, *others)
        if asked:
            transform(made[0], **asked.pop())
        return made

    monkeypatch.setattr(Accelerator, "prepare", prepared)
    within = 1e-5 if mixed_precision == "no" else 2e-3
    assert_same_losses(module, capsys, within, mixed_precision=mixed_precision)


class _Later:
    """In the place of the package: keeps what `transform` is asked for."""

    def __init__(self, transform: Any, asked: list[Any], status: Any) -> None:
        self.transform, self.status = lambda model, **options: asked.append(options), status


# ---- Lightning


@pytest.mark.parametrize("name", ["fabric_loop", pytest.param("lightning_module", marks=pytest.mark.slow)])
def test_lightning(name: str, capsys: Any) -> None:
    assert_same_losses(script(name, "lightning"), capsys)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fabric_loop", "lightning_module"])
def test_lightning_in_mixed_precision(name: str, capsys: Any) -> None:
    assert_same_losses(script(name, "lightning"), capsys, 2e-3, precision="bf16-mixed")


# ---- those that bring their own command line


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A folder with a model, its tokenizer, and data in the forms that these frameworks read."""
    build().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    pairs = [(words(12 + k, k), words(40, 50 + k)) for k in range(16)]
    chats = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in pairs]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": c}) + "\n" for c in chats))
    alpaca = [{"instruction": a, "input": "", "output": b} for a, b in pairs]
    (tmp_path / "alpaca.json").write_text(json.dumps(alpaca))
    (tmp_path / "dataset_info.json").write_text(json.dumps({"toy": {"file_name": "alpaca.json"}}))
    return tmp_path


def logged(*command: Any, cwd: Path) -> tuple[list[str], str]:
    """The losses and gradient norms that a run prints, and all that it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DISABLE_VERSION_CHECK": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
        timeout=600,
    )
    shown = done.stdout + done.stderr
    assert done.returncode == 0, shown[-3000:]
    return re.findall(r"'loss': '?[\d.]+'?, 'grad_norm': '?[\d.]+'?", shown), shown


def assert_same_log(got: tuple[list[str], str], want: tuple[list[str], str]) -> None:
    assert len(got[0]) == 3 and got[0] == want[0]
    assert "streambp/chunk" in got[1] and "StreamBPWarning" not in got[1] and "streambp" not in want[1]


@pytest.mark.slow
def test_llama_factory(toy: Path) -> None:
    pytest.importorskip("llamafactory", reason="llamafactory is not installed")
    settings = {
        "model_name_or_path": str(toy / "model"), "stage": "sft", "do_train": True, "finetuning_type": "full",
        "dataset": "toy", "dataset_dir": str(toy), "template": "default", "cutoff_len": 64,
        "output_dir": str(toy / "out"), "logging_steps": 1, "max_steps": 3, "per_device_train_batch_size": 2,
        "learning_rate": 1e-3, "report_to": "none", "disable_gradient_checkpointing": True,
        "overwrite_output_dir": True,
        "save_strategy": "no", "use_cpu": True,
    }  # fmt: skip
    (toy / "config.yaml").write_text(json.dumps(settings))  # JSON is YAML
    plain = "from llamafactory.train.tuner import run_exp; run_exp()"
    got = logged(FOLDER / "llama_factory.py", toy / "config.yaml", cwd=toy)
    assert_same_log(got, logged("-c", plain, toy / "config.yaml", cwd=toy))


@pytest.mark.slow
def test_ms_swift(toy: Path) -> None:
    pytest.importorskip("swift", reason="ms-swift is not installed")
    settings = {
        "model": toy / "model", "model_type": "llama", "template": "qwen2_5", "dataset": toy / "chat.jsonl",
        "tuner_type": "full", "torch_dtype": "float32", "max_length": 128, "max_steps": 3, "logging_steps": 1,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "gradient_checkpointing": "false",
        "use_logits_to_keep": "false", "output_dir": toy / "out", "report_to": "none", "use_cpu": "true",
        "split_dataset_ratio": 0, "dataset_num_proc": 1, "dataloader_num_workers": 0, "learning_rate": 1e-3,
    }  # fmt: skip
    program = "import sys; from swift import sft_main; sft_main(sys.argv[1:])"
    given = [word for name, value in settings.items() for word in (f"--{name}", value)]
    own = ["--external_plugins", FOLDER / "swift_streambp.py", "--callbacks", "streambp"]
    got, want = logged("-c", program, *given, *own, cwd=toy), logged("-c", program, *given, cwd=toy)
    assert_same_log(got, want)


def test_axolotl() -> None:
    """The plugin is one of Axolotl's, and gives the callback."""
    plugin = script("axolotl_streambp", "axolotl.integrations.base").StreamBPPlugin()
    (callback,) = plugin.add_callbacks_pre_trainer({}, None)
    assert isinstance(callback, StreamBPCallback)


@pytest.mark.slow
def test_axolotl_trains(toy: Path) -> None:
    pytest.importorskip("axolotl.train", reason="axolotl is not installed")
    data = {"path": str(toy / "alpaca.json"), "ds_type": "json", "type": "alpaca"}
    settings = {
        "base_model": str(toy / "model"), "datasets": [data], "dataset_prepared_path": str(toy / "prepared"),
        "output_dir": str(toy / "out"), "sequence_len": 128, "train_on_inputs": True, "max_steps": 3,
        "micro_batch_size": 2, "gradient_accumulation_steps": 1, "logging_steps": 1, "learning_rate": 1e-3,
        "optimizer": "adamw_torch", "lr_scheduler": "constant", "bf16": False, "fp16": False, "tf32": False,
        "attn_implementation": "sdpa", "gradient_checkpointing": False, "save_strategy": "no",
        "device_map": "cpu", "use_cpu": True,
    }  # fmt: skip
    program = "import sys, axolotl.cli.train as t; sys.path.insert(0, sys.argv[1]); t.do_cli(sys.argv[2])"
    runs = []
    for name, own in (("got", {"plugins": ["axolotl_streambp.StreamBPPlugin"]}), ("want", {})):
        path = toy / f"{name}.yaml"
        path.write_text(json.dumps({**settings, **own}))  # JSON is YAML
        runs.append(logged("-c", program, FOLDER, path, cwd=toy))
    assert_same_log(*runs)


# ---- the pages


def test_every_script_is_on_a_page() -> None:
    pages = "".join(page.read_text() for page in PAGES.glob("*.md"))
    for path in FOLDER.glob("*.py"):
        assert f"{{literalinclude}} ../../examples/frameworks/{path.name}" in pages
