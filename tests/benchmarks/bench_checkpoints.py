"""What checkpoints of recurrent state cost a prompt, by the tokens between two of them: time, and bytes that
are kept.

The engine makes two for each prompt: where the blocks end that it shares with others, and at its last border.
Here it makes one at every multiple of a spacing as well, which cuts chunks of the prompt there. Prompts are
cold and random.

    python -P tests/benchmarks/bench_checkpoints.py qwen3.5-0.8b --length 4096
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
from headway_testing.local import LocalEngine

from headway.engine.bench.settings import find_model
from headway.engine.protocol.config import EngineConfig
from headway.engine.scheduling.checkpoints import Checkpoints
from headway.engine.scheduling.prefix import PrefixCache, _Chain
from headway.engine.scheduling.request import Request

SPACINGS = (64, 128, 256, 512, 1024)


def main() -> None:
    arguments = parse_arguments()
    folder, is_shape = find_model(arguments.model)
    config = EngineConfig(
        model_path=str(folder),
        load_format="dummy" if is_shape or arguments.dummy else "safetensors",
        depth=0,
        max_model_len=arguments.length + 1,
        max_running=max(1, arguments.length // SPACINGS[0] // 4),  # four checkpoints a row
    )
    engine = LocalEngine(config)
    engine.engine.runner.capture([0], progress=lambda _: None)
    seconds = measure(engine, arguments.length, arguments.runs)
    state_bytes = bytes_of_state(engine)
    usual = statistics.median(seconds[None])
    print(f"prompt of {arguments.length:,} tokens, {state_bytes / 1e6:.2f} MB a checkpoint")
    print(f"{'spacing':>10} {'checkpoints':>12} {'MB':>8} {'ms':>10} {'ratio':>6}")
    for spacing, times in seconds.items():
        count = (
            1
            if spacing is None
            else len({*borders(arguments.length, spacing), (arguments.length - 1) // 64 * 64})
        )
        own = statistics.median(times)
        name = "as served" if spacing is None else f"{spacing:,}"
        print(
            f"{name:>10} {count:>12} {count * state_bytes / 1e6:>8.1f} {1e3 * own:>10.1f} {own / usual:>6.3f}"
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder or a shape of a model with recurrent layers")
    parser.add_argument("--dummy", action="store_true", help="draws the weights of a folder at random")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--runs", type=int, default=5)
    return parser.parse_args()


def borders(length: int, spacing: int) -> range:
    """Returns where a prompt of that length can have checkpoints: its last token is always computed."""
    return range(spacing, length, spacing)


def measure(engine: LocalEngine, length: int, num_runs: int) -> dict[int | None, list[float]]:
    """Returns seconds by spacing, None for what the engine does by itself: one prompt of each in turn; the
    first turn warms up."""
    chance = random.Random(0)
    seconds: dict[int | None, list[float]] = {spacing: [] for spacing in (None, *SPACINGS)}
    for turn in range(1 + num_runs):
        for spacing, times in seconds.items():
            prompt = chance.choices(range(engine.engine.info.vocab_size), k=length)
            with pytest.MonkeyPatch.context() as patch:
                if spacing is not None:
                    add_borders(patch, length, spacing)
                started = time.perf_counter()
                engine.generate(prompt, max_tokens=1)
                if turn > 0:
                    times.append(time.perf_counter() - started)
    return seconds


def add_borders(patch: pytest.MonkeyPatch, length: int, spacing: int) -> None:
    usual = PrefixCache._end_at_checkpoint

    def with_borders(
        cache: PrefixCache, request: Request, chain: _Chain, block_ids: list[int], checkpoints: Checkpoints
    ) -> None:
        usual(cache, request, chain, block_ids, checkpoints)
        chain.borders = tuple(sorted({*chain.borders, *borders(length, spacing)}))

    patch.setattr(PrefixCache, "_end_at_checkpoint", with_borders)


def bytes_of_state(engine: LocalEngine) -> int:
    pool = engine.engine.runner.pool
    return sum(memory[:, 0].nbytes for spec, memory in pool._memory.items() if hasattr(spec, "row_bytes"))


if __name__ == "__main__":
    main()
