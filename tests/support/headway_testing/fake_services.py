"""The services of a server in front of a FakeEngine."""

from __future__ import annotations

from typing import Any

from headway.server.formats import find_format
from headway.server.requests.services import Services
from headway.server.telemetry.metrics import Metrics
from headway.server.text.tokenizer import Tokenizer
from headway_testing.fake_chat import FakeChat
from headway_testing.fake_engine import FakeEngine


def fake_services(
    engine: FakeEngine,
    tokenizer: Tokenizer,
    chat: FakeChat | None = None,
    *,
    template: str = "",
    **fields: Any,
) -> Services:
    """template: the source of the model's chat template, which shows its output format. fields: of
    Services."""
    output_format = find_format(template)
    metrics = Metrics(lambda: engine.stats, lambda: engine.num_restarts, tool_format=output_format.name)
    return Services(
        "tiny",
        engine,
        tokenizer,
        metrics,
        chat,
        template_source=template,
        output_format=output_format,
        **fields,
    )
