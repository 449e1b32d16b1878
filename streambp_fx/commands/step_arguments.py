"""Arguments of several commands: of a step that is looked at without weights."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from ..models.known import known_models
from ..units import CHOICES


def at_least(minimum: int) -> Callable[[str], int]:
    """An argument type: an int that is not below `minimum`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, not {value}")
        return value

    return parse


def add_step_without_weights(
    command: argparse.ArgumentParser, length_required: bool = False, model_required: bool = True
) -> None:
    """Arguments of commands that look at a step which is not run."""
    command.add_argument(
        "model",
        metavar="MODEL",
        nargs=None if model_required else "?",
        help="a directory with config.json, a config.json file, or one of the models that are known by name: "
        + ", ".join(known_models()),
    )
    command.add_argument(
        "--seq-len", type=at_least(2), required=length_required, metavar="N", help="tokens of each sequence"
    )
    command.add_argument(
        "--batch-size", type=at_least(1), default=1, metavar="N", help="sequences (default: 1)"
    )
    command.add_argument("--chunk", type=at_least(1), metavar="N", help="rows of a chunk (default: chosen)")
    command.add_argument(
        "--loss-chunk",
        type=at_least(1),
        metavar="N",
        help="rows in a chunk of the loss head (default: 256 tokens of all sequences together)",
    )
    command.add_argument("--dtype", default="bfloat16", help="of the weights (default: bfloat16)")
    command.add_argument("--save", default="inputs", choices=CHOICES["save"], help="what a layer keeps")
    command.add_argument(
        "--every", type=at_least(1), default=1, metavar="K", help="every K-th layer keeps it"
    )
    command.add_argument(
        "--offload", default="none", choices=CHOICES["offload"], help="where it lies meanwhile"
    )
    command.add_argument(
        "--offload-rows",
        action="store_true",
        help="rows between layers lie there as well while layers run, and come by chunks",
    )
    command.add_argument(
        "--order", default="auto", choices=CHOICES["order"], help="what goes first: layers, or chunks"
    )
    several = command.add_argument_group("several devices, each with a batch of its own")
    several.add_argument("--gpus", type=at_least(1), metavar="N", help="how many share the model")
    several.add_argument("--shard", metavar="ENGINE", help="how: ddp, zero1, zero2, zero3 or fsdp2")
    several.add_argument(
        "--wrap",
        default="layers",
        metavar="WHAT",
        help="what fully_shard is called on beside the model: layers, or model for nothing else",
    )
    several.add_argument(
        "--no-reshard",
        dest="reshard_after_forward",
        action="store_false",
        help="fsdp2 keeps layers gathered between forward and backward",
    )
