"""`headway complete`: streams the completion of a prompt to the terminal, by an engine of its own."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import asdict

import msgspec

from headway.engine import EngineConfig, read_model_spec
from headway.server.base.config import CompleteConfig, ModelSource
from headway.server.cli.console import show, wait_with_progress
from headway.server.cli.hub import model_folder, with_folders
from headway.server.engine.client import EngineClient
from headway.server.generation.engine_requests import RequestOptions, choice_requests
from headway.server.generation.generation import Generation
from headway.server.protocol.completions import CompletionRequest, check
from headway.server.text.prompt import encode_prompts
from headway.server.text.tokenizer import Tokenizer, load_tokenizer


def complete(config: CompleteConfig, prompt: str, source: ModelSource, engine_config: EngineConfig) -> int:
    """Prints prompt and completion; returns the exit status. Raises ReaderGoneError.

    The checks are those of the API. Ctrl-C ends the engine, too. The engine takes memory for one request
    only.
    """
    folder = model_folder(source)
    tokenizer = load_tokenizer(folder, read_model_spec(folder).vocab_size)
    body = CompletionRequest(prompt=prompt, **asdict(config))
    check(body)
    engine = EngineClient(msgspec.structs.replace(with_folders(engine_config, folder), max_running=1))
    asyncio.run(_run(engine, tokenizer, body))
    return 0


async def _run(engine: EngineClient, tokenizer: Tokenizer, body: CompletionRequest) -> None:
    engine.start()
    try:
        info = await wait_with_progress(engine)
        prompts = await encode_prompts(body.prompt, tokenizer, info)
        ids = [prompt.token_ids for prompt in prompts]
        requests = choice_requests(body, RequestOptions(max_tokens=body.max_tokens), ids, tokenizer, info)
        generation = Generation(engine, tokenizer.vocabulary, requests)
        show(str(body.prompt))
        async with aclosing(generation.deltas()) as deltas:
            async for delta in deltas:
                show(delta.text)
        show("\n")
    finally:
        await engine.close()
