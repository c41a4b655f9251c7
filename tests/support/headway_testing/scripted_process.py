"""A server whose model says what it is told: `python -m headway_testing.scripted_process serve [FLAG ...]`.

It is `headway serve` before an engine that reads its answer in the conversation: the last message of the
user, and where that has several parts with TURN between them, the part after as many as there were answers
since. What agents add to the user's words (elements <system-reminder>, messages that begin with
"Observation:") is left out. The chat template must write turns in ChatML form. The text comes a few tokens at
a time, and ends with the model's own end token.
"""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from headway.engine import (
    Abort,
    Configure,
    EngineInfo,
    EngineStats,
    FinishReason,
    Heartbeat,
    Mailbox,
    Ready,
    RoundOutput,
    Shutdown,
    StatsSnapshot,
    Submit,
    TokenEvent,
)

TURN = "\n=====\n"
MOST_TOKENS = 3  # of an event: 1, 2, 3, 1, ..
IDLE_SECONDS = 0.01
_USER = "<|im_start|>user\n"
_ANSWER = "<|im_start|>assistant\n"
_END = "<|im_end|>"
_ASIDE = re.compile(r"<system-reminder>.*?</system-reminder>|\AObservation:.*", re.DOTALL)


def answer_to(prompt: str) -> str:
    """Returns what the conversation tells the model to say."""
    num_answered = -1
    for turn in reversed(prompt.split(_USER)):
        message, _, rest = turn.partition(_END)
        num_answered += rest.count(_ANSWER)
        script = _ASIDE.sub("", message).strip("\n")
        if script:
            break
    parts = script.split(TURN)
    return parts[min(num_answered, len(parts) - 1)]


@dataclass
class Saying:
    """Mutable: the tokens that are left of an answer, and the number of events so far."""

    tokens: list[int]
    reason: FinishReason
    num_events: int = 0

    def event(self, request_id: int) -> TokenEvent:
        count = self.num_events % MOST_TOKENS + 1
        now, self.tokens = self.tokens[:count], self.tokens[count:]
        self.num_events += 1
        return TokenEvent(request_id, now, None if self.tokens else self.reason, MOST_TOKENS, len(now) - 1)


def saying(request: Submit, tokenizer: Tokenizer) -> Saying:
    text = answer_to(tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False))
    tokens = [*tokenizer.encode(text, add_special_tokens=False).ids, *request.stop_token_ids[:1]]
    if len(tokens) > request.max_tokens:
        return Saying(tokens[: request.max_tokens], FinishReason.LENGTH)
    return Saying(tokens, FinishReason.STOP)


def serve(mailbox: Mailbox, tokenizer: Tokenizer) -> None:
    running: dict[int, Saying] = {}
    while True:
        for message in mailbox.receive(0.0 if running else IDLE_SECONDS):
            if isinstance(message, Shutdown):
                return
            if isinstance(message, Abort):
                running.pop(message.request_id, None)
            elif isinstance(message, Submit):
                running[message.request_id] = saying(message, tokenizer)
        if running:
            mailbox.send(RoundOutput([said.event(i) for i, said in running.items()]))
            running = {i: said for i, said in running.items() if said.tokens}
        mailbox.send(Heartbeat("serve", 1.0, 1))
        mailbox.send(StatsSnapshot(EngineStats(num_kv_blocks=64, num_requests_running=len(running))))


def info(tokenizer: Tokenizer) -> EngineInfo:
    return EngineInfo(
        architecture="ScriptedForCausalLM", device="cpu", dtype="float32", num_parameters=10, weights_bytes=40,
        kv_cache_bytes=80, num_blocks=64, block_size=16, max_model_len=1 << 15, max_running=64,
        vocab_size=tokenizer.get_vocab_size(), depth=MOST_TOKENS, has_draft_head=True, drafter="mtp",
    )  # fmt: skip


def run_engine(address: str) -> int:
    mailbox = Mailbox(address)
    (configure, *_) = mailbox.receive(10.0)
    assert isinstance(configure, Configure), configure
    tokenizer = Tokenizer.from_file(str(Path(configure.config.model_path) / "tokenizer.json"))
    mailbox.send(Ready(info(tokenizer)))
    serve(mailbox, tokenizer)
    mailbox.close()
    return 0


def run_server(arguments: list[str]) -> int:
    from headway.server import cli
    from headway.server.engine.child import EngineChild
    from headway.server.engine.client import EngineClient

    engine = [sys.executable, "-P", "-m", "headway_testing.scripted_process"]
    command = importlib.import_module("headway.server.cli.serve")
    command.EngineClient = partial(EngineClient, command=engine)
    cli.EngineChild = partial(EngineChild, engine)
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(run_server(sys.argv[1:]) if sys.argv[1] == "serve" else run_engine(sys.argv[1]))
