"""The command line: precedence, names in complaints, the banner, the drain on a signal."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shlex
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import httpx
import msgspec
import pytest
from headway_testing import tiny_tokenizers
from headway_testing.daemon import headway_command
from headway_testing.fake_engine import INFO, FakeEngine
from headway_testing.waiting import until

from headway.engine import ConfigError, DraftCheck, EngineConfig, EngineDeadError, ModelError
from headway.server import cli
from headway.server.app import create_app
from headway.server.base.config import ChatConfig, CompleteConfig, InspectConfig, ModelSource, ServerConfig
from headway.server.cli import console, options, serve
from headway.server.cli.console import banner, banner_fields, wait_with_progress
from headway.server.cli.foreign_flags import REMOVED
from headway.server.cli.options import Option, parse_size
from headway.server.cli.serve import DrainingServer
from headway.server.cli.settings import Settings
from headway.server.engine.client import EngineStatus
from headway.server.fleet.settings import FleetSettings
from headway.server.requests.services import Services


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_tokenizers.save(tmp_path / "model", tiny_tokenizers.byte_level())


Served = tuple[ServerConfig, ModelSource, EngineConfig]


def test_without_arguments_the_defaults_serve_the_embedded_model(served: list[Served]) -> None:
    assert cli.main(["serve"]) == 0
    assert served == [
        (ServerConfig(), ModelSource(), EngineConfig(model_path="", depth=3, chooses_depth=True))
    ]


class FakeChild:
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("error", [None, ConfigError("the port is taken")], ids=["served", "refused"])
def test_the_engine_imports_libraries_while_the_command_is_imported(
    monkeypatch: pytest.MonkeyPatch, error: ConfigError | None
) -> None:
    """It ends with the command, also where that refuses to serve."""
    child, order = FakeChild(), []
    monkeypatch.setattr(cli, "EngineChild", lambda: order.append("engine") or child)

    def run(config: ServerConfig, source: ModelSource, engine: EngineConfig, given: FakeChild) -> int:
        assert given is child
        assert not child.is_closed
        if error is not None:
            raise error
        return 0

    monkeypatch.setattr(cli, "_command", lambda *name: order.append(name) or run)
    assert cli.main(["serve"]) == (0 if error is None else 1)
    assert order == ["engine", ("cli.serve", "serve")]
    assert child.is_closed


def as_file(line: str, folder: Path, between: str) -> str:
    """Returns a command line that says the same by a file, with this between the words of its keys."""
    command, model, *rest = shlex.split(line)
    keys: dict[str, list[str]] = {"model": [model]}
    for word in rest:
        if word.startswith("--"):
            key = word.removeprefix("--").replace("-", between)
            keys.setdefault(key, [])
        else:
            keys[key].append(word)
    lines = [f"{key}: {json.dumps(values) if len(values) > 1 else ''.join(values) or 'true'}"
             for key, values in keys.items()]  # fmt: skip
    file = folder / "headway.yaml"
    file.write_text("\n".join(lines).replace(": *", ": '*'").replace(": ::1", ": '::1'"))
    return f"{command} --config {file}"


@pytest.mark.parametrize(
    "between", [None, "-", "_"], ids=["line", "file-with-hyphens", "file-with-underscores"]
)
def test_every_flag_arrives(served: list[Served], tmp_path: Path, between: str | None) -> None:
    line = """serve ORG/NAME --host ::1 --port 9 --served-model-name m --served-model-name n --drain-seconds 1.5 --log-level debug
        --revision v1 --device cpu --dtype float64 --max-model-len 100 --threads 2
        --max-depth 4 --max-running 5 --max-waiting 6 --block-size 32 --kv-cache-memory 1.5MiB
        --prefill-chunk 64 --no-prefix-caching --unix-socket /s --tls-cert /c --tls-key /k --api-key a
        --api-key b --admin-key c --cors-origin * --max-body 1MiB --request-timeout 60
        --keep-alive 5 --log-format json --otlp-endpoint http://c --load-format dummy --synthetic-acceptance .9,.8,.7,0 --relaxed-thinking 5,0.3
        --deterministic --fast-math --require-speculation --force-include-usage --unknown-fields refuse --metrics-names both --chat-template /t"""
    if between is not None:
        line = as_file(line, tmp_path, between)
    assert cli.main(shlex.split(line)) == 0
    server = ServerConfig(
        host="::1", port=9, served_model_name=["m", "n"], drain_seconds=1.5, log_level="debug", unix_socket="/s",
        tls_cert="/c", tls_key="/k", api_key=["a", "b"], admin_key="c", cors_origin=["*"], max_body_bytes=2**20,
        request_timeout=60.0, keep_alive=5.0,
        log_format="json", otlp_endpoint="http://c", force_include_usage=True, unknown_fields="refuse", metrics_names="both", chat_template="/t",
    )  # fmt: skip
    engine = EngineConfig(
        model_path="", device="cpu", dtype="float64", max_model_len=100, threads=2, depth=4, chooses_depth=True, max_running=5,
        max_waiting=6, block_size=32, kv_cache_memory_bytes=3 * 2**19, prefill_chunk=64, prefix_caching=False,
        load_format="dummy", synthetic_acceptance=(0.9, 0.8, 0.7, 0.0), relaxed_thinking=(5, 0.3), log_level="debug", log_format="json",
        deterministic=True, fast_math=True, require_speculation=True,
    )  # fmt: skip
    assert served == [(server, ModelSource("ORG/NAME", "v1"), engine)]


@pytest.mark.parametrize(
    ("given", "drafter", "path"),
    [("ngram", "ngram", None), ("auto", "auto", None), ("./head", "auto", "./head"), ("ORG/NAME", "auto", "ORG/NAME"),
     ("eagle3", "auto", "eagle3"), ("ORG/NAME,ngram", "auto,ngram", "ORG/NAME")],
)  # fmt: skip
def test_what_is_no_drafters_name_is_where_a_drafter_is(
    served: list[Served], given: str, drafter: str, path: str | None
) -> None:
    assert cli.main(["serve", "--drafter", given]) == 0
    engine = served[0][2]
    assert (engine.drafter, engine.drafter_path) == (drafter, path)


def test_variables_set_flags_and_the_command_line_wins(
    served: list[Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {
        "HEADWAY_MODEL": "A/B", "HEADWAY_PORT": "1", "HEADWAY_DEPTH": "2", "HEADWAY_NO_PREFIX_CACHING": "true",
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    cli.main(["serve", "--port", "7"])
    ((server, source, engine),) = served
    assert (server.port, source.name, engine.depth, engine.prefix_caching) == (7, "A/B", 2, False)
    assert not engine.chooses_depth


@pytest.mark.parametrize(
    ("flags", "depth", "chooses"),
    [
        ("", 3, True), ("--depth auto", 3, True), ("--depth 0", 0, False), ("--depth 4", 4, False),
        ("--max-depth 2", 2, True), ("--depth 1 --max-depth 2", 1, False), ("--max-depth 0", 0, True),
    ],
)  # fmt: skip
def test_a_number_fixes_the_depth(served: list[Served], flags: str, depth: int, chooses: bool) -> None:
    assert cli.main(["serve", *flags.split()]) == 0
    ((_, _, engine),) = served
    assert (engine.depth, engine.chooses_depth) == (depth, chooses)


def test_a_depth_above_the_most_is_refused(served: list[Served], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--depth", "3", "--max-depth", "2"]) != 0
    assert "--depth is 3, it must be auto or at most --max-depth, which is 2" in capsys.readouterr().err
    for most in (-1, 9):
        assert cli.main(["serve", "--depth", "0", f"--max-depth={most}"]) != 0
        assert f"--max-depth is {most}, it must be 0 to 8" in capsys.readouterr().err
    assert not served


ALL_OPTIONS = [
    o
    for groups in (cli.FLEET_GROUPS, cli.COMPLETE_GROUPS, cli.CHAT_GROUPS, cli.INSPECT_GROUPS)
    for group in groups.values()
    for o in group
]


@pytest.mark.parametrize("option", ALL_OPTIONS, ids=lambda option: option.flag)
def test_every_option_has_a_field_and_help(option: Option) -> None:
    configs = (ServerConfig, ModelSource, CompleteConfig, ChatConfig, InspectConfig, FleetSettings)
    fields = {f for config in configs for f in config.__dataclass_fields__}
    fields |= {field.name for field in msgspec.structs.fields(EngineConfig)}
    fields.add("max_depth")  # becomes the field depth, with chooses_depth
    fields.add("config")  # has values of others
    assert {option.key, f"{option.key}_bytes", option.key.removeprefix("no_")} & fields
    assert len(option.help) > 10


USER_PAGES = ("models", "clients", "from_other_servers", "exactness", "troubleshooting")


@pytest.mark.parametrize("page", ["README.md", "docs/running.md", "docs/troubleshooting.md"])
def test_the_pages_name_only_flags_that_exist(page: str) -> None:
    flags = set(re.findall(r"`--([a-z-]+)`", Path(__file__).parents[3].joinpath(page).read_text()))
    assert len(flags) > 7
    others = {"trust-remote-code", "max-num-seqs", "help-all"}  # the first two are of other servers
    assert flags - others - REMOVED.keys() <= {option.flag for option in ALL_OPTIONS}


@pytest.mark.parametrize(
    "line", ["--tp 2", "-tp=2", "--tp-size 2", "--tensor_parallel_size=2", "--tensor-parallel-size 2"]
)
def test_ranks_have_several_names(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[EngineConfig] = []
    monkeypatch.setattr(serve, "serve", lambda _config, _source, engine, *_: calls.append(engine) or 0)
    assert cli.main(["serve", *line.split()]) == 0
    assert [engine.tensor_parallel_size for engine in calls] == [2]


def test_the_banner_tells_the_ranks() -> None:
    assert "on cpu, 2 ranks)" in banner("m", msgspec.structs.replace(INFO, num_ranks=2), "http://x")


@pytest.mark.parametrize(
    ("start", "is_for_few"),
    [("`headway serve --help` shows these", False), ("`headway serve --help-all` also shows", True)],
    ids=["many", "few"],
)
def test_every_flag_of_the_server_is_explained(start: str, is_for_few: bool) -> None:
    page = Path(__file__).parents[3].joinpath("docs/running.md").read_text()
    table = page.partition(start)[2].split("\n\n")[1]
    first_cells = " ".join(line.split("|")[1] for line in table.splitlines())
    served = [option for group in cli.SERVE_GROUPS.values() for option in group]
    expected = {option.flag for option in served if option.is_for_few == is_for_few}
    assert set(re.findall(r"`--([a-z-]+)`", first_cells)) == expected


def flags_shown(command: str, flag: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    with pytest.raises(SystemExit) as left:
        cli.main([command, flag])
    assert left.value.code == 0
    return re.findall(r"^  (?:-h, )?--([a-z-]+)", capsys.readouterr().out, re.MULTILINE)


def test_help_shows_the_flags_that_many_need_and_help_all_every_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown, every = (flags_shown("serve", flag, capsys) for flag in ("--help", "--help-all"))
    served = [option for group in cli.SERVE_GROUPS.values() for option in group]
    assert shown == ["help", "help-all", *(option.flag for option in served if not option.is_for_few)]
    assert every == ["help", "help-all", *(option.flag for option in served)]
    assert len(shown) <= 36


@pytest.mark.parametrize("command", ["warmup", "fleet", "inspect", "complete"])
def test_other_commands_with_flags_for_few_have_both(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown, every = (set(flags_shown(command, flag, capsys)) for flag in ("--help", "--help-all"))
    assert "load-format" in every - shown


def test_the_page_says_what_to_write_instead_of_each_removed_flag() -> None:
    page = Path(__file__).parents[3].joinpath("docs/running.md").read_text()
    table = page[page.index("| removed | instead |") :].partition("\n\n")[0]
    told = dict(re.findall(r"^\| `--([a-z-]+)` \| (.+) \|$", table, re.MULTILINE))
    assert {flag: instead.replace("`", "") for flag, instead in told.items()} == REMOVED


@pytest.mark.parametrize(
    ("page", "limit"),
    [("README.md", 1600), ("docs/running.md", 2500), ("docs/design.md", 2000), *((f"docs/{page}.md", 900) for page in USER_PAGES)],
)  # fmt: skip
def test_a_page_that_is_read_from_top_to_bottom_is_short(page: str, limit: int) -> None:
    assert len(Path(__file__).parents[3].joinpath(page).read_text().split()) <= limit


WRONG = [
    ("HEADWAY_PORT", "http", "HEADWAY_PORT is 'http', it must be 0 to 65535"),
    ("HEADWAY_PORT", "65536", "HEADWAY_PORT is '65536'"),
    ("HEADWAY_DEPTH", "9", "HEADWAY_DEPTH is 9, it must be 0 to 8"),
    ("HEADWAY_DEPTH", "deep", "HEADWAY_DEPTH is 'deep', it must be auto or a whole number"),
    (
        "HEADWAY_SYNTHETIC_ACCEPTANCE",
        "0.9;0.8",
        "HEADWAY_SYNTHETIC_ACCEPTANCE is '0.9;0.8', it must be numbers with",
    ),
    (
        "HEADWAY_SYNTHETIC_ACCEPTANCE",
        "0.7,0.8,0.6",
        "HEADWAY_SYNTHETIC_ACCEPTANCE is 0.7,0.8,0.6, it must be numbers from 1",
    ),
    (
        "HEADWAY_SYNTHETIC_ACCEPTANCE",
        "0.7,0.6",
        "HEADWAY_SYNTHETIC_ACCEPTANCE is 0.7,0.6, it must be as long as --max-depth, 3",
    ),
    ("HEADWAY_MAX_DEPTH", "-1", "HEADWAY_MAX_DEPTH is -1"),
    ("HEADWAY_BLOCK_SIZE", "17", "HEADWAY_BLOCK_SIZE is 17, it must be a power of two"),
    ("HEADWAY_KV_CACHE_MEMORY", "much", "HEADWAY_KV_CACHE_MEMORY is 'much', it must be a size"),
    (
        "HEADWAY_NO_PREFIX_CACHING",
        "maybe",
        "HEADWAY_NO_PREFIX_CACHING is 'maybe', it must be true or false, 1 or 0",
    ),
    ("HEADWAY_DEVICE", "tpu", "HEADWAY_DEVICE is 'tpu', it must be one of auto, cpu, cuda"),
    (
        "HEADWAY_DRAFT_LM_HEAD",
        "int8",
        "HEADWAY_DRAFT_LM_HEAD is 'int8', it must be one of auto, full, int4, fp8 (int8 was removed: use auto)",
    ),
    (
        "HEADWAY_THREADS",
        "10000",
        f"HEADWAY_THREADS is 10000, it must be 1 to {max(64, 4 * (os.cpu_count() or 1))} (this",
    ),
    ("HEADWAY_THREADS", "0", "HEADWAY_THREADS is 0, it must be 1 to "),
    (
        "HEADWAY_MAX_WAITING",
        "9" * 20,
        f"HEADWAY_MAX_WAITING is '{'9' * 20}', it must be a whole number below 2^63",
    ),
    (
        "HEADWAY_KV_CACHE_MEMORY",
        "99999999TiB",
        "HEADWAY_KV_CACHE_MEMORY is '99999999TiB', it must be a size below 8 EiB",
    ),
    ("HEADWAY_DRAIN_SECONDS", "nan", "HEADWAY_DRAIN_SECONDS is 'nan'"),
    *(
        (name, "", f"{name} is '', it must be 1 character or more, without control characters")
        for name in (
            "HEADWAY_SERVED_MODEL_NAME",
            "HEADWAY_DRAFTER",
            "HEADWAY_UNIX_SOCKET",
            "HEADWAY_CHAT_TEMPLATE",
        )
    ),
    (
        "HEADWAY_OTLP_ENDPOINT",
        "localhost:4318",
        "HEADWAY_OTLP_ENDPOINT is 'localhost:4318', it must be a URL such as http://localhost:4318",
    ),
    ("HEADWAY_API_KEY", "", "HEADWAY_API_KEY is '', it must be 1 character or more"),
    ("HEADWAY_ADMIN_KEY", "a b", "HEADWAY_ADMIN_KEY is a text of 3 characters (not shown), it must be"),
]


@pytest.mark.parametrize(("variable", "value", "complaint"), WRONG, ids=[f"{n}={v}" for n, v, _ in WRONG])
def test_a_wrong_variable_is_named_and_so_is_its_flag(
    served: list[Served],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    value: str,
    complaint: str,
) -> None:
    flag = "--" + variable.removeprefix("HEADWAY_").lower().replace("_", "-")
    monkeypatch.setenv(variable, value)
    assert cli.main(["serve"]) == 1
    assert capsys.readouterr().err.startswith(f"headway: {complaint}")
    if flag != "--no-prefix-caching":
        assert cli.main(["serve", f"{flag}={value}"]) == 1
        error = capsys.readouterr().err
        assert value in error or "(not shown)" in error
        assert error.startswith(f"headway: {complaint.replace(variable, flag)}")
    assert not served


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "a file that holds a Jinja template: there is no such file"),
        (b"\xff\xfe", "a file that holds a Jinja template: "),
        (
            b"{% for m in messages %}",
            "a valid Jinja template: TemplateSyntaxError: Unexpected end of template.",
        ),
    ],
    ids=["missing", "no-text", "syntax"],
)
def test_a_chat_template_that_cannot_be_used_ends_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, reason: str
) -> None:
    file = tmp_path / "chat.jinja"
    if content is not None:
        file.write_bytes(content)
    assert cli.main(["serve", "--port", "0", "--chat-template", str(file)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"headway: --chat-template is {str(file)!r}, it must be {reason}")
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("123", 123),
        ("2GiB", 2**31),
        ("2 gib", 2**31),
        ("1.5M", 1_500_000),
        ("3kb", 3000),
        ("1Ti", 2**40),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "2XB", "1e9", "1,5G"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="2GiB"):
        parse_size(text)


def test_a_list_from_a_variable_has_one_entry() -> None:
    arguments = cli._parser().parse_args(["complete", "x"])
    assert Settings(arguments, {"HEADWAY_STOP": "END"}).read(options.GENERATION)["stop"] == ["END"]
    arguments = cli._parser().parse_args(["complete", "x", "--stop", "a", "--stop", "b"])
    assert Settings(arguments, {"HEADWAY_STOP": "END"}).read(options.GENERATION)["stop"] == ["a", "b"]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert (left.value.code, capsys.readouterr().out) == (0, "headway 0.1.0\n")


def test_a_port_in_use_is_told_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["serve", "/no/such/model", "--port", str(port)]) == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "complaint"),
    [("/no/such/model", "neither a folder nor"), ("{folder}", "the architecture is not named")],
    ids=["missing", "unknown-architecture"],
)
@pytest.mark.parametrize(
    "command", [["serve", "--port", "0"], ["complete", "x", "--model"]], ids=["serve", "complete"]
)
def test_a_bad_model_is_one_line_and_status_1(
    folder: Path, capsys: pytest.CaptureFixture[str], command: list[str], model: str, complaint: str
) -> None:
    assert cli.main([*command, model.format(folder=folder)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("headway: ")
    assert complaint in error
    assert "Traceback" not in error


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
@pytest.mark.parametrize("prompt", ["-", "a\udcff"], ids=["stdin", "argument"])
def test_a_prompt_that_is_not_utf8_is_one_line_and_status_1(
    prompt: str, errors: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), "utf-8", errors))
    assert cli.main(["complete", prompt]) == 1
    assert capsys.readouterr().err.startswith("headway: PROMPT has bytes that are not UTF-8; ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--served-model-name", "a\udcff"],
        ["serve", "a\udcff"],
        ["inspect", "--drafter", "a\udcff"],
        ["chat", "--system", "a\udcff"],
        ["chat", "--model", "a\udcff"],
        ["complete", "x", "--stop", "a\udcff"],
    ],
    ids=" ".join,
)
def test_a_value_that_is_not_utf8_is_one_line_and_status_1(
    arguments: list[str], served: list[Served], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 1
    error = capsys.readouterr().err
    assert error.endswith(" has bytes that are not UTF-8; convert it, such as with iconv\n")
    assert error.count("\n") == 1
    assert not served


def test_a_served_name_has_no_control_characters(
    served: list[Served], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "--served-model-name", "a\nb"]) == 1
    assert "it must be 1 character or more, without control characters" in capsys.readouterr().err
    assert not served


@pytest.mark.parametrize(("command", "module"), [("quantize", "quantize"), ("head", "training")])
def test_commands_of_the_engine_get_their_arguments_as_they_are(
    command: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(cli, "run", lambda program, arguments: runs.append((program[-1], arguments)) or 3)
    assert cli.main([command, "--help", "--model", "x"]) == 3
    assert runs == [(f"headway.engine.{module}", ["--help", "--model", "x"])]


@pytest.fixture
def heeded_interrupts() -> Iterator[None]:
    """In what is started from here, too: a shell's jobs in the background ignore them, and so does all that
    they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeded_interrupts")
