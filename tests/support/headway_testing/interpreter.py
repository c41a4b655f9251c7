"""Spares Triton's interpreter two repetitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from triton.runtime import interpreter


def spare_repetitions() -> None:
    """Saves a third of the time of an interpreted launch. Fails where Triton no longer has these
    functions."""
    interpreter._patch_lang = patched_once_a_launch(interpreter._patch_lang, interpreter._LangPatchScope)
    interpreter._get_np_dtype = looked_up_once(interpreter._get_np_dtype)


def patched_once_a_launch(patch: Callable[..., Any], scope: type) -> Callable[..., Any]:
    """Patches the language once for each module and launch. Each call of a device function would patch it
    again, and only the launch restores it."""
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
    """Keeps NumPy's types by name, which the interpreter looks up in a new table each time. Blocks of a type
    have the same as the type."""
    known: dict[str, np.dtype[Any]] = {}

    def look_up_once(kind: Any) -> np.dtype[Any]:
        name = kind.scalar.name
        if name not in known:
            known[name] = look_up(kind)
        return known[name]

    return look_up_once
