"""Triton's interpreter without two things that it does again and again to the same effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from triton.runtime import interpreter


def spare_repetitions() -> None:
    """A third of the time of an interpreted launch. Where Triton no longer has these functions, this
    fails."""
    interpreter._patch_lang = patched_once_a_launch(interpreter._patch_lang, interpreter._LangPatchScope)
    interpreter._get_np_dtype = looked_up_once(interpreter._get_np_dtype)


def patched_once_a_launch(patch: Callable[..., Any], scope: type) -> Callable[..., Any]:
    """Every call of a device function puts the interpreter's functions into the language anew, and only the
    launch takes them out: of the calls of one module the first in a launch is enough."""
    patched: set[int] = set()
    restore = scope.restore

    def patch_once(function: Callable[..., Any]) -> Any:
        module = id(function.__globals__)
        if module in patched:
            return scope()
        patched.add(module)
        return patch(function)

    def restore_all(changes: Any) -> None:
        patched.clear()
        restore(changes)

    scope.restore = restore_all
    return patch_once


def looked_up_once(look_up: Callable[..., Any]) -> Callable[..., Any]:
    """The table of NumPy's types was drawn up for each look-up. Blocks of a type have the same as the
    type."""
    known: dict[str, np.dtype[Any]] = {}

    def look_up_once(kind: Any) -> np.dtype[Any]:
        name = kind.scalar.name
        if name not in known:
            known[name] = look_up(kind)
        return known[name]

    return look_up_once
