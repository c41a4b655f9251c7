"""The command `headway head`: `data` samples a model's answers, `train` makes a draft head of them."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, PreTrainedModel

from headway.engine.bench.settings import parse_number
from headway.engine.build import assemble
from headway.engine.models.registry import read_model_spec
from headway.engine.models.spec import ModelSpec
from headway.engine.models.trained_head import model_layer
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.errors import ConfigError, HeadwayError, ModelError
from headway.engine.protocol.exit_status import reports
from headway.engine.protocol.messages import Submit
from headway.engine.training.answers import (
    Answer,
    Defaults,
    read_answers,
    read_prompts,
    requests_of,
    sample,
    split,
)
from headway.engine.training.folder import write_card, write_head
from headway.engine.training.head import UNROLLED, Target
from headway.engine.training.trainer import (
    CHECKPOINT,
    Scores,
    Settings,
    Trainer,
    can_be_learnt,
    scores,
    share_drafted,
)

MEASURED_TEMPERATURES, MEASURED_TOKENS = (0.0, 0.8), 256
MEASURED_CACHE_BYTES = 1 << 30
# The backends without cuDNN, whose gradients may differ from run to run.
DETERMINISTIC_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
LOGGED_EVERY = 100  # steps, where no progress bar is shown
SAVED_EVERY_SECONDS = 60.0  # a checkpoint, which a run that is killed leaves behind
DTYPES = ("auto", "float32", "bfloat16", "float16")


@reports(HeadwayError, OSError)
def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    started = time.monotonic()
    logging.basicConfig(level="WARNING", format="%(levelname)s %(name)s: %(message)s")
    given = _parser().parse_args(argv)
    console = Console(stderr=True)
    work = _data if given.command == "data" else _train
    work(given, started, console)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headway head",
        description="Trains a draft head for a model that ships none, from answers of the model itself: first `data`, then `train`, "
        "then headway serve MODEL --drafter DIR. See docs/heads.md.",
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    data = commands.add_parser("data", help="sample the model's answers to prompts", allow_abbrev=False)
    train = commands.add_parser(
        "train", help="train a head on these answers, or go on training it", allow_abbrev=False
    )
    for command in (data, train):
        command.add_argument("model", type=Path, metavar="MODEL", help="a folder in Hugging Face layout")
        command.add_argument("--out", type=Path, required=True, metavar="DIR", help="made if it is not there")
        command.add_argument("--seed", type=int, default=0, metavar="N", help="(default: %(default)s)")
        command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
        command.add_argument(
            "--dtype", choices=DTYPES, default="auto",
            help="of the model; auto: float32 on the CPU, the checkpoint's own on a GPU",
        )  # fmt: skip
        command.add_argument(
            "--minutes", type=float, metavar="M",
            help="stop after this time, loading included; `train` goes on where it stopped when it is started again",
        )  # fmt: skip
    data.add_argument(
        "--prompts", type=Path, required=True, metavar="FILE",
        help="a text a line, or, in a file that ends in .jsonl, a list of chat messages or an object with `messages` or `prompt`",
    )  # fmt: skip
    data.add_argument(
        "--temperatures", type=_temperatures, default=(0.0, 0.8), metavar="T,T",
        help="taken in turn (default: 0,0.8)",
    )  # fmt: skip
    data.add_argument(
        "--max-tokens", type=parse_number, default=512, metavar="N", help="of an answer (default: 512)"
    )
    train.add_argument(
        "--data", type=Path, required=True, nargs="+", metavar="FILE", help="answers, as `data` writes them"
    )
    for flag, default, meaning in (
        ("--draft-vocab", 8192, "tokens that are drafted, the most frequent ones of the answers"),
        ("--epochs", 4, "how often each answer is seen"),
        ("--batch-tokens", 8192, "tokens of a step"),
        ("--max-length", 1024, "tokens of a prompt with its answer"),
        ("--held-out", 100, "prompts on which the head is measured at the end and not trained"),
    ):
        train.add_argument(
            flag, type=parse_number, default=default, metavar="N", help=f"{meaning} (default: {default})"
        )
    train.add_argument(
        "--learning-rate", type=_learning_rate, default=5e-4, metavar="R", help="(default: %(default)s)"
    )
    return parser


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 <= temperature <= 2 for temperature in found):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers from 0 to 2, such as 0,0.8")
    return found


def _learning_rate(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0 and up to 1, such as 5e-4")
    return found


def _data(given: argparse.Namespace, started: float, console: Console) -> None:
    """Writes the answers to answers-SEED.jsonl. Raises HeadwayError."""
    file = given.out / f"answers-{given.seed}.jsonl"
    if file.exists():
        raise ConfigError(f"{file} exists; give another --seed or --out")
    model_layer(read_model_spec(given.model))  # refuses models for which no head can be trained
    defaults, prompts = Defaults.of(given.model), read_prompts(given.prompts, given.model)
    engine = assemble(
        EngineConfig(model_path=str(given.model), depth=0, device=given.device, dtype=given.dtype),
        progress=lambda _: None,
    )
    longest = max(engine.info.max_model_len - given.max_tokens, 0)
    fitting = [prompt for prompt in prompts if len(prompt) <= longest]
    if not fitting:
        raise ConfigError(
            f"none of {len(prompts):,} prompts has at most {longest:,} tokens, which --max-tokens {given.max_tokens} "
            f"leaves of {engine.info.max_model_len:,}; lower it"
        )
    given.out.mkdir(parents=True, exist_ok=True)
    encoder, unfinished = msgspec.json.Encoder(), given.out / f".{file.name}"
    with _progress(console) as bar, unfinished.open("wb") as written:
        task = bar.add_task(f"answers to {len(fitting):,} prompts", total=len(fitting))

        def tell(request: Submit, ids: list[int]) -> None:
            answer = Answer(list(request.prompt_token_ids), ids, request.sampling.temperature)
            written.write(encoder.encode(answer) + b"\n")
            bar.advance(task)

        requests = requests_of(
            fitting, given.temperatures, defaults, max_tokens=given.max_tokens, seed=given.seed
        )
        try:
            sample(engine, (r for r in requests if _has_time(given, started)), tell)
        except KeyboardInterrupt:
            written.flush()
            if written.tell() > 0:  # finished answers are complete all the same
                os.replace(unfinished, file)
                console.print(f"interrupted; the finished answers are in {file}")
            raise
    if unfinished.stat().st_size == 0:
        unfinished.unlink()
        raise ConfigError(f"--minutes {given.minutes:g} was over before the first answer began; give more")
    os.replace(unfinished, file)
    if len(fitting) < len(prompts):
        console.print(f"{len(prompts) - len(fitting):,} prompts had more than {longest:,} tokens")
    print(file)


def _train(given: argparse.Namespace, started: float, console: Console) -> None:
    """Writes the head once all steps are done, and before that a checkpoint. Raises HeadwayError."""
    settings = Settings(
        given.draft_vocab, given.epochs, given.batch_tokens, given.max_length, given.learning_rate, given.seed
    )
    if (given.out / "config.json").exists() and not (given.out / CHECKPOINT).exists():
        raise ConfigError(f"{given.out} has a model or a finished head; give another --out")
    vocab_size = read_model_spec(given.model).vocab_size
    answers, rest = split(read_answers(given.data, vocab_size), given.held_out)
    held_out = [answer for answer in rest if can_be_learnt(answer, settings.max_length)]
    if not held_out:
        raise ConfigError(
            f"none of the {len(rest)} held-out answers has enough tokens within --max-length {settings.max_length} to be "
            "measured; set --held-out or --max-length to more"
        )
    given.out.mkdir(parents=True, exist_ok=True)
    trained = _trained(given, started, console, settings, answers, held_out)
    if trained is None:
        return
    num_steps, found, drafted = trained
    gc.collect()  # the engine needs the memory
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    prompts = list({tuple(answer.prompt): answer.prompt for answer in held_out}.values())
    acceptance = measured_acceptance(given.model, given.out, prompts, device=given.device, dtype=given.dtype)
    card = write_card(
        given.out, given.model, settings, num_answers=len(answers), num_steps=num_steps, held_out=found,
        drafted=drafted, acceptance=acceptance,
    )  # fmt: skip
    (given.out / CHECKPOINT).unlink()
    print(card)


def _trained(
    given: argparse.Namespace,
    started: float,
    console: Console,
    settings: Settings,
    answers: Sequence[Answer],
    held_out: Sequence[Answer],
) -> tuple[int, Scores, float] | None:
    """Trains and writes a checkpoint. Once the head is trained and written, it returns the number of all
    steps, the scores of held-out answers, and the share of their tokens that can be drafted; None before."""
    target = load_target(given.model, device=given.device, dtype=given.dtype)
    trainer = Trainer(target, answers, settings)
    trainer.resume(given.out)
    num_steps = trainer.num_steps
    with _progress(console) as bar:
        task = bar.add_task("training", total=num_steps, completed=trainer.step)
        saved = time.monotonic()

        def tell(step: int, found: Scores) -> None:
            nonlocal saved
            if time.monotonic() - saved >= SAVED_EVERY_SECONDS:
                trainer.save(given.out)
                saved = time.monotonic()
            shown = " ".join(f"{loss:.3f}" for loss in found.losses.tolist())
            agreed = " ".join(f"{share:.2f}" for share in found.agreement.tolist())
            bar.update(task, completed=step, description=f"loss {shown}, agreement {agreed}")
            if not console.is_terminal and step % LOGGED_EVERY == 0:
                console.print(f"step {step} of {num_steps}: loss {shown}, agreement {agreed}")

        torch.use_deterministic_algorithms(True)
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 - it has no type
        with sdpa_kernel(DETERMINISTIC_ATTENTION), _noting_interrupts() as interrupts:
            trainer.save(given.out)  # fails at once if nothing can be written there
            trainer.run(lambda: not interrupts and _has_time(given, started), tell)
            trainer.save(given.out)
        torch.use_deterministic_algorithms(False)
    if trainer.step < num_steps:
        print(f"stopped after step {trainer.step:,} of {num_steps:,}; the same command goes on")
    if interrupts:
        raise KeyboardInterrupt
    if trainer.step < num_steps:
        return None
    write_head(given.out, target, trainer.head)
    with torch.no_grad():
        found = [scores(target, trainer.head, [answer], settings.max_length) for answer in held_out]
    mean = Scores(*(torch.stack(parts).mean(0) for parts in zip(*found, strict=True)))
    return num_steps, mean, share_drafted(held_out, trainer.head.draft_ids)


def load_target(model: Path, *, device: str, dtype: str) -> Target:
    """Returns the model in transformers' implementation. Raises ModelError for one that no head fits."""
    spec = read_model_spec(model)
    chosen = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    wanted = "float32" if dtype == "auto" and chosen == "cpu" else dtype
    try:
        loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model, dtype=wanted, attn_implementation=_attention(spec)
        )
    except ValueError as error:
        raise ModelError(f"transformers cannot load {model}, which trains with it: {error}") from None
    nn.Module.to(loaded.requires_grad_(False), torch.device(chosen))
    return Target(loaded, spec)


