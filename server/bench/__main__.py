"""`headway bench serve`: loads a running server over HTTP, level by level, and shows what its clients saw."""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from headway.server.bench.client import Prompts, Target
from headway.server.bench.figures import Figures, Level, References
from headway.server.bench.interference import Interference, LongPrompts, compare
from headway.server.bench.report import engine_rates, plain_milliseconds, show, show_interference, write
from headway.server.bench.run import Run
from headway.server.bench.server_side import read_engine
from headway.server.bench.workers import Workers

STREAMS_PER_WORKER = 16
INTERFERENCE_SECONDS = 10.0


class UsageError(Exception):
    """The requested run is impossible; the message gives the reason and a remedy."""


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 1 if the run is impossible, or if all requests of a level failed."""
    arguments = _parser().parse_args(argv)
    try:
        levels, interferences = run(arguments)
        show(levels)
        show_interference(interferences)
        _keep(arguments, argv, levels, interferences)
    except (UsageError, httpx.HTTPError, httpx.InvalidURL) as error:
        print(f"headway: {_told(error, arguments.base_url)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    for level in levels:
        if level.num_requests == 0:
            print(f"headway: {level.level}: no request was due; raise --duration", file=sys.stderr)
    return int(any(sum(level.errors.values()) == level.num_requests for level in levels))


def _told(error: Exception, base_url: str) -> str:
    if isinstance(error, UsageError):
        return str(error)
    reason = str(error) or type(error).__name__
    return f"{base_url} cannot be used: {reason}; start a server there, or name another by --base-url"


def run(arguments: argparse.Namespace) -> tuple[list[Figures], list[Interference]]:
    """Raises UsageError, httpx.HTTPError, httpx.InvalidURL."""
    if (file := arguments.json) is not None and not file.parent.is_dir():
        raise UsageError(f"--json is {file}, and {file.parent} is no folder; make it, or name another file")
    if file is not None and file.is_dir():
        raise UsageError(f"--json is {file}, which is a folder; name a file")
    long_prompts = _long_prompts(arguments)
    texts, plain = _texts(arguments.prompts), _plain_milliseconds(arguments.baseline)
    levels = _levels(arguments)
    headers = {} if arguments.api_key is None else {"Authorization": f"Bearer {arguments.api_key}"}
    num_workers = arguments.workers or _num_workers(levels)
    with httpx.Client(base_url=arguments.base_url, headers=headers, timeout=30) as client:
        engine = read_engine(client)
        needs_ids = not texts or long_prompts is not None
        vocab_size = _vocab_size(arguments, engine) if needs_ids else 0
        prompts = Prompts(arguments.input_len, vocab_size, texts)
        rates = _engine_rates(arguments, engine)
        target = Target(arguments.base_url, headers, _body(arguments))
        with Workers(num_workers + (long_prompts is not None)) as workers:
            whole = Run(
                workers, num_workers, client, target, prompts,
                arguments.num_requests, _seconds(arguments), arguments.seed,
            )  # fmt: skip
            figures: list[Figures] = []
            interferences: list[Interference] = []
            for level in levels:
                print(f"{level}", file=sys.stderr, flush=True)
                references = References(plain.get(str(level)), rates.get(str(level)))
                if long_prompts is None:
                    figures.append(whole.measure(level, references))
                else:
                    compared = compare(whole, level, long_prompts, references)
                    figures += [compared.undisturbed, compared.beside]
                    interferences.append(compared.interference)
            return figures, interferences


def _long_prompts(arguments: argparse.Namespace) -> LongPrompts | None:
    if arguments.prompt_every is None:
        return None
    if arguments.num_requests is not None:
        raise UsageError(
            f"--num-requests is {arguments.num_requests}, it does not go with --prompt-every; give --duration"
        )
    seconds = _seconds(arguments)
    if seconds is not None and arguments.prompt_every >= seconds:
        raise UsageError(
            f"--prompt-every is {arguments.prompt_every:g}, it must be below --duration, {seconds:g}, for a prompt to "
            "be sent; raise --duration"
        )
    return LongPrompts(arguments.prompt_len, arguments.prompt_every)


def _seconds(arguments: argparse.Namespace) -> float | None:
    """Returns the duration of a level, which has a default if long prompts are sent."""
    if arguments.prompt_every is None or arguments.duration is not None:
        seconds: float | None = arguments.duration
        return seconds
    return INTERFERENCE_SECONDS


def _levels(arguments: argparse.Namespace) -> list[Level]:
    """Returns the levels, closed loops first. The warm-up of an open loop has as many streams as requests
    arrive in a second."""
    closed = arguments.concurrency or (() if arguments.request_rate else (1, 32, 128))
    levels = [Level(number, None) for number in closed]
    return levels + [Level(max(1, round(rate)), rate) for rate in arguments.request_rate or ()]


def _num_workers(levels: Sequence[Level]) -> int:
    """Returns the number of client processes, at most half of the cores: the server needs some."""
    wanted = max(-(-level.num_streams // STREAMS_PER_WORKER) for level in levels)
    return max(1, min(wanted, (os.cpu_count() or 2) // 2))


def _texts(file: Path | None) -> tuple[str, ...]:
    if file is None:
        return ()
    texts = tuple(line for line in _read(file).splitlines() if line)
    if not texts:
        raise UsageError(f"--prompts is {file}, which has no line; write one prompt a line")
    return texts


def _vocab_size(arguments: argparse.Namespace, engine: Mapping[str, object]) -> int:
    vocab_size = arguments.vocab_size or engine.get("vocab_size")
    if not isinstance(vocab_size, int):
        raise UsageError(
            f"{arguments.base_url}/ready tells no vocab_size; is the server ready? For another one give --vocab-size"
        )
    return vocab_size


def _body(arguments: argparse.Namespace) -> dict[str, Any]:
    body = {
        "max_tokens": arguments.output_len,
        "temperature": arguments.temperature,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return body if arguments.model is None else body | {"model": arguments.model}


def _plain_milliseconds(file: Path | None) -> dict[str, float]:
    """Returns the time per output token of --baseline by level."""
    try:
        return {} if file is None else plain_milliseconds(_read(file))
    except (ValueError, KeyError, TypeError):
        raise UsageError(
            f"--baseline is {file}, it must be a file that headway bench serve --json wrote"
        ) from None


def _engine_rates(arguments: argparse.Namespace, engine: Mapping[str, object]) -> dict[str, float]:
    """Returns the engine's tokens a second of --engine by level."""
    file, lengths = arguments.engine, {"input_len": arguments.input_len, "output_len": arguments.output_len}
    if file is None:
        return {}
    try:
        rates = engine_rates(_read(file), {"depth": engine.get("depth", 0), **lengths})
    except (ValueError, KeyError, TypeError):
        raise UsageError(
            f"--engine is {file}, it must be a file that headway bench engine --json wrote"
        ) from None
    if not rates:
        raise UsageError(
            f"--engine is {file}, which has no closed loop of the server's depth and these lengths; run headway "
            "bench engine with --closed-loop, --depth, --input-len and --output-len to match"
        )
    return rates


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from None


