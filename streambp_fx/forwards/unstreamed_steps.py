"""Steps of a transformed model that are not streamed: how they run, how they are counted, what is said."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit

from ..errors import CaptureError, InputError, StreamBPError, warn
from ..models.arguments import Arguments, signature_of, without_cache
from ..models.checkpointing import layers_checkpointed, may_be_checkpointed
from ..models.inputs import check_values, complaints, explained, raise_its_own_error
from ..models.nested_models import is_of_transformers
from ..options import Options
from ..runtime.live_objects import Registry
from ..runtime.step_counts import StepCounts
from .lower import Lower, stream

# Every streamed forward there is, so that it is found below a wrapper that somebody put over it.
all_forwards: Registry[Any] = Registry()

_numbers = itertools.count()

# Those that are not to stream within the call that is being made.
resting: ContextVar[frozenset[Any]] = ContextVar("streambp_resting", default=frozenset())

CHECKPOINTED = ", and its layers are checkpointed"
IN_EVALUATION = (
    "the model is in evaluation mode, as from_pretrained returns it, and is differentiated all the same: "
    "such steps run unstreamed. Call model.train() to stream them"
)
TRACED_IN_EVALUATION = (
    "the model is in evaluation mode, gradients are on, and another compiler takes its forward into a graph "
    "of its own: if that is differentiated, the step runs unstreamed. Call model.train() to stream it, or "
    "evaluate within torch.no_grad()"
)
IN_A_TRANSFORM = (
    "the step is differentiated by torch.func, whose transforms a streamed step cannot be in: such steps run "
    "unstreamed. Use backward() or torch.autograd.grad"
)
PAST_THE_MODELS = (
    "a forward that somebody has put over the model's own ran past all that streambp_fx.transform streams: "
    "this step runs unstreamed. Take it away, or transform the model after it has been put there"
)


class UnstreamedSteps:
    """The part of a streamed forward that runs steps which are not streamed.

    Args:
        model: the model.
        original: its forward.
        options: how it is streamed.
        within: the model that it is a part of, if that is streamed as well.

    Attributes:
        counts: the training steps, streamed or not.
        number: of this streamed forward, by which a trace of Dynamo's can name it.
    """

    lower: Lower

    def __init__(self, model: nn.Module, original: Any, options: Options, within: nn.Module | None) -> None:
        self.model, self.original, self.options, self.within = model, original, options, within
        self.counts = StepCounts()
        self._not_captured: dict[frozenset[str], str] = {}  # arguments with which it could not be, and why
        self._odd: dict[tuple[str, ...], bool] = {}  # see `_with_odd_inputs`
        self._said: set[str] = set()
        self.number = next(_numbers)

    @property
    def __signature__(self) -> inspect.Signature:
        return signature_of(self.model, self.original)

    @property
    def is_known(self) -> bool:
        """True if the model's arguments mean what they mean in transformers."""
        return is_of_transformers(self.model, self.original)

    def may_checkpoint(self) -> bool:
        """True if what runs unstreamed may be checkpointed: see NOTE [unstreamed steps are checkpointed]."""
        return self.is_known and may_be_checkpointed(self.model)

    def say(self, why: str) -> None:
        """Count a step that was not streamed, and warn of the reason once."""
        self.counts.note(why)
        self.warn_once(why)

    def evaluated(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The original forward, of a model in evaluation mode. If that is differentiated, it is said once."""
        output = self.original(*args, **kwargs)
        if self.within is None:
            _when_differentiated(output, weakref.ref(self))
        return output

    def warn_once(self, why: str) -> None:
        """Warn of a reason, once."""
        if why not in self._said:
            self._said.add(why)
            warn(why)

    def through_others(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A forward that others have put over the model's, or an adapter's: the model within it streams."""
        within = [s.counts for s in all_forwards if s.within is self.model]
        before = sum(c.total for c in within)
        output = self.original(*args, **kwargs)
        if sum(c.total for c in within) == before:
            self.say(PAST_THE_MODELS)
        return output

    def as_it_is(self, given: Arguments) -> Any:
        """An unstreamed step, checkpointed if it may be: see NOTE [unstreamed steps are checkpointed].

        The models within the model are as they are, too.
        """
        with contextlib.ExitStack() as stack:
            if self.may_checkpoint():
                given = without_cache(given, self.model, self.__signature__)
                stack.enter_context(layers_checkpointed(self.model))
            stack.enter_context(self.alone())
            return self.original(*given.positional.values(), **given.keywords)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Within: the models within the model do not stream by themselves."""
        modules = set(self.model.modules()) - {self.model}
        before = resting.set(resting.get() | {s for s in all_forwards if s.model in modules})
        try:
            yield
        finally:
            resting.reset(before)

    def unstreamed(self, why: str, given: Arguments) -> Any:
        """The model as it is, with the models within it, because of an argument that cannot be streamed."""
        warn(f"{why}: this step runs unstreamed")
        self.counts.note(f"{why}: this step runs unstreamed")
        with self.alone():
            return self.original(*given.positional.values(), **given.keywords)

    def without_compiler(self, why: str, given: Arguments) -> Any:
        """The step as it is, since nothing can be captured now.

        Raises:
            CaptureError: nothing is to run.
        """
        if self.lower is not stream:
            raise CaptureError(f"{type(self.model).__name__} cannot be captured: {why}")
        with explained(given, self.model):
            output = self.as_it_is(given)
        self.say(why)
        return output

    def in_a_transform(self, given: Arguments, why: str = IN_A_TRANSFORM) -> Any:
        """The step as it is, not checkpointed either, within a transform of `torch.func` or the like."""
        with self.alone():
            output = self.original(*given.positional.values(), **given.keywords)
        self.say(why)
        return output

    def uncaptured(self, error: CaptureError, given: Arguments) -> Any:
        """The step without a graph, and with a warning; an error of the model's own is its own to raise.

        Raises:
            CaptureError: the option `on_error` is "raise", or nothing is to run.
        """
        if self.lower is not stream:
            raise error  # who explains or verifies a model is told so
        if self.options.on_error == "raise":
            with self.alone():
                raise_its_own_error(given, self.model, self.original)
            raise error
        with explained(given, self.model):
            output = self.as_it_is(given)
        why = f"{error}\nThe model runs unstreamed{CHECKPOINTED if self.may_checkpoint() else ''}."
        self._not_captured[given.names] = why
        self.counts.note(why)
        warn(why)
        return output

    def check_first(self, given: Arguments) -> None:
        """Before the first step: are there weights to run it with, and the dims that the options name?

        Raises:
            InputError: weights are on the meta device, and inputs are not.
            ValueError: `seq_dim` names a dim that the input does not have.
        """
        dims = self.options.seq_dim or {}
        for name, value in given.tensors():
            if name in dims and not -value.dim() <= dims[name] < value.dim():
                shape = tuple(value.shape)
                raise ValueError(f"seq_dim[{name!r}] is {dims[name]}, but the input has the shape {shape}")
        names = [n for n, p in self.model.named_parameters() if p.is_meta]
        if names and self.lower is stream and any(not v.is_meta for _, v in given.tensors()):
            raise InputError(
                f"{len(names)} weights of {type(self.model).__name__} are on the meta device and have no "
                f"values ({names[0]} for one), so no step runs. Load them (from_pretrained does, without "
                "torch.device('meta')), or look at the step without running it: streambp_fx.explain, "
                "streambp_fx.plan"
            )

    def odd_inputs(self, given: Arguments) -> dict[str, str]:
        """What is odd about the inputs of a model whose interface is known, by name: see `models.inputs`.

        Raises:
            InputError: inputs are on the meta device, and weights are not.
        """
        if self.lower is not stream:
            return {}
        check_values(given, self.model)
        if not self.is_known:
            return {}
        return complaints(given, self.model)

    def with_odd_inputs(
        self, odd: dict[str, str], given: Arguments, streamed: Callable[[Arguments], Any]
    ) -> Any:
        """A step with inputs that are not what the model's interface says.

        NOTE [odd inputs]: the model itself is asked first, with the inputs as they are, and its error is the
        one to raise. If it takes them, this step is done, unstreamed; the next one with them is streamed if
        it can be captured, which shows that they were right.

        Args:
            odd: what is odd, by name.
            given: the arguments.
            streamed: runs a step streamed.
        """
        key = tuple(odd.values())
        if self._odd.get(key):
            try:
                return streamed(given)
            except (CaptureError, FailOnRecompileLimitHit):
                self._odd[key] = False
            except (StreamBPError, torch.OutOfMemoryError):
                raise
            except (RuntimeError, IndexError, TypeError, ValueError):  # Dynamo's of shapes that do not fit
                self._odd[key] = False
        with explained(given, self.model):
            output = self._as_it_takes_it(given)
        self._odd.setdefault(key, True)
        self.say(f"{'; '.join(odd.values())}. The model takes it all the same: such steps run unstreamed")
        return output

    def _as_it_takes_it(self, given: Arguments) -> Any:
        """An unstreamed step; with a cache, as the model asks for by default, if it takes it so alone.

        Where there are several devices it is run once, as what they exchange would not fit together.
        """
        try:
            return self.as_it_is(given)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, IndexError, TypeError, ValueError):
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                raise
        # What it says of the call that was made is the error to raise.
        with self.alone():
            return self.original(*given.positional.values(), **given.keywords)


@torch._dynamo.assume_constant_result
def said_while_traced(number: int) -> None:
    """Have it said that Dynamo traces a model in evaluation mode for another compiler.

    Args:
        number: of the streamed forward.
    """
    for forward in all_forwards:
        if forward.number == number:
            forward.warn_once(TRACED_IN_EVALUATION)


def _when_differentiated(output: Any, owner: weakref.ref[UnstreamedSteps]) -> None:
    """Have it said when a gradient comes to an output of a model in evaluation mode."""
    leaves = torch.utils._pytree.tree_leaves(output)
    nodes = (v.grad_fn for v in leaves if isinstance(v, torch.Tensor) and v.grad_fn is not None)
    node = next(nodes, None)
    if node is None:
        return

    def said(gradients: Any) -> None:
        found = owner()
        if found is not None:
            found.say(IN_EVALUATION)

    node.register_prehook(said)
