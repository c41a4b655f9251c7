"""The command `headway`: serve, chat, inspect, warmup, complete, fleet, quantize, head, bench.

A command's module is imported when the command runs: importing the server takes a second, which other
commands need not wait for.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from typing import NoReturn, TypeVar

import msgspec
import shtab

from headway import __version__
from headway.engine import (
    MAX_DEPTH,
    ConfigError,
    EngineConfig,
    HeadwayError,
    configure_logging,
    wanted_drafter,
)
from headway.server.base.config import ChatConfig, CompleteConfig, InspectConfig, ModelSource, ServerConfig
from headway.server.cli import options
from headway.server.cli.bench import COMMANDS, OF_THE_ENGINE, run
from headway.server.cli.config_file import read_config_file
from headway.server.cli.endings import NOT_SERVABLE, ReaderGoneError
from headway.server.cli.environment import (
    refuse_removed,
    remarks_on_services,
    warnings_of_unknown,
    without_services,
)
from headway.server.cli.foreign_flags import UsageError, own_arguments, refusal, refuse_unknown_command
from headway.server.cli.options import Option, Value, add_options, parse_switch
from headway.server.cli.redaction import shortened
from headway.server.cli.settings import Settings
from headway.server.engine.child import EngineChild
from headway.server.engine.inspector import EngineInspector

Config = TypeVar("Config")

logger = logging.getLogger("headway.server")

SERVE_GROUPS = {
    "server": options.SERVER,
    "access": options.ACCESS,
    "requests": options.REQUESTS,
    "logs and metrics": options.TELEMETRY,
    "model": options.MODEL,
    "speculation": options.SPECULATION,
    "scheduling and memory": options.SCHEDULING,
}
FLEET_GROUPS = {"fleet": options.FLEET, **SERVE_GROUPS}
FLEET_STATUS, FLEET_STATUS_GROUPS = "fleet status", {"fleet": [options.URL]}
COMPLETE_GROUPS = {
    "generation": options.GENERATION,
    "model": options.MODEL,
    "speculation": options.SPECULATION,
}
CHAT_GROUPS = {"chat": options.CHAT}
INSPECT_GROUPS = {
    "inspection": options.INSPECTION,
    "model": options.MODEL,
    "speculation": options.SPECULATION,
    "scheduling and memory": options.SCHEDULING,
}
COMPLETION = "--print-completion"
NAMES = ("serve", "chat", "complete", "inspect", "warmup", "fleet", "quantize", "head", "bench")
# The command lines of these commands may have been written for another server.
FLAGS_OF_SERVERS = {
    "serve": SERVE_GROUPS,
    "warmup": SERVE_GROUPS,
    "fleet": FLEET_GROUPS,
    "inspect": INSPECT_GROUPS,
}
ALL_GROUPS = (FLEET_GROUPS, COMPLETE_GROUPS, CHAT_GROUPS, INSPECT_GROUPS)
MODEL_HELP = (
    "a folder in Hugging Face layout, or ORG/NAME on the Hugging Face Hub "
    "(HF_TOKEN, HF_ENDPOINT and the Hub's offline cache are respected); "
    "without it, the small model that ships with Headway [HEADWAY_MODEL]"
)
INSPECT_DESCRIPTION = (
    "Reports a model's family, layers, parameters, precision, MTP head, chat format, memory and floor of a round, from configuration "
    "and headers alone: no weights are read, nothing is downloaded, no GPU is needed. The options are those of `headway serve`. Exit "
    f"status: 0 if serve would start with them, {NOT_SERVABLE} if not, 1 for a model or an option that does not exist."
)
INSPECT_MODEL_HELP = (
    "a folder in Hugging Face layout, or the ORG/NAME of a downloaded one; "
    "without it, the small model that ships with Headway [HEADWAY_MODEL]"
)
SERVE_EPILOG = """\
every flag can also be set by the variable in brackets, or in a YAML file (--config): the command line wins over the
environment, and the environment over the file.

examples:
  headway serve                                     the embedded model
  headway serve ./MiMo-7B-Base --port 9000          a folder
  headway serve ORG/NAME --kv-cache-memory 8GiB     from the Hub

