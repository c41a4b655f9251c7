"""What grammars cost a decode round: no row, one row and all rows masked, in turns on one engine.

python -P tests/benchmarks/bench_masks.py [--shape mimo-7b] [--batches 1 32] [--depth 3]. On a GPU without a
shape's weights they are random: nothing is accepted, so that every round is one of full length. The masks
allow nearly everything, and the grammar is a JSON schema of strings, whose masks are as dear as any. Prints
the medians of device and host time a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from headway.engine.bench.measure import Post
from headway.engine.bench.shape import SHAPES
from headway.engine.build import assemble
from headway.engine.grammar.compile import json_schema_source
from headway.engine.grammar.compiler import GrammarCompiler
from headway.engine.loop import EngineLoop
from headway.engine.models.registry import read_model_spec
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.grammar import Grammar, TokenTable
from headway.engine.protocol.messages import Submit
from headway.engine.protocol.sampling_params import SamplingParams

SCHEMA = {"type": "array", "items": {"type": "string"}, "minItems": 10_000}
PROMPT_TOKENS, ROUNDS, RUNS = 128, 60, 5


def made_up_tokens(vocab_size: int) -> TokenTable:
    """All bytes, then words of two to five letters, the last id to end a text."""
    letters = b"etaoinshrdlucmfwypvbgkjqxz"
    words = (bytes(word) for length in range(2, 6) for word in product(letters, repeat=length))
    tokens = [bytes([i]) for i in range(256)] + [next(words) for _ in range(vocab_size - 257)]
    return TokenTable([*tokens, b"<end>"], [vocab_size - 1], [vocab_size - 1])


class Rounds:
    """Mutable: one engine, whose requests are numbered."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine = assemble(config, progress=lambda _: None)
        self.engine.runner.capture([config.depth], progress=lambda _: None)
        self.post = Post()
        vocab_size = self.engine.info.vocab_size
        compiler = GrammarCompiler(made_up_tokens(vocab_size), vocab_size)
        self.loop = EngineLoop(self.engine.scheduler, self.engine.runner, self.post, compiler=compiler)
        self.grammar = Grammar(json_schema_source(json.dumps(SCHEMA)))
        self.num_requests = 0

    def run(self, batch: int, num_masked: int) -> tuple[float, float]:
        """Returns (device seconds, host seconds) of a round in which all rows take part, medians."""
        scheduler, depth = self.engine.scheduler, self.engine.info.depth
        for row in range(batch):
            self.post.inbox.append(
                Submit(
                    request_id=self.num_requests,
                    prompt_token_ids=[(7 * self.num_requests + i) % 1000 for i in range(PROMPT_TOKENS)],
                    sampling=SamplingParams(temperature=1.0, seed=self.num_requests),
                    max_tokens=(ROUNDS + 20) * (depth + 1),
                    grammar=self.grammar if row < num_masked else None,
                )
            )
            self.num_requests += 1
        while sum(bool(r.output_token_ids) for r in scheduler.state.running) < batch:
            self.loop.step()
        for _ in range(10):
            self.loop.step()
        device, host = zip(*self._rounds(ROUNDS), strict=True)
        for request_id in list(scheduler.state.requests):
            scheduler.abort(request_id)
        while self.loop._in_flight:
            self.loop.step()
        return statistics.median(device), statistics.median(host)

    def _rounds(self, count: int) -> Iterator[tuple[float, float]]:
        stats = self.engine.scheduler.state.stats
        for _ in range(count):
            before, begun = sum(stats.stage_seconds.values()), time.perf_counter()
            self.loop.step()
            yield sum(stats.stage_seconds.values()) - before, time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="mimo-7b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()
    model = str(Path(str(SHAPES)) / arguments.shape)
    assert read_model_spec(model).draft_head is not None or arguments.depth == 0
    config = EngineConfig(
        model_path=model, load_format="dummy", depth=arguments.depth, device=arguments.device,
        max_model_len=2048, max_running=max(arguments.batches), prefix_caching=False,
    )  # fmt: skip
    rounds = Rounds(config)
    for batch in arguments.batches:
        kinds = sorted({0, 1, batch})
        for num_masked in kinds:
            for _ in range(2):
                rounds.run(batch, num_masked)
        found = {kind: [rounds.run(batch, kind) for _ in range(RUNS)] for kind in kinds}
        plain = [statistics.median(column) for column in zip(*found[0], strict=True)]
        for kind in kinds:
            device, host = (statistics.median(column) for column in zip(*found[kind], strict=True))
            print(
                f"{batch} rows, {kind} masked: device {device * 1e3:.3f} ms ({device / plain[0]:.3f}), "
                f"host {host * 1e3:.3f} ms ({host / plain[1]:.3f})"
            )


if __name__ == "__main__":
    main()
