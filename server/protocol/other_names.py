"""Other servers' names of fields that are served here. A body may use any of the names of a field."""

from __future__ import annotations

from collections.abc import Mapping

OtherNames = Mapping[str, str]

_SAMPLING = {
    "repeat_penalty": "repetition_penalty", "rep_pen": "repetition_penalty", "random_seed": "seed", "min_new_tokens": "min_tokens",
    "stop_sequences": "stop", "stopping_strings": "stop", "no_stop_trim": "include_stop_str_in_output", "ban_eos_token": "ignore_eos",
    "extra_key": "cache_salt",
}  # fmt: skip
_LIMITS = ("max_new_tokens", "n_predict", "num_predict")
_BUDGETS = {"thinking_token_budget": "thinking_budget_tokens", "reasoning_budget": "thinking_budget_tokens"}

COMPLETIONS = {
    **_SAMPLING,
    **dict.fromkeys((*_LIMITS, "max_output_tokens", "max_completion_tokens"), "max_tokens"),
}
CHAT = {**_SAMPLING, **_BUDGETS, **dict.fromkeys((*_LIMITS, "max_output_tokens"), "max_tokens")}
RESPONSES = {
    **_SAMPLING,
    **_BUDGETS,
    **dict.fromkeys((*_LIMITS, "max_tokens", "max_completion_tokens"), "max_output_tokens"),
}
MESSAGES = dict.fromkeys((*_LIMITS, "max_completion_tokens", "max_output_tokens"), "max_tokens") | {
    "stopping_strings": "stop_sequences"
}
# Values of other names that mean no value.
NO_LIMIT = (-1,)
NO_VALUE: Mapping[str, tuple[object, ...]] = dict.fromkeys(_LIMITS, NO_LIMIT) | {
    "extra_key": ("",),
    "min_new_tokens": (0,),
}
