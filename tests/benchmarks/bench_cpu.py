"""How much speculation and batching gain on the CPU: ratios within one run, the embedded model, greedy, fp32.

Every contender decodes the same held-out prompts in turn, several times over, forth and back; then those that
the bars compare do so again, some times more. Ratios are of neighbours in one turn, so that a machine whose
speed drifts slows both alike; their median counts. Tokens are timed from the first to the last, prefill
included.

    make bench-cpu
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
from headway_testing.local import LocalEngine

from headway.engine.protocol.config import EngineConfig

MODEL = Path(str(files("headway.engine.demo")))
DEPTHS = (0, 1, 2, 3, 4, 5)
STREAMS = 16
BARS = {"best depth / depth 0": 1.4, "best depth / transformers": 2.0, "16 streams / 1 stream": 4.0}

TRANSFORMERS, BASE = "transformers generate", "depth 0, 1 stream"

Contender = Callable[[], float]  # runs once; returns tokens per second


def main() -> int:
    """Prints the table; the exit status is 1 when a bar is missed."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    prompts = read_prompts()
    contenders: dict[str, Contender] = {TRANSFORMERS: transformers_contender(prompts, arguments.tokens)}
    for depth in arguments.depths:
        for streams in (1, STREAMS):
            engine = LocalEngine(config_of(depth))
            contenders[label(depth, streams)] = headway_contender(engine, prompts, streams, arguments.tokens)
    for run in contenders.values():
        run()  # warms up
    rates = measure(contenders, arguments.runs)
    best = {
        streams: max(arguments.depths, key=lambda depth, n=streams: statistics.median(rates[label(depth, n)]))
        for streams in (1, STREAMS)
    }
    single, many = (label(best[streams], streams) for streams in (1, STREAMS))
    pairs = {
        "best depth / depth 0": (single, BASE),
        "best depth / transformers": (single, TRANSFORMERS),
        "16 streams / 1 stream": (many, single),
    }
    finalists = {
        name: run for name, run in contenders.items() if any(name in pair for pair in pairs.values())
    }
    finals = measure(finalists, arguments.final_runs)
    print(f"torch {torch.__version__}, {arguments.threads} threads, {arguments.tokens} tokens a request")
    for name in contenders:
        rate, ratio = statistics.median(rates[name]), statistics.median(ratios(rates, name, BASE))
        print(f"  {name:24} {rate:8.1f} tokens/s   {ratio:5.2f} x depth 0")
    print(
        f"best depth: {best[1]} for 1 stream, {best[STREAMS]} for {STREAMS}; {arguments.final_runs} turns of these:"
    )
    for name, pair in pairs.items():
        found = sorted(ratios(finals, *pair))
        print(
            f"  {name:28} {statistics.median(found):5.2f} ({found[0]:.2f} to {found[-1]:.2f})   bar {BARS[name]}"
        )
    return int(any(statistics.median(ratios(finals, *pairs[name])) < bar for name, bar in BARS.items()))


def config_of(depth: int) -> EngineConfig:
    return EngineConfig(
        model_path=str(MODEL),
        dtype="float32",
        depth=depth,
        prefix_caching=False,
        kv_cache_memory_bytes=96 << 20,
    )


def label(depth: int, streams: int) -> str:
    return f"depth {depth}, {streams} stream{'s' * (streams > 1)}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS, help="0 among them")
    parser.add_argument("--tokens", type=int, default=160, help="new tokens of each request")
    parser.add_argument("--runs", type=int, default=3, help="turns of all contenders")
    parser.add_argument("--final-runs", type=int, default=9, help="turns of those that the bars compare")
    return parser.parse_args()


def read_prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    texts = [entry["text"] for entry in json.loads((MODEL / "heldout_prompts.json").read_text())]
    return [tokenizer.encode(text).ids for text in texts[:STREAMS]]


def headway_contender(engine: LocalEngine, prompts: list[list[int]], streams: int, tokens: int) -> Contender:
    """One stream decodes two prompts in turn, sixteen streams decode sixteen at once."""

    def run() -> float:
        start = time.perf_counter()
        for first in range(0, max(2, streams), streams):
            for prompt in prompts[first : first + streams]:
                engine.submit(prompt, max_tokens=tokens)
            engine.run()
        return max(2, streams) * tokens / (time.perf_counter() - start)

    return run


def transformers_contender(prompts: list[list[int]], tokens: int) -> Contender:
    """The same weights as Qwen2, with its KV cache."""
    content = json.loads((MODEL / "config.json").read_text())
    content |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    model = Qwen2ForCausalLM(Qwen2Config(**content)).float().eval()
    weights = load_file(MODEL / "model.safetensors")
    model.load_state_dict({n: t.float() for n, t in weights.items() if "mtp_layers" not in n})
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def run() -> float:
        start = time.perf_counter()
        for prompt in prompts[:2]:
            ids = torch.tensor([prompt])
            mask = torch.ones_like(ids)
            output = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=tokens,
                do_sample=False,
                use_cache=True,
                pad_token_id=0,
            )
            assert output.shape[1] == len(prompt) + tokens
        return 2 * tokens / (time.perf_counter() - start)

    return run


def measure(contenders: dict[str, Contender], turns: int) -> dict[str, list[float]]:
    """Tokens per second of each in each turn; every second turn goes backwards."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(turns):
        order = list(contenders.items())
        for name, run in order if turn % 2 == 0 else reversed(order):
            rates[name].append(run())
    return rates


def ratios(rates: dict[str, list[float]], one: str, other: str) -> list[float]:
    """Turn by turn."""
    return [a / b for a, b in zip(rates[one], rates[other], strict=True)]


if __name__ == "__main__":
    sys.exit(main())