@pytest.mark.parametrize("is_terminal", [True, False], ids=["both", "parent"])
def test_an_interrupt_ends_a_benchmark_quietly(is_terminal: bool) -> None:
    """Of the whole process group, as a terminal does it, or of the command alone. The server never
    answers."""
    command = headway_command("bench", "serve", "--base-url")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        running = subprocess.Popen([*command, url], stderr=subprocess.PIPE, start_new_session=True)
        silent.settimeout(60)
        connection, _ = silent.accept()
        with connection:
            (os.killpg if is_terminal else os.kill)(running.pid, signal.SIGINT)
            _, error = running.communicate(timeout=60)
    assert (running.returncode, error) == (130, b"")


def test_a_completion_takes_memory_for_one_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[EngineConfig] = []

    def start(config: EngineConfig) -> None:
        started.append(config)
        raise ConfigError("started")

    monkeypatch.setattr(import_module("headway.server.cli.complete"), "EngineClient", start)
    assert cli.main(["complete", "x"]) == 1
    (config,) = started
    assert config.num_rows == 1


@pytest.mark.slow
def test_a_completion_that_nobody_reads_ends_quietly() -> None:
    command = headway_command("complete", "def parse(", "--device", "cpu", "--depth", "0")
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as nobody:
        ended = subprocess.run(command, check=False, stdout=nobody, stderr=subprocess.PIPE, timeout=120)
    assert ended.returncode == 128 + signal.SIGPIPE
    assert b"Traceback" not in ended.stderr
    assert b"BrokenPipeError" not in ended.stderr


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({}, "3 drafts a round, by the model's MTP head"),
        ({"chooses_depth": True}, "0 to 3, chosen for each round, by the model's MTP head"),
        ({"drafter": "ngram", "has_draft_head": False}, "3 drafts a round, by n-gram lookup"),
        ({"drafter": "mtp,ngram"}, "3 drafts a round, by the model's MTP head and n-gram lookup"),
        ({"depth": 0}, "speculation is off"),
        ({"draft_check": DraftCheck(state="failed")}, "0: speculation is off, the drafter failed its check"),
        ({"depth": 0, "has_draft_head": False}, "no MTP head"),
    ],
    ids=["on", "auto", "ngram", "joined", "off", "failed", "no-head"],
)  # fmt: skip
def test_the_banner_tells_depth_and_a_curl_line_that_works(change: dict[str, object], line: str) -> None:
    text = banner("tiny", msgspec.structs.replace(INFO, **change), "http://127.0.0.1:8000")
    assert line in text
    command, url, flag, body = shlex.split(text.splitlines()[-1])
    assert (command, url, flag) == ("curl", "http://127.0.0.1:8000/v1/completions", "-d")
    assert json.loads(body)["prompt"] == "def read_config(path):\n"


