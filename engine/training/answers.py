"""The data of a head: answers that the target wrote, as token ids, one JSON object a line.

Also reads prompts, and samples the answers by the engine.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import msgspec
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from headway.engine.bench.measure import Post
from headway.engine.build import Engine
from headway.engine.loop import EngineLoop
from headway.engine.models.model_files import read_json_object
from headway.engine.protocol.errors import ConfigError, HeadwayError
from headway.engine.protocol.messages import Submit
from headway.engine.protocol.sampling_params import SamplingParams


class Answer(msgspec.Struct, frozen=True):
    """The text that the target wrote after a prompt. temperature: 0 for greedy."""

    prompt: list[int]
    answer: list[int]
    temperature: float


@dataclass(frozen=True, slots=True)
class Defaults:
    """The generation defaults that a server reads from the model's folder."""

    stop_token_ids: list[int]
    repetition_penalty: float

    @classmethod
    def of(cls, model: Path) -> Defaults:
        """Reads generation_config.json and, where it names none, the end of texts from config.json."""
        content = read_json_object(model / "generation_config.json") or {}
        ends = content.get("eos_token_id") or (read_json_object(model / "config.json") or {}).get(
            "eos_token_id"
        )
        penalty = content.get("repetition_penalty")
        stops = ends if isinstance(ends, list) else [ends] if isinstance(ends, int) else []
        return cls(stops, float(penalty) if isinstance(penalty, int | float) else 1.0)


def read_prompts(file: Path, model: Path) -> list[list[int]]:
    """Returns the token ids of each line's prompt, without those that come twice.

    A line of a file that ends in .jsonl is a list of chat messages, an object with them as `messages`, or one
    with a text as `prompt`; a line of any other file is a text. A text is a user's message to a model with a
    chat template, and is continued as it is by another. Raises ConfigError.
    """
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model)
    found: dict[tuple[int, ...], None] = {}
    try:
        lines = file.read_text(encoding="utf-8").split(
            "\n"
        )  # strings in JSON may contain other line separators
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is no UTF-8: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        content: object = line
        if file.suffix == ".jsonl":
            try:
                content = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"line {number} of {file} is no JSON: {error}") from None
        if isinstance(content, dict):
            content = content.get("messages", content.get("prompt"))
        if isinstance(content, str) and tokenizer.chat_template:
            content = [{"role": "user", "content": content}]
        if isinstance(content, str):
            ids = tokenizer.encode(content)
        elif isinstance(content, list) and tokenizer.chat_template:
            try:
                ids = tokenizer.apply_chat_template(content, add_generation_prompt=True, return_dict=False)
            except Exception as error:  # noqa: BLE001  # whatever the model's template raises
                raise ConfigError(
                    f"line {number} of {file} does not fit the model's chat template: {error}"
                ) from None
        else:
            raise ConfigError(
                f"line {number} of {file} is neither a prompt nor messages for a model with a chat template"
            )
        found[tuple(ids)] = None
    prompts = [list(ids) for ids in found if ids]
    if not prompts:
        raise ConfigError(f"{file} has no prompts; give a file with one on each line")
    return prompts


def sample(engine: Engine, requests: Iterable[Submit], tell: Callable[[Submit, list[int]], None]) -> None:
    """Runs the requests on an engine in this process, one for each of its rows at once. tell: called with
    each request and its tokens when it has ended. Raises HeadwayError."""
    post = Post()
    loop = EngineLoop(engine.scheduler, engine.runner, post)
    running: dict[int, tuple[Submit, array[int]]] = {}
    waiting = iter(requests)
    upcoming = next(waiting, None)
    while upcoming is not None or running:
        while upcoming is not None and len(running) < engine.info.max_running:
            running[upcoming.request_id] = upcoming, array("q")
            post.inbox.append(upcoming)
            upcoming = next(waiting, None)
        loop.step()
        for event in chain(*post.take_events()):
            if event.error is not None:
                raise HeadwayError(f"the engine failed a prompt: {event.error}")
            running[event.request_id][1].extend(event.token_ids)
            if event.finish_reason is not None:
                request, ids = running.pop(event.request_id)
                tell(request, ids.tolist())


def requests_of(
    prompts: Sequence[list[int]],
    temperatures: Sequence[float],
    defaults: Defaults,
    *,
    max_tokens: int,
    seed: int,
) -> Iterator[Submit]:
    """Yields a request for each prompt; the temperatures take turns."""
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(
            temperature=temperatures[number % len(temperatures)],
            repetition_penalty=defaults.repetition_penalty,
            seed=seed * len(prompts) + number,
        )
        yield Submit(
            request_id=number, prompt_token_ids=prompt, sampling=sampling, max_tokens=max_tokens,
            stop_token_ids=defaults.stop_token_ids,
        )  # fmt: skip


def read_answers(files: Sequence[Path], vocab_size: int) -> list[Answer]:
    """Returns the answers of all files in turn, whose tokens are among vocab_size ones. Raises
    ConfigError."""
    decoder, found = msgspec.json.Decoder(Answer), []
    for file in files:
        try:
            read = [decoder.decode(line) for line in file.read_bytes().splitlines()]
        except msgspec.DecodeError as error:
            raise ConfigError(f"{file} has no answers of `headway head data`: {error}") from None
        largest = max((max(answer.prompt + answer.answer, default=0) for answer in read), default=0)
        if largest >= vocab_size:
            raise ConfigError(
                f"{file} has token {largest}, the model has {vocab_size:,} tokens; give answers of this model"
            )
        found += read
    return found


def split(answers: Sequence[Answer], num_held_out: int) -> tuple[list[Answer], list[Answer]]:
    """Returns the answers to train on, and those to held-out prompts. The held-out prompts are the first ones
    by hash, so that they are the same for all files that have them. Raises ConfigError if nothing is left."""

    def digest(prompt: tuple[int, ...]) -> bytes:
        return hashlib.sha256(array("q", prompt).tobytes()).digest()

    ranked = sorted({tuple(answer.prompt) for answer in answers}, key=digest)
    held_out = set(ranked[:num_held_out])
    if len(ranked) <= len(held_out):
        raise ConfigError(
            f"the data has {len(ranked):,} different prompts and {num_held_out:,} are held out; give more data"
        )
    parts: tuple[list[Answer], list[Answer]] = ([], [])
    for answer in answers:
        parts[tuple(answer.prompt) in held_out].append(answer)
    return parts
