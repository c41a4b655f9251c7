"""The options of guidance within a schema that change how its text is written, but not which values are
valid."""

from __future__ import annotations

from collections.abc import Callable

Schema = dict[str, object]

OPTIONS = "x-guidance"
# Text between two tokens of JSON: nothing, a space, or a new line with its indent, so that a model cannot
# write spaces for ever. No \\u escapes: with one a listed property would pass as an unlisted one.
WRITING: Schema = {"whitespace_pattern": r"\x20|\r?\n[\x20\t]{0,32}", "json_allowed_escapes": 'nrbtf\\"'}
# The values that do not change which values are valid. `coerce_one_of` has no effect: members of oneOf that
# could be valid at once are refused.
_PASSES: dict[str, Callable[[object], bool]] = {
    "whitespace_flexible": lambda value: isinstance(value, bool),
    "item_separator": lambda value: isinstance(value, str) and value.strip(" ") == ",",
    "key_separator": lambda value: isinstance(value, str) and value.strip(" ") == ":",
    "whitespace_pattern": lambda value: value is None,
    "coerce_one_of": lambda value: isinstance(value, bool),
    "lenient": lambda value: value is False,
}


def written(schema: object) -> tuple[object, Schema]:
    """Returns the schema without its options, and how its text is written: WRITING, changed by the options.

    Options that would change which values are valid stay in the schema, where they are refused.
    """
    options = schema.get(OPTIONS) if isinstance(schema, dict) else None
    if not isinstance(schema, dict) or not isinstance(options, dict):
        return schema, WRITING
    if not all(name in _PASSES and _PASSES[name](value) for name, value in options.items()):
        return schema, WRITING
    rest = {name: value for name, value in schema.items() if name != OPTIONS}
    if options.get("whitespace_flexible") is not False:
        return rest, WRITING
    exact = {name: value for name, value in WRITING.items() if name != "whitespace_pattern"}
    named = ("whitespace_flexible", "item_separator", "key_separator")
    return rest, exact | {name: options[name] for name in named if name in options}
