"""Where nodes of a graph come from: the model's name of an input, and the line that calls an op."""

from __future__ import annotations

import re

import torch

# Where functions are that stand between a model and its ops: it is the model's line that is wanted.
STANDS_IN = ("/streambp_fx/models/", "/streambp_fx/dynamo/", "/torch/nn/attention/")
IN_MODULE = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")


def source_expression(placeholder: torch.fx.Node) -> str:
    """The expression in which Dynamo found an input: `L['self']._modules['norm']._parameters['weight']`."""
    argument = placeholder.meta.get("grapharg")
    name = argument.source.name if argument is not None else placeholder.name
    return name() if callable(name) else name


def is_kept_by_model(node: torch.fx.Node) -> bool:
    """True for a parameter or a buffer of a module."""
    source = node.meta.get("source", "")
    return node.op == "placeholder" and ("._buffers[" in source or "._parameters[" in source)


def path(placeholder: torch.fx.Node) -> str:
    """Dotted name of a captured parameter or buffer in its model, "model.norm.weight"; an input's name."""
    source = placeholder.meta.get("source", "")
    parts = [p for p in IN_MODULE.findall(source) if p != "_orig_mod"]
    if parts:
        return ".".join(parts)
    words = re.findall(r"[A-Za-z_]\w*", source)
    return words[-1] if words else placeholder.name


def source_name(placeholder: torch.fx.Node) -> str:
    """Readable name of a Dynamo input: `model.layers.0.mlp.up_proj.weight`, or the argument's name."""
    name = source_expression(placeholder)
    for table in ("_modules", "_parameters", "_buffers"):
        name = name.replace(f".{table}[", "[")
    parts = [p.strip("'\"") for p in name.replace("]", "").replace("L[", "").split("[")]
    return ".".join(p for p in parts if p not in ("self", "args", "kwargs", "model"))


def source_line(node: torch.fx.Node) -> str:
    """`file.py:123: code` of the model's source line that made `node`, or its name if unknown."""
    lines = [line.rstrip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    for position in range(len(lines) - 1, -1, -1):
        text = lines[position].strip()
        if text.startswith("File ") and not any(folder in text for folder in STANDS_IN):
            file, line = text.split('"')[1], text.split("line ")[1].split(",")[0]
            code = lines[position + 1].strip() if position + 1 < len(lines) else ""
            return f"{file}:{line}: {code}"
    return node.name
