"""The command line: a table of every flag with its default and its help. Each flag is also read from
HEADWAY_<FLAG>, and from the file of --config."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import get_args

from headway.engine import MAX_DEPTH, CpuWeights, QuantizeFormat

DEFAULT_MAX_DEPTH = 3
MAX_REPLAYS = 1000
_INT_LIMIT = 2**63  # the range of integers in the engine's messages
_SIZE_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {f"{unit}i": 2 ** (10 * power) for power, unit in enumerate("kmgt", start=1)}
CONTROL_CHARACTERS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_URL = r"https?://[^/?#\s]+(/[^?#\s]*)?"


def parse_name(text: str) -> str:
    """Accepts a name or a path: an empty one would be the working directory."""
    if not text or CONTROL_CHARACTERS.search(text):
        raise ValueError("1 character or more, without control characters")
    return text


def parse_size(text: str) -> int:
    """Returns a number of bytes: 2GiB, 512MiB, 1.5G, 1000000."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]i?|)b?", text.strip().lower())
    if match is None:
        raise ValueError("a size such as 2GiB or 512MiB")
    size = float(match[1]) * (_SIZE_UNITS | _BINARY_UNITS)[match[2]]
    if size >= _INT_LIMIT:
        raise ValueError("a size below 8 EiB, such as 2GiB or 512MiB")
    return int(size)


def parse_body_size(text: str) -> int:
    size = parse_size(text)
    if size == 0:
        raise ValueError("a size of 1 byte or more, such as 8MiB")
    return size


def parse_origin(text: str) -> str:
    """Accepts a page's origin as browsers send it (scheme, host and perhaps a port, in lower case), or *."""
    if text != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#@\sA-Z]+", text):
        raise ValueError("* or an origin such as https://example.org:8443, without a path")
    return text


def parse_url(text: str) -> str:
    """Accepts a server's URL, with or without the /v1 that clients' base URLs end in."""
    if not re.fullmatch(_URL, text):
        raise ValueError("a URL such as http://localhost:8000")
    return text.rstrip("/").removesuffix("/v1")


def parse_endpoint(text: str) -> str:
    """Accepts a collector's URL, as it is given."""
    if not re.fullmatch(_URL, text):
        raise ValueError("a URL such as http://localhost:4318")
    return text


def parse_switch(text: str) -> bool:
    is_on = text.lower() in ("1", "true", "yes", "on")
    if not is_on and text.lower() not in ("0", "false", "no", "off", ""):
        raise ValueError("true or false, 1 or 0")
    return is_on