@pytest.mark.parametrize(("note", "path"), [(None, "chat/completions"), ("continues code", "completions")])
def test_the_banners_curl_line_chats_with_a_model_that_was_trained_to(note: str | None, path: str) -> None:
    line = banner("tiny", INFO, "http://x", tool_format="plain", chat_note=note).splitlines()[-1]
    _, url, _, body = shlex.split(line)
    assert url == f"http://x/v1/{path}"
    assert ("messages" in json.loads(body)) == (note is None)


def test_the_banner_tells_the_form_of_calls_of_a_model_that_can_chat() -> None:
    assert "hermes (--tool-format)" in banner("tiny", INFO, "http://localhost", tool_format="hermes")
    assert "--tool-format" not in banner("tiny", INFO, "http://localhost")


def test_the_banners_curl_line_goes_by_the_path_that_is_listened_at() -> None:
    line = banner("tiny", INFO, "http://localhost", "/run/my socket").splitlines()[-1]
    assert shlex.split(line)[:-2] == [
        "curl", "--unix-socket", "/run/my socket", "http://localhost/v1/completions",
    ]  # fmt: skip


def test_the_banners_fields_name_the_path_that_is_listened_at() -> None:
    assert "unix_socket" not in banner_fields("tiny", INFO, "http://localhost:1")
    fields = banner_fields("tiny", INFO, "http://localhost", "/run/my socket")
    assert (fields["url"], fields["unix_socket"]) == ("http://localhost", "/run/my socket")


