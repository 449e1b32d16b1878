"""Long work is announced on a terminal, and on a pipe where that was asked for."""

from __future__ import annotations

import functools
import io
import time

import pytest
import torch
from torch import nn

import streambp_fx
from streambp_fx.passes import PASSES
from streambp_fx.show import progress
from streambp_fx.show.progress import announced


class Terminal(io.StringIO):
    """Standard error on a terminal."""

    def isatty(self) -> bool:
        return True


def stderr_of(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, quiet: str | None = None) -> str:
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("STREAMBP_QUIET", raising=False)
    if quiet is not None:
        monkeypatch.setenv("STREAMBP_QUIET", quiet)
    with announced("long work"), announced("a part of it"):
        pass
    return stream.getvalue()


def test_a_terminal_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    text = stderr_of(monkeypatch, Terminal(), quiet="0")
    assert text.count("long work took") == 1 and "a part of it" not in text
    assert stderr_of(monkeypatch, Terminal()), "and the next time again"


@pytest.mark.parametrize(("stream", "quiet"), [(io.StringIO, None), (Terminal, "1"), (Terminal, "yes")])
def test_quiet(monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO], quiet: str | None) -> None:
    assert stderr_of(monkeypatch, stream(), quiet) == ""


def test_after_an_error_the_line_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.delenv("STREAMBP_QUIET", raising=False)
    with pytest.raises(KeyError), announced("work that fails"):
        raise KeyError
    assert "long work took" in stderr_of(monkeypatch, Terminal())


class Net(nn.Module):
    """A model that compiles in a moment."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(torch.tanh(self.embed(input_ids)))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def test_the_first_step_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.delenv("STREAMBP_QUIET", raising=False)
    model, ids = streambp_fx.transform(Net().train(), chunk=8), torch.randint(20, (2, 30))
    for _ in range(2):
        model(input_ids=ids, labels=ids)["loss"].backward()
    assert terminal.getvalue().count("the first training step took") == 1


def test_how_long_it_will_take() -> None:
    """Roughly by the size of the model, then by what is traced; once that is over nothing is promised."""
    work = progress.Work("planning", expected=60.0)
    assert str(work) == "streambp-fx: planning, 0 of about 60 s"
    work.start -= 10.0
    for share in (0.01, 0.02):
        work.advanced(share)
    assert str(work) == "streambp-fx: planning, 10 of about 60 s", "so little of it says nothing"
    work.phase -= 5.0
    work.advanced(0.25)  # five seconds for a quarter, ten before: 15 more, and what comes after
    assert str(work) == "streambp-fx: planning, 10 of about 30 s"
    work.advanced(0.1)  # another trace has begun
    work.advanced(1.0)
    work.passed("capture", None, 1.0)
    assert str(work) == "streambp-fx: planning, 10 of about 12 s (finding out what each row reads)"
    work.start -= 5.0
    work.passed("normalize", None, 1.0)  # of no interest to a user
    assert str(work) == "streambp-fx: planning, 15 s so far (finding out what each row reads)"
    assert progress.NEXT.keys() <= {p.name for p in PASSES}


def test_work_within_other_work_says_how_long_that_will_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(progress.QUIET, raising=False)
    monkeypatch.setattr(progress, "PIPE_SECONDS", 0.02)
    step = functools.partial(progress.announced, "the first training step", expected=40.0)
    with progress.announced("planning", on_pipes=True), step():
        time.sleep(0.1)
    assert "streambp-fx: planning, 0 of about 40 s" in capsys.readouterr().err
    with progress.announced("planning", on_pipes=True):
        time.sleep(0.1)
    assert "about" not in capsys.readouterr().err


def test_tracing_tells_what_share_is_done() -> None:
    from streambp_fx.passes.pipeline.log import observed

    shares: list[float] = []
    with observed(lambda *_: None, shares.append):
        streambp_fx.explain(Net(), 30)
    assert len(shares) > 4 and shares[-1] == 1.0 and shares == sorted(shares)


def test_on_a_pipe_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where it was asked for, and nothing if it is over before, or silenced."""
    monkeypatch.delenv(progress.QUIET, raising=False)
    monkeypatch.setattr(progress, "PIPE_SECONDS", 0.02)
    with progress.announced("planning Qwen3-8B", on_pipes=True):
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) >= 2
    assert all(line.startswith("streambp-fx: planning Qwen3-8B, 0 s so far") for line in lines)
    monkeypatch.setattr(progress, "PIPE_SECONDS", 10.0)
    with progress.announced("planning Qwen3-8B", on_pipes=True):
        pass
    monkeypatch.setenv(progress.QUIET, "1")
    monkeypatch.setattr(progress, "PIPE_SECONDS", 0.02)
    with progress.announced("planning Qwen3-8B", on_pipes=True):
        time.sleep(0.1)
    assert not capsys.readouterr().err
