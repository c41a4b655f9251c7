"""A fake engine that is as quick as its frames: `python -m headway_testing.fast_process SECONDS ADDRESS`.

Every round takes SECONDS and gives every request the next three tokens of its own prompt but the
first, again and again. Frames are made by the engine's own mailbox.
When all requests of a burst have ended it writes when their events were sent, by the first token of their
prompts: {"sent": {"17": [monotonic seconds]}}, one line on stderr a burst.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass

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

TOKENS_PER_EVENT = 3
REPORT_SECONDS = 0.1


@dataclass
class Script:
    """Mutable: a request and how much of it was sent."""

    name: int
    tokens: list[int]
    num_left: int
    num_sent: int = 0

    def event(self, request_id: int) -> TokenEvent:
        count = min(TOKENS_PER_EVENT, self.num_left)
        ids = [self.tokens[(self.num_sent + i) % len(self.tokens)] for i in range(count)]
        self.num_sent += count
        self.num_left -= count
        reason = FinishReason.LENGTH if self.num_left == 0 else None
        return TokenEvent(request_id, ids, reason, 3, count - 1, queue_seconds=None)


def serve(mailbox: Mailbox, round_seconds: float) -> None:
    running: dict[int, Script] = {}
    sent: dict[int, list[float]] = {}
    due = reported = time.monotonic()
    while True:
        for message in mailbox.receive(max(0.0, min(0.05, due - time.monotonic()))):
            if isinstance(message, Shutdown):
                return
            if isinstance(message, Abort):
                running.pop(message.request_id, None)
            elif isinstance(message, Submit):
                running[message.request_id] = Script(
                    message.prompt_token_ids[0], message.prompt_token_ids[1:], message.max_tokens
                )
        now = time.monotonic()
        if running and now >= due:
            for script in running.values():
                sent.setdefault(script.name, []).append(now)
            mailbox.send(RoundOutput([script.event(i) for i, script in running.items()]))
            running = {i: script for i, script in running.items() if script.num_left > 0}
            due = max(due + round_seconds, now)
        if sent and not running:
            print(json.dumps({"sent": sent}), file=sys.stderr, flush=True)
            sent = {}
        if now - reported >= REPORT_SECONDS:
            reported = now
            mailbox.send(Heartbeat("serve", 1.0, 1))
            mailbox.send(StatsSnapshot(EngineStats(num_kv_blocks=64, num_requests_running=len(running))))
        if not running:
            due = max(due, now + 0.01)


def info(configure: Configure) -> EngineInfo:
    return EngineInfo(
        architecture="FakeForCausalLM", device="cpu", dtype="float32", num_parameters=10, weights_bytes=40,
        kv_cache_bytes=80, num_blocks=64, block_size=16, max_model_len=1 << 20, max_running=1024, vocab_size=4096,
        depth=configure.config.depth, has_draft_head=True, drafter="mtp",
    )  # fmt: skip


def main(round_seconds: str, address: str) -> int:
    mailbox = Mailbox(address)
    (configure, *_) = mailbox.receive(10.0)
    assert isinstance(configure, Configure), configure
    mailbox.send(Ready(info(configure)))
    serve(mailbox, float(round_seconds))
    mailbox.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
