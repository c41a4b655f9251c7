"""Translates `reasoning_effort` to the variable that the chat template reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from headway.server.base.conversation import Conversation
from headway.server.base.errors import ApiError

# Variables that turn thinking on and off, with the pattern that shows in a template's source that it reads
# them.
_SWITCHES = {
    "enable_thinking": re.compile(r"\benable_thinking\b"),
    "thinking": re.compile(r"\bthinking is (?:not )?defined\b"),
}
_EFFORT = re.compile(r"\breasoning_effort\b")


def with_effort(conversation: Conversation, effort: str | None, template: str) -> Conversation:
    """Returns the conversation with the variable that tells its template how long to think. effort: None
    leaves this to the template.

    Templates that can only turn thinking on and off do so for every effort except `none`; others get no
    variable. Raises ApiError if the request itself gives the variable another value.
    """
    if effort is None:
        return conversation
    variables = effort_variables(effort, template)
    for name, value in variables.items():
        own = conversation.template_variables.get(name, value)
        if own != value:
            raise ApiError(
                f"reasoning_effort is {effort!r} and chat_template_kwargs.{name} is {own!r}: they contradict each other; send one of "
                "them",
                param="reasoning_effort",
                code="invalid_value",
            )
    return replace(conversation, template_variables={**conversation.template_variables, **variables})


def effort_variables(effort: str, template: str) -> Mapping[str, object]:
    if _EFFORT.search(template):
        return {"reasoning_effort": effort}
    return {name: effort != "none" for name, pattern in _SWITCHES.items() if pattern.search(template)}


def is_without_effect(effort: str | None, template: str, *, thinks: bool) -> bool:
    """Returns whether the request has an effort that the model cannot follow. thinks: the model reasons,
    so that this includes `none`."""
    return effort is not None and (thinks or effort != "none") and not effort_variables(effort, template)
