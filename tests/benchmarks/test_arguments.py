"""The command line of the benchmarks: what is refused, and how."""

import json

import pytest
from rich.console import Console

from benchmarks.__main__ import main
from benchmarks.cases import CASES
from benchmarks.modes import MODES


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--case", "dens"], "there is no case 'dens'; cases: dense, "),
        (["--modes", "eager,fast"], "there is no mode 'fast'; modes: eager, "),
        (["--modes", ","], "no mode is named"),
        (["--sweep", "tokens", "--values", "1k,2k"], "give whole numbers"),
        (["--sweep", "tokens", "--values", "512"], "two sizes or more"),
        (["--case", "batch", "--budget", "much"], "--budget: 'much' is no amount of memory"),
        (["--reference", "/nowhere"], "there is no streamed_qwen3.py"),
        (["--published", "/nowhere"], "there is no src/streambp"),
        (["--check", "--recorded", "/nowhere.json"], "no ratios are recorded"),
    ],
)
def test_bad_input_is_said_plainly_before_anything_is_run(arguments, message, tmp_path, capsys):
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.startswith("error: ") and not captured.out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [["--sweep", "width"], ["--steps", "0"], ["--tolerance", "-1"]])
def test_bad_values_are_refused_by_the_parser(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert f"argument {arguments[0]}" in capsys.readouterr().err


def test_a_published_checkout_needs_an_environment(tmp_path, capsys):
    (tmp_path / "src" / "streambp").mkdir(parents=True)
    assert main(["--published", str(tmp_path)]) == 2
    assert "--published-python" in capsys.readouterr().err


def test_a_broken_record_is_refused(tmp_path, capsys):
    (tmp_path / "recorded.json").write_text(json.dumps({"other": 1}))
    assert main(["--check", "--recorded", str(tmp_path / "recorded.json")]) == 2
    assert "holds no recorded ratios" in capsys.readouterr().err


def test_the_list_names_every_case_and_mode_and_why_one_cannot_run(capsys):
    console = Console(width=200)
    assert main(["--list"], console) == 0
    shown = capsys.readouterr().out
    assert all(f" {name} " in shown for name in [*CASES, "batch", *MODES])
    assert "not given (--reference PATH)" in shown
