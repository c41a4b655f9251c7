"""Models by path and from a hub: a stand-in on loopback answers as the Hugging Face Hub does.

The library reads its variables when it is imported, so each case runs in a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from headway.engine import EngineConfig, ModelError
from headway.server.base.config import ModelSource
from headway.server.cli import hub as hub_module
from headway.server.cli.hub import EMBEDDED_NAME, model_folder, model_name, with_folders

SHA = {"main": "a" * 40, "v1": "b" * 40}
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"version":"1.0"}',
    "model.safetensors": b"\x00" * 64,
    "pytorch_model.bin": b"pickle",
    "modeling_custom.py": b"raise SystemExit",
    "original/consolidated.safetensors": b"\x01" * 64,
}
WANTED = ["config.json", "model.safetensors", "tokenizer.json"]
RESOLVE = """
import logging, sys
logging.basicConfig(level="INFO")
from headway.engine import ModelError
from headway.server.base.config import ModelSource
from headway.server.cli.hub import model_folder
name, revision = (argument or None for argument in sys.argv[1:])
try:
    print(model_folder(ModelSource(name, revision)))
except ModelError as error:
    sys.exit(str(error))
"""


@dataclass
class StandIn:
    """A hub with ORG/NAME, ORG/gated and ORG/private. Mutable: notes what was asked."""

    url: str = ""
    requests: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)


def handler_of(hub: StandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            """Silence."""

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0].strip("/")
            hub.requests.append(f"{self.command} {path}")
            hub.tokens.add(self.headers.get("Authorization", ""))
            parts = path.split("/")
            if parts[:2] == ["api", "models"]:
                self.answer_api("/".join(parts[2:4]), parts[4:])
            else:
                self.answer_file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))

        def answer_api(self, repository: str, rest: list[str]) -> None:
            has_token = self.headers.get("Authorization") == "Bearer good"
            if repository == "ORG/broken":
                self.answer(400)
            elif repository not in ("ORG/NAME", "ORG/gated") and not (
                repository == "ORG/private" and has_token
            ):
                self.answer(401 if not has_token else 404, error="RepoNotFound")
            elif rest[:1] == ["tree"]:
                self.answer(200, json.dumps([self.entry(path) for path in FILES]).encode())
            elif (revision := rest[1] if rest else "main") not in SHA:
                self.answer(404, error="RevisionNotFound")
            else:
                self.answer(200, json.dumps({"id": repository, "sha": SHA[revision]}).encode())

        def entry(self, path: str) -> dict[str, object]:
            return {"type": "file", "path": path, "size": len(FILES[path]), "oid": etag(path)}

        def answer_file(self, repository: str, revision: str, path: str) -> None:
            if repository == "ORG/gated":
                self.answer(403, error="GatedRepo")
                return
            self.answer(200, FILES[path], **{"ETag": f'"{etag(path)}"', "X-Repo-Commit": revision})

        def answer(self, status: int, body: bytes = b"", error: str | None = None, **headers: str) -> None:
            self.send_response(status)
            for name, value in {**headers, **({"X-Error-Code": error} if error else {})}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    return Handler


def etag(path: str) -> str:
    return hashlib.sha1(FILES[path]).hexdigest()


@pytest.fixture(scope="module")
def running_hub() -> Iterator[StandIn]:
    hub = StandIn()
    with ThreadingHTTPServer(("127.0.0.1", 0), handler_of(hub)) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        hub.url = f"http://127.0.0.1:{server.server_port}"
        yield hub
        server.shutdown()
        thread.join()


@pytest.fixture
def hub(running_hub: StandIn) -> StandIn:
    running_hub.requests.clear()
    running_hub.tokens.clear()
    return running_hub


def resolve(home: Path, name: str, revision: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment = {**kept, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", **variables}
    return subprocess.run(
        [sys.executable, "-P", "-c", RESOLVE, name, revision],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def files_in(folder: str) -> list[str]:
    root = Path(folder)
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_a_repository_is_fetched_without_code_and_pickle_and_kept_for_offline_use(
    hub: StandIn, tmp_path: Path
) -> None:
    fetched = resolve(tmp_path, "ORG/NAME", HF_ENDPOINT=hub.url, HF_TOKEN="good")
    assert fetched.returncode == 0, fetched.stderr
    folder = fetched.stdout.strip()
    assert files_in(folder) == WANTED
    assert Path(folder, "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert hub.tokens == {"Bearer good"}
    offline = resolve(tmp_path, "ORG/NAME", HF_HUB_OFFLINE="1")
    assert (offline.returncode, offline.stdout.strip()) == (0, folder)
    unreachable = resolve(tmp_path, "ORG/NAME", HF_ENDPOINT="http://127.0.0.1:9")
    assert (unreachable.returncode, unreachable.stdout.strip()) == (0, folder)


def test_revision_and_download_folder_are_respected(hub: StandIn, tmp_path: Path) -> None:
    wanted = tmp_path / "here"
    fetched = resolve(tmp_path, "ORG/NAME", "v1", HF_HUB_CACHE=str(wanted), HF_ENDPOINT=hub.url)
    assert fetched.returncode == 0, fetched.stderr
    folder = Path(fetched.stdout.strip())
    assert folder.is_relative_to(wanted)
    assert folder.name == SHA["v1"]


@pytest.mark.parametrize(
    ("name", "revision", "complaints"),
    [("ORG/unknown", "", ["no repository ORG/unknown", "HF_TOKEN"]),
     ("ORG/private", "", ["no repository ORG/private", "HF_TOKEN"]),
     ("ORG/gated", "", ["ORG/gated is gated", "accept its terms", "HF_TOKEN"]),
     ("ORG/NAME", "v9", ["no revision v9"])],
    ids=["unknown", "private", "gated", "revision"],
)  # fmt: skip
def test_a_refusal_of_the_hub_is_explained_in_a_line(
    hub: StandIn, tmp_path: Path, name: str, revision: str, complaints: list[str]
) -> None:
    refused = resolve(tmp_path, name, revision, HF_ENDPOINT=hub.url)
    assert refused.returncode == 1
    assert all(complaint in refused.stderr for complaint in complaints), refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    "variables",
    [{"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}],
    ids=["no-network", "offline"],
)
def test_an_unreachable_hub_says_how_to_serve_a_folder(tmp_path: Path, variables: dict[str, str]) -> None:
    refused = resolve(tmp_path, "ORG/NAME", **variables)
    assert refused.returncode == 1
    assert "cannot be reached" in refused.stderr
    assert "headway serve PATH" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("name", "token"),
    [("ORG/NAME", "good"), ("ORG/broken", "good"), ("ORG/NAME", "b\u00e4d")],
    ids=["fetched", "refused", "token"],
)
def test_keys_of_the_hub_are_neither_logged_nor_in_an_error(
    hub: StandIn, tmp_path: Path, name: str, token: str
) -> None:
    endpoint = hub.url.replace("://", "://me:correct-horse@")
    resolved = resolve(tmp_path, name, HF_ENDPOINT=endpoint, HF_TOKEN=token)
    assert resolved.returncode == (0 if (name, token) == ("ORG/NAME", "good") else 1)
    assert not any(secret in resolved.stderr for secret in ("correct-horse", token, "Traceback"))


def test_a_folder_is_served_as_it_is_under_its_own_name(tmp_path: Path) -> None:
    source = ModelSource(str(tmp_path))
    assert (model_folder(source), model_name(source)) == (tmp_path, tmp_path.name)
    assert model_name(ModelSource("ORG/NAME")) == "ORG/NAME"


@pytest.mark.parametrize("name", [".", None])
def test_a_revision_of_a_folder_is_refused(name: str | None) -> None:
    with pytest.raises(ModelError, match=r"--revision is v1, but \S+ is a folder .*; leave --revision out"):
        model_folder(ModelSource(name, "v1"))


def test_the_name_of_a_working_directory_that_is_not_utf8_can_be_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a\udcff").mkdir()
    monkeypatch.chdir(tmp_path / "a\udcff")
    assert model_name(ModelSource(".")) == "a?"


def test_without_a_name_it_is_the_embedded_model() -> None:
    assert model_folder(ModelSource()).name == "demo"
    assert model_name(ModelSource()) == EMBEDDED_NAME


@pytest.mark.parametrize("name", ["/no/such/folder", "./ORG/NAME", "name", "a/b/c", "~/nothing"])
def test_what_is_neither_folder_nor_repository_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="neither a folder nor"):
        model_folder(ModelSource(name))


def test_a_drafter_is_found_as_a_model_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "_download", lambda repository, source: Path("/cache", repository))
    model, config = tmp_path / "model", EngineConfig(model_path="")
    assert with_folders(config, model) == EngineConfig(model_path=str(model))
    for name, folder in ((str(tmp_path), str(tmp_path)), ("ORG/HEAD", "/cache/ORG/HEAD")):
        found = with_folders(EngineConfig(model_path="", drafter_path=name), model)
        assert found == EngineConfig(model_path=str(model), drafter_path=folder)
    with pytest.raises(
        ModelError, match="--drafter is ngrams; it must be auto, mtp, ngram, none, the path of"
    ):
        with_folders(EngineConfig(model_path="", drafter_path="ngrams"), model)
    unused = EngineConfig(model_path="", drafter_path="ngrams", depth=0)
    assert with_folders(unused, model).drafter_path == "ngrams"
