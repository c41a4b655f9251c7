"""A process that speaks the engine's frames: `python -m headway_testing.fake_process [MODE] ADDRESS`.

It counts up from the prompt's last id, three tokens a round. A request with max_tokens 666 kills it. Modes:
serve, model-error, crash-at-start, silent, slow-load, deaf (serves, ignores Shutdown and SIGTERM),
needs:FOLDER (serves if the folder is there). EngineInfo.architecture tells how many tokens the token table
has.
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from headway.engine import (
    Abort,
    Configure,
    EngineInfo,
    EngineStats,
    Failure,
    FinishReason,
    Heartbeat,
    Mailbox,
    Pause,
    Ready,
    Resume,
    RoundOutput,
    SetDepth,
    Shutdown,
    StatsSnapshot,
    Submit,
    TokenEvent,
)

DEADLY_MAX_TOKENS = 666
SILENCING_MAX_TOKENS = 667
FAULTY_MAX_TOKENS = 668
GARBLING_MAX_TOKENS = 669
BUSY_MAX_TOKENS = 671
COMPILING_MAX_TOKENS = 672
WAITING_MAX_TOKENS = 673
LONG_COMPILING_MAX_TOKENS = 674
ENDLESS_MAX_TOKENS = 675
RANKED_MAX_TOKENS = 676
LONG_STEP_SECONDS = 2.0
LONG_COMPILER_SECONDS = 10.0
COMPILER = "import sys, time; end = time.monotonic() + float(sys.argv[1])\nwhile time.monotonic() < end: pass"
ROUND_SECONDS = 0.01


def compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def compile_for(seconds: float) -> None:
    subprocess.run([sys.executable, "-S", "-c", COMPILER, str(seconds)], check=True)


def wait() -> None:
    """Uses one percent of a processor, and never ends."""
    while True:
        begin = time.process_time()
        while time.process_time() - begin < 0.004:
            pass
        time.sleep(0.4)


class FakeLoop:
    """Mutable: requests in flight by id, with the next id and the number of tokens left."""

    def __init__(self, mailbox: Mailbox, mode: str) -> None:
        self.mailbox = mailbox
        self.mode = mode
        self.running: dict[int, tuple[int, int]] = {}
        self.stats = EngineStats(num_kv_blocks=64)
        self.is_paused = False

    def serve(self) -> None:
        step = 0
        while True:
            for message in self.mailbox.receive(ROUND_SECONDS):
                if isinstance(message, Shutdown) and self.mode != "deaf":
                    return
                self.take(message)
            events = [] if self.is_paused else [self.advance(request_id) for request_id in list(self.running)]
            if events:
                self.mailbox.send(RoundOutput(events))
            step += 1
            self.mailbox.send(Heartbeat("serve", 1.0, step))
            self.mailbox.send(StatsSnapshot(self.stats))

    def take(self, message: object) -> None:
        if isinstance(message, Abort):
            self.running.pop(message.request_id, None)
        if isinstance(message, Pause | Resume):
            self.is_paused = isinstance(message, Pause)
        if isinstance(message, SetDepth):
            self.stats.draft_tokens_per_position = [1] * message.depth
        if not isinstance(message, Submit):
            return
        if message.max_tokens == DEADLY_MAX_TOKENS:
            os.kill(os.getpid(), signal.SIGKILL)
        if message.max_tokens == SILENCING_MAX_TOKENS:
            time.sleep(3600)
        if message.max_tokens == GARBLING_MAX_TOKENS:
            self.mailbox._socket.send(b"no frame of ours")
        if message.max_tokens == BUSY_MAX_TOKENS:
            compute(LONG_STEP_SECONDS)
        if message.max_tokens == ENDLESS_MAX_TOKENS:
            compute(math.inf)
        if message.max_tokens == RANKED_MAX_TOKENS:
            with subprocess.Popen(["sleep", "3600"]):
                compute(math.inf)
        if message.max_tokens == WAITING_MAX_TOKENS:
            wait()
        if message.max_tokens == COMPILING_MAX_TOKENS:
            compile_for(LONG_STEP_SECONDS)
        if message.max_tokens == LONG_COMPILING_MAX_TOKENS:
            compile_for(LONG_COMPILER_SECONDS)
        if message.max_tokens == FAULTY_MAX_TOKENS:
            raise RuntimeError("a fault of the engine's own")
        self.stats.num_prompt_tokens += len(message.prompt_token_ids)
        num_got = len(message.output_token_ids or ())
        self.running[message.request_id] = (
            message.prompt_token_ids[-1] + num_got + 1,
            message.max_tokens - num_got,
        )

    def advance(self, request_id: int) -> TokenEvent:
        first, left = self.running.pop(request_id)
        tokens = list(range(first, first + min(3, left)))
        self.stats.num_generation_tokens += len(tokens)
        if len(tokens) == left:
            return TokenEvent(request_id, tokens, FinishReason.LENGTH)
        self.running[request_id] = (first + len(tokens), left - len(tokens))
        return TokenEvent(request_id, tokens, None, 3, 2)


def info(config: Configure) -> EngineInfo:
    num_tokens = len(config.token_table.tokens) if config.token_table else ""
    return EngineInfo(
        architecture=f"Fake{num_tokens}ForCausalLM", device="cpu", dtype="float32", num_parameters=10, weights_bytes=40,
        kv_cache_bytes=80, num_blocks=64, block_size=config.config.block_size, max_model_len=2048,
        max_running=config.config.num_rows, vocab_size=600, depth=config.config.depth, has_draft_head=True, drafter="mtp",
    )  # fmt: skip


def main(mode: str, address: str) -> int:
    faulthandler.register(signal.SIGUSR1)
    mailbox = Mailbox(address)
    (configure, *_) = mailbox.receive(10.0)
    assert isinstance(configure, Configure), configure
    if mode == "model-error":
        mailbox.send(Failure("ModelError", "config.json is missing"))
    elif mode.startswith("needs:") and not Path(mode.removeprefix("needs:")).is_dir():
        mailbox.send(Failure("ModelError", f"{mode.removeprefix('needs:')} is missing"))
    elif mode == "silent":
        time.sleep(3600)
    elif mode == "slow-load":
        for tenth in range(10):
            mailbox.send(Heartbeat("load", tenth / 10))
            time.sleep(0.05)
        time.sleep(3600)
    elif mode.startswith(("serve", "deaf", "needs:")):
        if mode == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        mailbox.send(Ready(info(configure)))
        try:
            FakeLoop(mailbox, mode).serve()
        except RuntimeError as error:
            mailbox.send(Failure("crash", str(error)))
            mailbox.close()
            return 1
    mailbox.close()
    return 0 if mode == "serve" else 1


if __name__ == "__main__":
    sys.exit(main(*(sys.argv[1:] if len(sys.argv) == 3 else ("serve", sys.argv[1]))))
