"""The printed programs of a schedule, function by function, as HTML."""

from __future__ import annotations

import ast
import io
import keyword
import re
import tokenize
from dataclasses import dataclass
from html import escape

SEGMENT = re.compile(r"segment_(\d+)(?:_|$)")


@dataclass(frozen=True)
class Function:
    """One function of the printed module.

    Attributes:
        name: its name.
        about: the first line of its docstring, or "".
        segment: index of the segment that it is named after, or None.
        lines: how many lines it has.
        text: its source.
    """

    name: str
    about: str
    segment: int | None
    lines: int
    text: str


def functions(code: str) -> list[Function]:
    """The functions of a printed module in their order; what stands above the first one is left out."""
    lines, found = code.splitlines(), []
    for node in ast.parse(code).body:
        if isinstance(node, ast.FunctionDef):
            match = SEGMENT.match(node.name)
            about = (ast.get_docstring(node) or "").partition("\n\n")[0].replace("\n", " ")
            text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            number = int(match.group(1)) if match else None
            found.append(Function(node.name, about, number, text.count("\n") + 1, text))
    return found


def highlighted(code: str) -> str:
    """Python source as HTML: comments, strings and keywords in spans, everything escaped."""
    lines, parts, at = code.splitlines(keepends=True), [], (1, 0)

    def between(start: tuple[int, int], end: tuple[int, int]) -> str:
        if start[0] == end[0]:
            return lines[start[0] - 1][start[1] : end[1]]
        middle = "".join(lines[start[0] : end[0] - 1])
        return lines[start[0] - 1][start[1] :] + middle + lines[end[0] - 1][: end[1]]

    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            mark = "c"
        elif token.type == tokenize.STRING:
            mark = "s"
        elif token.type == tokenize.NAME and keyword.iskeyword(token.string):
            mark = "k"
        else:
            continue
        parts.append(escape(between(at, token.start)))
        parts.append(f'<span class="{mark}">{escape(token.string)}</span>')
        at = token.end
    last = (len(lines), len(lines[-1])) if lines else (1, 0)
    return "".join([*parts, escape(between(at, last)) if lines else ""])


def function_html(function: Function) -> str:
    """A function as an element that opens."""
    words = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(function.about))
    about = f' <span class="muted">{words}</span>' if words else ""
    return (
        f'<details class="program"><summary><code>{escape(function.name)}</code> '
        f'<span class="muted">{function.lines} lines</span>{about}</summary>'
        f'<pre tabindex="0"><code>{highlighted(function.text)}</code></pre></details>'
    )