def _attention(spec: ModelSpec) -> str:
    """Returns the name of the attention implementation: torch's own has no soft caps."""
    return "eager" if any(attention.soft_cap for attention in spec.attentions) else "sdpa"


def measured_acceptance(
    model: Path, head: Path, prompts: Sequence[list[int]], *, device: str, dtype: str
) -> dict[float, list[float]]:
    """Measures the head in the engine. Returns for each temperature the shares of rounds whose first 1 ..
    UNROLLED drafts were accepted, among those with that number of drafts."""
    config = EngineConfig(
        model_path=str(model), drafter_path=str(head), depth=UNROLLED, device=device, dtype=dtype,  # type: ignore[arg-type]
        kv_cache_memory_bytes=MEASURED_CACHE_BYTES,
    )  # fmt: skip
    engine, defaults = assemble(config, progress=lambda _: None), Defaults.of(model)
    max_tokens = min(MEASURED_TOKENS, engine.info.max_model_len - max(map(len, prompts)))
    found: dict[float, list[float]] = {}
    before = ([0] * UNROLLED, [0] * UNROLLED)
    for temperature in MEASURED_TEMPERATURES:
        requests = requests_of(prompts, [temperature], defaults, max_tokens=max_tokens, seed=0)
        sample(engine, requests, lambda request, ids: None)
        stats = engine.scheduler.snapshot()
        after = (list(stats.draft_tokens_per_position), list(stats.accepted_tokens_per_position))
        drafted, kept = (
            [b - a for a, b in zip(*pair, strict=True)] for pair in zip(before, after, strict=True)
        )
        found[temperature] = [k / max(d, 1) for k, d in zip(kept, drafted, strict=True)]
        before = after
    return found


@contextmanager
def _noting_interrupts() -> Iterator[list[int]]:
    """Yields a list that gets an entry for each SIGINT, so that steps and checkpoints are never
    interrupted."""
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)


def _has_time(given: argparse.Namespace, started: float) -> bool:
    return given.minutes is None or time.monotonic() - started < 60 * given.minutes


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


if __name__ == "__main__":
    # Makes steps bit-identical in every run. cuBLAS reads the variable at its first use.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    sys.exit(main(sys.argv[1:]))
