"""What takes the place of a model's forward: the training step streamed, all else as it was."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from .dynamo import each_frame
from .dynamo.hooks import IN_FORWARD_MODE, MAY_CHANGE, Hooks, hook_on_saved_tensors, is_forward_mode
from .dynamo.messages import LOGGERS, SKIPPED, in_plain_words, switched_off
from .dynamo.this_backend import beside_the_trace, is_traced_for_export, is_traced_for_us
from .errors import CaptureError, CompileError, StreamBPError, warn
from .forwards.lower import Lower, NotStreamed, lowered, stream
from .forwards.unstreamed_steps import UnstreamedSteps, all_forwards, resting, said_while_traced
from .models.adapters import lengthens_sequence, prepare_tracing
from .models.arguments import (
    Arguments,
    cannot_be_streamed,
    counted,
    dims_of_sequence,
    open_dims,
    without_cache,
)
from .models.checkpointing import TakeOver
from .models.experts import declare_experts
from .models.inputs import explained_by_values
from .models.nested_models import caller_of_forward, switched_by_others
from .models.plain_forms import in_plain_pytorch
from .models.recorded_outputs import collector_kept
from .models.recurrences import declare_recurrences
from .models.unread_logits import rebuilt, vocabularies, without_lazy, without_logits
from .options import Options
from .runtime.segments import dispatch_modes
from .runtime.several_devices.parameter_groups import NotSupported, ShardedParameters
from .schedule import Schedule
from .sharding import sharded_parameters
from .show.progress import announced, seconds_to_compile
from .versions.differences import ending_checkpoints, ignoring, keep_forwards


class StreamedForward(UnstreamedSteps):
    """Takes the place of a model's `forward`: streamed in training, the original otherwise.

    It lives in the instance and not in the class, holds no parameters, and is no module: names, state dict
    and saved files do not change. A copy of the model gets a copy that streams the copy.

    NOTE [models within models]: a trainer may put a forward of its own over the model's, which calls the
    backbone and has its own loss head. The backbone is streamed then. So each model within the model has a
    streamed forward as well; it waits until it is called outside of a graph that is being captured.
    """

    def __init__(
        self,
        model: nn.Module,
        original: Any,
        options: Options,
        had_forward: bool,
        verbose: bool = False,
        within: nn.Module | None = None,
    ) -> None:
        super().__init__(model, original, options, within)
        self.had_forward, self.verbose, self.active = had_forward, verbose, True
        self.captured = in_plain_pytorch(original)
        all_forwards.add(self)
        self.schedules: list[Schedule] = []
        self._compiled: Any = None
        self.lower: Lower = stream
        self._begun = False
        self._hooked: Hooks | None = None  # with these it could not be captured
        self._why = ""  # it could not
        self._runs = 0  # of compiled graphs
        self._dims: dict[str, int] = {}
        self._take_over = TakeOver()
        self._modes: list[Any] = []
        self._sharded: ShardedParameters | None = None
        functools.update_wrapper(self, original, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self._traced(args, kwargs)
        if torch.compiler.is_exporting() and detect_fake_mode((args, kwargs)) is not None:
            return self.original(*args, **kwargs)  # an export without Dynamo, in this thread
        called_on = caller_of_forward()
        if called_on is not None and self.is_carried_by(called_on):
            return self._on_a_copy(called_on, args, kwargs)
        if args and args[0] is self.model:  # somebody bound it to the model, as a function of the class
            args = args[1:]
        if self in resting.get() or not (self.active and torch.is_grad_enabled()):
            return self.original(*args, **kwargs)
        if not self.model.training:
            return self.evaluated(args, kwargs)
        if switched_by_others(self.model, self.original, kwargs) or lengthens_sequence(self.model):
            return self.through_others(args, kwargs)
        given = Arguments.of_call(self.model, self.original, args, kwargs)
        if given is not None:
            with self._left_as_found():
                return self._train(given)
        output = self.original(*args, **kwargs)  # an error, as a rule, which is the model's own to raise
        why = f"the arguments do not fit the signature {self.__signature__}: this step runs unstreamed"
        warn(why)
        self.counts.note(why)
        return output

    def _traced(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The forward as Dynamo meets it; see NOTE [under another torch.compile]."""
        if not self.active:
            return self.original(*args, **kwargs)
        if is_traced_for_export() or is_traced_for_us():
            return self.captured(*args, **kwargs)
        if self.model.training and torch.is_grad_enabled():
            return beside_the_trace(self, args, kwargs)
        if self.within is None and torch.is_grad_enabled():
            said_while_traced(self.number)
        return self.original(*args, **kwargs)

    @property
    def __code__(self) -> Any:
        """Where the model's own forward is written: an export names its inputs after that."""
        return inspect.unwrap(self.original).__code__

    def is_carried_by(self, module: nn.Module) -> bool:
        """True for a shallow copy of the model, which has this streamed forward and not one of its own."""
        return module is not self.model and vars(module).get("forward") is self

    def unplace(self, module: nn.Module) -> None:
        """Give a module that has this streamed forward the forward that it had, or would have."""
        if self.had_forward:
            module.forward = self.original
        else:
            del module.forward

    def _on_a_copy(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The forward of a shallow copy, on the copy.

        NOTE [shallow copies]: `copy.copy(model)` and the replicas of `nn.DataParallel` share the attributes
        of the model, its streamed forward among them. A step on them is the unstreamed one, of the copy.
        """
        if self.active and module.training and torch.is_grad_enabled():
            name = type(module).__name__
            warn(f"a shallow copy of a transformed {name} is not streamed itself: transform it, too")
        forward = self.original if self.had_forward else types.MethodType(type(module).forward, module)
        return forward(*args, **kwargs)

    def _train(self, given: Arguments) -> Any:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return self.in_a_transform(given)
        if is_forward_mode():
            return self.in_a_transform(given, IN_FORWARD_MODE)
        odd = self.odd_inputs(given)
        if odd:
            return self.with_odd_inputs(odd, given, self._streamed)
        off = switched_off()
        if off is not None:
            return self.without_compiler(off, given)
        asked = cannot_be_streamed(given, self.model)
        if asked:
            return self.unstreamed(", ".join(asked), given)
        hook = hook_on_saved_tensors()
        if hook is not None:
            return self.unstreamed(f"{hook} {MAY_CHANGE}", given)
        mode = dispatch_modes.mode_that_may_change()
        if mode is not None:
            return self.unstreamed(f"{mode} {dispatch_modes.MAY_CHANGE}", given)
        if self._hooked is None or self._hooked.keys != Hooks(self.model).keys:
            try:
                return self._streamed(given)
            except FailOnRecompileLimitHit:
                failed: CaptureError | None = None
            except CaptureError as error:
                failed = error
            if failed is None:
                limit = each_frame.RECOMPILE_LIMIT
                why = f"there are {limit} graphs, each for other values of arguments or attributes"
                return self.unstreamed(why, given)
            hooked = Hooks(self.model)
            if not hooked:
                return self.uncaptured(failed, given)
            self._hooked = hooked
            self._why = str(failed).split("\n")[1]
        why = f"the forward of {type(self.model).__name__} cannot be captured with hooks of {self._hooked}"
        return self.unstreamed(f"{why} ({self._why})", given)

    def _streamed(self, given: Arguments) -> Any:
        if given.names in self._not_captured:
            self.counts.note(self._not_captured[given.names])
            return self.as_it_is(given)
        by_values = explained_by_values(given, self.model) if self.is_known else contextlib.nullcontext()
        try:
            with by_values:
                return self._compiled_step(given)
        except NotStreamed:
            return self.as_it_is(given)
        except NotSupported as error:
            words = f"the forward of {type(self.model).__name__} cannot be captured:\n{error}"
            raise CaptureError(words) from error

    def _compiled_step(self, given: Arguments) -> Any:
        if self.is_known:
            given = counted(without_cache(given, self.model, self.__signature__))
        self._declare_sizes(given)
        if self._compiled is None:
            self.check_first(given)
            self._compiled = self._compile()
        modes = _get_current_dispatch_mode_stack()
        runs = self._runs
        with self._take_over(self.model), self._opened():
            output = self._train_under(modes, given) if modes else self._call(given)
        if self._runs == runs:
            self.say(SKIPPED)
        return output

    @contextlib.contextmanager
    def _opened(self) -> Iterator[None]:
        """Within: parameters of which each device stores a piece have their full size, and may be taken."""
        self._sharded = sharded_parameters(self.model)
        with contextlib.nullcontext() if self._sharded is None else self._sharded.opened():
            yield

    @contextlib.contextmanager
    def _left_as_found(self) -> Iterator[None]:
        """Within: an error that leaves the model leaves parameters in pieces, as they were."""
        try:
            with ending_checkpoints():
                yield
        except BaseException:
            if self._sharded is not None:
                self._sharded.failed(False)
            raise

    def _train_under(self, modes: list[Any], given: Arguments) -> Any:
        """With dispatch modes active (a memory meter), which Dynamo refuses: only what runs sees them."""
        self._modes = modes
        try:
            with _disable_current_modes():
                return self._call(given)
        finally:
            self._modes = []

    @property
    def sequence_dims(self) -> dict[str, int]:
        """Dims that carry the sequence in the call that is being captured, by the name of the input."""
        return self._dims

    @property
    def sharded(self) -> ShardedParameters | None:
        """Parameters that an engine has sharded, in the call that is being captured."""
        return self._sharded

    def _declare_sizes(self, given: Arguments) -> None:
        """Tell Dynamo which dims carry the sequence, so that another length is the same graph.

        NOTE [batch sizes]: the batch size is a symbol as well, so that further ones share the graph, and so
        that a part of the batch can be run where the rest is padding (`runtime.segments.step_blocks`).
        PyTorch compiles a graph of its own for one sequence.
        """
        self._dims = dims_of_sequence(given, self.options.seq_dim or {}, self.model)
        for name, value in given.tensors():
            for dim in open_dims(name, value, self._dims):
                torch._dynamo.maybe_mark_dynamic(value, dim)

    def run(self, executor: Any, *inputs: Any) -> Any:
        """Run a compiled graph, in the dispatch modes that Dynamo was not to see.

        Args:
            executor: the graph.
            inputs: its inputs, tensors of any shape and dtype.
        """
        self._runs += 1
        with contextlib.ExitStack() as stack:
            for mode in self._modes:
                _push_mode(mode)
                stack.callback(_pop_mode)
            return executor(*inputs)

    def _call(self, given: Arguments) -> Any:
        drop = self.options.logits == "drop" and given.get("labels") is not None
        widths = tuple(sorted(vocabularies(self.model))) if drop else ()
        settings = torch._dynamo.config.patch(
            allow_unspec_int_on_nn_module=True,
            recompile_limit=each_frame.RECOMPILE_LIMIT,
            optimize_ddp=False,  # it would cut the graph where a bucket ends
        )
        runs = self._runs
        try:
            with ignoring(LOGGERS), settings, self._first_announced(), collector_kept():
                output = rebuilt(*self._compiled(given.positional, given.keywords, widths))
                return without_lazy(output, self.model) if self.options.logits == "drop" else output
        except torch._dynamo.exc.TorchDynamoException as error:
            cause = error.__cause__ or error
            if isinstance(cause, CompileError) or isinstance(
                getattr(error, "inner_exception", None), CompileError
            ):
                raise getattr(error, "inner_exception", cause) from error
            raise CaptureError(in_plain_words(self.model, error)) from error
        except (StreamBPError, FailOnRecompileLimitHit, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if self._runs != runs:
                raise  # of a step that runs
            raise CaptureError(in_plain_words(self.model, error)) from error

    def _first_announced(self) -> contextlib.AbstractContextManager[None]:
        """The first step captures and compiles, which takes some seconds."""
        first, self._begun = not self._begun, True
        if not first:
            return contextlib.nullcontext()
        return announced("the first training step", expected=seconds_to_compile(self.model))

    def _compile(self, lower: Lower | None = None) -> Any:
        """A function of its own for this model, so that its compiled code is not shared with other models.

        Args:
            lower: what becomes of a captured graph; None: it is streamed.
        """

        def call(positional: dict[str, Any], keywords: dict[str, Any], dropped: tuple[int, ...]) -> Any:
            return without_logits(self.captured(*positional.values(), **keywords), dropped)

        prepare_tracing()
        keep_forwards(self.model)
        declare_experts(self.model.modules())
        declare_recurrences(self.model.modules())
        own = types.FunctionType(
            call.__code__.replace(), call.__globals__, "streamed_forward", None, call.__closure__
        )
        self.lower = lower or stream
        backend = functools.partial(lowered, weakref.ref(self))
        return torch.compile(own, backend=backend, fullgraph=True, dynamic=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> StreamedForward:
        model = copy.deepcopy(self.model, memo)
        original = copy.deepcopy(self.original, memo)
        within = copy.deepcopy(self.within, memo)
        return StreamedForward(model, original, self.options, self.had_forward, self.verbose, within)

    def __reduce__(self) -> tuple:
        settings = (self.options, self.had_forward, self.verbose, self.within)
        return StreamedForward, (self.model, self.original, *settings)

    def report(self, schedule: Schedule) -> None:
        """Keep the schedule of a graph that was compiled, and print it if the user wants that."""
        if all(s is not schedule for s in self.schedules):
            self.schedules.append(schedule)
            if self.options.check != "never" and schedule.segments:
                return  # it comes again when it has been checked
        if self.verbose:
            print(schedule.for_length())
