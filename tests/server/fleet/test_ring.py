"""Which replica gets a request: requests that begin alike the same one, unless it is far ahead."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from headway.server.fleet.ring import KEY_BYTES, least_loaded, preferred, prompt_key

REPLICAS = [f"replica-{i}" for i in range(8)]
IDLE = dict.fromkeys(REPLICAS, 0)
SYSTEM, USER, ANSWER = (
    {"role": role, "content": f"The {role} says this."} for role in ("system", "user", "assistant")
)


def key(**body: Any) -> bytes:
    return prompt_key(json.dumps(body).encode())


GROWING = {
    "chat": ({"messages": [SYSTEM, USER]}, {"messages": [SYSTEM, USER, ANSWER, {**USER, "content": "more"}]}),
    "chat without a system": ({"messages": [USER]}, {"messages": [USER, ANSWER, USER]}),
    "messages": (
        {"system": "Be brief.", "messages": [USER]},
        {"system": "Be brief.", "messages": [USER, ANSWER, USER]},
    ),
    "responses": (
        {"instructions": "Be brief.", "input": [USER]},
        {"instructions": "Be brief.", "input": [USER, ANSWER, USER]},
    ),
    "document": ({"prompt": "a" * KEY_BYTES + "b"}, {"prompt": "a" * KEY_BYTES + "c"}),
    "document in a chat": (
        {"messages": [{**USER, "content": "a" * KEY_BYTES + "b"}]},
        {"messages": [{**USER, "content": "a" * KEY_BYTES + "c"}]},
    ),
    "cache key": ({"prompt": "a", "prompt_cache_key": "k"}, {"prompt": "b", "prompt_cache_key": "k"}),
    "other fields": ({"prompt": "a", "seed": 1, "stream": True}, {"prompt": "a", "seed": 2, "max_tokens": 3}),
}


@pytest.mark.parametrize("name", GROWING)
def test_requests_that_begin_alike_have_one_key(name: str) -> None:
    first, second = (key(**body) for body in GROWING[name])
    assert first == second != b""


OTHERS = [
    {"prompt": "a"},
    {"prompt": "b"},
    {"prompt": "a", "cache_salt": "mine"},
    {"prompt": "a", "cache_salt": "yours"},
    {"prompt": "a", "prompt_cache_key": "k"},
    {"prompt": ["a", "b"]},
    {"prompt": [1, 2, 3]},
    {"input": "c"},
    {"input": "a", "instructions": "b"},
    {"messages": [USER]},
    {"messages": [SYSTEM, USER]},
    {"messages": [{**SYSTEM, "content": "Something else."}, USER]},
    {"messages": [SYSTEM, {**USER, "content": "Something else."}]},
]


def test_other_prompts_have_other_keys() -> None:
    assert len({key(**body) for body in OTHERS}) == len(OTHERS)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"\xff", b'{"messages": 3}', b'{"model": "x"}', b'{"prompt_cache_key": 3}'],
)  # fmt: skip
def test_what_has_no_prompt_has_no_key(body: bytes) -> None:
    assert prompt_key(body) == b""


def test_replicas_own_similar_shares() -> None:
    shares = Counter(preferred(b"%d" % i, IDLE) for i in range(20_000))
    assert shares.keys() == set(REPLICAS)
    assert max(shares.values()) < 1.5 * 20_000 / len(REPLICAS)
    assert min(shares.values()) > 0.5 * 20_000 / len(REPLICAS)


def test_few_keys_change_their_owner_when_a_replica_goes() -> None:
    gone = REPLICAS[3]
    before = {i: preferred(b"%d" % i, IDLE) for i in range(2000)}
    after = {i: preferred(b"%d" % i, {name: 0 for name in REPLICAS if name != gone}) for i in before}
    assert {i for i in before if before[i] != after[i]} == {i for i in before if before[i] == gone}


def test_routers_that_hear_of_replicas_in_another_order_agree() -> None:
    backwards = dict.fromkeys(reversed(REPLICAS), 0)
    assert all(preferred(b"%d" % i, IDLE) == preferred(b"%d" % i, backwards) for i in range(100))


@pytest.mark.parametrize(
    ("own", "other", "is_passed_over"),
    [(0, 0, False), (8, 0, False), (30, 0, True), (30, 30, False), (45, 30, False), (60, 30, True)],
)
def test_an_owner_far_ahead_of_the_others_is_passed_over(own: int, other: int, is_passed_over: bool) -> None:
    owner = preferred(b"key", IDLE)
    assert owner is not None
    loads = dict.fromkeys(REPLICAS, other) | {owner: own}
    assert (preferred(b"key", loads) is None) == is_passed_over


def test_one_replica_is_never_passed_over() -> None:
    assert preferred(b"key", {"only": 10_000}) == "only"


def test_the_least_loaded_are_all_that_have_the_fewest() -> None:
    assert least_loaded({"a": 2, "b": 1, "c": 1}) == ["b", "c"]
