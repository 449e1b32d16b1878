"""One attention over four tokens in two chunks, forwards and backwards by hand, against autograd.

Width 1, so that every value is a number: a query, key and value of token i are `x[i]` times a weight. The
scores are scaled by ln 2, so that the softmax weights are powers of two and can be checked on paper.
"""

import math

import torch
from torch import Tensor

X = torch.tensor([1.0, 2.0, 0.0, 1.0], dtype=torch.float64)  # the input of the layer, a number a token
WEIGHTS = {"query": 1.0, "key": 1.0, "value": 3.0}
SCALE = math.log(2)
CHUNKS = [(0, 2), (2, 4)]


def probabilities(query: Tensor, key: Tensor, start: int) -> Tensor:
    """Softmax weights of the rows from `start` on the keys up to each row, (rows, keys)."""
    hidden = torch.arange(len(key)) > torch.arange(start, start + len(query))[:, None]
    scores = SCALE * query[:, None] * key
    return scores.masked_fill(hidden, -math.inf).softmax(-1)


def show(title: str, values: Tensor) -> None:
    print(f"{title:<34}" + "".join(f"{v:9.4f}" for v in values.flatten().tolist()))


def forward() -> tuple[Tensor, Tensor, Tensor]:
    """The layer's output; keys and values are the carried state, to which each chunk adds its rows."""
    key, value, output = (torch.zeros(4, dtype=torch.float64) for _ in range(3))
    for start, end in CHUNKS:
        rows = X[start:end]
        key[start:end], value[start:end] = WEIGHTS["key"] * rows, WEIGHTS["value"] * rows
        weights = probabilities(WEIGHTS["query"] * rows, key[:end], start)
        output[start:end] = weights @ value[:end]
        show(f"forward, rows {start}-{end - 1}: output", output[start:end])
    return key, value, output


def backward(key: Tensor, value: Tensor, output_grad: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Gradients of the input and of the weights, the last chunk first."""
    grads = {name: torch.zeros((), dtype=torch.float64) for name in WEIGHTS}
    key_grad, value_grad, input_grad = (torch.zeros(4, dtype=torch.float64) for _ in range(3))
    for start, end in reversed(CHUNKS):
        rows, upstream = X[start:end], output_grad[start:end]
        query = WEIGHTS["query"] * rows
        # The chunk again, without anything that the forward kept but its input and the keys and values.
        weights = probabilities(query, key[:end], start)
        output = weights @ value[:end]
        # From the output back to the state: contributions to every row that was read, added to what is there.
        score_grad = weights * (value[:end] - output[:, None]) * upstream[:, None] * SCALE
        value_grad[:end] += weights.T @ upstream
        key_grad[:end] += score_grad.T @ query
        query_grad = score_grad @ key[:end]
        show(f"backward, rows {start}-{end - 1}: value gradients", value_grad)
        # No earlier chunk reads these rows: their gradients are complete, and go back to the input.
        own = {"query": query_grad, "key": key_grad[start:end], "value": value_grad[start:end]}
        for name, grad in own.items():
            grads[name] += grad @ rows
            input_grad[start:end] += grad * WEIGHTS[name]
        show(f"backward, rows {start}-{end - 1}: input gradients", input_grad[start:end])
    return input_grad, grads


def by_autograd(loss_of: object) -> tuple[Tensor, dict[str, Tensor]]:
    """The same gradients by PyTorch, all four tokens at once."""
    x = X.clone().requires_grad_()
    weights = {k: torch.tensor(v, dtype=torch.float64, requires_grad=True) for k, v in WEIGHTS.items()}
    query, key, value = (weights[name] * x for name in ("query", "key", "value"))
    loss = loss_of(probabilities(query, key, 0) @ value)  # type: ignore[operator]
    found = torch.autograd.grad(loss, [x, *weights.values()])
    return found[0], dict(zip(weights, found[1:], strict=True))


def compare(input_grad: Tensor, grads: dict[str, Tensor], loss_of: object) -> None:
    expected, weights = by_autograd(loss_of)
    gap = max(float((input_grad - expected).abs().max()), *(float(abs(grads[k] - weights[k])) for k in grads))
    show("gradients of the weights q, k, v", torch.stack(list(grads.values())))
    print(f"largest difference to autograd    {'below 1e-14' if gap < 1e-14 else gap}\n")


print("The loss is the sum of the outputs: its gradient by each output is 1, whatever the outputs are.")
key, value, output = forward()
print(f"loss {output.sum():.4f}")
compare(*backward(key, value, torch.ones(4, dtype=torch.float64)), torch.sum)

print("The loss is -log sigmoid(sum / 10): its gradient by an output is known after a first sweep only.")
key, value, output = forward()
sums = [output[start:end].sum() for start, end in CHUNKS]
show("sums of the two chunks", torch.stack(sums))
total = torch.stack(sums).sum().requires_grad_()
loss = -torch.nn.functional.logsigmoid(total / 10)
(coefficient,) = torch.autograd.grad(loss, total)
print(f"loss {loss:.4f}, its gradient by the sum {coefficient:.4f}")
compare(
    *backward(key, value, coefficient.expand(4)),
    lambda output: -torch.nn.functional.logsigmoid(output.sum() / 10),
)
