"""Functions that printed programs bring along, as text."""

from __future__ import annotations

import inspect

from ...passes.step.row_chunks import TILE, split_rows

# What the runtime itself calls, so that the text cuts a sequence where a step does.
SPLIT_ROWS = inspect.getsource(split_rows).replace("= TILE", f"= {TILE}")

NO_PROGRAM = '''
def no_program(rows, prefix, total):
    """What to raise where a chunk is of a kind for which nothing was printed."""
    return ValueError(
        f"no program was printed for {rows} rows after {prefix} of {total}: "
        "print the code for this sequence length"
    )
'''

ACCUMULATE = '''
def accumulate(gradients, names, found):
    """Add gradients to those of the same name."""
    for name, gradient in zip(names, found, strict=True):
        if gradient is not None:
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
'''

DIFFERENTIATE = '''
def differentiate(function, inputs, wanted, cotangents=None, random_state=None):
    """Gradients of the inputs at the positions `wanted`, by autograd: unchunked parts are computed again."""
    inputs = [v.detach() if isinstance(v, torch.Tensor) else v for v in inputs]
    for k in wanted:
        inputs[k].requires_grad_()
    with torch.random.fork_rng(devices=[], enabled=random_state is not None), torch.enable_grad():
        if random_state is not None:
            torch.set_rng_state(random_state)
        outputs = function(*inputs)
        if cotangents is None:
            cotangents = [torch.ones_like(v) for v in outputs]
        pairs = zip(outputs, cotangents, strict=True)
        pairs = [(v, g) for v, g in pairs if g is not None and v.requires_grad]
        if not pairs:
            return [None] * len(wanted)
        roots, cotangents = zip(*pairs, strict=True)
        return torch.autograd.grad(roots, [inputs[k] for k in wanted], cotangents, allow_unused=True)
'''

ROWS_OF = '''
def rows_of(value, dim, outer, total, inner, start, rows):
    """Rows of a value whose dim `dim` is `outer * total * inner`: a view merged the sequence with others."""
    split = value.unflatten(dim, (outer, total, inner))
    return split.narrow(dim + 1, start, rows).flatten(dim, dim + 2)
'''

WRITE_ROWS = '''
def write_rows(buffer, dim, outer, total, inner, start, value):
    """Store rows of a value whose dim `dim` is `outer * total * inner`."""
    value = value.unflatten(dim, (outer, -1, inner))
    buffer.unflatten(dim, (outer, total, inner)).narrow(dim + 1, start, value.shape[dim + 1]).copy_(value)
'''

ADD_ROWS = '''
def add_rows(buffer, dim, outer, total, inner, start, value):
    """Add to rows of a value whose dim `dim` is `outer * total * inner`."""
    value = value.unflatten(dim, (outer, -1, inner))
    buffer.unflatten(dim, (outer, total, inner)).narrow(dim + 1, start, value.shape[dim + 1]).add_(value)
'''

POWER_OF_TWO = '''
def power_of_two_above(value):
    """The power of two just above the greatest magnitude."""
    greatest = value.abs().amax().float().clamp_min(torch.finfo(torch.float32).tiny)
    return torch.exp2(torch.ceil(torch.log2(greatest)))
'''

DROPOUT_MASK = '''
def dropout_mask(like, probability, seed):
    """Factors 0 or 1 / (1 - p), drawn from a generator with this seed."""
    import random

    if probability == 1.0:
        return torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    generator = torch.Generator(device=like.device).manual_seed(random.Random(seed).getrandbits(32))
    keep = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    return keep.bernoulli_(1.0 - probability, generator=generator).div_(1.0 - probability)
'''

RANDOM_NUMBERS = '''
def random_numbers(size, method, parameters, seed, dtype, device):
    """Numbers drawn by a method of a tensor from a generator with this seed."""
    import random

    generator = torch.Generator(device=device).manual_seed(random.Random(seed).getrandbits(32))
    given = [int(p) if method == "random_" else p for p in parameters]
    return getattr(torch.empty(size, dtype=dtype, device=device), method)(*given, generator=generator)
'''

# By the name that a program calls them by.
HELPERS = {
    "split_rows": SPLIT_ROWS,
    "no_program": NO_PROGRAM,
    "accumulate": ACCUMULATE,
    "differentiate": DIFFERENTIATE,
    "rows_of": ROWS_OF,
    "write_rows": WRITE_ROWS,
    "add_rows": ADD_ROWS,
    "power_of_two_above": POWER_OF_TWO,
    "dropout_mask": DROPOUT_MASK,
    "random_numbers": RANDOM_NUMBERS,
}
