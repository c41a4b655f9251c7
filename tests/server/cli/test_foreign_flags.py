"""Command lines that were written for vLLM, SGLang or llama-server."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from headway.engine import EngineConfig
from headway.server import cli
from headway.server.base.config import ModelSource, ServerConfig
from headway.server.cli import foreign_flags

Served = tuple[ServerConfig, ModelSource, EngineConfig]
OURS = {f"--{option.flag}" for group in cli.SERVE_GROUPS.values() for option in group}
KEY = "correct-horse"


@pytest.mark.parametrize(
    ("line", "taken"),
    [
        ("ORG/NAME --trust-remote-code --enable-prefix-caching --port 7", ["--trust-remote-code", "--enable-prefix-caching"]),
        ("--enable_chunked_prefill ORG/NAME --data-parallel-size 1 --port=7", ["--enable_chunked_prefill", "--data-parallel-size"]),
        ("--attention-backend flashinfer --schedule-policy=lpm ORG/NAME --port 7", ["--attention-backend", "--schedule-policy"]),
        ("--jinja -fa on ORG/NAME --flash-attn -cb --port 7", ["--jinja", "-fa", "--flash-attn", "-cb"]),
        ("--kv-cache-dtype auto --task generate ORG/NAME --port 7", ["--kv-cache-dtype", "--task"]),
        ("--trust-remote-code true --enable-prefix-caching=True ORG/NAME --mlock False --perf=off --port 7",
         ["--trust-remote-code", "--enable-prefix-caching", "--mlock", "--perf"]),
        ("ORG/NAME -O3 --api-server-count 1 --chat-template-content-format auto --no-ui --numa distribute --reasoning-budget -1 --port 7",
         ["-O3", "--api-server-count", "--chat-template-content-format", "--no-ui", "--numa", "--reasoning-budget"]),
    ],
    ids=["vllm", "underscores", "sglang", "llama-server", "defaults", "switches-with-a-value", "more"],
)  # fmt: skip
def test_flags_that_change_nothing_are_taken_with_a_word(
    served: list[Served], caplog: pytest.LogCaptureFixture, line: str, taken: list[str]
) -> None:  # fmt: skip
    with caplog.at_level(logging.INFO, "headway.server"):
        assert cli.main(["serve", *line.split()]) == 0
    ((config, source, _),) = served
    assert (config.port, source.name) == (7, "ORG/NAME")
    assert caplog.messages == [f"{flag} is accepted and changes nothing" for flag in taken]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--max-num-seqs 64", "--max-num-seqs is a flag of other servers: use --max-running"),
        ("--max_num_seqs=64", "use --max-running"),
        ("-c 4096 -np 4", "-c is a flag of other servers: use --max-model-len"),
        ("--mem-fraction-static 0.9", "use --kv-cache-memory"),
        ("--data-parallel-size 2", "one server for each GPU"),
        ("--kv-cache-dtype fp8", "the KV cache has the model's precision"),
        ("--task embed", "texts are generated"),
        ("--enable-prefix-caching=false", "is 'false', only true is accepted; use --no-prefix-caching"),
        ("--enforce-eager=maybe", "is 'maybe', only true or false is accepted"),
        ("--reasoning-budget 0", "use thinking_budget_tokens in requests"),
        ("--repeat-penalty 1.1", "use repetition_penalty in requests"),
        ("--api-server-count 4", "one process for HTTP"),
        ("--log-file x", "the shell"),
        ("--enable-lora", "adapters are not served"),
        ("--max_model_len 5", "there is no --max_model_len; did you mean --max-model-len?"),
        ("--depht 3", "there is no --depht; did you mean --depth?"),
        (
            "--max-num-seq 9",
            "there is no --max-num-seq; --max-num-seqs is a flag of other servers: use --max-running",
        ),
        ("--colour", "there is no --colour; --help-all names all flags"),
        ("--download-dir /models", "--download-dir was removed: use the variable HF_HUB_CACHE"),
        (
            "--max-waiting-tokens=9",
            "--max-waiting-tokens was removed: use --max-waiting, a number of requests",
        ),
        (f"--apikey {KEY}", "there is no --apikey; did you mean --api-key?"),
        (f"--api_key={KEY}", "did you mean --api-key?"),
        (f"--hf-token {KEY}", "use the variable HF_TOKEN"),
        (f"ORG/NAME --api-key my {KEY}", "2 arguments are no flags, the limit is 1, MODEL"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "warmup"])
def test_other_flags_are_refused_with_what_to_use_and_without_their_values(
    served: list[Served], capsys: pytest.CaptureFixture[str], command: str, line: str, told: str
) -> None:  # fmt: skip
    with pytest.raises(SystemExit) as left:
        cli.main([command, *line.split()])
    error = capsys.readouterr().err
    assert left.value.code == 2
    assert error.startswith(f"usage: headway {command} [MODEL]")
    assert told in error
    assert KEY not in error
    assert not served


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (f"complete x --modle={KEY}", "headway complete: error: there is no --modle; did you mean --model?"),
        (
            f"chat --max-token {KEY}",
            "headway chat: error: there is no --max-token; did you mean --max-tokens?",
        ),
        ("complete two words", "there is no argument 'words'; put quotes around values with spaces"),
        ("sevre ORG/NAME", "headway: error: there is no command 'sevre'; did you mean serve?"),
        ("run ORG/NAME", "there is no command 'run'; the commands are serve, chat,"),
        (f"--api-key={KEY}", "--api-key needs a command before it, such as headway serve --api-key"),
    ],
)
def test_what_no_command_has_is_refused_with_the_nearest_name(
    capsys: pytest.CaptureFixture[str], line: str, told: str
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(line.split())
    error = capsys.readouterr().err
    assert left.value.code == 2
    assert told in error
    assert KEY not in error


def test_the_page_says_of_other_servers_flags_what_the_command_says() -> None:
    page = Path(__file__).parents[3].joinpath("docs/from_other_servers.md").read_text()
    table = page.partition("| vLLM | SGLang | llama-server | Headway |\n")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[1:]]
    assert len(rows) > 10
    for *theirs, ours in rows:
        told = set(re.findall(r"`(--[a-z-]+)`", ours)) or {"one server", "adapters"}
        for flag in re.findall(r"`(--?[a-z-]+)`", " ".join(theirs)):
            name, own = flag.lstrip("-"), foreign_flags.ALIASES.get(flag, flag)
            if name not in foreign_flags.HARMLESS and own not in told:
                error = foreign_flags.refusal(flag, name, OURS)
                assert any(one in error for one in told) or "config.json" in error, error


def test_what_is_to_be_used_exists_and_no_flag_is_in_two_tables() -> None:
    instead = {**foreign_flags.INSTEAD, **foreign_flags.REMOVED}
    flags = {
        flag
        for text in (*instead.values(), *foreign_flags.OFF_INSTEAD.values())
        for flag in re.findall(r"--[a-z-]+", text)
    }
    assert len(flags) > 20
    assert flags <= OURS
    refused, harmless = (
        {*instead, *foreign_flags.NOT_SERVED},
        {*foreign_flags.HARMLESS, *foreign_flags.HARMLESS_WITH_VALUE},
    )
    assert len(instead) == len(foreign_flags.INSTEAD) + len(foreign_flags.REMOVED)
    assert instead.keys().isdisjoint(foreign_flags.NOT_SERVED)
    assert foreign_flags.HARMLESS.isdisjoint(foreign_flags.HARMLESS_WITH_VALUE)
    assert refused.isdisjoint(harmless)
    assert foreign_flags.OFF_INSTEAD.keys() <= foreign_flags.HARMLESS
    assert foreign_flags.ONE_OF_SOME.keys() <= refused
    assert {f"--{name}" for name in refused | harmless}.isdisjoint(OURS)
