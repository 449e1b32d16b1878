"""The command line: `streambp-fx demo`, `verify`, `plan`, `explain`, `recipe` and `doctor`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import __version__
from .commands.plan_arguments import add_plan
from .commands.step_arguments import add_step_without_weights, at_least
from .models.sources import check_source, config_file
from .units import CHOICES

# NOTE [arguments first]: PyTorch and transformers take ten seconds to import. What is wrong with a model's
# name or an amount is said before.


class _Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default to what is said of an argument that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def _add_demo(commands: argparse._SubParsersAction) -> None:
    demo = commands.add_parser(
        "demo",
        help="fine-tune a small pretrained model streamed, and compare with gradient checkpointing",
        description="Fine-tune a causal language model for a few steps with the streamed training step, "
        "then measure memory, time and gradients against Hugging Face gradient checkpointing.",
        formatter_class=_Defaults,
    )
    demo.add_argument("--seq-len", type=at_least(2), default=3072, metavar="N", help="tokens of the sequence")
    demo.add_argument(
        "--chunk", type=at_least(1), metavar="N", help="sequence rows in a chunk (default: a quarter)"
    )
    demo.add_argument(
        "--loss-chunk", type=at_least(1), default=256, metavar="N", help="rows in a chunk of the loss head"
    )
    demo.add_argument(
        "--model",
        default="smollm2",
        metavar="PATH_OR_CONFIG",
        help="smollm2, a directory with config.json (and weights), or a config.json file; never downloaded",
    )
    demo.add_argument("--steps", type=at_least(1), default=2, metavar="N", help="steps of fine-tuning")
    demo.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float64"), default="float32", help="of the weights"
    )
    demo.add_argument(
        "--threads", type=at_least(0), default=0, metavar="N", help="of PyTorch; 0: as many as it chooses"
    )
    demo.set_defaults(handler=_demo)


def _demo(args: argparse.Namespace) -> int:
    check_source(args.model)
    from .commands.demo import DemoOptions, run_demo

    options = DemoOptions(
        model=args.model,
        seq_len=args.seq_len,
        chunk=args.chunk or -(-args.seq_len // 4),
        loss_chunk=args.loss_chunk,
        steps=args.steps,
        dtype=args.dtype,
        threads=args.threads,
    )
    run_demo(options)
    return 0


def _add_verify(commands: argparse._SubParsersAction) -> None:
    verify = commands.add_parser(
        "verify",
        help="check a model: streamed gradients against eager, and which rows each value depends on",
        description="Run one training step of a causal language model eager and streamed, compare loss and "
        "gradients, and try on real tensors what the analysis claims of each value: that it does not depend "
        "on later rows. Exit status: 0 if all is confirmed, 1 if not, 2 for bad input.",
    )
    verify.add_argument(
        "model",
        metavar="MODEL",
        help="smollm2, a directory with config.json (and weights), or a config.json file; never downloaded",
    )
    verify.add_argument(
        "--seq-len",
        type=at_least(2),
        metavar="N",
        help="tokens of each sequence (default: 261, or fewer if the model has fewer positions)",
    )
    verify.add_argument(
        "--batch-size", type=at_least(1), default=1, metavar="N", help="sequences (default: 1)"
    )
    verify.add_argument(
        "--chunk", type=at_least(1), metavar="N", help="sequence rows in a chunk (default: a quarter)"
    )
    verify.add_argument(
        "--loss-chunk",
        type=at_least(1),
        metavar="N",
        help="rows in a chunk of the loss head (default: a quarter of the sequence, 256 at most)",
    )
    verify.add_argument(
        "--dtype",
        choices=("float32", "float64", "bfloat16"),
        default="float32",
        help="of the weights (default: float32)",
    )
    verify.add_argument("--json", action="store_true", help="print everything that was found as JSON")
    verify.set_defaults(handler=_verify)


def _verify(args: argparse.Namespace) -> int:
    check_source(args.model)
    from .commands.verify import VerifyOptions, run_verify

    options = VerifyOptions(
        model=args.model,
        seq_len=args.seq_len,
        batch_size=args.batch_size,
        chunk=args.chunk,
        loss_chunk=args.loss_chunk,
        dtype=args.dtype,
        as_json=args.json,
    )
    return 0 if run_verify(options).ok else 1


def _add_explain(commands: argparse._SubParsersAction) -> None:
    explain = commands.add_parser(
        "explain",
        help="the schedule of a training step: as text, page, picture or program",
        description="Show how the training step of a model is streamed, without weights and without running "
        "it. Without one of these the schedule is printed.",
    )
    add_step_without_weights(explain, length_required=True)
    explain.add_argument("--html", metavar="FILE", help="write the schedule as a page that needs no network")
    explain.add_argument("--plot", metavar="FILE", help="draw the memory of the step (.png, .svg or .pdf)")
    explain.add_argument("--code", action="store_true", help="print the program")
    explain.add_argument("--instructions", action="store_true", help="print the instructions of the step")
    explain.add_argument(
        "--dot", action="store_true", help="print the graph of segments in Graphviz's language"
    )
    explain.set_defaults(handler=_explain)


def _explain(args: argparse.Namespace) -> int:
    config_file(args.model)
    from .commands.explain import ExplainOptions, run_explain

    asked = {k: v for k, v in vars(args).items() if k not in ("command", "handler")}
    run_explain(ExplainOptions(**asked))
    return 0


def _add_recipe(commands: argparse._SubParsersAction) -> None:
    recipe = commands.add_parser(
        "recipe",
        help="training scripts for long sequences: list them, print one to copy, or run one",
    )
    recipe.add_argument("name", metavar="NAME", nargs="?", help="of a recipe (default: list them)")
    recipe.add_argument("--model", metavar="PATH", help="a folder with a model and its tokenizer")
    recipe.add_argument("--data", metavar="FILE", help="the training data, one JSON object a line")
    recipe.add_argument("--output", metavar="DIR", help="where the result goes (default: NAME-output)")
    recipe.add_argument("--show", action="store_true", help="print the script instead of running it")
    recipe.add_argument("--gpu", metavar="SIZE", help="of sft-lora: 24GB (default), 48GB or 80GB")
    recipe.add_argument(
        "--seq-len",
        type=at_least(2),
        metavar="N",
        help="tokens of a sequence (default: what the script says)",
    )
    recipe.add_argument("--chunk", type=at_least(1), metavar="N", help="rows of a chunk (default: chosen)")
    recipe.add_argument(
        "--offload",
        choices=CHOICES["offload"],
        help="where what is kept lies (default: what the script says)",
    )
    recipe.add_argument(
        "--max-steps", type=at_least(1), metavar="N", help="then stop (default: all the data)"
    )
    recipe.set_defaults(handler=_recipe)


def _recipe(args: argparse.Namespace) -> int:
    from .commands.recipe import RecipeOptions, run_recipe

    asked = {k: v for k, v in vars(args).items() if k not in ("command", "handler")}
    run_recipe(RecipeOptions(**asked))
    return 0


def _add_doctor(commands: argparse._SubParsersAction) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="what there is on this machine, what is missing, and does a streamed step work",
        description="Print versions, the device, the kernels that were found, the speed of the disk for "
        "offloading and what is missing, a line each, and try a streamed step of a tiny model. Exit status: "
        "0 if nothing is broken, 1 if something is.",
    )
    doctor.add_argument("--no-self-test", action="store_true", help="leave out the step")
    doctor.set_defaults(handler=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    from .commands.doctor import run_doctor

    return 0 if run_doctor(not args.no_self_test) else 1


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    parser = argparse.ArgumentParser(
        prog="streambp-fx",
        description="Stream the exact training step of a causal language model chunk by chunk.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_verify(commands)
    add_plan(commands)
    _add_explain(commands)
    _add_recipe(commands)
    _add_doctor(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments without the program's name; None: those of the process.

    Returns:
        the exit status: 0; 1 if the work failed; 2 if an argument is wrong; 130 if interrupted.

    Raises:
        SystemExit: by argparse, with status 2 for arguments it refuses and 0 for --help.
    """
    args = build_parser().parse_args(argv)
    try:
        return args.handler(args)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        from .errors import (
            CaptureError,
            OutputError,
            PlanError,
            RecipeError,
            StreamBPError,
            VerificationError,
        )
        from .models.sources import ModelSourceError

        if not isinstance(error, (ModelSourceError, StreamBPError)):
            from .measure.step import MeasurementError, WorkerError  # takes seconds to import

            if not isinstance(error, (MeasurementError, WorkerError)):
                raise
        print(f"streambp-fx {args.command}: error: {error}", file=sys.stderr)
        wrong: tuple[type[Exception], ...] = (ModelSourceError, VerificationError)
        wrong += (PlanError, OutputError, RecipeError)
        if args.command in ("plan", "explain"):  # they do nothing with a model that cannot be captured
            wrong += (CaptureError,)
        return 2 if isinstance(error, wrong) else 1


if __name__ == "__main__":
    sys.exit(main())
