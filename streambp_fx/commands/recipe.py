"""`streambp-fx recipe`: training scripts that come with the package, listed, printed and run."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ..errors import RecipeError
from ..units import did_you_mean, readable
from ..versions import release

PACKAGE = f"{__package__.split('.')[0]}.recipes"
# From this release on TrainingArguments has `activation_checkpointing`.
TRANSFORMERS = "5.23"
# Characters of the data that are looked at before training, some tenths of a second.
LOOKED_AT = 2**26


@dataclass(frozen=True)
class Recipe:
    """A training script of `examples/recipes/`.

    Attributes:
        name: on the command line. The module has its name, with underscores.
        fields: the sets of fields that a line of the data may have; one of them must be there.
        packages: that it imports, beside those that the package needs itself.
    """

    name: str
    fields: tuple[tuple[str, ...], ...]
    packages: tuple[str, ...]

    @property
    def file(self) -> str:
        """The name of its file."""
        return self.name.replace("-", "_") + ".py"

    def text(self) -> str:
        """The script."""
        return (resources.files(PACKAGE) / self.file).read_text()

    @property
    def title(self) -> str:
        """The first line of the script's docstring."""
        return self.text().split('"""', 2)[1].splitlines()[0]

    def train(self) -> Callable[..., Any]:
        """The function `train` of the script.

        Raises:
            RecipeError: a package that the script imports is not installed, or too old.
        """
        missing = [p for p in self.packages if importlib.util.find_spec(p) is None]
        if missing:
            raise RecipeError(
                f"{self.name} needs packages that are not installed: {sys.executable} -m pip install "
                + " ".join(missing)
            )
        found = importlib.metadata.version("transformers")
        if release(found) < release(TRANSFORMERS):
            raise RecipeError(
                f"the recipes need transformers {TRANSFORMERS} or later, and {found} is installed: "
                f"{sys.executable} -m pip install --upgrade transformers"
            )
        return importlib.import_module(f"{PACKAGE}.{self.file.removesuffix('.py')}").train


_EXAMPLES = (("messages",), ("prompt", "completion"), ("text",))
_TRAINERS = ("accelerate", "datasets", "trl")
RECIPES = (
    Recipe("sft-lora", _EXAMPLES, (*_TRAINERS, "peft")),
    Recipe("full-finetune", _EXAMPLES, _TRAINERS),
    Recipe("dpo", (("prompt", "chosen", "rejected"),), (*_TRAINERS, "peft")),
    Recipe("grpo", (("prompt", "answer"),), (*_TRAINERS, "peft")),
    Recipe("continued-pretraining", (("text",),), ("accelerate", "datasets")),
)


@dataclass(frozen=True)
class RecipeOptions:
    """What `streambp-fx recipe` is asked for; None: what the recipe says.

    Attributes:
        name: of a recipe; None: list all of them.
        model: a folder with a model and its tokenizer.
        data: a file in JSON Lines.
        output: the folder that is written; by default `NAME-output`.
        show: print the script and do nothing else.
        gpu, seq_len, chunk, offload, max_steps: arguments of the recipe's `train`.
    """

    name: str | None = None
    model: str | None = None
    data: str | None = None
    output: str | None = None
    show: bool = False
    gpu: str | None = None
    seq_len: int | None = None
    chunk: int | None = None
    offload: str | None = None
    max_steps: int | None = None

    def settings(self) -> dict[str, Any]:
        """The arguments of `train` that were given."""
        names = ("gpu", "seq_len", "chunk", "offload", "max_steps")
        return {n: getattr(self, n) for n in names if getattr(self, n) is not None}