def _keep(
    arguments: argparse.Namespace,
    argv: Sequence[str],
    levels: Sequence[Figures],
    interferences: Sequence[Interference],
) -> None:
    """Raises UsageError."""
    if arguments.json is not None:
        head = {
            "command": shlex.join(["headway", "bench", "serve", *argv]),
            "client": f"{platform.platform()}, {os.cpu_count()} cores",
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        try:
            write(arguments.json, head, levels, interferences)
        except OSError as error:
            raise UsageError(f"--json is {arguments.json}, which cannot be written: {error}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headway bench serve",
        description="Streams completions from a running server, level by level: closed loops of N streams, or "
        "N arrivals a second. Tells time to first token (TTFT), time per output token (TPOT: end to end less "
        "TTFT, over tokens less 1), gaps between chunks, throughput, and what speculation did.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--base-url", type=_url, default="http://127.0.0.1:8000", metavar="URL",
        help="(default: http://127.0.0.1:8000)")  # fmt: skip
    add("--concurrency", type=_list_of(_count), metavar="N,N",
        help="closed loop: streams at once (default: 1,32,128 unless there is a rate)")  # fmt: skip
    add(
        "--request-rate", type=_list_of(_positive), metavar="R,R", help="open loop: Poisson arrivals a second"
    )
    add(
        "--num-requests",
        type=_count,
        metavar="N",
        help="requests of a level (default: 4 a stream, 8 at least)",
    )
    add("--duration", type=_positive, metavar="S", help="seconds of a level; then no more requests are sent")
    add("--prompt-every", type=_positive, metavar="S",
        help="measure each level once more with a long prompt sent every N seconds, and report how the two "
        f"slow each other down; --duration is {INTERFERENCE_SECONDS:g} unless given")  # fmt: skip
    add(
        "--prompt-len", type=_count, default=8192, metavar="N", help="tokens of a long prompt (default: 8192)"
    )
    add("--input-len", type=_count, default=128, metavar="N", help="random tokens of a prompt (default: 128)")
    add(
        "--output-len",
        type=_count,
        default=256,
        metavar="N",
        help="generated tokens; no stop token ends them (default: 256)",
    )
    add("--prompts", type=Path, metavar="FILE", help="texts instead of random tokens, one a line")
    add("--temperature", type=float, default=0.0, metavar="T", help="(default: 0)")
    add("--seed", type=int, default=0, metavar="N", help="the seed of prompts and requests (default: 0)")
    add("--model", metavar="NAME", help="sent with each request (default: none)")
    add("--api-key", type=_key, metavar="KEY", help="sent with each request")
    add(
        "--vocab-size", type=_count, metavar="N", help="vocabulary of random tokens (default: that of /ready)"
    )
    add("--workers", type=_count, metavar="N",
        help=f"client processes (default: one for {STREAMS_PER_WORKER} streams, at most half the cores)")  # fmt: skip
    add("--baseline", type=Path, metavar="FILE",
        help="figures of the same levels without speculation, for the conversion")  # fmt: skip
    add("--engine", type=Path, metavar="FILE",
        help="figures of headway bench engine --closed-loop, to show their share that is reached over HTTP")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write all figures there")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number, 1 or more")
    return int(text)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return number


def _url(text: str) -> str:
    """Accepts a server's URL, with or without the /v1 that clients' base URLs end in."""
    if not re.fullmatch(r"https?://[^/?#\s]+(/[^?#\s]*)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no URL such as http://localhost:8000")
    return text.rstrip("/").removesuffix("/v1")


def _key(text: str) -> str:
    if not re.fullmatch("[!-~]+", text):
        raise argparse.ArgumentTypeError("a key has 1 character or more, printable ASCII without spaces")
    return text


def _list_of(parse: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    return lambda text: tuple(parse(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
