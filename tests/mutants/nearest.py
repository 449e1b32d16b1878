"""Which tests are tried on a mutant of a module, from the nearest and fastest to the farthest."""

from __future__ import annotations

MODULES = {
    "passes/axes.py": ["tests/passes/test_axes.py"],
    "passes/batch.py": ["tests/e2e/test_ragged.py"],
    "passes/determinism.py": ["tests/e2e/test_dropout.py"],
    "passes/footprints.py": ["tests/passes/test_masks.py"],
    "passes/extract.py": ["tests/e2e/test_fallback.py"],
    "passes/functional.py": ["tests/e2e/test_changes_in_place.py"],
    "passes/gradients.py": ["tests/passes/test_gradient_edges.py"],
    "passes/lower.py": ["tests/e2e/test_gradients.py"],
    "passes/mask_data.py": ["tests/passes/test_masks.py", "tests/e2e/test_packed.py"],
    "passes/mask_documents.py": ["tests/passes/test_masks.py"],
    "passes/mask_elements.py": ["tests/passes/test_masks.py"],
    "passes/mask_facts.py": ["tests/passes/test_masks.py"],
    "passes/mask_fills.py": ["tests/passes/test_masks.py"],
    "passes/mask_registry.py": ["tests/passes/test_masks.py"],
    "passes/mask_rules.py": ["tests/passes/test_masks.py"],
    "passes/mask_views.py": ["tests/passes/test_masks.py"],
    "passes/masks.py": ["tests/passes/test_masks.py"],
    "passes/normalize.py": ["tests/e2e/test_changes_in_place.py"],
    "passes/predicates.py": ["tests/passes/test_masks.py"],
    "passes/purity.py": ["tests/e2e/test_dropout.py"],
    "passes/rematerialize.py": ["tests/passes/test_late_and_rematerialize.py"],
    "passes/reuse.py": ["tests/passes/test_reuse.py"],
    "passes/rules/contractions.py": ["tests/passes/test_axes.py"],
    "passes/rules/indexing.py": ["tests/passes/test_axes.py"],
    "passes/rules/pointwise.py": ["tests/passes/test_axes.py"],
    "passes/rules/reductions.py": ["tests/passes/test_axes.py"],
    "passes/rules/registry.py": ["tests/passes/test_axes.py", "tests/passes/test_expand.py"],
    "passes/rules/scatters.py": ["tests/e2e/test_changes_in_place.py"],
    "passes/rules/shapes.py": ["tests/passes/test_axes.py", "tests/passes/test_expand.py"],
    "passes/score_rules.py": ["tests/passes/test_score_rules.py"],
    "passes/scores.py": ["tests/passes/test_score_rules.py"],
    "passes/sequence.py": ["tests/e2e/test_inputs.py"],
    "passes/shown.py": ["tests/e2e/test_hooks.py"],
    "streambp_fx/runtime/written.py": ["tests/e2e/test_changes_in_place.py"],
}
# Tried after those, on all: models that are checked to be exact and to be streamed.
FARTHER = [
    ["tests/passes"],
    ["tests/e2e/test_fallback.py", "tests/e2e/test_families.py"],
    ["tests/e2e/test_random.py", "tests/e2e/test_compile.py", "tests/e2e/test_gradients.py"],
    ["tests/e2e/test_adversaries.py", "tests/e2e/test_levels.py", "tests/e2e/test_containment.py"],
]


def tests_of(path: str) -> list[list[str]]:
    """Selections of tests for pytest, in order."""
    return [MODULES.get(path, []), *FARTHER] if path in MODULES else FARTHER