then:
  curl localhost:8000/v1/completions -d '{"prompt":"def read_config(path):\\n","max_tokens":64,"repetition_penalty":1.1}'
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status. A fault of the user's or of the environment is one line on stderr; a reader
    that closes stdout is no fault."""
    given, remarks = _without_foreign_flags(sys.argv[1:] if argv is None else list(argv))
    if given and given[0] in OF_THE_ENGINE:
        return _run_on_engine(given[0], given[1:])
    arguments, unknown = _parser(shows_all=not {"--help-all", COMPLETION}.isdisjoint(given)).parse_known_args(
        given, argparse.Namespace(remarks=remarks)
    )
    runs = {
        "serve": (_serve, SERVE_GROUPS),
        "warmup": (_warm_up, SERVE_GROUPS),
        "fleet": (_fleet, FLEET_GROUPS),
        FLEET_STATUS: (_fleet_status, FLEET_STATUS_GROUPS),
        "chat": (_chat, CHAT_GROUPS),
        "inspect": (_inspect, INSPECT_GROUPS),
        "complete": (_complete, COMPLETE_GROUPS),
    }
    run_command, groups = runs.get(arguments.command, (_bench, {}))
    if unknown:
        known = ["--model", *(f"--{option.flag}" for option in _options(groups))]
        _end_with_usage(arguments.command, _told_of_unknown(unknown[0], known))
    settings = Settings(arguments, _environment())
    if arguments.command in ("inspect", "complete", "chat"):  # the others have a log
        for line in _warnings_of_variables():
            print(f"headway: {line}", file=sys.stderr)
    try:
        if arguments.command in FLAGS_OF_SERVERS:
            settings = _with_config_file(settings)
        return run_command(settings)
    except HeadwayError as error:
        if isinstance(error, ConfigError):
            error = settings.name_the_source(error, _options(groups))
        print(f"headway: {error}", file=sys.stderr)
        return 1
    except ReaderGoneError:
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 130


def _environment() -> dict[str, str]:
    """Returns the environment without Kubernetes' own variables, and without an empty HEADWAY_MODEL, as
    compose files set it."""
    names = without_services(os.environ).items()
    return {name: value for name, value in names if value or name != options.MODEL_NAME.variable}


def _with_config_file(settings: Settings) -> Settings:
    """Raises ConfigError."""
    path = settings.value(options.CONFIG)
    if path is None:
        return settings
    known = [option for option in _options(SERVE_GROUPS) if option is not options.CONFIG]
    return replace(settings, file=read_config_file(str(path), [options.MODEL_NAME, *known]))


def _without_foreign_flags(argv: list[str]) -> tuple[list[str], list[str]]:
    """Returns the command line without ineffective flags of other servers, and remarks on these. Ends the
    program if a flag or a variable cannot be accepted."""
    if argv[:2] == FLEET_STATUS.split():
        return [FLEET_STATUS, *argv[2:]], []
    command = argv[0] if argv else ""
    try:
        refuse_unknown_command(command, NAMES)
    except UsageError as error:
        _end_with_usage("", str(error))
    if command not in FLAGS_OF_SERVERS:
        return argv, []
    known = _options(FLAGS_OF_SERVERS[command])
    flags = {f"--{option.flag}": option.parse is not parse_switch for option in known}
    try:
        refuse_removed(os.environ)
        own, remarks = own_arguments(argv[1:], {**flags, "-h": False, "--help": False, "--help-all": False})
    except UsageError as error:
        _end_with_usage(command, str(error))
    return [command, *own], remarks


def _told_of_unknown(argument: str, known: Sequence[str]) -> str:
    """Returns the message about an argument that a command does not have. It leaves out the value."""
    flag = argument.partition("=")[0]
    if not flag.startswith("-"):
        return f"there is no argument {shortened(argument)!r}; put quotes around values with spaces"
    return refusal(flag, flag.lstrip("-").replace("_", "-"), known)


def _end_with_usage(command: str, error: str) -> NoReturn:
    program = f"headway {command}".strip()
    usage = {"": "COMMAND", "complete": "PROMPT", "chat": "", FLEET_STATUS: ""}.get(command, "[MODEL]")
    print(
        f"usage: {program} {usage}".rstrip() + f" [--FLAG VALUE ...]\n{program}: error: {error}",
        file=sys.stderr,
    )
    sys.exit(2)


def _parser(*, shows_all: bool = False) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headway", description="Serves large language models, fast through their own MTP heads."
    )
    parser.add_argument("--version", action="version", version=f"headway {__version__}")
    shtab.add_argument_to(
        parser, COMPLETION, "print the completion of commands and flags for this shell, and exit"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    formatter = argparse.RawDescriptionHelpFormatter
    serve_parser = commands.add_parser(
        "serve", help="start the HTTP server", epilog=SERVE_EPILOG, formatter_class=formatter,
        description="Serves one model over the OpenAI HTTP API.", allow_abbrev=False,
    )  # fmt: skip
    warmup_parser = commands.add_parser(
        "warmup", help="compile the kernels that serve needs on this GPU, and end",
        description="Fills Triton's cache (TRITON_CACHE_DIR), in an image build or before a rollout, so that `headway serve` "
        "with the same options compiles nothing. Needs a GPU of the kind that will serve.", allow_abbrev=False,
    )  # fmt: skip
    fleet_parser = commands.add_parser(
        "fleet", help="start several servers of one model behind one address, on Ray Serve",
        description="Starts Ray Serve on this machine, and one `headway serve` a replica. The other options are those of these servers. "
        "Needs the extra ray. `headway fleet status` describes a running fleet. For several machines see docs/fleet.md.", allow_abbrev=False,
    )  # fmt: skip
    status_parser = commands.add_parser(
        FLEET_STATUS, prog=f"headway {FLEET_STATUS}", allow_abbrev=False,
        description="Shows the replicas of a running fleet: state, requests, KV cache, and why requests were routed to each.",
    )  # fmt: skip
    chat_parser = commands.add_parser(
        "chat", help="chat in the terminal with a running server", allow_abbrev=False,
        description="Chats with a running server, of Headway or another with OpenAI's API. Without a terminal each line of stdin "
        "is a message.",
    )  # fmt: skip
    chat_parser.add_argument(
        "--model", metavar="NAME", help="one of the server's models (default: the first)"
    )
    inspect_parser = commands.add_parser(
        "inspect", help="report what a model folder contains, whether it can be served, and what fits", allow_abbrev=False,
        description=INSPECT_DESCRIPTION,
    )  # fmt: skip
    for command in (serve_parser, warmup_parser, fleet_parser, inspect_parser):
        text = INSPECT_MODEL_HELP if command is inspect_parser else MODEL_HELP
        model = command.add_argument("model", nargs="?", metavar="MODEL", help=text)
        model.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    complete_parser = commands.add_parser(
        "complete", help="complete a prompt in the terminal, without a server",
        description="Streams the completion of a prompt to the terminal.", allow_abbrev=False,
    )  # fmt: skip
    complete_parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; - reads stdin")
    complete_parser.add_argument("--model", metavar="MODEL", help=MODEL_HELP)
    commands.add_parser(
        "quantize", help="write a copy of a model folder with weights of 8 or 4 bits", add_help=False
    )
    commands.add_parser(
        "head", help="train a draft head for a model that ships none, from its own answers", add_help=False
    )
    bench_parser = commands.add_parser(
        "bench", help="measure the engine alone, or a server over HTTP; check exactness; compare models", allow_abbrev=False,
        description="Measures the engine alone, or a server over HTTP, or checks that texts are exact: headway bench engine "
        "--help tells more.",
    )  # fmt: skip
    bench_parser.add_argument(
        "kind",
        choices=tuple(COMMANDS),
        help="engine: without HTTP; exact: whether anything but the request changes its text; quality: two models' "
        "predictions; serve: a running server; "
        "shape: writes a folder without weights",
    )
    bench_parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the arguments of the benchmark")
    for command, groups in (
        (serve_parser, SERVE_GROUPS),
        (warmup_parser, SERVE_GROUPS),
        (fleet_parser, FLEET_GROUPS),
        (status_parser, FLEET_STATUS_GROUPS),
        (complete_parser, COMPLETE_GROUPS),
        (chat_parser, CHAT_GROUPS),
        (inspect_parser, INSPECT_GROUPS),
    ):
        add_options(command, groups, shows_all=shows_all)
    return parser


def _command(module: str, function: str) -> Callable[..., int]:
    """Imports a command and returns its function."""
    found: Callable[..., int] = getattr(importlib.import_module(f"headway.server.{module}"), function)
    return found


def _server_config(
    settings: Settings, groups: Mapping[str, list[Option]]
) -> tuple[ServerConfig, dict[str, Value]]:
    """Returns the server's configuration, and the values of all options. Configures the log, and logs the
    flags and variables that change nothing."""
    values = settings.read(_options(groups))
    config = _build(ServerConfig, {**values, "max_body_bytes": values["max_body"]})
    configure_logging(config.log_level, config.log_format)
    for line in (*settings.typed.remarks, *settings.file.remarks, *remarks_on_services(os.environ)):
        logger.info(line)
    for line in _warnings_of_variables():
        logger.warning(line)
    return config, values


def _warnings_of_variables() -> list[str]:
    known = {o.variable for groups in ALL_GROUPS for o in (options.MODEL_NAME, *_options(groups))}
    return warnings_of_unknown(os.environ, known)


def _serve(settings: Settings) -> int:
    config, values = _server_config(settings, SERVE_GROUPS)
    source, engine_config = _source(settings, values), _engine_config(values)
    with ExitStack() as stack:
        child = None
        with suppress(OSError):  # the start that follows reports it
            # It imports torch while this process imports the command.
            child = stack.enter_context(closing(EngineChild()))
        return _command("cli.serve", "serve")(config, source, engine_config, child)


def _bench(settings: Settings) -> int:
    return run(COMMANDS[settings.typed.kind], settings.typed.arguments)


def _run_on_engine(command: str, arguments: Sequence[str]) -> int:
    """Runs a command whose options all belong to the engine. argparse cannot pass them on: a remainder
    must not begin with an option."""
    try:
        return run(OF_THE_ENGINE[command], arguments)
    except KeyboardInterrupt:
        return 130


def _chat(settings: Settings) -> int:
    values = settings.read(_options(CHAT_GROUPS))
    model = replace(settings, environment={}).value(options.MODEL_NAME)  # one of the server's, no folder
    return _command("cli.chat", "chat")(_build(ChatConfig, values), model)


def _warm_up(settings: Settings) -> int:
    _, values = _server_config(settings, SERVE_GROUPS)
    return _command("cli.warmup", "warm_up")(_source(settings, values), _engine_config(values))


def _fleet(settings: Settings) -> int:
    config, values = _server_config(settings, FLEET_GROUPS)
    try:
        fleet = _command("fleet.command", "fleet")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"headway fleet needs Ray Serve ({error}); install it: pip install 'headway[ray]'"
        ) from None
    return fleet(settings, config, _source(settings, values))


def _fleet_status(settings: Settings) -> int:
    return _command("fleet.status", "status")(settings.value(options.URL))


def _inspect(settings: Settings) -> int:
    values = settings.read(_options(INSPECT_GROUPS))
    config, source = _build(InspectConfig, values), _source(settings, values)
    with closing(EngineInspector()) as engine:  # it imports torch while this process imports the command
        flags = settings.typed_flags(o for o in _options(SERVE_GROUPS) if o.key in values)
        return _command("cli.inspect", "inspect")(config, source, _engine_config(values), engine, flags)


def _complete(settings: Settings) -> int:
    values = settings.read(_options(COMPLETE_GROUPS))
    logging.basicConfig(level="WARNING", format="%(levelname)s %(name)s: %(message)s")
    prompt, source = _prompt(settings.typed.prompt), _source(settings, values)
    return _command("cli.complete", "complete")(
        _build(CompleteConfig, values), prompt, source, _engine_config(values)
    )


def _prompt(given: str) -> str:
    """Raises ConfigError: bytes that are not UTF-8 come as lone surrogates, or cannot be read."""
    try:
        prompt = sys.stdin.read() if given == "-" else given
        prompt.encode()
    except UnicodeError:
        raise ConfigError("PROMPT has bytes that are not UTF-8; convert it, such as with iconv") from None
    return prompt


def _options(groups: Mapping[str, list[Option]]) -> list[Option]:
    return [option for group in groups.values() for option in group]


def _build(kind: type[Config], values: Mapping[str, Value]) -> Config:
    """Returns the configuration from those values that are fields of it, with their types checked."""
    return msgspec.convert(dict(values), kind)


def _source(settings: Settings, values: Mapping[str, Value]) -> ModelSource:
    return _build(ModelSource, {**values, "name": settings.value(options.MODEL_NAME) or None})


def _engine_config(values: Mapping[str, Value]) -> EngineConfig:
    """Returns the engine's configuration. The model's folder is filled in when the source is resolved."""
    drafter, drafter_path = wanted_drafter(str(values["drafter"]))
    renamed: dict[str, Value] = {
        "drafter": drafter,
        "drafter_path": drafter_path,
        **_depth(values["depth"], values["max_depth"]),
        "model_path": "",
        "kv_cache_memory_bytes": values.get("kv_cache_memory"),
        "prefix_caching": not values.get("no_prefix_caching"),
    }
    return _build(EngineConfig, {**values, **renamed})


def _depth(depth: Value, most: Value) -> dict[str, Value]:
    """Returns the fields for the depth. most: None if --max-depth is not given. Raises ConfigError if it is
    out of range, or if the two exclude each other."""
    if isinstance(most, int) and not 0 <= most <= MAX_DEPTH:
        raise ConfigError(f"--max-depth is {most}, it must be 0 to {MAX_DEPTH}")
    if depth == "auto":
        return {"depth": options.DEFAULT_MAX_DEPTH if most is None else most, "chooses_depth": True}
    if isinstance(depth, int) and isinstance(most, int) and depth > most:
        raise ConfigError(
            f"--depth is {depth}, it must be auto or at most --max-depth, which is {most}; leave one out"
        )
    return {"depth": depth}