def run_recipe(options: RecipeOptions) -> None:
    """List the recipes, print one, or train with it.

    Raises:
        RecipeError: there is no such recipe, a package is missing, the model or the data cannot be read, or
            an option is not one of this recipe.
    """
    if options.name is None:
        print("\n".join(listing()))
        return
    recipe = find(options.name)
    if options.show:
        print(recipe.text(), end="")
        return
    model = checked_model(options.model, recipe)
    data = checked_data(options.data, recipe)
    settings = options.settings()
    _check_settings(recipe, settings)
    output = options.output or f"{recipe.name}-output"
    _check_output(output)
    train = recipe.train()
    for note in notes(recipe, train, settings, model):
        print(f"note: {note}", file=sys.stderr)
    trainer = train(str(model), str(data), output, **settings)
    print(summary(trainer.state.log_history))
    print(f"written to {output}")


def listing() -> Iterator[str]:
    """A line for each recipe, and how to run one."""
    width = max(len(r.name) for r in RECIPES)
    for recipe in RECIPES:
        yield f"{recipe.name:{width}}  {recipe.title}"
    yield ""
    yield "streambp-fx recipe NAME --show                    prints the script, to be copied and changed"
    yield "streambp-fx recipe NAME --model PATH --data FILE  runs it"


def find(name: str) -> Recipe:
    """A recipe by its name; underscores and a trailing `.py` are forgiven.

    Raises:
        RecipeError: there is none of that name.
    """
    asked = name.removesuffix(".py").replace("_", "-")
    for recipe in RECIPES:
        if recipe.name == asked:
            return recipe
    names = [r.name for r in RECIPES]
    raise RecipeError(
        f"no recipe is called {name!r}: there are {', '.join(names)}.{did_you_mean(asked, names)}"
    )


def checked_model(source: str | None, recipe: Recipe) -> Path:
    """The folder of a model, after a look at its files.

    Raises:
        RecipeError: it is not given, is no folder, or lacks the config, the weights or the tokenizer.
    """
    if source is None:
        raise RecipeError(f"{recipe.name} trains a model: give the folder of one with --model PATH")
    path = Path(source).expanduser()
    if not path.is_dir():
        raise RecipeError(f"--model {source}: no such folder (models are not downloaded)")
    wanted = {
        "config.json": ("config.json",),
        "weights": ("*.safetensors", "*.bin"),
        "tokenizer": ("tokenizer*", "vocab*"),
    }
    missing = [what for what, names in wanted.items() if not any(any(path.glob(n)) for n in names)]
    if missing:
        raise RecipeError(f"--model {source}: the folder holds no {', no '.join(missing)}")
    return path


