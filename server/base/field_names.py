"""Translates the paths of a chat's fields to the paths of the request that the chat was made from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from headway.engine import HeadwayError
from headway.server.base.errors import ApiError, as_api_error

# Matches paths in an error message, except within a quoted value.
_PATHS = re.compile(
    r"(?<![\w'\".])(?:messages(?=\[| is )|tools(?=\[)|response_format|max_completion_tokens|max_tokens|reasoning_effort"
    r"|thinking_budget_tokens|parallel_tool_calls|stop(?= is )|tool_choice(?=\.))(?:\[\d+\]|\.\w+)*"
)


class FieldNames:
    """Maps paths in a chat to paths in its request. A path stands for everything within it, too. Mutable:
    the translation of a request adds the paths of its parts."""

    def __init__(self, names: Mapping[str, str]) -> None:
        """names: the request's path for each path in the chat."""
        self._names = dict(names)
        self._entries: dict[str, list[tuple[int, str]]] = {}

    def add_entries(self, path: str, first: int, own: str) -> None:
        """Maps the entries of a list from the index `first` on to those of the request's list `own`, up to
        the next entries that are added."""
        self._entries.setdefault(path, []).append((first, own))

    def add(self, path: str, own: str) -> None:
        self._names[path] = own

    def own(self, path: str) -> str:
        """Returns the request's path. A path that has no other name stays as it is."""
        for end in (len(path), *(match.start() for match in reversed([*re.finditer(r"[.\[]", path)]))):
            if (name := self._name(path[:end])) is not None:
                return name + path[end:]
        return path

    def _name(self, path: str) -> str | None:
        if (name := self._names.get(path)) is not None or not path.endswith("]"):
            return name
        entries, _, number = path[:-1].rpartition("[")
        runs = [(first, own) for first, own in self._entries.get(entries, ()) if first <= int(number)]
        return f"{runs[-1][1]}[{int(number) - runs[-1][0]}]" if runs else None

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Translates the errors that are raised within."""
        try:
            yield
        except HeadwayError as error:
            raise self.renamed(as_api_error(error)) from error

    def renamed(self, error: ApiError) -> ApiError:
        if type(error) is not ApiError:
            return error
        message = _PATHS.sub(lambda match: self.own(match[0]), str(error))
        param = None if error.param is None else self.own(error.param)
        return ApiError(message, status=error.status, param=param, code=error.code, headers=error.headers)
