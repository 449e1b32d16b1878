"""Mathematics as MathML, which browsers show by themselves: no script, no font, nothing to load."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging

log = logging.getLogger(__name__)


def mathml(node: nodes.Node, display: str) -> str:
    """MathML of a formula in TeX; a warning if it uses more of TeX than is known."""
    source = node.astext()
    try:
        result = convert(source, display=display)
    except Exception as error:  # its own errors have no common type
        log.warning("formula %r: %s", source, error, location=node)
        return ""
    if "\\" in result:
        log.warning("formula %r has a command that is not known", source, location=node)
    return result


def visit_inline(self: Any, node: nodes.math) -> None:
    self.body.append(mathml(node, "inline"))
    raise nodes.SkipNode


def visit_block(self: Any, node: nodes.math_block) -> None:
    self.body.append(f'<div class="formula">{mathml(node, "block")}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the renderer."""
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
