"""From events to deltas, beside HTTP: what depends on the reader, and what does not."""

from __future__ import annotations

import asyncio
import re
from contextlib import aclosing

import pytest
from headway_testing.fake_engine import FakeEngine

from headway.engine import EngineDeadError, SamplingParams
from headway.server.generation.choice import ChoiceRequest
from headway.server.generation.generation import Generation
from headway.server.requests.services import Services


class TestASlowReader:
    """Nothing is read before the engine is done; what happens to the tokens does not wait for it."""

    @pytest.fixture
    def generation(self, engine: FakeEngine, services: Services) -> Generation:
        ids = services.tokenizer.encode("abc END def")
        request = ChoiceRequest(ids, SamplingParams(), max_tokens=90, stop=("END",))
        return Generation(engine, services.tokenizer.vocabulary, [request], metrics=services.metrics)

    async def test_does_not_delay_the_end_by_a_stop_string(
        self, engine: FakeEngine, generation: Generation
    ) -> None:
        async with aclosing(generation.deltas()) as deltas:
            first = await anext(deltas)
            for _ in range(50):
                await asyncio.sleep(0)
            assert (engine.running, engine.aborted) == ({}, [0])
            rest = [delta async for delta in deltas]
        assert "".join(delta.text for delta in [first, *rest]) == "abc "
        assert generation.outcomes == ["stop"]

    async def test_does_not_change_the_times_that_are_observed(
        self, engine: FakeEngine, generation: Generation, services: Services
    ) -> None:
        engine.script = lambda request: [40] * 6
        async with aclosing(generation.deltas()) as deltas:
            await anext(deltas)
            await asyncio.sleep(0.3)
            assert [delta async for delta in deltas]
        text = services.metrics.text().decode()
        (total,) = re.findall(r"headway_request_duration_seconds_sum (\S+)", text)
        assert float(total) < 0.3

    async def test_gets_what_it_missed_in_one_piece(self, engine: FakeEngine, generation: Generation) -> None:
        engine.script = lambda request: [40] * 90
        async with aclosing(generation.deltas()) as deltas:
            first = await anext(deltas)
            for _ in range(200):
                await asyncio.sleep(0)
            rest = [delta async for delta in deltas]
        (piece,) = rest
        assert first.num_tokens + piece.num_tokens == 90
        assert len(first.text + piece.text) == 90
        assert piece.finish_reason == "length"

    async def test_gets_a_fault_after_what_came_before_it(
        self, engine: FakeEngine, generation: Generation
    ) -> None:
        engine.script = lambda request: [40] * 90
        engine.die_after = 30
        async with aclosing(generation.deltas()) as deltas:
            first = await anext(deltas)
            for _ in range(50):
                await asyncio.sleep(0)
            rest = await anext(deltas)
            with pytest.raises(EngineDeadError):
                await anext(deltas)
        assert len(first.text + rest.text) == 30
