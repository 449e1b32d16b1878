"""The command line: what it accepts, what it refuses and how, and the demo on a tiny model."""

import io
import json
import runpy
import subprocess
import sys

import pytest
from rich.console import Console

import streambp_fx
from streambp_fx.cli import build_parser, main
from streambp_fx.commands.demo import DemoOptions, run_demo
from streambp_fx.models.known import known_models
from streambp_fx.show import progress

TINY = {
    "model_type": "llama",
    "vocab_size": 211,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


def test_defaults():
    args = build_parser().parse_args(["demo"])
    assert (args.seq_len, args.chunk, args.loss_chunk, args.steps) == (3072, None, 256, 2)
    assert (args.model, args.dtype, args.threads) == ("smollm2", "float32", 0)


@pytest.mark.parametrize(("given", "chunk"), [([], 25), (["--chunk", "7"], 7)])
def test_the_chunk_is_a_quarter_rounded_up_unless_it_is_given(monkeypatch, given, chunk):
    seen = []
    monkeypatch.setattr("streambp_fx.commands.demo.run_demo", seen.append)
    assert main(["demo", "--seq-len", "97", *given]) == 0
    assert seen == [DemoOptions(seq_len=97, chunk=chunk)]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["demo", "--chunk", "0"], "--chunk: must be at least 1, not 0"),
        (["demo", "--chunk", "many"], "'many' is not a whole number"),
        (["demo", "--seq-len", "1"], "--seq-len: must be at least 2"),
        (["demo", "--loss-chunk", "-3"], "--loss-chunk: must be at least 1"),
        (["demo", "--steps", "0"], "--steps: must be at least 1"),
        (["demo", "--threads", "-1"], "--threads: must be at least 0"),
        (["demo", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["demo", "--fast"], "unrecognized arguments: --fast"),
        (["verify"], "required: MODEL"),
        (["verify", "smollm2", "--seq-len", "1"], "--seq-len: must be at least 2"),
        (["verify", "smollm2", "--batch-size", "0"], "--batch-size: must be at least 1"),
        (["verify", "smollm2", "--chunk", "x"], "'x' is not a whole number"),
        (["verify", "smollm2", "--dtype", "float16"], "invalid choice: 'float16'"),
        (["dance"], "invalid choice: 'dance'"),
        ([], "required: COMMAND"),
    ],
)
def test_bad_arguments(capsys, argv, said):
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err


def test_a_missing_model(capsys, tmp_path):
    assert main(["demo", "--model", str(tmp_path / "nothing")]) == 2
    error = capsys.readouterr().err
    assert "no such file or directory" in error and "Traceback" not in error


def test_a_folder_without_a_config(capsys, tmp_path):
    assert main(["demo", "--model", str(tmp_path)]) == 2
    assert "no config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["plan", "qwen3-7b", "--seq-len", "64"], "Did you mean 'Qwen3-8B'?"),
        (["recipe", "sft"], "Did you mean 'sft-lora'?"),
    ],
)
def test_names_that_are_nearly_right(capsys, argv, said):
    assert main(argv) == 2
    assert said in capsys.readouterr().err


def test_it_is_a_module_that_can_be_run(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["streambp_fx", "--version"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_module("streambp_fx", run_name="__main__")
    assert exit_.value.code == 0 and streambp_fx.__version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ([], "demo"),
        (["demo"], "demo"),
        (["verify"], "MODEL"),
        *((["plan"], name) for name in known_models()),
    ],
)
def test_help(capsys, command, said):
    with pytest.raises(SystemExit) as exit_:
        main([*command, "--help"])
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    assert said in shown and "None" not in shown


def test_a_failed_step_is_an_error_and_not_a_traceback(capsys, config, monkeypatch):
    from streambp_fx.measure.step import WorkerError

    def fail(*_):
        raise WorkerError("the streamed step failed")

    monkeypatch.setattr("streambp_fx.commands.demo.run_isolated", fail)
    assert main(["demo", "--model", config, "--seq-len", "8"]) == 1
    assert "error: the streamed step failed" in capsys.readouterr().err


