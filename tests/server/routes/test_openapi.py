"""The description of the API: complete, and true of whatever a machine can think of to send."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import httpx
import pytest
from fastapi.routing import APIRoute
from headway_testing.fake_chat import JoinedContents
from headway_testing.fake_engine import FakeEngine

from headway.server.http.keys import Keys
from headway.server.requests.services import Services
from headway.server.routes import (
    admin,
    chat,
    completions,
    messages,
    models,
    ops,
    responses,
    speculation,
    tokens,
)
from headway.server.routes.openapi import OPERATIONS, description

ROUTERS = [
    module.router
    for module in (admin, chat, completions, messages, models, ops, responses, speculation, tokens)
]
FEW = """
[[operations]]
exclude-path = ["/tokenize", "/v1/models", "/health"]
enabled = false
"""
# Three quarters of the cases that are derived from the schemas are of these three operations.
WITHOUT_THE_LARGEST = """
[[operations]]
include-path = ["/v1/chat/completions", "/v1/completions", "/v1/responses"]
phases.coverage.enabled = false
"""
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
    "unsupported_method,allow_header_conformance,negative_data_rejection"
)


@pytest.fixture
def services(services: Services) -> Services:
    keys = Keys((), "admin")
    return Services(
        "tiny", services.engine, services.tokenizer, services.metrics, JoinedContents(), keys=keys
    )


def test_every_route_is_described_and_no_other() -> None:
    routes = [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]
    found = {(m.lower(), r.path.replace(":path", "")) for r in routes for m in r.methods}
    assert {(o.method, o.path) for o in OPERATIONS} == found


async def test_the_description_is_served(client: httpx.AsyncClient) -> None:
    assert (await client.get("/openapi.json")).json() == description()


@pytest.mark.parametrize(
    ("configuration", "num_examples", "num_cases"),
    [
        (FEW, 6, 100),
        pytest.param(WITHOUT_THE_LARGEST, 6, 2_000, marks=pytest.mark.slow),
        pytest.param("", 50, 10_000, marks=pytest.mark.long),
    ],
    ids=["few", "small", "all"],
)
async def test_made_up_requests_get_no_5xx_and_only_what_is_described(
    address: str, engine: FakeEngine, tmp_path: Path, configuration: str, num_examples: int, num_cases: int
) -> None:
    """Right and wrong bodies, every field at its limits, sequences of operations, streams among them."""
    (tmp_path / "schemathesis.toml").write_text(configuration)
    engine.pause = lambda: None  # type: ignore[method-assign]  # one made-up pause would hold all the rest
    command = [
        Path(sys.executable).with_name("schemathesis"), "run", f"{address}/openapi.json", "--checks", CHECKS,
        "--header", "Authorization: Bearer admin", "--max-examples", str(num_examples), "--seed", "1", "--no-color",
        "--suppress-health-check", "too_slow",  # which measures the machine
    ]  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        *command, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        output = (await process.communicate())[0].decode()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, output
    generated = re.search(r"(\d+) generated", output.replace(",", ""))
    assert generated is not None, output
    assert int(generated[1]) >= num_cases
    async with httpx.AsyncClient(base_url=address) as client:
        assert (
            await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3})
        ).status_code == 200
        assert (await client.get("/load")).json()["num_requests"] == 0
    assert not engine.running
