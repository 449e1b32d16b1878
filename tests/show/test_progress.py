"""Long work is announced on a terminal, and nowhere else."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

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
    import streambp_fx

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.delenv("STREAMBP_QUIET", raising=False)
    model, ids = streambp_fx.transform(Net().train(), chunk=8), torch.randint(20, (2, 30))
    for _ in range(2):
        model(input_ids=ids, labels=ids)["loss"].backward()
    assert terminal.getvalue().count("the first training step took") == 1
