"""The arguments of `streambp-fx plan`, and what is done with them."""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import PlanError
from ..models.sources import config_file
from ..planning.amounts import check_amounts
from ..units import CHOICES
from .step_arguments import add_step_without_weights, at_least


def add_plan(commands: argparse._SubParsersAction) -> None:
    """Add the command and its arguments."""
    plan = commands.add_parser(
        "plan",
        help="does a training step fit: memory by cause, the chunk, the longest sequence",
        description="Predict the memory of a streamed training step from its schedule, without weights and "
        "without running it. With --memory: whether it fits, and the longest sequence that does.",
    )
    add_step_without_weights(plan, model_required=False)
    plan.add_argument(
        "--memory", "--gpu-memory", metavar="SIZE", help="of the device, or of each, for example 80GiB"
    )
    plan.add_argument(
        "--context-parallel",
        type=at_least(1),
        default=1,
        metavar="K",
        help="of the --gpus, K share each sequence",
    )
    plan.add_argument("--lora-rank", type=at_least(1), metavar="N", help="train LoRA adapters of this rank")
    plan.add_argument(
        "--optimizer", default="none", help="none, sgd, momentum or adamw (default: none: states elsewhere)"
    )
    plan.add_argument(
        "--policy",
        default="given",
        choices=CHOICES["policy"],
        help="auto: choose --save and --every so that it fits",
    )
    plan.add_argument(
        "--published",
        action="store_true",
        help="instead of a MODEL and --memory: the lengths that were published for StreamBP on 80 GB, beside "
        "those of a plan",
    )
    plan.add_argument(
        "--frontier",
        nargs="?",
        const="",
        metavar="FILE",
        help="also what memory buys: peak and work, with --gpu seconds, from the least memory to no "
        "recompute; FILE: draw it (.png, .svg or .pdf)",
    )
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    time = plan.add_argument_group("time of a step, predicted from these rates")
    time.add_argument(
        "--gpu",
        metavar="NAME",
        help="A100, A800, H100, H200, L40S, or here: this machine, which is measured (with --gpus: H100)",
    )
    time.add_argument(
        "--flops", type=float, metavar="RATE", help="operations a second, instead of those of the data sheet"
    )
    time.add_argument(
        "--efficiency",
        type=float,
        metavar="SHARE",
        help="of that rate that products and attention reach (default: as on an H100)",
    )
    time.add_argument(
        "--interconnect",
        metavar="LINK",
        help="nvlink, pcie, ib400, or GB/s in one direction (default: NVLink where the device has it)",
    )
    plan.set_defaults(handler=_plan)


def _plan(args: argparse.Namespace) -> int:
    sizes = {"chunk": args.chunk, "loss_chunk": args.loss_chunk, "batch_size": args.batch_size}
    weights = {"dtype": args.dtype, "optimizer": args.optimizer}
    stored = {"save": args.save, "every": args.every, "offload": args.offload, "policy": args.policy}
    stored |= {"order": args.order, "offload_rows": args.offload_rows}
    if args.published:
        names = ("model", "seq_len", "memory", "lora_rank", "gpus", "shard", "gpu", "flops")
        given = [n for n in names if getattr(args, n) is not None]
        if given:
            raise PlanError(
                f"--published brings its models, memory, device and adapters: leave out {', '.join(given)}"
            )
        from .published import print_published

        print_published(args.json, **sizes, **weights, **stored)
        return 0
    if args.model is None:
        raise PlanError("which MODEL? Give a name or a path, or --published")
    check_amounts(args.seq_len, args.memory)
    config_file(args.model)
    return _print_plan(args, {**sizes, **weights, **stored})


def _print_plan(args: argparse.Namespace, asked: dict[str, Any]) -> int:
    from ..plan import plan
    from ..show.memory_plot import check_picture
    from ..show.progress import announced
    from .frontier_plot import plot_frontier
    from .plan import print_plan

    engine = ("gpus", "shard", "wrap", "reshard_after_forward", "context_parallel")
    several = (*engine, "interconnect", "gpu", "flops", "efficiency")
    devices = {n: getattr(args, n) for n in several if getattr(args, n) is not None}
    shared = {**asked, **devices, "frontier": args.frontier is not None}
    if args.frontier:
        check_picture(args.frontier)  # before the work
    with announced(f"planning {args.model}", on_pipes=True):
        found = plan(args.model, args.seq_len, args.memory, lora_rank=args.lora_rank, **shared)
    print_plan(found, args.json)
    if args.frontier:
        plot_frontier(found, args.frontier)
    return 0