@pytest.mark.parametrize(
    ("change", "is_warned"),
    [({}, False), ({"has_dummy_weights": True}, True), ({"synthetic_acceptance": (0.5,)}, True)],
    ids=["true", "dummy", "synthetic"],
)
def test_the_banner_warns_of_text_that_means_nothing(change: dict[str, object], is_warned: bool) -> None:
    assert (
        "means nothing" in banner("tiny", msgspec.structs.replace(INFO, **change), "http://x")
    ) == is_warned


def test_the_banner_names_weights_in_8_bits() -> None:
    told = banner("tiny", msgspec.structs.replace(INFO, cpu_weights="int8"), "http://x")
    assert f"{INFO.dtype} on {INFO.device}, weights in int8)\n" in told
    assert "weights in" not in banner("tiny", INFO, "http://x")


def test_the_banner_says_what_is_lossy() -> None:
    told = banner("tiny", msgspec.structs.replace(INFO, relaxed_thinking=(5, 0.3)), "http://x")
    assert "\n  LOSSY    while a chat reasons, drafts that the model does not choose" in told
    assert "(--relaxed-thinking 5,0.3)\n" in told
    assert "LOSSY" not in banner("tiny", INFO, "http://x")


def test_the_banner_says_what_people_should_know_of_chats() -> None:
    told = banner("tiny", INFO, "http://x", tool_format="plain", chat_note="continues code")
    assert "\n  chat     continues code\n" in told
    assert "tools" not in told
    assert "\n  chat " not in banner("tiny", INFO, "http://x", tool_format="plain")


