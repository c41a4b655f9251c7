"""The names of a chat's fields in the words of the API that the chat was asked for by."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from headway.engine import HeadwayError
from headway.server.base.errors import ApiError, as_api_error

# Paths in a message of an error, but not within a value that it repeats in quotes.
_PATHS = re.compile(
    r"(?<![\w'\".])(?:messages(?=\[| is )|tools(?=\[)|response_format|max_completion_tokens|max_tokens|reasoning_effort"
    r"|thinking_budget_tokens|parallel_tool_calls|stop(?= is )|tool_choice(?=\.))(?:\[\d+\]|\.\w+)*"
)


class FieldNames:
    """Mutable: whoever translates a request adds the names of its parts. A name stands for what is within the
    part, too."""

    def __init__(self, names: Mapping[str, str]) -> None:
        """names: by the path in the chat, the path in the request."""
        self._names = dict(names)
        self._entries: dict[str, list[tuple[int, str]]] = {}

    def add_entries(self, path: str, first: int, own: str) -> None:
        """From the first on, the entries of the list are those of the request's own list, until others are
        added."""
        self._entries.setdefault(path, []).append((first, own))

    def add(self, path: str, own: str) -> None:
        self._names[path] = own

    def own(self, path: str) -> str:
        """Returns the request's path; that of a field which both have stays as it is."""
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
        """Errors that are raised within name the request's own fields."""
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
