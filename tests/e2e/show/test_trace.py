"""Looking at the compiler: the program after each pass, differences, the segment graph, the printed table."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from e2e_check import GRAPH_PASSES
from e2e_models import build, plain

import streambp_fx

PASSES = list(GRAPH_PASSES)
PASSES.insert(PASSES.index("widen_late"), "masks")  # a stage of its own in a trace
PASSES += [
    "accumulate",
    "dead_code",
    "recorded_steps",
    "simplify",
    "reorder",
    "rematerialize",
    "write_in_place",
    "workspace",
]
PASSES += ["views", "names", "keep_inputs_of_groups", "overwrite_rows_of_loss", "drop_what_nobody_reads"]
PASSES += ["fold_layers"]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def traced() -> streambp_fx.Trace:
    model = build("gemma2")
    model.train(False)
    before = copy.deepcopy(model.state_dict())
    found = streambp_fx.trace(model, plain(2, 37), chunk=16)
    assert "forward" not in vars(model) and not model.training, "the model is left as it was"
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    return found


def test_every_pass_in_order(traced: streambp_fx.Trace) -> None:
    assert [p.name for p in traced.passes] == PASSES and traced.names == [*PASSES, "lower"]
    ops = {p.name: p.ops for p in traced.passes}
    assert ops["capture"] > ops["normalize"] > 50, "dead code and views that do nothing are gone"
    assert all(p.seconds >= 0 for p in traced.passes) and sum(p.seconds for p in traced.passes) > 0
    table = str(traced).splitlines()
    assert table[0].split() == ["pass", "ops", "seconds", "what", "it", "does"] and len(table) == 1 + len(
        PASSES
    )
    assert table[3].split()[:2] == ["normalize", str(ops["normalize"])]


def test_the_program_after_a_pass(traced: streambp_fx.Trace) -> None:
    """Each text is taken right after its pass, though passes change the graph in place."""
    captured, shared = traced.after("capture"), traced.after("signatures")
    assert "inputs['model.layers.0.self_attn.q_proj.weight']" in captured
    assert re.search(r"modeling_gemma2\.py:\d+: query_states = self\.q_proj", captured)
    assert re.search(
        r"linear\w* = aten\.linear\.default\(\w+, \w+\)  # \[\w+, T, 32\] float64$", captured, re.M
    )
    assert re.search(r"linear\w* = .* float64, stream \[-, row, -\]$", shared, re.M)
    assert "# ---- segment 1 (layer)" in shared and "# ---- segment" not in traced.after("lazy_outputs")
    assert "reads WINDOW" in shared and "reads FULL" in traced.after("axes"), "proved by footprints"


def test_masks_and_the_finished_program(traced: streambp_fx.Trace) -> None:
    masks = traced.after("masks")
    assert "reads WINDOW of 16 rows" in masks and "reads CAUSAL" in masks
    assert "causal and window 16" in masks and "modeling_gemma2.py:" in masks
    assert traced.after("lower") == traced.schedule.code()
    assert "def step(input_ids, labels, parameters" in traced.after("lower")


def test_differences(traced: streambp_fx.Trace) -> None:
    difference = traced.diff("capture", "normalize")
    assert difference.splitlines()[:2] == ["--- capture", "+++ normalize"]
    assert any(line.startswith("-") for line in difference.splitlines()[2:])
    assert traced.diff("signatures", "signatures") == ""
    assert streambp_fx.diff("a\nb", "a\nc") == "--- before\n+++ after\n@@ -1,2 +1,2 @@\n a\n-b\n+c"


def test_names_that_no_pass_has(traced: streambp_fx.Trace) -> None:
    words = r"'normalise'; the passes are capture, .*, lower\. Did you mean 'normalize'"
    with pytest.raises(streambp_fx.UnknownPassError, match=words):
        traced.after("normalise")
    with pytest.raises(ValueError, match="Did you mean 'footprints'"):
        traced.diff("capture", "footprint")
    with pytest.raises(TypeError, match=r"as trace\.after\(name\) gives them, not Trace"):
        streambp_fx.diff("a", traced)  # type: ignore[arg-type]


def test_what_trace_refuses() -> None:
    model = build("llama", num_hidden_layers=1)
    with pytest.raises(ValueError, match="unknown option 'chnk'"):
        streambp_fx.trace(model, plain(1, 9), chnk=4)
    refused = pytest.raises(streambp_fx.CaptureError, match="gave no graph to trace")
    with refused, pytest.warns(streambp_fx.StreamBPWarning, match="output_attentions"):
        streambp_fx.trace(model, {**plain(1, 9), "output_attentions": True})
    assert "forward" not in vars(model)


# -- the segment graph -----------------------------------------------------------------------------------

STATEMENT = re.compile(
    r"\s*(?:(?P<a>\w+) -> (?P<b>\w+)|(?P<node>\w+))"
    r'(?: \[(?P<attributes>\w+="(?:[^"\\]|\\.)*"(?:, \w+="(?:[^"\\]|\\.)*")*)\])?;'
)


def parse(text: str) -> tuple[dict[str, str], list[tuple[str, str, str]]]:
    """Nodes and edges of Graphviz text, with their attributes; fails for what is not of the language."""
    lines = text.splitlines()
    assert re.fullmatch(r'digraph "\w+" \{', lines[0]) and lines[-1] == "}"
    nodes: dict[str, str] = {}
    edges = []
    for line in lines[1:-1]:
        if re.fullmatch(r'  \w+="\w+";', line):
            continue
        found = STATEMENT.fullmatch(line)
        assert found is not None, line
        if found["node"]:
            nodes[found["node"]] = found["attributes"] or ""
        else:
            edges.append((found["a"], found["b"], found["attributes"] or ""))
    assert all(end in nodes for a, b, _ in edges for end in (a, b)), "every end of an edge is a node"
    return nodes, edges


@pytest.mark.slow
def test_segment_graph() -> None:
    schedule = streambp_fx.explain(build("llama"), seq_len=64, batch_size=2, chunk=16)
    nodes, edges = parse(schedule.to_dot())
    assert {"inputs", "outputs", *(f"segment_{k}" for k in range(4))} <= set(nodes)
    ends = [(a, b) for a, b, _ in edges]
    for wanted in [("inputs", "segment_0"), *((f"segment_{k}", f"segment_{k + 1}") for k in range(3))]:
        assert wanted in ends
    assert ("segment_1", "segment_1") in ends and ("segment_3", "segment_3") not in ends
    assert ("segment_3", "outputs") in ends
    labels = {(a, b): text for a, b, text in edges}
    assert "512 bytes a row" in labels["segment_1", "segment_2"], "2 sequences, 32 numbers of 8 bytes"
    assert "state" in labels["segment_1", "segment_1"] and "512 bytes" in labels["segment_1", "segment_1"]
    assert "dashed" not in nodes["segment_1"]


def test_segment_graph_of_what_runs_whole() -> None:
    class Flip(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor, say: str = 'a "quoted" word') -> torch.Tensor:
            return self.inner(x).flip(1)

    model = build("llama", num_hidden_layers=1)
    model.model.layers[0].mlp = Flip(model.model.layers[0].mlp)
    with pytest.warns(streambp_fx.StreamBPWarning):
        nodes, _ = parse(streambp_fx.explain(model, seq_len=64).to_dot())
    whole = [text for text in nodes.values() if "flip" in text]
    assert len(whole) == 1 and "dashed" in whole[0] and "runs unchunked: " in whole[0]
    assert "test_trace.py" in whole[0]


# -- verbose ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_verbose_prints_the_table_once_a_graph(capsys: Any) -> None:
    model = build("llama", num_hidden_layers=1)
    streambp_fx.transform(model, chunk=16, loss_chunk=8, verbose=True)
    assert capsys.readouterr().out == "", "nothing is compiled yet"
    model(**plain(2, 37)).loss.backward()
    shown = capsys.readouterr().out
    schedule = streambp_fx.schedule(model)
    assert shown == f"{schedule.for_length(37)}\n" and "for 37 tokens, chunk 16" in shown
    assert schedule.seq_len is None, "the schedule itself serves all lengths"
    model(**plain(2, 37)).loss.backward()
    assert capsys.readouterr().out == "", "the graph is known"


def test_verbose_is_kept_by_copies_and_is_no_option_of_compilation() -> None:
    model = streambp_fx.transform(build("llama", num_hidden_layers=1), verbose=True)
    assert copy.deepcopy(model).forward.verbose and pickle.loads(pickle.dumps(model)).forward.verbose
    assert not streambp_fx.transform(model).forward.verbose
    assert not hasattr(streambp_fx.Options(), "verbose")
    with pytest.raises(ValueError, match="verbose must be True or False, not 'yes'"):
        streambp_fx.transform(model, verbose="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown option 'verbos'"):
        streambp_fx.transform(model, verbos=True)
