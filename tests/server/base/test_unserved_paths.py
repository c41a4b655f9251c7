"""Known APIs that are not served, refusals that must not be repeated, and characters that end a line for
some."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import openai
import pytest

from headway.server.base.unserved_paths import help_for
from headway.server.http.sse import escape_line_ends
from headway.server.requests.answer import _json

PATHS = [
    "/v1/embeddings", "/v1/audio/speech", "/v1/files",
    "/v1/images/generations", "/v1/batches", "/v1/moderations", "/v1/fine_tuning/jobs", "/v1/assistants",
    "/v1/threads/t/runs", "/v1/rerank", "/score", "/generate", "/embeddings", "/v1/chat/completions/c/messages", "/v1/complete",
    "/generate_stream", "/embedding", "/v2/embed", "/api/chat", "/api/tags", "/v1/organization/usage/costs",
]  # fmt: skip
RESOURCES = Path(str(openai.__file__)).parent / "resources"


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
@pytest.mark.parametrize("path", PATHS)
async def test_a_known_api_that_is_not_served_is_400(
    client: httpx.AsyncClient, path: str, method: str
) -> None:
    response = await client.request(method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported_endpoint")
    assert "/v1/chat/completions" in response.json()["error"]["message"]


FITTING = {
    "/completion": "POST /v1/completions", "/infill": "POST /v1/completions with `prompt` and `suffix`", "/api/generate": "POST /v1/completions",
    "/generate": "POST /v1/completions", "/v1/engines/davinci/completions": "POST /v1/completions", "/invocations": "POST /v1/completions",
    "/inference/v1/generate": "POST /v1/completions", "/api/v1/generate": "POST /v1/completions", "/v1/complete": "POST /v1/completions",
    "/openai/deployments/gpt/completions": "POST /v1/completions", "/v2/models/m/generate": "POST /v1/completions",
    "/api/chat": "POST /v1/chat/completions", "/openai/deployments/gpt/chat/completions": "POST /v1/chat/completions",
    "/v1/engines/m/chat/completions": "POST /v1/chat/completions", "/api/v1/chat/completions": "POST /v1/chat/completions",
    "/api/v0/chat/completions": "POST /v1/chat/completions", "/apply-template": "POST /v1/chat/completions",
    "/v1beta/models/m:generateContent": "POST /v1/chat/completions", "/api/tags": "GET /v1/models",
    "/api/show": "GET /v1/models", "/props": "GET /v1/models", "/info": "GET /v1/models", "/get_model_info": "GET /v1/models",
    "/api/v0/models": "GET /v1/models", "/slots": "GET /load", "/slots/0": "GET /load", "/api/version": "GET /version", "/v1/health": "GET /health",
    "/health_generate": "GET /health/generate", "/decode": "POST /detokenize", "/api/extra/tokencount": "POST /tokenize",
    "/abort_request": "POST /abort/{id}", "/sleep": "POST /pause", "/completion/": "POST /v1/completions",
    "/v1/v1/chat/completions": "POST /v1/chat/completions", "/v1//chat/completions": "POST /v1/chat/completions", "/v1/chat/completion": "POST /v1/chat/completions",
    "/v1/v1/completions": "POST /v1/completions", "/v1/completion": "POST /v1/completions", "/v1/v1/responses": "POST /v1/responses", "/v1/response": "POST /v1/responses",
    "/anthropic/v1/messages": "POST /v1/messages", "/v1/v1/messages": "POST /v1/messages",
}  # fmt: skip
WITHOUT = [
    "/embed", "/embed_sparse", "/rerank", "/v1/reranking", "/score", "/v1/classify", "/pooling", "/api/embed", "/similarity", "/encode", "/api/pull",
    "/lora-adapters", "/v1/load_lora_adapter", "/flush_cache", "/reset_prefix_cache", "/update_weights_from_disk", "/start_profile", "/api/blobs/sha256:1",
    "/collective_rpc", "/openai/deployments/e/embeddings",
]  # fmt: skip


@pytest.mark.parametrize("path", FITTING)
async def test_a_path_of_a_known_server_is_told_first_what_fits_best(
    client: httpx.AsyncClient, path: str
) -> None:
    error = (await client.post(path, json={})).json()["error"]
    assert error["code"] == "unsupported_endpoint"
    assert error["message"].startswith(f"{path} is not served here: use {FITTING[path]}")


@pytest.mark.parametrize("path", WITHOUT)
async def test_a_path_of_a_known_server_that_nothing_fits_says_so(
    client: httpx.AsyncClient, path: str
) -> None:
    error = (await client.post(path, json={})).json()["error"]
    assert error["code"] == "unsupported_endpoint"
    assert "nothing here does that" in error["message"] or "flags of `headway serve`" in error["message"]


async def test_what_a_refused_path_names_is_served(client: httpx.AsyncClient) -> None:
    """Except for ids and methods: no path that is offered is unknown."""
    offered = {
        name
        for path in FITTING
        for name in re.findall(r"(?:GET|POST) (/[\w/]+)", help_for(path.rstrip("/")) or "")
    }
    assert {"/v1/models", "/load", "/version", "/tokenize"} <= offered
    for path in offered - {"/abort/"}:
        assert (await client.get(path)).status_code not in (400, 404), path


async def test_no_path_of_the_openai_package_is_404(client: httpx.AsyncClient) -> None:
    found = {
        path
        for file in RESOURCES.rglob("*.py")
        for path in re.findall(r'"(/[a-z_]+[^"]*)"', file.read_text())
    }
    assert {"/completions", "/responses", "/chat/completions/{completion_id}"} <= found
    for path in found - {"/models/{model}"}:
        url = "/v1" + re.sub(r"{[a-z_]+}", "x", path).removeprefix("/v1")
        answers = [await client.get(url), await client.post(url, json={})]
        assert {answer.status_code for answer in answers} <= {200, 400, 405}, url


async def test_other_paths_stay_404(client: httpx.AsyncClient) -> None:
    for path in ("/v1/responsesx", "/generated", "/v1/nonsense"):
        assert (await client.post(path)).status_code == 404


def test_a_payload_of_an_event_is_one_line_for_every_reader() -> None:
    payload = _json({"text": "a\u0085b\u2028c\u2029d\u2019é"})
    assert payload.decode().splitlines() == [payload.decode()]
    assert payload == b'{"text":"a\\u0085b\\u2028c\\u2029d\xe2\x80\x99\xc3\xa9"}'
    assert escape_line_ends(b"plain") == b"plain"
