"""A real fleet on Ray beside a single server, both with the embedded model on the CPU."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Semaphore
from typing import Any

import httpx
import pytest
import yaml
from headway_testing.daemon import KV_CACHE, Server, headway_command, start_server, stop_server
from headway_testing.fleets import (
    LASTING,
    NEEDS_RAY,
    Fleet,
    command_of,
    completion,
    descendants,
    end,
    events_of,
    load_of,
    parent_of,
    started,
    wait_until,
    wait_until_begun,
)
from headway_testing.killing import Killing, ask, mixed_requests
from headway_testing.ports import free_port
from headway_testing.prometheus import (
    RULES,
    is_of_fleets,
    panel_queries,
    rules,
    running_prometheus,
    selectors,
)

pytestmark = [
    pytest.mark.fleet,
    NEEDS_RAY,
]
FLAGS = ("--threads", "1", "--depth", "3", *KV_CACHE)
NUM_REPLICAS = 2
VOCAB_SIZE = 4096
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    port = free_port()
    flags = ("--replicas", str(NUM_REPLICAS), "--gpus", "0", "--port", str(port), *FLAGS)
    folder = tmp_path_factory.mktemp("fleet")
    running = started(headway_command("fleet", *flags), port, folder)
    yield running
    assert end(running) == 0


@pytest.fixture(scope="module")
def single() -> Iterator[Server]:
    running = start_server(*FLAGS)
    yield running
    assert stop_server(running) == 0


HELLO = [{"role": "user", "content": "write a loop"}]
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "def f(x):", "max_tokens": 24, "logprobs": 2, "seed": 3}),
    "chat": ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 24, "seed": 4}),
    "responses": ("/v1/responses", {"input": "write a loop", "max_output_tokens": 24, "seed": 5}),
    "messages": ("/v1/messages", {"messages": HELLO, "max_tokens": 24, "temperature": 0}),
}  # fmt: skip
PLACES = ["/v1/models", "/version", "/nothing", "/v1/models/other", "/tokenizer_info"]


def lasting(content: Any) -> Any:
    """Without ids, times, and what depends on the cache and on the load."""
    if isinstance(content, dict):
        drop = {"id", "created", "created_at", "completed_at", "item_id", "usage", "sequence_number"}
        return {key: lasting(value) for key, value in content.items() if key not in drop}
    return [lasting(value) for value in content] if isinstance(content, list) else content


def text_of(content: Any) -> str:
    """Returns all texts of a stream or an answer, in their order."""
    if isinstance(content, dict):
        return "".join(
            value if key in ("text", "delta", "content") and isinstance(value, str) else text_of(value)
            for key, value in content.items()
            if key not in ("logprobs", "response", "item", "part")
        )
    return "".join(map(text_of, content)) if isinstance(content, list) else ""


@pytest.mark.parametrize("path", PLACES)
def test_places_answer_as_those_of_one_server(fleet: Fleet, single: Server, path: str) -> None:
    one, other = (httpx.get(f"{url}{path}") for url in (fleet.url, single.url))
    assert one.status_code == other.status_code
    assert one.headers["content-type"] == other.headers["content-type"]
    assert lasting(one.json()) == lasting(other.json())


@pytest.mark.parametrize("name", REQUESTS)
def test_every_api_answers_as_one_server_does(fleet: Fleet, single: Server, name: str) -> None:
    path, body = REQUESTS[name]
    one, other = (httpx.post(f"{url}{path}", json=body, timeout=120) for url in (fleet.url, single.url))
    assert one.status_code == other.status_code == 200, one.text
    assert lasting(one.json()) == lasting(other.json())
    assert len(one.headers.get_list("date")) == 1
    streams = [
        httpx.post(f"{url}{path}", json=body | {"stream": True}, timeout=120)
        for url in (fleet.url, single.url)
    ]
    assert streams[0].headers["content-type"] == streams[1].headers["content-type"]
    assert "headway" not in " ".join(streams[0].headers)
    assert not re.search("^:", streams[0].text, re.MULTILINE), "comments for the ingress alone"
    texts = [text_of(events_of(stream.text)) for stream in streams]
    assert texts[0] == texts[1] != ""


WRONG: list[tuple[str, bytes, int]] = [
    ("/v1/completions", b'{"prompt": "a", "temperature": 17}', 400),
    ("/v1/chat/completions", b"{", 400),
    ("/v1/completions", b'{"prompt": "' + b"x" * (9 * 2**20) + b'"}', 413),
    ("/v1/messages", b'{"messages": []}', 400),
]


@pytest.mark.parametrize(("path", "body", "status"), WRONG)
def test_what_is_wrong_is_refused_as_one_server_does(
    fleet: Fleet, single: Server, path: str, body: bytes, status: int
) -> None:
    one, other = (httpx.post(f"{url}{path}", content=body, timeout=60) for url in (fleet.url, single.url))
    assert (one.status_code, other.status_code) == (status, status)
    assert one.json()["error"]["type"] == other.json()["error"]["type"]


def test_forty_seeded_requests_get_the_texts_of_one_server(fleet: Fleet, single: Server) -> None:
    with ThreadPoolExecutor(20) as pool:
        wanted = list(pool.map(lambda i: completion(single.url, i), range(40)))
        got = list(pool.map(lambda i: completion(fleet.url, i, stream=i % 2 == 0), range(40)))
    assert got == wanted
    assert len(set(got)) > 30


@pytest.mark.parametrize("topic", ["hash tables", "binary trees", "iterators"])
def test_requests_that_begin_alike_find_their_beginning_in_a_cache(fleet: Fleet, topic: str) -> None:
    """Of one server alone: in turn, the second would find nothing."""
    prompt = f"# A module about {topic}.\n" * 50
    for number in range(5):
        body = {"prompt": f"{prompt}{number}", "max_tokens": 1}
        usage = httpx.post(f"{fleet.url}/v1/completions", json=body, timeout=60).json()["usage"]
        assert (usage["prompt_tokens_details"]["cached_tokens"] > 100) == (number > 0)


def test_prometheus_has_what_the_fleets_panels_and_alerts_read(fleet: Fleet, tmp_path: Path) -> None:
    config = yaml.safe_load((RULES / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "2s", "evaluation_interval": "2s"}
    config["rule_files"] = [str(RULES / name) for name in config["rule_files"]]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [fleet.url.removeprefix("http://")]}]
    panels = {title: query for title, query in panel_queries() if is_of_fleets(query)}
    alerts = [rule for rule in rules("alert") if is_of_fleets(rule["expr"])]
    read = {selector.partition("{")[0] for rule in alerts for selector in selectors(rule["expr"])}
    assert len(panels) >= 7
    assert len(alerts) >= 4
    with contextmanager(running_prometheus)(tmp_path, config) as running:
        for number in range(3):
            completion(fleet.url, number)
            running.wait_for_scrape()
        assert [title for title, query in panels.items() if not running.query(query)] == []
        assert [name for name in read if not running.query(name)] == []
        found = {rule["name"]: rule for rule in running.rules()}
        assert {found[rule["alert"]]["state"] for rule in alerts} == {"inactive"}
        replicas = running.query("count by (instance) (headway_engine_state{state='serving'} == 1)")
        assert [value for _, value in replicas] == [NUM_REPLICAS]


def test_status_tells_of_both_replicas(fleet: Fleet) -> None:
    command = headway_command("fleet", "status", "--url", fleet.url)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    first, _, *rows = done.stdout.splitlines()
    assert first == f"{fleet.url}: {NUM_REPLICAS} running"
    assert [row.split()[2] for row in rows] == ["serving"] * NUM_REPLICAS
    assert "prefix" in done.stdout


def test_a_client_that_leaves_ends_its_request(fleet: Fleet) -> None:
    def running() -> int:
        return sum(load["num_requests"] for load in map(load_of, fleet.servers()))

    body = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{fleet.url}/v1/completions", json=body, timeout=60) as answer:
        pieces = answer.iter_raw()  # where it has no name it ends at once, and closes the connection
        next(pieces)
        assert running() == 1
    wait_until(lambda: running() == 0, 20)


@pytest.mark.parametrize("num_kills", [1, pytest.param(10, marks=pytest.mark.long)])
@pytest.mark.parametrize("what", ["engine", "server", "actor"])
def test_streams_outlive_what_is_killed(fleet: Fleet, single: Server, what: str, num_kills: int) -> None:
    with ThreadPoolExecutor(16) as pool:
        wanted = list(pool.map(lambda i: completion(single.url, i, **LASTING), range(16)))
        for number in range(num_kills):
            begun = Semaphore(0)
            asked = [
                pool.submit(completion, fleet.url, i, begun=begun, stream=i < 12, **LASTING)
                for i in range(16)
            ]
            wait_until_begun(begun, 12)
            server = fleet.servers()[number % NUM_REPLICAS]
            engine = next(pid for pid in descendants(server) if "headway.engine.process" in command_of(pid))
            victim = {"engine": engine, "server": server, "actor": parent_of(server)}[what]
            assert load_of(server)["num_requests"] > 0
            assert not any(future.done() for future in asked)
            os.kill(victim, signal.SIGKILL)
            assert [future.result() for future in asked] == wanted
            fleet.wait_for_replicas(NUM_REPLICAS, without=server if what != "engine" else 0)


async def test_random_requests_are_the_same_while_servers_are_killed(fleet: Fleet) -> None:
    """Of all endpoints with any fields, every second one streamed."""
    requests, killing = mixed_requests(11, 24, VOCAB_SIZE), Killing()
    async with httpx.AsyncClient(base_url=fleet.url, timeout=300) as client:
        wanted = await asyncio.gather(*(ask(client, request, killing) for request in requests))
        for _ in range(2):
            asked = [asyncio.create_task(ask(client, request, killing)) for request in requests]
            await asyncio.sleep(1.5)
            killed = fleet.servers()[0]
            os.kill(killed, signal.SIGKILL)
            got = await asyncio.gather(*asked)
            assert [(i, found) for i, found in enumerate(got) if found != wanted[i]] == []
            await asyncio.to_thread(fleet.wait_for_replicas, NUM_REPLICAS, without=killed)


def test_a_signal_lets_streams_finish_and_leaves_no_process(fleet: Fleet, single: Server) -> None:
    """It is the last test of this fleet."""
    with ThreadPoolExecutor(8) as pool:
        wanted = list(pool.map(lambda i: completion(single.url, i, **LASTING), range(8)))
        begun = Semaphore(0)
        asked = [pool.submit(completion, fleet.url, i, begun=begun, stream=True, **LASTING) for i in range(8)]
        wait_until_begun(begun, 8)
        assert not any(future.done() for future in asked)
        assert end(fleet) == 0
        assert [future.result() for future in asked] == wanted


CONFIGURATION = {
    "proxy_location": "HeadOnly",
    "http_options": {"host": "127.0.0.1"},
    "applications": [
        {
            "name": "headway",
            "route_prefix": "/",
            "import_path": "headway.server.fleet.application:build",
            "args": {"replicas": 1, "gpus": 0, "routing": "round-robin", "serve": {"threads": 1, "kv-cache-memory": "64MiB"}},
        }
    ],
}  # fmt: skip


def ray_serve(configuration: dict[str, Any], port: int, folder: Path, args: dict[str, Any]) -> list[str]:
    """Returns the command by which Ray starts the application with other arguments."""
    (application,) = configuration["applications"]
    options = configuration["http_options"] | {"port": port}
    changed = application | {"args": application["args"] | args}
    file = folder / "serve.yaml"
    file.write_text(yaml.safe_dump(configuration | {"http_options": options, "applications": [changed]}))
    return [sys.executable, "-P", "-m", "ray.serve.scripts", "run", str(file)]


def test_ray_starts_a_configuration(tmp_path: Path) -> None:
    port = free_port()
    command = ray_serve(CONFIGURATION, port, tmp_path, {})
    running = started(command, port, tmp_path)
    try:
        assert completion(running.url, 1)
    finally:
        end(running, signal.SIGINT)


def test_the_files_of_deploy_are_configurations_of_ray() -> None:
    code = "import sys, yaml; from ray.serve.schema import ServeDeploySchema as S; S.model_validate(yaml.safe_load(sys.stdin))"
    plain = (ROOT / "deploy/ray/serve.yaml").read_text()
    service = yaml.safe_load((ROOT / "deploy/ray/rayservice.yaml").read_text())["spec"]["serveConfigV2"]
    for text in (plain, service):
        subprocess.run([sys.executable, "-P", "-c", code], input=text, text=True, check=True, timeout=60)