def parse_int(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise ValueError("a whole number") from None
    if not -_INT_LIMIT < value < _INT_LIMIT:
        raise ValueError("a whole number below 2^63")
    return value


def parse_count(text: str) -> int:
    value = parse_int(text) if text.isdecimal() else 0
    if value == 0:
        raise ValueError("a whole number, 1 or more")
    return value


def parse_replays(text: str) -> int:
    value = parse_int(text)
    if not 0 <= value <= MAX_REPLAYS:
        raise ValueError(f"0 to {MAX_REPLAYS}")
    return value


def parse_depth(text: str) -> str | int:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise ValueError("auto or a whole number") from None


def parse_key(text: str) -> str:
    """Refuses an empty key, which would admit everybody who sends none."""
    if not re.fullmatch("[!-~]+", text):
        wanted = "1 character or more, printable ASCII without spaces"
        if re.fullmatch(r"[!-~]+[\r\n]+", text):
            wanted += "; it ends in a line break, which echo adds: `printf %s KEY | base64` encodes a key without one"
        raise ValueError(wanted)
    return text


def parse_pem_path(text: str) -> str:
    if "-----BEGIN" in text:
        raise ValueError("the path of a file in PEM form, not what the file holds")
    return parse_name(text)


def parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError("a number, 0 or more")
    return seconds


def parse_port(text: str) -> int:
    if not text.isdecimal() or len(text) > 5 or int(text) > 65535:
        raise ValueError("0 to 65535 (0: any free port)")
    return int(text)


def parse_rates(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError("numbers with commas between, such as 0.9,0.8,0.7") from None


def parse_relaxed(text: str) -> tuple[int, float]:
    try:
        top_k, max_gap = text.split(",")
        return int(top_k), float(max_gap)
    except ValueError:
        raise ValueError("a number of tokens and a probability with a comma between, such as 5,0.3") from None


def parse_layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError("numbers of layers with commas between, such as 2,16,29") from None


def one_of(*values: str, removed: Mapping[str, str] | None = None) -> Callable[[str], str]:
    """removed: values that earlier versions accepted, and what to use instead of each."""

    def parse(text: str) -> str:
        if text not in values:
            instead = (removed or {}).get(text)
            hint = "" if instead is None else f" ({text} was removed: use {instead})"
            raise ValueError("one of " + ", ".join(values) + hint)
        return text

    return parse


def numbers_in(low: float, high: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise ValueError(f"{low:g} to {high:g}")
        return value

    return parse


Parsed = str | int | float | bool | tuple[float, ...]
Value = Parsed | list[str] | None


@dataclass(frozen=True, slots=True)
class Option:
    """One flag. A parser raises ValueError with a message that says what the value must be.

    is_list: the flag may be repeated. is_secret: messages show only the length of the value. is_for_few: only
    --help-all shows the flag.
    """

    flag: str
    parse: Callable[[str], Parsed]
    default: Value
    help: str
    metavar: str = "N"
    is_list: bool = False
    is_secret: bool = False
    is_for_few: bool = False

    @property
    def key(self) -> str:
        return self.flag.replace("-", "_")

    @property
    def variable(self) -> str:
        return "HEADWAY_" + self.key.upper()


# The model, which most commands take as a positional argument.
MODEL_NAME = Option("model", str, None, "a folder or ORG/NAME", "MODEL")
CONFIG = Option(
    "config",
    parse_name,
    None,
    "a YAML file with one key a flag, such as max-running: 64, and the key model",
    "FILE",
)
SERVER = [
    CONFIG,
    Option("host", parse_name, "127.0.0.1", "address to listen on; 0.0.0.0 for all", "NAME"),
    Option("port", parse_port, 8000, "port to listen on; 0 for any free one"),
    Option("unix-socket", parse_name, None, "listen at this path instead of host and port", "PATH"),
    Option("tls-cert", parse_pem_path, None, "serve https with this certificate (PEM); needs --tls-key", "PATH", is_secret=True),
    Option("tls-key", parse_pem_path, None, "the key of --tls-cert", "PATH", is_secret=True),
    Option("drain-seconds", parse_seconds, 30.0, "how long SIGTERM waits for running requests", "S"),
    Option("engine-timeout", numbers_in(1, 3600), 10.0, "an engine that gives no sign of life for this long is replaced, "
           "unless it computes or loads", "S", is_for_few=True),
    Option("replay", parse_replays, 2, "how many times a request continues in a restarted engine after its engine has ended; after one "
           "more end it gets an error", "N", is_for_few=True),
    Option("fleet-key", parse_key, None, "the key that marks requests which a fleet continues here; `headway fleet` sets it", "KEY",
           is_secret=True, is_for_few=True),
]  # fmt: skip
FLEET = [
    Option("replicas", parse_count, 2, "servers that share the requests"),
    Option("gpus", parse_int, None, "GPUs of each server; 0 for the CPU (default: 1 if there are any)"),
    Option("routing", one_of("prefix", "least-loaded", "round-robin"), "prefix", "which server gets a request: prefix (the "
           "one that has seen its beginning, unless it has far more requests than the others), least-loaded or round-robin", "NAME"),
]  # fmt: skip
ACCESS = [
    Option("api-key", parse_key, [], "clients must send this key; may be given again. Better set by the variable: "
           "other users see the command line", "KEY", is_list=True, is_secret=True),
    Option("admin-key", parse_key, None, "the key for /abort and for changing limits, which nobody may do without it. Better set by the variable, too",
           "KEY", is_secret=True),
    Option("cors-origin", parse_origin, [], "allow requests of web pages of this origin, * for all; may be given again", "URL", is_list=True),
]  # fmt: skip
REQUESTS = [
    Option("served-model-name", parse_name, [], "the model's name in the API (default: its folder or ORG/NAME); may be given again: "
           "all are accepted, answers carry the first", "NAME", is_list=True),
    Option("chat-template", parse_name, None, "a file with the Jinja template that turns chats into prompts (default: the model's own)", "FILE"),
    Option("tool-format", parse_name, None, "the format of the model's tool calls and reasoning, such as hermes, qwen_xml or llama_json; plain for none "
           "(default: the one found in its chat template; /ready shows it)", "NAME", is_for_few=True),
    Option("max-body", parse_body_size, 8 * 2**20, "the largest body of a request (default: 8MiB)", "SIZE"),
    Option("request-timeout", parse_seconds, 0.0, "a request that takes longer fails (default: 0, no limit)", "S"),
    Option("unknown-fields", one_of("ignore", "refuse"), "ignore", "what to do with unknown fields of a body: ignore (a header of the "
           "answer names them) or refuse", "NAME", is_for_few=True),
    Option("keep-alive", parse_seconds, 15.0, "seconds of silence in a stream after which a comment is sent; 0 for none", "S", is_for_few=True),
    Option("force-include-usage", parse_switch, False, "end every stream with its usage, whatever its stream_options say", is_for_few=True),
]  # fmt: skip
TELEMETRY = [
    Option("log-level", one_of("debug", "info", "warning", "error"), "info", "debug, info, warning or error", "NAME"),
    Option("log-format", one_of("human", "json"), "human", "lines for people, or a JSON object a line", "NAME"),
    Option("otlp-endpoint", parse_endpoint, None, "send OpenTelemetry spans to this collector, such as http://localhost:4318; needs the extra otel", "URL"),
    Option("metrics-names", one_of("headway", "vllm", "both"), "headway", "whose names the metrics have: headway, vllm "
           "(for dashboards, autoscalers and benchmarks made for vLLM), or both", "NAME", is_for_few=True),
]  # fmt: skip
MODEL = [
    Option("revision", parse_name, None, "branch, tag or commit on the Hub", "NAME"),
    Option("device", one_of("auto", "cpu", "cuda"), "auto", "auto, cpu or cuda", "NAME"),
    Option("dtype", one_of("auto", "float32", "float64", "bfloat16", "float16"), "auto",
           "auto (float32 on the CPU, else the model's own), float32, float64, bfloat16, float16", "NAME"),
    Option("load-format", one_of("safetensors", "dummy"), "safetensors",
           "safetensors reads the folder's weights; dummy draws random ones, for measurements: the text means nothing", "NAME", is_for_few=True),
    Option("quantize", one_of(*get_args(QuantizeFormat)), "none", "quantize the weights of linear layers as they are read: fp8, int8 or int4; "
           "`headway quantize` writes the same to a folder", "FORMAT"),
    Option("quantize-lm-head", parse_switch, False, "quantize the LM head, too", is_for_few=True),
    Option("expanded-weights", parse_switch, False, "on a GPU, keep an expanded copy of quantized weights for passes of more than 64 tokens, such as prompts; it leaves "
           "less memory for the KV cache", is_for_few=True),
    Option("cpu-weights", one_of(*get_args(CpuWeights)), "full", "on an x86 CPU, the precision of the weights of linear layers and experts: full, or int8 or "
           "int4, which are faster and give other texts, the same at any depth and batch", "NAME", is_for_few=True),
    Option("deterministic", parse_switch, False, "refuse to start if a text could depend on other requests or on the depth: with "
           "float64 on a GPU, with 16 bits on a CPU, and with --fast-math"),
    Option("fast-math", parse_switch, False, "on a GPU, use the order of sums that is fastest for the batch: small models gain, but a text may "
           "depend on other requests if two tokens are almost equally probable"),
    Option("max-model-len", parse_int, None, "context length in tokens (default: the model's, or what fits)"),
    Option("threads", parse_int, None, "CPU threads of the engine (default: one for each 10 million parameters, at most all cores)"),
    Option("tensor-parallel-size", parse_int, 1, "processes that compute the model together, each on a GPU of its own or on the CPU, with a share of its heads, "
           "weights and KV cache (also --tp); --threads and --kv-cache-memory apply to each. Changes no text", is_for_few=True),
]  # fmt: skip
SPECULATION = [
    Option("depth", parse_depth, "auto", f"drafts a round: auto (chosen for each round, 0 to --max-depth) or 0 to {MAX_DEPTH}; "
           "0 turns speculation off. Changes the speed, not the text of a stream"),
    Option("max-depth", parse_int, None, f"the most drafts of a round that auto chooses, 0 to {MAX_DEPTH} (default: {DEFAULT_MAX_DEPTH})"),
    Option("drafter", parse_name, "auto", "the source of drafts, which cannot change the text: mtp (the model's MTP head), ngram (the "
           "tokens after an earlier occurrence of the last tokens in the prompt or the output; for every model), none, auto (mtp if the "
           "model has a head, else none), or the folder or ORG/NAME of an EAGLE-3 head for the model, or of a smaller model with its vocabulary; "
           "with ,ngram appended, each request gets n-gram drafts while these are accepted more often", "NAME"),
    Option("drafter-taps", parse_layers, None, "the model's layers that an EAGLE-3 head reads as the stream enters them, such as 2,16,29 "
           "(default: those of its config.json, numbered by the convention whose drafts are accepted more often at the start)", "LAYERS", is_for_few=True),
    Option("require-speculation", parse_switch, False, "refuse to start if there is no drafter, or if it fails its check at the "
           "start; otherwise such a model is served with speculation off"),
    Option("draft-lm-head", one_of("auto", "full", "int4", "fp8", removed={"int8": "auto"}), "auto", "precision of the LM head for drafts, "
           "which cannot change the text: full, fp8 (half the bytes; on Ada, Hopper and later), int4 (on the same GPUs; a quarter of "
           "the bytes, with candidates rescored in full; fp8 beyond 16 rows, or 8 if hidden is below 2,048), or auto (for large "
           "vocabularies on CUDA the first of int4 and fp8 that is possible; else full)", "NAME", is_for_few=True),
    Option("draft-layers", one_of("auto", "full", "fp8"), "auto", "precision of weights and inputs of the MTP layer's products "
           "after a norm, which cannot change the text: full, fp8 (half the bytes; on Ada, Hopper and later), or auto "
           "(fp8 there for models wider than 2,048; else full)", "NAME", is_for_few=True),
    Option("synthetic-acceptance", parse_rates, None, "for measurements: accept the drafts at each position at these rates, "
           "such as 0.9,0.8,0.7, whatever the model says; the text means nothing", "RATES", is_for_few=True),
    Option("relaxed-thinking", parse_relaxed, None, "LOSSY: while a chat reasons, also accept drafts that are among this many of the most "
           "probable tokens and at most this much less probable than the first, such as 5,0.3; drafts then change the text", "K,DELTA", is_for_few=True),
    Option("audit-rate", numbers_in(0, 1), 0.0, "recompute this share of the finished requests without drafts and cached prefixes while "
           "the server is idle; /metrics counts those that differ, and the log names them", "SHARE", is_for_few=True),
]  # fmt: skip
SCHEDULING = [
    Option("max-running", parse_int, None, "requests that generate at once (default: 256 on a GPU with room for them, 64 on a CPU)"),
    Option("max-waiting", parse_int, 1024, "requests that may wait; more get status 429"),
    Option("block-size", parse_int, 16, "tokens a KV cache block", is_for_few=True),
    Option("kv-cache-memory", parse_size, None, "size of the KV cache, such as 2GiB (default: what fits)", "SIZE"),
    Option(
        "prefill-chunk", parse_int, None, "prompt tokens computed between two rounds (chunked prefill); default at most 512 on a CPU, fewer for large models; on a GPU 512 to 1024 while "
        "requests decode, and up to 8192 while none does"
    ),
    Option("no-prefix-caching", parse_switch, False, "compute every prompt from its start"),
]  # fmt: skip
SAMPLING = [
    Option("temperature", numbers_in(0, 2), None, "0 always takes the likeliest token (default: the model's)", "T"),
    Option("top-p", numbers_in(1e-6, 1), None, "sample from the likeliest tokens of this total probability", "P"),
    Option("top-k", parse_int, None, "sample from the k likeliest tokens; 0 is off", "K"),
    Option("min-p", numbers_in(0, 1), None, "drop tokens below this share of the likeliest one's", "P"),
    Option("seed", parse_int, None, "the same seed gives the same text (default: drawn)"),
]  # fmt: skip
GENERATION = [
    Option("max-tokens", parse_int, 64, "tokens to generate at most"),
    *SAMPLING,
    Option("stop", str, None, "end before this text; may be given again", "TEXT", is_list=True),
]  # fmt: skip
INSPECTION = [
    CONFIG,
    Option("gpu-memory", parse_size, None, "report what fits on a GPU with this memory, such as 80GiB, which need not be in this machine", "SIZE"),
    Option("json", parse_switch, False, "print one JSON object"),
    *(option for option in REQUESTS if option.flag in ("chat-template", "tool-format")),
]  # fmt: skip
URL = Option("url", parse_url, "http://localhost:8000", "where the server is", "URL")
CHAT = [
    URL,
    Option("api-key", parse_key, None, "the key that the server requires; better set by the variable: other users see the command line",
           "KEY", is_secret=True),
    Option("system", str, None, "a message that says what the model is to be (default: the model's own)", "TEXT"),
    Option("max-tokens", parse_count, None, "tokens of an answer at most (default: the server's)"),
    *SAMPLING,
]  # fmt: skip


def add_options(
    parser: argparse.ArgumentParser, groups: Mapping[str, list[Option]], *, shows_all: bool
) -> None:
    """Adds the groups under their titles, and --help-all if --help does not show every flag."""
    if any(option.is_for_few for group in groups.values() for option in group):
        parser.add_argument(
            "--help-all", action="help", help="show all flags, also those that few operators need, and exit"
        )
    for title, options in groups.items():
        group = parser.add_argument_group(title)
        for option in options:
            text = f"{option.help}{_default_note(option)} [{option.variable}]".replace("%", "%%")
            shown = text if shows_all or not option.is_for_few else argparse.SUPPRESS
            _add_option(group, option, shown)


def _add_option(group: argparse._ArgumentGroup, option: Option, text: str) -> None:
    name, key = f"--{option.flag}", option.key
    if option.parse is parse_switch:
        group.add_argument(name, dest=key, action="store_const", const="1", help=text)
    else:
        action = "append" if option.is_list else "store"
        group.add_argument(name, dest=key, action=action, metavar=option.metavar, help=text)


def _default_note(option: Option) -> str:
    is_told = option.default in (None, []) or option.default is False or "default" in option.help
    return "" if is_told else f" (default: {option.default})"
