"""Plans of random models: what is drawn, from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from e2e_random_menu import BLOCKS, LOSSES, RANDOM, Entry
from e2e_random_programs import hidden_program, scores_program
from e2e_subject import VOCAB, WIDTH


class RefusedByEager(Exception):
    """Autograd does not allow it, a length is too short for it, or it is not finite."""


@dataclass(frozen=True)
class Plan:
    """One random model and what is done with it.

    Attributes:
        blocks: class and name of each; of "program" and "scores" the seed of a random one.
        loss: class and name.
        shared: blocks with parameters of the first block that allows it.
        door: "compile" or "transform".
        options: of the compiler.
        sizes: batch and length of each step.
        expensive: `passes.s3_cut.segment.EXPENSIVE` for it (-1: nothing is cut where it need not be).
        extras: situations; see `_prepare` and `_between`.
        draws: has random ops, and is compared with itself and by finite differences.
    """

    seed: int
    blocks: tuple[tuple[str, Any], ...]
    loss: tuple[str, str]
    shared: frozenset[int] = frozenset()
    door: str = "compile"
    options: tuple[tuple[str, Any], ...] = ()
    sizes: tuple[tuple[int, int], ...] = ((2, 33),)
    expensive: float = 4.0
    extras: frozenset[str] = frozenset()
    draws: bool = False

    def __str__(self) -> str:
        lines = [f"seed {self.seed}, door {self.door}, {dict(self.options)}, sizes {self.sizes}"]
        for number, (kind, name) in enumerate(self.blocks):
            said = ""
            if kind in PROGRAMS:
                said = "".join(f"\n      {line}" for line in PROGRAMS[kind](name).said)
            lines.append(f"  {number}: {kind}, {name}{', shared' if number in self.shared else ''}{said}")
        lines.append(f"  loss {self.loss}, extras {sorted(self.extras)}, expensive {self.expensive}")
        return "\n".join(lines)


PROGRAMS: dict[str, Callable[[int], Any]] = {"program": hidden_program, "scores program": scores_program}
EXTRAS = (
    "frozen",
    "tied",
    "strided",
    "optimizer",
    "forward hook",
    "parameter hook",
    "gradient hook",
    "picked",
)


def entry_of(kind: str, name: Any) -> Entry:
    if kind in PROGRAMS:
        program = PROGRAMS[kind](name)
        return (lambda m, x, past, ids: program(m, x, ids)), None
    return RANDOM[name] if kind == "random" else BLOCKS[kind][name]


def plan_of(seed: int, attempt: int) -> Plan:
    choose = random.Random(1_000_003 * seed + attempt)
    draws = choose.random() < 0.1
    kinds = [*BLOCKS, "program", "program", "program", "scores program", "scores program"]

    def block() -> tuple[str, Any]:
        kind = choose.choice(kinds)
        if kind in PROGRAMS:
            return kind, choose.randrange(1 << 30)
        return kind, choose.choice(sorted(BLOCKS[kind]))

    blocks = [block() for _ in range(choose.choice([0, 1, 1, 2, 2, 3]))]
    if draws:
        ordinary = [("ordinary", n) for n in ("causal", "mlp", "window", "mean", "slopes")]
        blocks = [choose.choice(ordinary), ("random", choose.choice(sorted(RANDOM)))]
    blocks.insert(choose.randint(0, len(blocks)), ("ordinary", "causal"))  # so that there is a sequence
    loss = choose.choice(sorted(LOSSES)) if choose.random() < 0.7 and not draws else "ordinary"
    chunk = choose.choice([1, 3, 8, 8, 16])
    lengths = [
        choose.choice([choose.randint(9, 40), 33, WIDTH, VOCAB, 2 * WIDTH]),
        choose.randint(7, 60),
        chunk + 1,
    ]
    batch = choose.randint(1, 3)
    grows = choose.random() < 0.5
    options = {"chunk": chunk, "loss_chunk": choose.choice([2, 5, 8])}
    for name, values in {
        "save": ["attention"],
        "every": [2, 3],
        "offload": ["disk"],
        "logits": ["keep"],
    }.items():
        if choose.random() < 0.15:
            options[name] = choose.choice(values)
    door = choose.choice(["compile", "transform"])
    if door == "compile" and choose.random() < 0.5:
        options["seq_dim"] = {"input_ids": 1}
    return Plan(
        seed,
        tuple(blocks),
        (loss, choose.choice(sorted(LOSSES[loss]))),
        frozenset(k for k in range(len(blocks)) if choose.random() < 0.3),
        door,
        tuple(options.items()),
        tuple((batch + (k if grows else 0), n) for k, n in enumerate(lengths)),
        choose.choice([4.0, 4.0, -1.0, 50.0]),
        frozenset(e for e in EXTRAS if choose.random() < 0.1 and not draws),
        draws,
    )