def test_demo_on_a_tiny_model(config, monkeypatch):
    monkeypatch.setattr(progress, "PIPE_SECONDS", 1.0)
    monkeypatch.delenv(progress.QUIET, raising=False)
    text = io.StringIO()
    options = DemoOptions(
        model=config, seq_len=96, chunk=24, loss_chunk=10, steps=2, dtype="float64", threads=1
    )
    result = run_demo(options, Console(file=text, width=100))
    assert result.difference.relative < 1e-9
    assert len(result.losses) == 2 and result.losses[1] < result.losses[0]
    assert result.losses[0] == pytest.approx(result.checkpointing.losses[0], rel=1e-9)
    assert text.getvalue().count("segments for 96 tokens, chunk 24, loss chunk 10") == 1
    assert text.getvalue().count("a first step, which is captured and compiled: 88 tokens, loss") == 1
    for shown in ("Fine-tuning, streamed", "step 2 of 2", "Hugging Face checkpointing", "streamed, chunk 24"):
        assert shown in text.getvalue()
    lines = [line for line in text.getvalue().splitlines() if "s in all so far" in line]
    assert (lines and "fine-tuning, streamed" in lines[0]) or "about" in lines[-1]
    assert "largest relative gradient difference" in text.getvalue()
    assert "weights are random" in text.getvalue()


def test_demo_command(monkeypatch, config):
    given = []
    monkeypatch.setattr("streambp_fx.commands.demo.run_demo", given.append)
    argv = ["demo", "--model", config, "--seq-len", "98", "--steps", "1", "--threads", "1"]
    assert main(argv) == 0
    assert given == [DemoOptions(model=config, seq_len=98, chunk=25, loss_chunk=256, steps=1, threads=1)]


@pytest.mark.slow
def test_demo_command_to_the_end(capsys, config):
    argv = ["demo", "--model", config, "--seq-len", "96", "--steps", "1", "--threads", "1"]
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert "streamed, chunk 24" in shown and "96 tokens of random tokens" in shown


@pytest.mark.slow
def test_verify_prints_tables(capsys, config):
    argv = ["verify", config, "--seq-len", "67", "--batch-size", "2", "--chunk", "16", "--loss-chunk", "8"]
    assert main([*argv, "--dtype", "float64"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in (
        *("2 sequences of 67 tokens, chunk 16, loss chunk 8", "float64, random tokens", "weights are random"),
        *("21 of 21 parameters agree within 1e-06", "norm ", "0, 15, 16,", "all rows up to its own"),
        "confirmed: gradients agree",
    ):
        assert words in shown, words


@pytest.mark.slow
def test_verify_as_json_with_default_sizes(capsys, config):
    assert main(["verify", config, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["seq_len"] == 261 and found["chunk"] == found["loss_chunk"] == 66
    assert len(found["gradients"]) == 21 and all(g["ok"] for g in found["gradients"])
    assert {p["reach"] for p in found["probes"]} == {"row", "causal"} and found["not_claimed"] == []


@pytest.mark.slow
def test_verify_fails_where_gradients_differ(capsys, config, monkeypatch):
    """Status 1, and the words for it."""
    module = sys.modules["streambp_fx.verify"]
    honest = module.compile_graph

    def wrong(*args, **kwargs):
        run = honest(*args, **kwargs)
        return lambda *inputs: [v if v is None else v * 1.01 for v in run(*inputs)]

    monkeypatch.setattr(module, "compile_graph", wrong)
    assert main(["verify", config, "--seq-len", "67"]) == 1
    shown = capsys.readouterr().out
    assert "differs: " in shown and "NOT CONFIRMED: loss or gradients differ" in shown


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["nothing-here"], "no such file or directory"),
        (["FOLDER"], "holds no config.json"),
        (["CONFIG", "--seq-len", "90"], "--seq-len 90, but the model has 64 positions"),
    ],
)
def test_verify_refuses_in_plain_words_and_writes_nothing(capsys, tmp_path, monkeypatch, argv, said):
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64, "vocab_size": 211}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    empty, config = tmp_path / "empty", tmp_path / "config.json"
    empty.mkdir()
    config.write_text(json.dumps({"model_type": "gpt2", **sizes, **ends}))
    monkeypatch.chdir(empty)
    places = {"FOLDER": str(empty), "CONFIG": str(config)}
    assert main(["verify", *(places.get(a, a) for a in argv)]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and "Traceback" not in captured.err and captured.out == ""
    assert list(empty.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        "explain nope --seq-len 8",
        "plan",
        "plan nope --seq-len 8",
        "plan qwen3-8b",
        "plan qwen3-8b --memory 3x",
        "verify nope",
        "demo --model nope",
    ],
)
def test_wrong_arguments_are_said_before_pytorch_is_imported(arguments: str) -> None:
    """It takes seconds."""
    code = "import sys; from streambp_fx.cli import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    run = [sys.executable, "-c", code, *arguments.split()]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["2", "False"], done.stdout
    assert "error:" in done.stderr and "Traceback" not in done.stderr
