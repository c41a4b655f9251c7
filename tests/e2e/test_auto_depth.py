"""A server that chooses the depth of its rounds, as it does by default."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest
from headway_testing.daemon import Server

pytestmark = pytest.mark.slow

BODY = {"prompt": "def add(a, b):\n", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
KEY = {"Authorization": "Bearer secret"}


@pytest.mark.parametrize(
    "depth_of_server", [3, pytest.param(0, marks=pytest.mark.long)], ids=["asked-of-a-server", "server"]
)
def test_it_says_so_and_its_text_is_that_of_a_server_without_drafts(
    guarded: Server,
    request: pytest.FixtureRequest,
    start: Callable[..., Iterator[Server]],
    depth_of_server: int,
) -> None:
    """The other server makes no drafts because the request asks for none, or because it has no depth."""
    state = httpx.get(f"{guarded.url}/v1/speculation", headers=KEY).json()
    assert (state["chooses_depth"], state["depth"], state["drafter"]) == (True, 4, "mtp")
    wish = BODY | {"speculation": {"report": True}}
    chosen = httpx.post(f"{guarded.url}/v1/completions", json=wish, headers=KEY, timeout=60).json()
    body = BODY | {"speculation": {"max_draft_tokens": 0}}
    for plain in start("--depth", "0") if depth_of_server == 0 else [request.getfixturevalue("server")]:
        wanted = httpx.post(f"{plain.url}/v1/completions", json=body, timeout=60).json()
    assert chosen["choices"][0]["text"] == wanted["choices"][0]["text"]
    assert guarded.metric("headway_spec_decode_depth_count") > 0


def test_a_limit_holds_for_what_is_chosen(guarded: Server) -> None:
    url, headers = f"{guarded.url}/v1/speculation", {"Authorization": "Bearer admin"}
    limited = httpx.put(url, json={"max_draft_tokens": 1}, headers=headers)
    assert limited.json()["max_draft_tokens"] == 1
    before = httpx.get(url, headers=KEY).json()["drafted_per_position"]
    httpx.post(f"{guarded.url}/v1/completions", json=BODY, headers=KEY, timeout=60).raise_for_status()
    after = httpx.get(url, headers=KEY).json()["drafted_per_position"]
    assert after[1:] == before[1:]
    assert httpx.put(url, json={"max_draft_tokens": None}, headers=headers).json()["max_draft_tokens"] == 4
