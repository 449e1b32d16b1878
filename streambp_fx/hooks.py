"""Hooks of modules: noticed in the first step, and when they come and go later.

NOTE [hooks that come later]: Dynamo calls the hooks that a module has when it traces the model, and by default
does not look whether there are others in a later step (`skip_nnmodule_hook_guards`). A graph of ours is
compiled again then: for each module that was found without hooks Dynamo is asked to look after all, and for
the hooks of all modules (`register_module_forward_hook`) too. It looks in its guards, in C++.
"""

from __future__ import annotations

import torch
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import AttrSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import TracingContext
from torch.nn.modules import module as modules

# Names in torch.nn.modules.module.
OF_ALL_MODULES = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)


def guard_hooks() -> None:
    """Have the graph that Dynamo is compiling compiled again when hooks of modules come or go."""
    context = TracingContext.try_get()
    if context is None:
        return
    guards = context.guards_context.dynamo_guards
    skipped = [g for g in guards if g.create_fn is GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT]
    for guard in skipped:
        guards.add(guard.originating_source.make_guard(GuardBuilder.SEQUENCE_LENGTH))
    source = InstructionTranslator.current_tx().import_source(modules.__name__)
    for name in OF_ALL_MODULES:
        guards.add(AttrSource(source, name).make_guard(GuardBuilder.DICT_KEYS_MATCH))
