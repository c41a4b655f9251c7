"""Flags that this version does not have. Flags of vLLM, SGLang and llama-server are accepted if they change
nothing; others, and those that were removed, are refused with what to use instead.

The names are those of `vllm serve`, `sglang.launch_server` and `llama-server`. Only values of switches are
repeated in messages: others may be keys.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches

from headway.server.cli.options import parse_switch
from headway.server.cli.redaction import shortened

_MODEL = "the model without a flag: headway serve MODEL"
_DEVICES = "one server for each GPU: CUDA_VISIBLE_DEVICES=0 headway serve, behind a load balancer"
_REQUESTS = "the field of that name in requests, or generation_config.json in the model's folder"
# Flags of earlier versions, and what to use instead.
REMOVED = {
    "download-dir": "the variable HF_HUB_CACHE",
    "max-waiting-tokens": "--max-waiting, a number of requests",
}
# Short names of flags of this version.
ALIASES = dict.fromkeys(
    ("--tp", "--tp-size", "-tp", "--tensor_parallel_size", "--gpus"), "--tensor-parallel-size"
)
# Flags of other servers, and what to use instead.
INSTEAD = {
    "model": _MODEL, "model-path": _MODEL, "m": _MODEL, "hf": _MODEL, "hf-repo": _MODEL,
    "max-num-seqs": "--max-running", "max-running-requests": "--max-running", "parallel": "--max-running", "np": "--max-running",
    "max-queued-requests": "--max-waiting",
    "context-length": "--max-model-len", "ctx-size": "--max-model-len", "c": "--max-model-len", "max-seq-len": "--max-model-len",
    "gpu-memory-utilization": "--kv-cache-memory, a size", "mem-fraction-static": "--kv-cache-memory, a size",
    "kv-cache-memory-bytes": "--kv-cache-memory", "max-total-tokens": "--kv-cache-memory, a size",
    "num-gpu-blocks-override": "--kv-cache-memory, a size", "page-size": "--block-size",
    "max-num-batched-tokens": "--prefill-chunk", "chunked-prefill-size": "--prefill-chunk", "max-prefill-tokens": "--prefill-chunk",
    "batch-size": "--prefill-chunk", "ubatch-size": "--prefill-chunk", "b": "--prefill-chunk", "ub": "--prefill-chunk",
    "no-enable-prefix-caching": "--no-prefix-caching", "disable-radix-cache": "--no-prefix-caching", "no-cache-prompt": "--no-prefix-caching",
    "speculative-config": "--drafter and --depth", "speculative-model": "--drafter", "speculative-algorithm": "--drafter",
    "speculative-algo": "--drafter", "num-speculative-tokens": "--depth", "speculative-num-steps": "--depth",
    "speculative-num-draft-tokens": "--depth", "draft-max": "--max-depth", "draft": "--max-depth", "draft-n": "--max-depth",
    "chat-template-file": "--chat-template", "tool-call-parser": "--tool-format", "reasoning-parser": "--tool-format",
    "reasoning-format": "--tool-format", "default-chat-template-kwargs": "chat_template_kwargs in requests",
    "alias": "--served-model-name", "a": "--served-model-name", "model-name": "--served-model-name",
    "uds": "--unix-socket", "ssl-certfile": "--tls-cert", "ssl-keyfile": "--tls-key", "ssl-cert-file": "--tls-cert",
    "ssl-key-file": "--tls-key", "api-key-file": "the variable HEADWAY_API_KEY", "admin-api-key": "--admin-key",
    "hf-token": "the variable HF_TOKEN", "allowed-origins": "--cors-origin",
    "uvicorn-log-level": "--log-level", "verbosity": "--log-level debug", "verbose": "--log-level debug", "v": "--log-level debug",
    "otlp-traces-endpoint": "--otlp-endpoint", "oltp-traces-endpoint": "--otlp-endpoint", "timeout": "--request-timeout",
    "watchdog-timeout": "--engine-timeout", "shutdown-timeout": "--drain-seconds",
    "t": "--threads", "threads-batch": "--threads", "n-gpu-layers": "--device", "gpu-layers": "--device", "ngl": "--device",
    "seed": "seed in requests", "random-seed": "seed in requests", "temp": _REQUESTS, "temperature": _REQUESTS, "top-p": _REQUESTS,
    "top-k": _REQUESTS, "min-p": _REQUESTS, "n-predict": "max_tokens in requests", "n": "max_tokens in requests",
    "repeat-penalty": "repetition_penalty in requests", "presence-penalty": _REQUESTS, "frequency-penalty": _REQUESTS, "ignore-eos": "ignore_eos in requests",
    "reasoning-budget": "thinking_budget_tokens in requests", "chat-template-kwargs": "chat_template_kwargs in requests",
    "enable-reasoning": "--tool-format, if the model's template does not tell", "log-file": "the shell: headway serve 2> FILE",
    "override-generation-config": _REQUESTS, "generation-config": _REQUESTS,
    "quantization": "a folder whose config.json has the precision of its weights", "q": "a folder whose config.json has the precision of its weights",
    "tokenizer": "tokenizer.json in the model's folder", "tokenizer-path": "tokenizer.json in the model's folder",
    "pipeline-parallel-size": _DEVICES, "pp": _DEVICES,
    "pp-size": _DEVICES, "data-parallel-size": _DEVICES, "dp": _DEVICES, "dp-size": _DEVICES, "nnodes": _DEVICES,
}  # fmt: skip
NOT_SERVED = {
    "api-server-count": "a server has one process for HTTP; leave it out",
    "enable-lora": "adapters are not served; merge them into the weights", "lora-modules": "adapters are not served; merge them into the weights",
    "lora-paths": "adapters are not served; merge them into the weights", "lora": "adapters are not served; merge them into the weights",
    "embedding": "embeddings are not served", "embeddings": "embeddings are not served", "is-embedding": "embeddings are not served",
    "reranking": "ranking is not served", "task": "texts are generated, nothing else", "runner": "texts are generated, nothing else", "kv-cache-dtype": "the KV cache has the model's precision; leave it out",
    "cache-type-k": "the KV cache has the model's precision; leave it out", "cache-type-v": "the KV cache has the model's precision; leave it out",
    "mmproj": "pictures are not served", "rope-scaling": "positions are as config.json has them; set it there",
    "hf-overrides": "config.json is served as it is; change it there", "root-path": "paths are fixed; let the proxy remove its prefix",
}  # fmt: skip
# Flags that are accepted with the values which describe this server anyway.
ONE_OF_SOME = {
    **dict.fromkeys(("pipeline-parallel-size", "pp", "pp-size", "data-parallel-size", "dp", "dp-size", "nnodes"), ("1",)),
    "kv-cache-dtype": ("auto",), "generation-config": ("auto",), "task": ("auto", "generate"),
    "runner": ("auto", "generate"), "api-server-count": ("1",), "reasoning-budget": ("-1",),
}  # fmt: skip
# Flags that change no text, or describe this server anyway.
HARMLESS = frozenset((
    "trust-remote-code", "enable-prefix-caching", "enable-chunked-prefill", "no-enable-chunked-prefill", "enable-auto-tool-choice", "enforce-eager",
    "disable-cuda-graph", "enable-mixed-chunk", "enable-metrics", "enable-cache-report", "disable-log-requests", "no-enable-log-requests",
    "enable-log-requests", "disable-log-stats", "disable-uvicorn-access-log", "disable-custom-all-reduce", "disable-frontend-multiprocessing",
    "enable-prompt-tokens-details", "enable-server-load-tracking", "enable-torch-compile", "enable-p2p-check", "log-requests",
    "skip-server-warmup", "disable-overlap-schedule", "use-v2-block-manager", "async-scheduling",
    "jinja", "flash-attn", "fa", "cont-batching", "cb", "no-context-shift", "mlock", "no-mmap", "no-webui", "metrics", "slots", "no-slots",
    "log-disable", "no-warmup", "cache-prompt", "webui", "ui", "no-ui", "swa-full", "no-kv-offload", "kv-offload", "perf", "no-perf", "props",
    "no-trust-remote-code", "enable-expert-parallel", "enable-log-outputs", "disable-log-outputs", "enable-request-id-headers", "O0", "O1", "O2", "O3",
))  # fmt: skip
# Flags of HARMLESS that `false` would make effective, and what to use for that.
OFF_INSTEAD = dict.fromkeys(("enable-prefix-caching", "cache-prompt"), "--no-prefix-caching")
HARMLESS_WITH_VALUE = frozenset((
    "tokenizer-mode", "swap-space", "cpu-offload-gb", "guided-decoding-backend", "structured-outputs-config", "grammar-backend", "attention-backend",
    "sampling-backend", "distributed-executor-backend", "schedule-policy", "scheduling-policy", "schedule-conservativeness", "cuda-graph-max-bs", "max-log-len",
    "compilation-config", "limit-mm-per-prompt", "model-impl", "log-level-http", "threads-http", "cache-reuse", "stream-interval",
    "decode-log-interval", "chat-template-content-format", "prio", "numa", "split-mode", "sm", "main-gpu", "mg", "max-logprobs", "O", "cache-ram",
    "prefix-caching-hash-algo",
))  # fmt: skip
OPTIONAL_VALUES = dict.fromkeys(HARMLESS, ("true", "True", "false", "False")) | dict.fromkeys(
    ("flash-attn", "fa"), ("on", "off", "auto")
)


class UsageError(Exception):
    """A command line that cannot be accepted."""


def own_arguments(arguments: Sequence[str], flags: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """Returns the command line without flags that are accepted and change nothing, and remarks on those.
    Raises UsageError.

    flags: the flags of this program, each with whether a value follows.
    """
    own: list[str] = []
    remarks: list[str] = []
    left = list(arguments)
    num_plain = 0
    while left:
        argument = left.pop(0)
        flag, equals, value = argument.partition("=")
        if not argument.startswith("-") or argument == "-":
            num_plain += 1
            own.append(argument)
        elif (flag := flag if flag in flags else ALIASES.get(flag, flag)) in flags:
            own.append(flag + equals + value)
            if flags[flag] and not equals and left:
                own.append(left.pop(0))
        else:
            name = flag.lstrip("-").replace("_", "-")
            takes = name in HARMLESS_WITH_VALUE or name in ONE_OF_SOME
            is_value = bool(left) and (
                (takes and not left[0].startswith("-"))
                or left[0] in (*ONE_OF_SOME.get(name, ()), *OPTIONAL_VALUES.get(name, ()))
            )
            given = value if equals else left.pop(0) if is_value else None
            if not is_harmless(name, given):
                raise UsageError(refusal(flag, name, flags, given))
            remarks.append(f"{flag} is accepted and changes nothing")
    if num_plain > 1:
        raise UsageError(
            f"{num_plain} arguments are no flags, the limit is 1, MODEL; put quotes around values with spaces"
        )
    return own, remarks


def is_harmless(name: str, value: str | None) -> bool:
    """Returns whether a flag of another server changes nothing. value: None if none is given."""
    if name in ONE_OF_SOME:
        return value in ONE_OF_SOME[name]
    if name in HARMLESS:
        try:
            return value is None or parse_switch(value) or name not in OFF_INSTEAD
        except ValueError:
            return value in OPTIONAL_VALUES[name]
    return name in HARMLESS_WITH_VALUE


def refusal(flag: str, name: str, flags: Collection[str], value: str | None = None) -> str:
    """Returns why a flag that is none of these is refused, and what to use. name: the flag without leading
    dashes, with - between words."""
    if name in HARMLESS:
        accepted = (
            f"true is accepted; use {OFF_INSTEAD[name]}"
            if name in OFF_INSTEAD
            else "true or false is accepted"
        )
        return f"{flag} is {shortened(value or '')!r}, only {accepted}"
    if name in REMOVED:
        return f"{flag} was removed: use {REMOVED[name]}"
    if name in INSTEAD:
        return f"{flag} is a flag of other servers: use {INSTEAD[name]}"
    if name in NOT_SERVED:
        return f"{flag} is a flag of other servers: {NOT_SERVED[name]}"
    if f"--{name}" in ALIASES:  # on the command line alone
        return f"there is no {flag}; use {ALIASES[f'--{name}']}"
    ours = {known.lstrip("-"): known for known in flags}
    near = get_close_matches(name, [*ours, *INSTEAD, *NOT_SERVED], n=1, cutoff=0.75)
    if near and near[0] not in ours:
        return f"there is no {flag}; {refusal(f'--{near[0]}', near[0], flags)}"
    hint = f"did you mean {ours[near[0]]}?" if near else "--help-all names all flags"
    return f"there is no {flag}; {hint}"


def refuse_unknown_command(argument: str, commands: Collection[str]) -> None:
    """Raises UsageError for a first argument that is no command. It does not repeat a flag's value, which
    may be a key."""
    if argument in ("", *commands, "-h", "--help", "--version", "--print-completion"):
        return
    if argument.startswith("-"):
        flag = argument.partition("=")[0]
        raise UsageError(f"{flag} needs a command before it, such as headway serve {flag}")
    near = get_close_matches(argument, commands, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(commands)}"
    raise UsageError(f"there is no command {shortened(argument)!r}; {hint}")
