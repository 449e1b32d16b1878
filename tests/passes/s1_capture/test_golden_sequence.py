"""sequence: which sizes of the inputs are the sequence length, told from the ops and not from the numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from golden import check_golden
from golden_graphs import Small, ids, listed, source
from graphs import in_backend
from torch import Tensor

from streambp_fx.passes.graph.facts import expression
from streambp_fx.passes.graph.sources import source_name
from streambp_fx.passes.s1_capture.sequence_length import find_lengths


def found_in(function: Callable[..., Any], name: str, *inputs: Tensor, **options: Any) -> dict[str, str]:
    """Compare what is found in a function of inputs, all sizes of which are open, with its golden file."""
    given = inputs or (ids(),)
    dims = tuple(tuple(range(v.dim())) for v in given)
    found = in_backend(lambda graph, _: _words(graph, **options), Small(function), *given, open_dims=dims)
    asked = [f"asked with {k}={v}" for k, v in options.items()]
    lines = [f"{k + ':':<10}{v}" for k, v in found.items()]
    check_golden("\n".join([source(function), "", *asked, *lines]), __file__, f"sequence_{name}")
    return found


def _words(graph: torch.fx.GraphModule, **options: Any) -> dict[str, str]:
    lengths = find_lengths(graph, **options)

    def sizes(symbols: Any) -> str:
        return listed(sorted(place for place, symbol in _places(graph) if symbol in symbols))

    return {
        "sequence": sizes(lengths.sequence),
        "samples": sizes(lengths.samples),
        "others": sizes(lengths.others - lengths.samples),
        "longer": str(lengths.longer),
        "reason": (lengths.reason or "-").replace("'l_labels_'", "labels"),
    }


def _places(graph: torch.fx.GraphModule) -> Iterator[tuple[str, Any]]:
    """The sizes of the inputs that are symbols, as `dim 1 of ids`."""
    for node in graph.graph.nodes:
        value = node.meta.get("example_value") if node.op == "placeholder" else None
        for dim, size in enumerate(value.shape) if isinstance(value, Tensor) else ():
            if isinstance(size, torch.SymInt):
                yield f"dim {dim} of {source_name(node)}", expression(size)


def attention(m: Small, ids: Tensor) -> Tensor:
    q = m.heads(m.embed(ids))
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


def test_attention_says_along_which_size_it_reads() -> None:
    """Though the batch is as large as the sequence is long."""
    found = found_in(attention, "attention", ids(13, 13))
    assert (found["sequence"], found["samples"]) == ("dim 1 of ids", "dim 0 of ids")


def two_inputs(m: Small, ids: Tensor, labels: Tensor) -> Tensor:
    q = m.heads(m.embed(ids))
    return F.scaled_dot_product_attention(q, q, q, is_causal=True) * labels.sum()


def test_an_input_as_long_as_the_tokens_has_their_length() -> None:
    """Its other size is a number of samples, and becomes one with that of the tokens."""
    found = found_in(two_inputs, "two_inputs", ids(3, 13), torch.ones(3, 13))
    assert found["sequence"] == "dim 1 of ids, dim 1 of labels"
    assert found["samples"] == "dim 0 of ids, dim 0 of labels"


def test_an_input_of_another_length_has_one_of_its_own() -> None:
    found = found_in(two_inputs, "another_length", ids(3, 13), torch.ones(3, 17))
    assert found["sequence"] == "dim 1 of ids" and "dim 1 of labels" in found["others"]


def test_two_sizes_of_an_input_that_are_as_long_as_the_tokens_are_not_told_apart() -> None:
    found = found_in(two_inputs, "square_input", ids(3, 13), torch.ones(13, 13))
    assert found["sequence"] == "-" and "equally long (13)" in found["reason"]


def shifted(m: Small, ids: Tensor) -> Tensor:
    q = m.heads(m.embed(ids[:, :-1]))
    scores = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    return scores.sum() + ids[:, 1:].sum()


def test_tokens_and_labels_of_one_input() -> None:
    """What is streamed is one row shorter than the input."""
    found = found_in(shifted, "shifted")
    assert (found["sequence"], found["longer"]) == ("dim 1 of ids", "1")


def running_sum(m: Small, ids: Tensor) -> Tensor:
    return m.head(m.embed(ids).cumsum(1))


def test_a_running_sum_is_read_where_there_is_no_attention() -> None:
    assert found_in(running_sum, "running_sum")["sequence"] == "dim 1 of ids"


def by_rows(m: Small, ids: Tensor) -> Tensor:
    return m.head(m.embed(ids).exp())


def test_nothing_reads_along_a_size() -> None:
    found = found_in(by_rows, "by_rows")
    assert found["sequence"] == "-" and found["reason"].startswith("no op of the graph reads along")


def test_a_user_who_names_the_dim_is_believed() -> None:
    found = found_in(by_rows, "named", ids(), seq_dim={"ids": 1})
    assert (found["sequence"], found["reason"]) == ("dim 1 of ids", "-")


def encoder(m: Small, ids: Tensor, labels: Tensor) -> Tensor:
    q, k = m.heads(m.embed(ids)), m.heads(m.embed(labels))
    q = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    k = F.scaled_dot_product_attention(k, k, k)
    return F.scaled_dot_product_attention(q, k, k)


def test_ops_that_read_along_sizes_of_different_lengths() -> None:
    found = found_in(encoder, "encoder", ids(2, 13), ids(2, 7))
    assert found["sequence"] == "-" and "different lengths, [7, 13]" in found["reason"]


def test_the_input_that_is_likely_to_hold_the_tokens_decides() -> None:
    found = found_in(encoder, "encoder_likely", ids(2, 13), ids(2, 7), likely={"ids": 1})
    assert found["sequence"] == "dim 1 of ids"