class DrainedEngine(FakeEngine):
    """Mutable: notes the drain, and ends what runs after its time as the client does."""

    def drain(self, seconds: float) -> None:
        self.state = "draining"
        late = EngineDeadError(f"the server is shutting down; it waited {seconds:g} s")
        asyncio.get_running_loop().call_later(seconds, self.fail_all, late)


@pytest.mark.parametrize(
    ("num_tokens", "drain_seconds", "last"),
    [(30, 60.0, "data: [DONE]"), (240, 0.3, "shutting down")],
    ids=["finishes-in-time", "takes-too-long"],
)
async def test_sigterm_lets_requests_finish_up_to_the_drain_time(
    services: Services, num_tokens: int, drain_seconds: float, last: str
) -> None:
    engine = DrainedEngine()
    engine.round_seconds = 0.03
    services = Services(services.model_name, engine, services.tokenizer, services.metrics)
    server = DrainingServer(create_app(services), ServerConfig(drain_seconds=drain_seconds), engine)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        running = asyncio.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started)
        address = listener.getsockname()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{address[1]}") as client:
            body = {"prompt": "abc", "max_tokens": num_tokens, "stream": True}
            post = asyncio.create_task(client.post("/v1/completions", json=body))
            await until(lambda: bool(engine.running))
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(running, 30)
            assert last in (await post).text.strip().splitlines()[-1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)


