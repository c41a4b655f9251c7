"""Servers for the clients: the embedded model as it is, and with a chat template in its folder; a scripted
model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from headway_testing.chat_models import HERMES_TEMPLATE, demo_with_template, scripted_model
from headway_testing.daemon import Server, running_scripted_server, running_server

TEMPLATE = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith("tests/clients/"):
            item.add_marker(pytest.mark.clients)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    yield from running_server()


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model's files and a chat template; its name is demo-chat."""
    return demo_with_template(tmp_path_factory.mktemp("chat") / "demo-chat", TEMPLATE)


@pytest.fixture(scope="session")
def chat_server(chat_folder: Path) -> Iterator[Server]:
    yield from running_server(str(chat_folder))


@pytest.fixture(scope="session")
def tools_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model's files and a chat template with tools; its name is demo-tools."""
    return demo_with_template(tmp_path_factory.mktemp("tools") / "demo-tools", HERMES_TEMPLATE)


@pytest.fixture(scope="session")
def tools_server(tools_folder: Path) -> Iterator[Server]:
    """The real model, which means nothing of what it says: what a request enforces holds all the same."""
    yield from running_server(str(tools_folder))


@pytest.fixture(scope="session")
def scripted_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model that says what the user's last message tells it to; its name is demo-tools."""
    yield from running_scripted_server(
        str(scripted_model(tmp_path_factory.mktemp("scripted") / "demo-tools"))
    )


@pytest.fixture(scope="session")
def environment() -> Path:
    """The folder of the clients' own commands; `make test-clients` makes their virtual environment."""
    folder = Path(__file__).parents[2] / ".venv-clients/bin"
    assert folder.is_dir(), f"{folder} is missing: run make test-clients"
    return folder


@pytest.fixture(scope="session")
def node_programs() -> Path:
    """The folder of the programs that `make test-clients` installs by npm."""
    folder = Path(__file__).parent / "node_modules/.bin"
    assert folder.is_dir(), f"{folder} is missing: run make test-clients"
    return folder
