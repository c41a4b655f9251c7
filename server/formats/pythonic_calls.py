"""Calls that are written as a list of calls in Python."""

from __future__ import annotations

import ast
import json
import warnings
from dataclasses import dataclass
from typing import Any

from headway.server.formats.arguments import MAX_NAME, Schemas, Tell, dump
from headway.server.formats.cursor import Cursor, NoCallError, Wait, optional
from headway.server.formats.pieces import ToolCall


@dataclass(frozen=True)
class PythonicCalls:
    """`[name(key=value), ...]`: Llama 4 and the small models of Llama 3.2, at the beginning of the answer or after a token."""

    openers: tuple[str, ...] = ("<|python_start|>",)
    closer: str = "<|python_end|>"
    starts: tuple[str, ...] = ("[",)

    def read(self, cursor: Cursor, opener: str, schemas: Schemas, tell: Tell) -> Wait:
        if opener in self.starts:
            cursor.position -= len(opener)
        yield from cursor.space()
        start = cursor.position
        yield from cursor.expect("[")
        yield from cursor.space()
        if (yield from cursor.until("(", limit=MAX_NAME)).strip() not in schemas:
            raise NoCallError
        cursor.position = start
        calls = _python_calls((yield from cursor.balanced("[", "\"'")))
        if any(call.name not in schemas for call in calls):
            raise NoCallError
        yield from optional(cursor, self.closer)
        for call in calls:
            tell(call)


def _python_calls(text: str) -> list[ToolCall]:
    try:
        with warnings.catch_warnings(action="ignore"):
            expression = ast.parse(text, mode="eval").body
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise NoCallError from error
    if not isinstance(expression, ast.List):
        raise NoCallError
    return [_python_call(node, text) for node in expression.elts]


def _python_call(node: ast.expr, text: str) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args or any(k.arg is None for k in node.keywords):
        raise NoCallError
    arguments = {str(k.arg): _value(k.value, text) for k in node.keywords}
    return ToolCall(ast.unparse(node.func), dump(arguments))


def _value(node: ast.expr, text: str) -> Any:
    """Returns the value of an argument: as JSON where it is, else as Python with the constants of either."""
    try:
        return json.loads(ast.get_source_segment(text, node) or "")
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(_JsonNames().visit(node))
    except (ValueError, TypeError, MemoryError, RecursionError) as error:
        raise NoCallError from error


class _JsonNames(ast.NodeTransformer):
    """Takes JSON's names of constants for Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        names = {"true": True, "false": False, "null": None}
        return ast.Constant(names[node.id]) if node.id in names else node