def checked_data(source: str | None, recipe: Recipe) -> Path:
    """The file of the data, after a look at its lines, the first `LOOKED_AT` characters of them.

    Raises:
        RecipeError: it is not given, there is no such file, it is empty, or a line is not what the recipe
            reads.
    """
    wanted = " or ".join("{" + ", ".join(f'"{f}": ...' for f in fields) + "}" for fields in recipe.fields)
    if source is None:
        raise RecipeError(f"{recipe.name} reads JSON Lines, {wanted}: give a file with --data FILE")
    path = Path(source).expanduser()
    if not path.is_file():
        raise RecipeError(f"--data {source}: no such file")
    fields: tuple[str, ...] | None = None
    for number, line in _lines(path):
        said = _complaint(line, recipe.fields if fields is None else (fields,))
        if said is not None:
            others = "" if fields is None else f", as in the lines before: {{{', '.join(fields)}}}"
            raise RecipeError(f"--data {source}: line {number} {said}; wanted: {wanted}{others}")
        if fields is None:
            fields = next(f for f in recipe.fields if set(json.loads(line)) >= set(f))
    if fields is None:
        raise RecipeError(f"--data {source}: the file has no line; wanted: {wanted}")
    return path


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file that are not empty, with their numbers from 1."""
    left = LOOKED_AT
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, line
            left -= len(line)
            if left < 0:
                return


def _complaint(line: str, wanted: Sequence[tuple[str, ...]]) -> str | None:
    """What a line of the data is, if it is not an object with all of one of these tuples of fields."""
    try:
        found = json.loads(line)
    except ValueError as error:
        return f"is no JSON ({error})"
    if not isinstance(found, dict):
        return f"is no object, but of type {type(found).__name__}"
    fields = next((fields for fields in wanted if set(found) >= set(fields)), None)
    if fields is not None:
        name = next((f for f in fields if not isinstance(found[f], _types(f))), None)
        if name is None:
            return None
        wanted_types = " or ".join(t.__name__ for t in _types(name))
        return f"has {name} of type {type(found[name]).__name__}, and not {wanted_types}"
    return f"has the fields {', '.join(sorted(found)) or '(none)'}"


def _types(field: str) -> tuple[type, ...]:
    """What TRL reads: text, or a list of messages."""
    return (list,) if field == "messages" else (str, list)


def _check_output(folder: str) -> None:
    """The folder can be written, as far as can be seen before anything is."""
    path = Path(folder).expanduser().absolute()
    there = next(p for p in (path, *path.parents) if os.path.exists(p))
    if not there.is_dir():
        raise RecipeError(f"--output {folder}: {there} is a file, not a folder")
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise RecipeError(f"--output {folder}: {there} cannot be written ({error.strerror})") from error


def _check_settings(recipe: Recipe, settings: dict[str, Any]) -> None:
    """What the script's `train` takes, read from its text: what it imports takes ten seconds to load."""
    body = ast.parse(recipe.text()).body
    (train,) = (s for s in body if isinstance(s, ast.FunctionDef) and s.name == "train")
    known = {a.arg for a in (*train.args.args, *train.args.kwonlyargs)}
    strange = [f"--{n.replace('_', '-')}" for n in settings if n not in known]
    if strange:
        raise RecipeError(f"{recipe.name} has no {', no '.join(strange)}")
    assigned = (s for s in body if isinstance(s, ast.Assign) and ast.unparse(s.targets[0]) == "SEQ_LEN")
    sizes: dict[str, int] = next((ast.literal_eval(s.value) for s in assigned), {})
    if "gpu" in settings and settings["gpu"] not in sizes:
        raise RecipeError(f"--gpu {settings['gpu']}: {recipe.name} has settings for {', '.join(sizes)}")


def sequence_length(train: Callable[..., Any], settings: dict[str, Any]) -> int:
    """Tokens of a sequence, given or by default: the argument, or an entry of the script's `SEQ_LEN`."""
    defaults = {n: p.default for n, p in inspect.signature(train).parameters.items()}
    asked = {**defaults, **settings}
    return asked["seq_len"] or sys.modules[train.__module__].SEQ_LEN[asked["gpu"]]


def notes(recipe: Recipe, train: Callable[..., Any], settings: dict[str, Any], model: Path) -> Iterator[str]:
    """What is worth a look before hours of training."""
    config = json.loads((model / "config.json").read_text())
    length, positions = sequence_length(train, settings), config.get("max_position_embeddings")
    if isinstance(positions, int) and positions < length:
        yield (
            f"the model's config has {positions:,} positions, and sequences may have {length:,} tokens: "
            "see the model's card for how to extend them (often rope_parameters in config.json)"
        )


def summary(log: list[dict[str, Any]]) -> str:
    """What the log of a trainer says of a streamed run: steps, losses, chunk and peak."""
    steps = [entry for entry in log if "loss" in entry]
    if not steps:
        return "no step was logged"
    text = f"{len(steps)} steps, loss {steps[0]['loss']:.4f} to {steps[-1]['loss']:.4f}"
    if "streambp/chunk" not in steps[-1]:
        return f"{text}; no step was streamed"
    chunk, peak = int(steps[-1]["streambp/chunk"]), readable(steps[-1]["streambp/peak_bytes"])
    return f"{text}; streamed in chunks of {chunk}, activations took at most {peak} by the cost model"
