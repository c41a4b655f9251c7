"""Checks that a JSON schema can be enforced token by token, and rewrites it for the library that enforces it.

Keywords that the library would silently not enforce, or enforce in another sense, are refused with their
places or, if the request is not strict, left out and reported.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection
from urllib.parse import quote, unquote

from headway.engine import RequestError
from headway.server.json_schema.disjoint import Document, are_disjoint
from headway.server.json_schema.keywords import (
    ANNOTATIONS,
    COUNTS,
    DRAFTS,
    KNOWN,
    LENGTHS,
    MAX_EXACT,
    NEUTRAL,
    NUMBERS,
    ONE_SCHEMA,
    PAGE,
    REFUSED,
    RESTS,
    SCHEMA_LISTS,
    SCHEMA_MAPS,
    count_of,
    inexact_number,
    texts_in,
    value_fault,
)
from headway.server.json_schema.number_bounds import number_constraint
from headway.server.json_schema.patterns import PatternError, rust_pattern
from headway.server.json_schema.places import escaped, field_path, value_at
from headway.server.json_schema.property_names import without_property_names
from headway.server.json_schema.string_formats import (
    FORMATS,
    PATTERN_FORMATS,
    format_constraint,
    number_constraint_of,
)
from headway.server.json_schema.writing import written as as_written

Schema = dict[str, object]

MAX_DEPTH = 64
MAX_SCHEMAS = 5000
LIFTED_LEVELS = 24  # the library reads 127 levels of objects and arrays; a schema within another takes two or more of them
MAX_SHOWN = 64  # characters of a value that an error repeats

# Characters that JSON writes by \u escapes only; and U+007F, which needs no escape, but which the library
# excludes from texts.
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
# Keywords that are allowed beside $ref in every draft.
BESIDE_REFERENCE = frozenset({"$ref", "$defs", "definitions", "$schema", "$id"})
_DEFINITION = re.compile("#/(?:\\$defs|definitions)/[^/]*")


class _Unserved(RequestError):
    """A keyword that cannot be enforced, or whose value is invalid."""


def enforceable(
    schema: object, param: str, dropped: list[str] | None = None, without: Collection[str] = ()
) -> Schema:
    """Returns the schema in a form that a grammar enforces completely (also as `%json` of a Lark grammar).

    param: the field that the schema came in. dropped: receives the paths of keywords that are left out
    because they cannot be enforced; None refuses them. without: keywords that cannot be enforced in this
    schema (lengths only beside a pattern or a format), and patterns in Rust's syntax between slashes. Raises
    RequestError that names the keyword and its place.
    """
    schema, writing = as_written(schema)
    walk = _Walk(schema, param, dropped, without)
    if not isinstance(schema, dict | bool):
        raise walk.refusal("", "#", "must be an object, true or false")
    found = walk.schema(schema, "#", 0)
    if found is False:
        raise walk.refusal("", "#", "is false, which no value fits; write a schema that some value fits")
    walk.link()
    return {**walk.with_lifted(found if isinstance(found, dict) else {}), "x-guidance": writing}


class _Walk:
    """One pass over a schema. Mutable: collects the places of the schemas and the targets of references."""

    def __init__(
        self, document: object, param: str, dropped: list[str] | None, without: Collection[str]
    ) -> None:
        self._source = document
        self._document = Document(document)
        self._param = param
        self._dropped = dropped
        self._without = without
        self._places: dict[str, Schema | bool] = {}  # schemas in the library's form by place
        self._references: list[tuple[str, str, Schema]] = []  # (place, target, the schema that has it)
        self._lifted: Schema = {}  # definitions that the client's schema does not have
        self._is_old = False  # a draft in which `$ref` makes its neighbours void

    def refusal(
        self, keyword: str, place: str, why: str, kind: type[RequestError] = RequestError
    ) -> RequestError:
        subject = f"{keyword} at {place}" if keyword else f"the schema at {place}"
        return kind(f"{self._param}: {subject} {why}. See {PAGE}", param=self._param, code="invalid_grammar")

    def _unserved(self, keyword: str, place: str, why: str) -> RequestError:
        return self.refusal(keyword, place, why, _Unserved)

    def _drop(self, keyword: str, place: str, error: RequestError) -> None:
        """Reports the path of what is left out. Raises the error if nothing may be left out."""
        if self._dropped is None:
            raise error
        self._dropped.append(f"{self._param}{field_path(place)}{f'.{keyword}' if keyword else ''}")

    def schema(self, schema: object, place: str, depth: int) -> Schema | bool:
        """Returns the schema in the library's form. The order of its keywords stays, since it is the order
        in which properties are written."""
        self._places[place] = True
        found = self._places[place] = self._read(schema, place, depth)
        return found

    def _read(self, schema: object, place: str, depth: int) -> Schema | bool:
        if isinstance(schema, bool):
            return schema
        why = self._flaw(schema, depth)
        if why is not None:
            self._drop("", place, self._unserved("", place, why))
            return True
        assert isinstance(schema, dict), place
        if depth == 0:
            self._read_draft(schema)
        seen = self._without_names(schema, place) if "propertyNames" in schema else schema
        written: Schema = {}
        extra: list[Schema] = []  # constraints that replace keywords, for allOf
        dropped: list[str] = []
        for keyword, value in schema.items():
            if keyword not in seen:
                continue
            try:
                self._keyword(keyword, value, seen, place, depth, written, extra)
            except _Unserved as error:
                self._drop(keyword, place, error)
                dropped.append(keyword)
        for keyword in (RESTS[name] for name in dropped if name in RESTS):
            if not isinstance(schema.get(keyword, True), list) and written.pop(keyword, True) is not True:
                why = "is about the rest of what another keyword says, which cannot be enforced"
                self._drop(keyword, place, self._unserved(keyword, place, why))
        if extra:
            members = written.get("allOf", [])
            assert isinstance(members, list), members
            written["allOf"] = [*members, *extra]
        for keyword in {"properties", "patternProperties"} & (set(seen) - set(schema)):
            self._write_names(keyword, seen[keyword], written, place)
        return self._lift(written) if depth and depth % LIFTED_LEVELS == 0 else written

    def _without_names(self, schema: Schema, place: str) -> Schema:
        """Returns the schema without `propertyNames`, where other keywords can say the same."""
        names = schema["propertyNames"]
        inner = f"{place}/propertyNames"
        try:
            if isinstance(names, dict) and "pattern" in names:
                self._pattern(names["pattern"], inner)
            elif isinstance(names, dict) and "enum" in names:
                listed = (
                    names["enum"] if self._dropped is None else self._writable("enum", names["enum"], inner)
                )
                self._check_writable("enum", listed, inner)
                schema = {**schema, "propertyNames": {**names, "enum": listed}}
            elif isinstance(names, dict) and "const" in names:
                self._check_writable("const", names["const"], inner)
        except _Unserved as error:
            self._drop("propertyNames", place, error)
            return {keyword: value for keyword, value in schema.items() if keyword != "propertyNames"}
        return without_property_names(schema)

    def _write_names(self, keyword: str, names: object, written: Schema, place: str) -> None:
        """Gives the names that `propertyNames` allows the schema of `additionalProperties`, which was read at
        its own place: references may lead there, and errors name it."""
        assert isinstance(names, dict), names
        entry = written.pop("additionalProperties", True)
        is_pattern = keyword == "patternProperties"
        written[keyword] = {self._pattern(name, place) if is_pattern else name: entry for name in names}
        written["additionalProperties"] = False

    def _lift(self, written: Schema) -> Schema:
        """Moves the schema to a definition at the root, and returns a reference to it."""
        name = f"x-lifted-{len(self._lifted)}"
        self._lifted[name] = written
        return {"$ref": f"#/$defs/{name}"}

    def with_lifted(self, root: Schema) -> Schema:
        definitions = root.get("$defs", {})
        assert isinstance(definitions, dict), definitions
        return {**root, "$defs": {**definitions, **self._lifted}} if self._lifted else root

    def _flaw(self, schema: object, depth: int) -> str | None:
        """Returns why a schema is left out or refused as a whole; None if it is not."""
        if not isinstance(schema, dict):
            return "must be an object, true or false"
        if depth > MAX_DEPTH:
            return f"is nested {depth} deep, the limit is {MAX_DEPTH}"
        if len(self._places) > MAX_SCHEMAS:
            return f"is one of more than {MAX_SCHEMAS} schemas; use fewer properties and members"
        return None

    def _read_draft(self, schema: Schema) -> None:
        draft = schema.get("$schema")
        if draft is None:
            return
        known = DRAFTS.get(draft.rstrip("#")) if isinstance(draft, str) else None
        if known is None:
            why = f"is {_shown(draft)}, it must be left out or one of {', '.join(DRAFTS)}"
            self._drop("$schema", "#", self._unserved("$schema", "#", why))
        self._is_old = bool(known)

    def _keyword(
        self,
        keyword: str,
        value: object,
        schema: Schema,
        place: str,
        depth: int,
        written: Schema,
        extra: list[Schema],
    ) -> None:
        if keyword in NEUTRAL and value is NEUTRAL[keyword]:
            return
        if keyword in REFUSED:
            why = f"cannot be enforced while a text is generated; {REFUSED[keyword]}"
            raise self._unserved(keyword, place, why)
        if keyword in ANNOTATIONS or keyword.startswith("x-"):
            return
        if keyword in self._without and _is_beside_others(keyword, schema):
            why = "cannot be enforced beside the rest of this schema; leave it out"
            raise self._unserved(keyword, place, why)
        self._check_conflicts(keyword, value, schema, place)
        if self._dropped is not None:
            value = self._writable(keyword, value, place)
        inner = f"{place}/{escaped(keyword)}"
        if keyword in SCHEMA_MAPS:
            written[keyword] = self._map(keyword, value, inner, depth)
        elif keyword in SCHEMA_LISTS or (keyword == "items" and isinstance(value, list)):
            self._list(keyword, value, inner, depth, written, extra)
        elif keyword in ONE_SCHEMA:
            written[keyword] = self.schema(value, inner, depth + 1)
        elif keyword == "format":
            if "pattern" not in schema or not isinstance(value, str) or value not in PATTERN_FORMATS:
                extra.append(self._format(value, schema, place))
        elif keyword in NUMBERS:
            number = self._value(keyword, value, place)
            assert isinstance(number, int | float), number
            constraint = number_constraint(keyword, number)
            if keyword in constraint:
                written[keyword] = number
            else:
                extra.append(constraint)
        elif keyword == "$ref":
            self._references.append((place, self._target(value, place), written))
            written[keyword] = value
        elif keyword not in ("$schema", "$id"):
            written[keyword] = self._value(keyword, value, place)
        elif depth:
            why = "is served at the root alone; move the schema into $defs without it"
            raise self._unserved(keyword, place, why)

    def _check_conflicts(self, keyword: str, value: object, schema: Schema, place: str) -> None:
        """Refuses a keyword that its neighbours make void or ambiguous."""
        if keyword not in KNOWN:
            close = difflib.get_close_matches(keyword, KNOWN, 1)
            hint = f"did you mean {close[0]}?" if close else "a name of your own must begin with x-"
            raise self._unserved(_shown(keyword), place, f"is no keyword that is known; {hint}")
        if self._is_old and "$ref" in schema and keyword not in BESIDE_REFERENCE:
            why = "stands beside $ref, which makes it void in this draft; put both into allOf"
            raise self._unserved(keyword, place, why)
        if keyword == "prefixItems" and (self._is_old or isinstance(schema.get("items"), list)):
            raise self._unserved(keyword, place, "needs the draft 2020-12, and items as a schema")
        if keyword == "additionalItems" and not isinstance(schema.get("items"), list):
            raise self._unserved(keyword, place, "does nothing without a list as items; use items")
        if keyword == "minProperties":
            self._check_min_properties(value, schema, place)

    def _check_min_properties(self, value: object, schema: Schema, place: str) -> None:
        """Refuses numbers that cannot be enforced: names that a grammar does not list may be repeated, and
        then count once."""
        required = schema.get("required")
        num_required = len(set(map(str, required))) if isinstance(required, list) else 0
        is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
        most = num_required + 1
        if not is_closed and (count_of(value) or 0) > most:
            why = f"is {value}, it can be enforced up to {most} (one more than required) unless additionalProperties is false"
            raise self._unserved("minProperties", place, why)

    def _map(self, keyword: str, value: object, place: str, depth: int) -> Schema:
        if not isinstance(value, dict):
            raise self._unserved(keyword, place, "must be an object of schemas")
        is_pattern = keyword == "patternProperties"
        if keyword == "properties":
            self._check_writable(keyword, list(value), place)
        written: Schema = {}
        for name, entry in value.items():
            inner = f"{place}/{escaped(name)}"
            written[self._pattern(name, inner) if is_pattern else name] = self.schema(entry, inner, depth + 1)
        if len(written) < len(value):
            why = "has two patterns that mean the same; join their schemas by allOf"
            raise self._unserved(keyword, place, why)
        return written

    def _writable(self, keyword: str, value: object, place: str) -> object:
        """Returns the names or constants of a keyword that can be written. The others are dropped, unless
        none is left."""
        if not isinstance(value, list | dict) or keyword not in ("enum", "required", "properties"):
            return value
        is_fine = {
            i: not any(map(_UNWRITABLE.search, texts_in(entry)))
            and (keyword != "enum" or inexact_number(entry) is None)
            for i, entry in enumerate(value)
        }
        if all(is_fine.values()) or not any(is_fine.values()):
            return value
        self._drop(keyword, place, self._unserved(keyword, place, "has what is never written"))
        if isinstance(value, list):
            return [entry for i, entry in enumerate(value) if is_fine[i]]
        return {name: entry for i, (name, entry) in enumerate(value.items()) if is_fine[i]}

    def _check_writable(self, keyword: str, value: object, place: str) -> None:
        """Refuses texts within the value that have characters which are never written."""
        text = next((text for text in texts_in(value) if _UNWRITABLE.search(text)), None)
        if text is not None:
            why = f"has {_shown(text)} with a control character that is never written; leave it out"
            raise self._unserved(keyword, place, why)

    def _list(
        self, keyword: str, value: object, place: str, depth: int, written: Schema, extra: list[Schema]
    ) -> None:
        if not isinstance(value, list) or not value:
            raise self._unserved(keyword, place, "must be a list of one schema or more")
        members = [self.schema(entry, f"{place}/{i}", depth + 1) for i, entry in enumerate(value)]
        if keyword == "oneOf" and (self._dropped is not None or are_disjoint(value, self._document)):
            if not are_disjoint(value, self._document):
                self._drop("", place, self._unserved(keyword, place, "is enforced as anyOf"))
            extra.append({"anyOf": members})
        else:
            written[keyword] = members

    def _format(self, value: object, schema: Schema, place: str) -> Schema:
        if isinstance(value, str):
            types = schema.get("type")
            numbers = number_constraint_of(value, types if isinstance(types, list) else [types])
            if numbers is not None:
                return numbers
        if not isinstance(value, str) or value not in FORMATS:
            why = f"is {_shown(value)}, it must be one of {', '.join(FORMATS)}, or left out; pattern does the rest"
            raise self._unserved("format", place, why)
        return format_constraint(value)

    def _pattern(self, value: object, place: str) -> str:
        if not isinstance(value, str):
            raise self._unserved("pattern", place, f"is {_shown(value)}, it must be a string")
        try:
            pattern = rust_pattern(value)
        except PatternError as error:
            raise self._unserved("the pattern", place, str(error)) from None
        if f"/{pattern}/" in self._without:
            why = f"is {_shown(value)}, which is no regular expression, has ^ or $ within it, or is too intricate; write a simpler one"
            raise self._unserved("the pattern", place, why)
        return pattern

    def _value(self, keyword: str, value: object, place: str) -> object:
        """Returns the value of a keyword that contains no schema."""
        if keyword == "pattern":
            return self._pattern(value, place)
        if keyword in ("required", "enum", "const"):
            self._check_writable(keyword, value, place)
        wanted = value_fault(keyword, value)
        if wanted is not None:
            fault = self.refusal if keyword == "type" else self._unserved
            raise fault(keyword, place, f"is {_shown(value)}, it must be {wanted}")
        if keyword in (*NUMBERS, "enum", "const") and (number := inexact_number(value)) is not None:
            why = f"has {number}; numbers are enforced exactly up to {MAX_EXACT} and of up to 15 digits"
            raise self._unserved(keyword, place, why)
        return count_of(value) if keyword in COUNTS else value

    def _target(self, value: object, place: str) -> str:
        if not isinstance(value, str) or (value != "#" and not value.startswith("#/")):
            why = f'is {_shown(value)}, it must be a path within this schema, such as "#/$defs/name"'
            raise self.refusal("$ref", place, why)
        return unquote(value)

    def link(self) -> None:
        """Resolves references. A target that is no definition at the root becomes one: some forms of calls
        split a schema."""
        names: dict[str, str] = {}
        for place, target, holder in self._references:
            if target not in self._places:
                error = self._unserved("$ref", place, f"is {_shown(target)}, where this schema has no schema")
                if value_at(self._source, target) is None:
                    raise error
                self._drop("$ref", place, error)
                del holder["$ref"]
            elif (
                _DEFINITION.fullmatch(target) and value_at(self._places["#"], target) is self._places[target]
            ):
                holder["$ref"] = f"#{quote(target[1:], safe='/~')}"
            else:
                name = names.setdefault(target, f"x-linked-{len(names)}")
                self._lifted[name] = _without_definitions(self._places[target])
                holder["$ref"] = f"#/$defs/{name}"


def _without_definitions(schema: Schema | bool) -> Schema | bool:
    if isinstance(schema, bool):
        return schema
    return {keyword: value for keyword, value in schema.items() if keyword not in ("$defs", "definitions")}


def _is_beside_others(keyword: str, schema: Schema) -> bool:
    """Returns whether the schema has keywords that cannot be combined with this length or reference."""
    if keyword in LENGTHS:
        return bool({"pattern", "format"} & set(schema))
    return keyword != "$ref" or bool(set(schema) - ANNOTATIONS - BESIDE_REFERENCE)


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
