"""Servers for the clients: the embedded model as it is, and with a chat template in its folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
from headway_testing.daemon import Server, running_server

TEMPLATE = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.clients)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    yield from running_server()


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model's files and a chat template; its name is demo-chat."""
    folder = tmp_path_factory.mktemp("chat") / "demo-chat"
    shutil.copytree(str(files("headway.engine.demo")), folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="session")
def chat_server(chat_folder: Path) -> Iterator[Server]:
    yield from running_server(str(chat_folder))


@pytest.fixture(scope="session")
def environment() -> Path:
    """The folder of the clients' own commands; `make test-clients` makes their virtual environment."""
    folder = Path(__file__).parents[2] / ".venv-clients/bin"
    assert folder.is_dir(), f"{folder} is missing: run make test-clients"
    return folder
