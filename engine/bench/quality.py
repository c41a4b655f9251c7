"""`headway bench quality`: compares a model's predictions with another's, such as the one before
quantisation, or with its own for other --cpu-weights.

Both read the same texts, those that the embedded model has not seen. Perplexity is exp of the mean negative
log-probability of the texts' tokens; the agreement is the share of places at which both hold the same token
the most probable.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.table import Table

from headway.engine.bench.measure import Post
from headway.engine.bench.report import TABLE_WIDTH, keep_json
from headway.engine.bench.settings import check_json
from headway.engine.build import assemble
from headway.engine.demo.heldout import heldout_prompts
from headway.engine.loop import EngineLoop
from headway.engine.protocol.config import CpuWeights, EngineConfig
from headway.engine.protocol.errors import ConfigError, HeadwayError
from headway.engine.protocol.exit_status import reports
from headway.engine.protocol.logprobs import TokenLogprobs, join
from headway.engine.protocol.messages import Submit
from headway.engine.protocol.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Quality:
    """The result of a comparison. models: their folders. cpu_weights, perplexities: those of each. agreement:
    the share of equal most probable tokens. num_tokens: the number of predicted tokens."""

    models: list[str]
    cpu_weights: list[CpuWeights]
    perplexities: list[float]
    agreement: float
    num_tokens: int


@reports(HeadwayError)
def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    logging.basicConfig(level="WARNING", format="%(levelname)s %(name)s: %(message)s")
    parser = argparse.ArgumentParser(
        prog="headway bench quality",
        description="Compares the predictions of two models, such as a quantized one with the one that it was made of, over the "
        "embedded held-out texts: perplexity of both, and how often both hold the same token the most probable.",
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("first", metavar="A", help="a folder in Hugging Face layout, with a tokenizer.json")
    parser.add_argument("second", metavar="B", help="another, of the same vocabulary; A's tokenizer is used")
    parser.add_argument("--texts", type=int, default=100, metavar="N", help="of 100 texts (default: all)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    parser.add_argument("--cpu-weights", nargs=2, choices=get_args(CpuWeights), default=["full", "full"], metavar=("A", "B"),
        help="what each is multiplied by on a CPU, as of `headway serve` (default: full full)")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    given = parser.parse_args(argv)
    if not 1 <= given.texts <= 100:
        raise ConfigError(f"--texts is {given.texts}; set 1 to 100")
    check_json(given.json)
    models = [given.first, given.second]
    texts = heldout_prompts(Path(given.first))[: given.texts]
    has_tokenizer = (Path(given.second) / "tokenizer.json").exists()
    if has_tokenizer and heldout_prompts(Path(given.second))[: given.texts] != texts:
        raise ConfigError(
            f"{given.first} and {given.second} encode the texts differently; give models of one vocabulary"
        )
    found = compare(models, texts, device=given.device, dtype=given.dtype, cpu_weights=given.cpu_weights)
    _show(found)
    keep_json(found, given.json)
    return 0


def compare(
    models: list[str],
    texts: Sequence[list[int]],
    *,
    device: str = "auto",
    dtype: str = "auto",
    cpu_weights: Sequence[CpuWeights] = ("full", "full"),
) -> Quality:
    """Compares two models. models: their folders. texts: the token ids of each text. cpu_weights: those of
    each model. Raises HeadwayError."""
    configs = [
        EngineConfig(model_path=model, depth=0, device=device, dtype=dtype, cpu_weights=weights)  # type: ignore[arg-type]
        for model, weights in zip(models, cpu_weights, strict=True)
    ]
    first, second = scores = [_scores(config, texts) for config in configs]
    same = sum(a == b for a, b in zip(first.top_ids, second.top_ids, strict=True))
    count = len(first.logprobs)
    perplexities = [math.exp(-math.fsum(own.logprobs) / count) for own in scores]
    return Quality(models, list(cpu_weights), perplexities, same / count, count)


def _scores(config: EngineConfig, texts: Sequence[list[int]]) -> TokenLogprobs:
    """Returns the log-probabilities of all tokens except each text's first. Raises HeadwayError."""
    engine = assemble(config, progress=lambda _: None)
    if engine.info.cpu_weights != config.cpu_weights:
        raise ConfigError(
            f"--cpu-weights is {config.cpu_weights}, but this machine has {engine.info.cpu_weights} alone"
        )
    largest = max(map(max, texts))
    if largest >= engine.info.vocab_size:
        raise ConfigError(
            f"{config.model_path} has {engine.info.vocab_size:,} tokens, a text has the token {largest:,}; give models of one "
            "vocabulary"
        )
    post = Post()
    loop = EngineLoop(engine.scheduler, engine.runner, post)
    post.inbox = [
        Submit(
            request_id=n, prompt_token_ids=ids, sampling=SamplingParams(num_prompt_logprobs=1), max_tokens=1
        )
        for n, ids in enumerate(texts)
    ]
    found: dict[int, TokenLogprobs] = {}
    while len(found) < len(texts):
        loop.step()
        for event in chain(*post.take_events()):
            if event.error is not None:
                raise HeadwayError(f"the engine failed a text: {event.error}")
            if event.prompt_logprobs is not None:
                found[event.request_id] = event.prompt_logprobs
    del loop, engine
    gc.collect()
    return join([found[n] for n in range(len(texts))])


def _show(found: Quality) -> None:
    table = Table()
    for name in ("model", "perplexity", "agreement"):
        table.add_column(name, justify="left" if name == "model" else "right")
    agreements = ["", f"{found.agreement:.2%}"]
    for model, weights, perplexity, agreement in zip(
        found.models, found.cpu_weights, found.perplexities, agreements, strict=True
    ):
        of_weights = "" if weights == "full" else f", {weights}"
        table.add_row(f"{model}{of_weights}", f"{perplexity:.4f}", agreement)
    console = Console(width=TABLE_WIDTH)
    console.print(table)
    console.print(f"{found.num_tokens:,} tokens")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