@pytest.fixture
def with_terminal() -> Iterator[None]:
    """No signal is ignored, though the tests run by nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("with_terminal")
@pytest.mark.parametrize("first", serve.SIGNALS)
@pytest.mark.parametrize("second", serve.SIGNALS)
async def test_the_second_signal_waits_for_nothing(
    services: Services, monkeypatch: pytest.MonkeyPatch, first: int, second: int
) -> None:
    """Before the server serves, too: while a template is checked."""
    ends: list[str | int] = []
    engine = DrainedEngine()
    monkeypatch.setattr(engine, "kill", lambda: ends.append("engine"), raising=False)
    monkeypatch.setattr("os._exit", ends.append)
    server = DrainingServer(create_app(services), ServerConfig(), engine)
    with server.capture_signals():
        os.kill(os.getpid(), first)
        await until(lambda: server.should_exit)
        os.kill(os.getpid(), first)  # as `timeout` does: to the process, and to its group
        await asyncio.sleep(2 * serve.ECHO_SECONDS)
        assert ends == []
        os.kill(os.getpid(), second)
        await until(lambda: len(ends) == 2)
    assert ends == ["engine", 128 + second]


@pytest.mark.usefixtures("with_terminal")
def test_what_nohup_ignores_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with serve.leaving_on_signals():
        signal.raise_signal(signal.SIGHUP)


@pytest.mark.usefixtures("with_terminal")
@pytest.mark.parametrize("number", serve.SIGNALS)
def test_a_signal_before_the_server_runs_ends_the_command(number: int) -> None:
    """Process 1 of a container would not die by it."""
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as left, serve.leaving_on_signals():
        signal.raise_signal(number)
    assert left.value.code == 128 + number
    assert signal.getsignal(number) == before


class LoadingEngine(FakeEngine):
    """Mutable: loads for a moment, then fails or is ready."""

    error: Exception | None = None

    async def wait_until_ready(self) -> object:
        await asyncio.sleep(0.02)
        if self.error is not None:
            raise self.error
        return self.info


@pytest.mark.parametrize(
    "error", [None, ModelError("no"), ConfigError("no")], ids=["ready", "model", "config"]
)
async def test_progress_is_told_in_lines_and_a_failed_start_is_raised(
    capsys: pytest.CaptureFixture[str], error: Exception | None
) -> None:
    engine = LoadingEngine()
    engine.error = error
    if error is None:
        assert await wait_with_progress(engine) == INFO
    else:
        with pytest.raises(type(error)):
            await wait_with_progress(engine)
    assert capsys.readouterr().err == "ready: 100 %, 0 s\n"


class CompilingEngine(FakeEngine):
    """Mutable: loads, then compiles for long without news of its progress."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0

    def status(self) -> EngineStatus:
        self.looks += 1
        phase, progress = ("load", 0.25 * self.looks) if self.looks <= 3 else ("capture", 0.0)
        return replace(super().status(), phase=phase, progress=progress)

    async def wait_until_ready(self) -> object:
        await until(lambda: self.looks == 12)
        return self.info


