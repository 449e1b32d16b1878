"""Hooks of modules: noticed in the first step, and when they come and go later.

NOTE [hooks that come later]: Dynamo calls the hooks that a module has when it traces the model, and by
default does not look whether there are others in a later step (`skip_nnmodule_hook_guards`). A graph of ours
is compiled again then: for each module that was found without hooks Dynamo is asked to look after all, and
for the hooks of all modules (`register_module_forward_hook`) too. It looks in its guards, in C++.

NOTE [methods that are replaced later]: nor does Dynamo look whether a class has other functions in a later
step (`Layer.forward = other`), though it looks at those of an instance. So for one module of each class it is
asked to look at all functions that the class, and what it inherits from, had.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import FunctionType

from torch import nn
from torch._C import _autograd as autograd
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import AttrSource, ChainedSource, TypeSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import Source, TracingContext
from torch.autograd import forward_ad
from torch.nn.modules import module as modules

# What is called when a module is registered, saved or loaded, and not in a step.
ELSEWHERE = ("state_dict", "registration")


def _tables_of_hooks(owner: object) -> tuple[str, ...]:
    """Names of the tables of hooks that an object has: all that PyTorch has, be they new to us."""
    tables = (n for n, v in vars(owner).items() if isinstance(v, dict) and "hooks" in n)
    return tuple(n for n in tables if not any(word in n for word in ELSEWHERE))


# Attributes of a module, and names in torch.nn.modules.module.
OF_A_MODULE, OF_ALL_MODULES = _tables_of_hooks(nn.Module()), _tables_of_hooks(modules)


def guard_hooks() -> None:
    """Have the graph that Dynamo is compiling compiled again when hooks of modules come or go."""
    context = TracingContext.try_get()
    if context is None:
        return
    guards = context.guards_context.dynamo_guards
    skipped = [g for g in guards if g.create_fn is GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT]
    for guard in skipped:
        guards.add(guard.originating_source.make_guard(GuardBuilder.SEQUENCE_LENGTH))
    for source, name in _methods(g.originating_source for g in skipped):
        guards.add(AttrSource(TypeSource(source), name).make_guard(GuardBuilder.CLOSURE_MATCH))
    source = InstructionTranslator.current_tx().import_source(modules.__name__)
    for name in OF_ALL_MODULES:
        guards.add(AttrSource(source, name).make_guard(GuardBuilder.DICT_KEYS_MATCH))


def _methods(tables: Iterable[Source]) -> Iterator[tuple[Source, str]]:
    """For one module of each class where it is found, and the names of the functions that the class has.

    Args:
        tables: where the tables of hooks of modules are found.
    """
    output, seen = InstructionTranslator.current_tx().output, set[type]()
    scope = {"L": output.local_scope, "G": output.global_scope}
    for source in dict.fromkeys(s for table in tables for s in _holders(table)):
        try:
            module = eval(source.name, {}, scope)  # as Dynamo itself finds what it guards
        except Exception:
            continue  # it is reached by what Dynamo alone knows
        if isinstance(module, nn.Module) and type(module) not in seen:
            seen.add(type(module))
            classes = (c for c in type(module).__mro__ if c is not nn.Module and issubclass(c, nn.Module))
            own = ((n, v) for c in classes for n, v in vars(c).items())
            names = dict.fromkeys(n for n, v in own if isinstance(v, FunctionType))
            yield from ((source, n) for n in names if isinstance(getattr(type(module), n), FunctionType))


def _holders(source: Source) -> Iterator[Source]:
    """What a source is reached through, from the nearest to the outermost."""
    while isinstance(source, ChainedSource):
        source = source.base
        yield source


# Hooks of PyTorch on what autograd saves, which give back what they were given.
HARMLESS = (
    "torch.utils.checkpoint._checkpoint_hook.",
    "torch.utils.checkpoint._recomputation_hook.",
    "torch.autograd.graph.save_on_cpu.",
)
MAY_CHANGE = "is a hook on saved tensors, which may change what autograd saves"


def hook_on_saved_tensors() -> str | None:
    """Name of a hook on what autograd saves that may change it, if there is one.

    NOTE [hooks on saved tensors]: eager gives `saved_tensors_hooks` every tensor that an op saves, and its
    gradient is that of what they give back. A streamed step saves other tensors, and fewer. Only of hooks of
    PyTorch's own is it known that they give back the values: checkpoints, and `save_on_cpu`.
    """
    top = autograd._top_saved_tensors_default_hooks(True)
    if top is None:
        return None
    names = [f"{getattr(f, '__module__', '')}.{getattr(f, '__qualname__', type(f).__name__)}" for f in top]
    return None if all(name.startswith(HARMLESS) for name in names) else names[0]


IN_FORWARD_MODE = (
    "the step is within torch.autograd.forward_ad.dual_level, and a streamed step carries no tangents: it "
    "runs unstreamed"
)


def is_forward_mode() -> bool:
    """True within a level of forward-mode differentiation, where inputs and weights may have tangents.

    NOTE [tangents]: an `autograd.Function` without a `jvp` is an error for inputs that have tangents, but
    only for those that require a gradient; the tangents of others would be lost without a word.
    """
    return forward_ad._current_level >= 0


class Hooks:
    """The hooks that are called within a model's forward and backward: of its modules, and of all modules.

    Not those of the model itself, which are called around its forward.

    Attributes:
        keys: what PyTorch knows them by; a hook that is taken away and added again has another.
        where: what has them, in words.
    """

    def __init__(self, model: nn.Module) -> None:
        self.keys: list[int] = []
        self.where: list[str] = []
        named = ((repr(name), module) for name, module in model.named_modules() if module is not model)
        for name, module in named:
            self._add(name, [getattr(module, table, {}) for table in OF_A_MODULE])
        self._add("all modules", [getattr(modules, table) for table in OF_ALL_MODULES])

    def _add(self, where: str, tables: list[dict[int, object]]) -> None:
        keys = [key for table in tables for key in table]
        self.keys += keys
        self.where += [where] * bool(keys)

    def __bool__(self) -> bool:
        return bool(self.keys)

    def __str__(self) -> str:
        more = len(self.where) - 3
        return ", ".join(self.where[:3]) + (f" and {more} more" if more > 0 else "")
