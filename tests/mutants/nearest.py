"""Which tests are tried on a mutant of a module, from the nearest and fastest to the farthest."""

from __future__ import annotations

MODULES = {
    "passes/s2_prove/axes.py": [
        "tests/passes/s2_prove/test_axes.py",
        "tests/e2e/models/test_custom_functions.py",
    ],
    "passes/s2_prove/independent_samples.py": ["tests/e2e/inputs/test_ragged.py"],
    "passes/graph/determinism.py": ["tests/e2e/models/test_dropout.py"],
    "passes/s2_prove/footprints.py": [
        "tests/passes/masks/test_masks.py",
        "tests/passes/s2_prove/test_score_rules.py",
    ],
    "passes/graph/subgraph.py": ["tests/e2e/guards/test_fallback.py"],
    "passes/graph/functionalization.py": ["tests/e2e/models/test_changes_in_place.py"],
    "passes/graph/memory.py": [
        "tests/e2e/models/test_changes_in_place.py",
        "tests/e2e/checks/test_adversaries.py",
        "-k",
        "branches or changes_in_place",
    ],
    "passes/s2_prove/gradient_edges.py": ["tests/passes/s2_prove/test_gradient_edges.py"],
    "passes/s5_lower/lower.py": [
        "tests/passes/s5_lower/test_restrict.py",
        "tests/passes/s5_lower/test_golden_lower.py",
        "tests/e2e/losses/test_gradients.py",
    ],
    "passes/s5_lower/accumulate.py": [
        "tests/passes/s5_lower/test_golden_lower.py",
        "tests/e2e/memory/test_float32_sums.py",
        "tests/e2e/models/test_tables.py",
    ],
    "passes/masks/at_run_time.py": [
        "tests/passes/masks/test_compare.py",
        "tests/passes/masks/test_masks.py",
        "tests/e2e/inputs/test_packed.py",
    ],
    "passes/masks/packed_documents.py": ["tests/passes/masks/test_masks.py"],
    "passes/masks/elements.py": ["tests/passes/masks/test_masks.py"],
    "passes/masks/facts.py": ["tests/passes/masks/test_masks.py"],
    "passes/masks/fill_rules.py": ["tests/passes/masks/test_masks.py"],
    "passes/masks/registry.py": ["tests/passes/masks/test_masks.py"],
    "passes/masks/element_rules.py": ["tests/passes/masks/test_masks.py"],
    "passes/masks/view_rules.py": ["tests/passes/masks/test_masks.py"],
    "passes/masks/analysis.py": ["tests/passes/masks/test_masks.py"],
    "passes/s1_capture/normalize.py": [
        "tests/passes/s1_capture/test_rewrites.py",
        "tests/e2e/models/test_changes_in_place.py",
    ],
    "passes/masks/predicates.py": ["tests/passes/masks/test_masks.py"],
    "passes/graph/purity.py": ["tests/e2e/models/test_dropout.py"],
    "passes/s5_lower/rematerialize.py": ["tests/passes/s5_lower/test_reorder_and_rematerialize.py"],
    "passes/s5_lower/write_in_place.py": ["tests/passes/s5_lower/test_write_in_place.py"],
    "passes/cost/storages.py": [
        "tests/passes/cost/test_storages.py",
        "tests/passes/s5_lower/test_write_in_place.py",
        "tests/passes/s5_lower/test_reorder_and_rematerialize.py",
    ],
    "passes/rules/contractions.py": ["tests/passes/s2_prove/test_axes.py", "tests/passes/rules"],
    "passes/rules/indexing.py": ["tests/passes/s2_prove/test_axes.py", "tests/passes/rules"],
    "passes/rules/pointwise.py": ["tests/passes/s2_prove/test_axes.py", "tests/passes/rules"],
    "passes/rules/reductions.py": ["tests/passes/s2_prove/test_axes.py", "tests/passes/rules"],
    "passes/rules/registry.py": ["tests/passes/s2_prove/test_axes.py", "tests/passes/rules"],
    "passes/rules/row_orders.py": ["tests/passes/rules/test_row_orders.py", "tests/passes/rules"],
    "passes/rules/scatters.py": ["tests/passes/rules", "tests/e2e/models/test_changes_in_place.py"],
    "passes/rules/shapes.py": ["tests/passes/s2_prove/test_axes.py", "tests/passes/rules"],
    "passes/s2_prove/score_rules.py": ["tests/passes/s2_prove/test_score_rules.py"],
    "passes/s2_prove/scores.py": ["tests/passes/s2_prove/test_score_rules.py"],
    "passes/s1_capture/sequence_length.py": ["tests/e2e/inputs/test_inputs.py"],
    "passes/s1_capture/rewrites/fills.py": [
        "tests/passes/s1_capture/test_products_and_fills.py",
        "tests/e2e/models/test_context.py",
    ],
    "passes/s3_cut/context_cuts.py": ["tests/e2e/models/test_context.py"],
    "passes/s2_prove/inner_outputs.py": [
        "tests/e2e/guards/test_inner_values.py",
        "tests/e2e/guards/test_hooks.py",
    ],
    "streambp_fx/runtime/written_inputs.py": ["tests/e2e/models/test_changes_in_place.py"],
}
BRANCHES = ["tests/e2e/checks/test_adversaries.py", "-k", "branches"]
# Of modules of which the hand-picked mutants alone are tried.
OF_PICKED = {
    "passes/graph/autograd_functions.py": ["tests/e2e/models/test_changes_in_place.py"],
    "passes/s2_prove/branches.py": BRANCHES,
    "passes/s1_capture/kept_gradients.py": ["tests/e2e/checks/test_adversaries.py"],
    "streambp_fx/dynamo/this_backend.py": ["tests/e2e/checks/test_adversaries.py"],
    "streambp_fx/dynamo/branches/as_asked.py": BRANCHES,
    "passes/s2_prove/branch_bodies.py": BRANCHES,
    "passes/s2_prove/emptiness.py": BRANCHES,
    "streambp_fx/dynamo/branches/objects.py": BRANCHES,
    "streambp_fx/dynamo/branches/body.py": BRANCHES,
    "passes/s2_prove/linear_loss.py": ["tests/passes/s2_prove/test_linear_loss.py"],
    "passes/s1_capture/rewrites/products.py": ["tests/passes/s1_capture/test_rewrites.py"],
    "passes/s4_trace/prefix_attention.py": [
        "tests/e2e/checks/test_adversaries.py",
        "tests/e2e/models/test_dropout.py",
        "-k",
        "(nothing and dropout) or equal_layers",
    ],
    "passes/s1_capture/rewrites/attention_sinks.py": ["tests/passes/s1_capture/test_products_and_fills.py"],
    "passes/s4_trace/attention_kernels.py": [
        "tests/passes/s4_trace",
        "tests/e2e/memory/test_kernels.py",
        "tests/e2e/models/test_autocast.py",
    ],
    "streambp_fx/dynamo/skipped_frames.py": ["tests/e2e/guards/test_bypasses.py"],
    "streambp_fx/dynamo/each_frame.py": [
        "tests/e2e/losses/test_numbers_of_rows.py",
        "tests/e2e/guards/test_bypasses.py",
        "tests/e2e/inputs/test_messages.py",
    ],
    "passes/s3_cut/segment.py": [
        "tests/passes/s3_cut/test_segment.py",
        "tests/e2e/models/test_custom_functions.py",
    ],
    "passes/s6_schedule/step_parts.py": ["tests/e2e/models/test_custom_functions.py"],
}
# Tried after those, on all: models that are checked to be exact and to be streamed.
FARTHER = [
    ["tests/passes"],
    ["tests/e2e/guards/test_fallback.py", "tests/e2e/models/test_families.py"],
    [
        "tests/e2e/checks/test_random.py",
        "tests/e2e/guards/test_compile.py",
        "tests/e2e/losses/test_gradients.py",
    ],
    [
        "tests/e2e/checks/test_adversaries.py",
        "tests/e2e/guards/test_levels.py",
        "tests/e2e/guards/test_containment.py",
    ],
]


def tests_of(path: str) -> list[list[str]]:
    """Selections of tests for pytest, in order; those of the nearest that are slow come last."""
    nearest = {**OF_PICKED, **MODULES}.get(path)
    return FARTHER if nearest is None else [nearest, *FARTHER, [*nearest, "-m", "slow"]]