async def test_no_phase_of_a_start_is_quiet_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(console, "LINE_SECONDS", 0.05)
    lines: list[str] = []
    await wait_with_progress(CompilingEngine(), lines.append)
    assert [line.split(",")[0] for line in lines[:4]] == [
        "loading weights: 25 %", "loading weights: 50 %", "loading weights: 75 %", "trying and capturing steps: 0 %",
    ]  # fmt: skip
    assert len(lines) > 5


@pytest.mark.parametrize(
    ("command", "flag", "told"),
    [
        ("serve", "--port", "0 to 65535 (0: any free port)"),
        ("serve", "--max-running", "a whole number"),
        ("serve", "--depth", "auto or a whole number"),
        ("serve", "--kv-cache-memory", "a size below 8 EiB, such as 2GiB or 512MiB"),
        ("serve", "--drain-seconds", "a number, 0 or more"),
        ("chat", "--max-tokens", "a whole number"),
    ],
)
def test_a_number_of_more_digits_than_python_reads_is_refused_as_others_are(
    capsys: pytest.CaptureFixture[str], command: str, flag: str, told: str
) -> None:
    assert cli.main([command, flag, "9" * 5000]) == 1
    assert capsys.readouterr().err == f"headway: {flag} is '{'9' * 200}...', it must be {told}\n"
