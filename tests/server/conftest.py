"""The app around a FakeEngine: in process (`client`) and on a real port (`address`)."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
from headway_testing import tiny_tokenizers
from headway_testing.fake_engine import INFO, FakeEngine
from headway_testing.fake_services import fake_services
from headway_testing.served import served

from headway.server.app import create_app
from headway.server.grammar.grammars import Grammars
from headway.server.requests.services import Services
from headway.server.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tiny")
    return load_tokenizer(tiny_tokenizers.save(folder, tiny_tokenizers.byte_level()))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def write(engine: FakeEngine, tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """Sets the text of every answer, which the model's end follows; returns its ids."""

    def write(text: str) -> list[int]:
        ids = [*tokenizer.encode_plain(text), tokenizer.stop_token_ids[0]]
        engine.script = lambda request: ids
        return ids

    return write


@pytest.fixture
def services(engine: FakeEngine, tokenizer: Tokenizer, grammars: Grammars) -> Services:
    return fake_services(engine, tokenizer, grammars=grammars)


@pytest.fixture
async def grammars(tokenizer: Tokenizer) -> AsyncIterator[Grammars]:
    """Its worker starts with the first form that is checked."""
    grammars = Grammars(tokenizer.token_table(), INFO.vocab_size)
    yield grammars
    await grammars.close()


@pytest.fixture
async def client(services: Services) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(services), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://headway") as client:
        yield client


@pytest.fixture
async def address(services: Services) -> AsyncIterator[str]:
    """http://127.0.0.1:PORT of a uvicorn that runs in the test's own loop."""
    async with served(services) as address:
        yield address
