"""The file of --config: who wins, which values are taken as they stand, and what is refused."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from headway.engine import ConfigError, EngineConfig
from headway.server import cli
from headway.server.base.config import ModelSource, ServerConfig
from headway.server.cli import serve, warmup
from headway.server.cli.endings import NOT_SERVABLE

SECRET = "correct-horse"

Served = tuple[ServerConfig, ModelSource, EngineConfig]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "headway.yaml"


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(
    served: list[Served], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("port: 1\nmax-running: 1\nmax-waiting: 1\ndeterministic: true\nserved-model-name: [a, b]")
    monkeypatch.setenv("HEADWAY_PORT", "2")
    monkeypatch.setenv("HEADWAY_MAX_RUNNING", "2")
    monkeypatch.setenv("HEADWAY_DETERMINISTIC", "0")
    assert cli.main(["serve", "--config", str(file), "--port", "3", "--served-model-name", "c"]) == 0
    ((server, _, engine),) = served
    assert (server.port, engine.max_running, engine.max_waiting) == (3, 2, 1)
    assert (engine.deterministic, server.served_model_name) == (False, ["c"])


def test_a_variable_names_the_file(served: list[Served], file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("port: 1")
    monkeypatch.setenv("HEADWAY_CONFIG", str(file))
    assert cli.main(["serve"]) == 0
    assert [server.port for server, _, _ in served] == [1]


@pytest.mark.parametrize(
    ("typed", "variable", "expected"),
    [([], None, "A/file"), ([], "A/variable", "A/variable"), (["A/typed"], "A/variable", "A/typed"), ([], "", "A/file")],
    ids=["file", "variable", "typed", "empty-variable"],
)  # fmt: skip
def test_the_model_may_stand_in_the_file(
    served: list[Served], file: Path, monkeypatch: pytest.MonkeyPatch, typed: list[str], variable: str | None, expected: str
) -> None:  # fmt: skip
    file.write_text("model: A/file")
    if variable is not None:
        monkeypatch.setenv("HEADWAY_MODEL", variable)
    assert cli.main(["serve", *typed, "--config", str(file)]) == 0
    assert [source.name for _, source, _ in served] == [expected]


def test_the_example_of_the_page_is_a_file(served: list[Served], file: Path) -> None:
    page = Path(__file__).parents[3].joinpath("docs/running.md").read_text()
    file.write_text(page.partition("```yaml\n")[2].partition("```")[0])
    assert cli.main(["serve", "--config", str(file)]) == 0
    ((server, source, engine),) = served
    assert (source.name, engine.max_running, server.served_model_name) == (
        "ORG/NAME",
        64,
        ["NAME", "NAME-latest"],
    )
    assert not engine.prefix_caching


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "---\n"], ids=["empty", "comment", "document"])
def test_a_file_without_keys_changes_nothing(served: list[Served], file: Path, text: str) -> None:
    file.write_text(text)
    assert cli.main(["serve", "--config", str(file)]) == 0
    assert cli.main(["serve"]) == 0
    assert served[0] == served[1]


def test_values_mean_what_they_mean_on_the_command_line(served: list[Served], file: Path) -> None:
    """Other readers of YAML make a number of 1.10 and of 0o17, a date of 2026-01-02, and nothing of null."""
    file.write_text(
        "revision: 1.10\nserved-model-name:\n  - 0o17\n  - 2026-01-02\n  - 'null'\n  - \"~\"\n  - ' a: b '\n"
        "drafter: none\nkv-cache-memory: 1.5MiB\napi_key: 12345\nno_prefix_caching: True\nforce_include_usage: off"
    )
    assert cli.main(["serve", "--config", str(file)]) == 0
    ((server, source, engine),) = served
    assert source.revision == "1.10"
    assert server.served_model_name == ["0o17", "2026-01-02", "null", "~", " a: b "]
    assert (engine.drafter, engine.kv_cache_memory_bytes, server.api_key) == ("none", 3 * 2**19, ["12345"])
    assert (engine.prefix_caching, server.force_include_usage) == (False, False)


def test_keys_of_other_servers_that_change_nothing_are_taken_with_a_word(
    served: list[Served], file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file.write_text(
        "trust-remote-code: true\ncompilation-config: {level: 3}\ndata_parallel_size: 1\nenforce-eager: false\nport: 7"
    )
    with caplog.at_level(logging.INFO, "headway.server"):
        assert cli.main(["serve", "--config", str(file)]) == 0
    assert [server.port for server, _, _ in served] == [7]
    keys = ("trust-remote-code", "compilation-config", "data_parallel_size", "enforce-eager")
    assert caplog.messages == [
        f"{file}, line {line}: {key} is accepted and changes nothing"
        for line, key in enumerate(keys, start=1)
    ]


@pytest.mark.parametrize(
    ("text", "line", "told"),
    [
        ("port: http", 1, "port is 'http', it must be 0 to 65535 (0: any free port)"),
        ("port:", 1, "port has no value; give one, or leave the key out"),
        ("port: [80]", 1, "port is a list, it must be one value"),
        ("port: {http: 80}", 1, "port is a mapping, it must be one value"),
        ("port: !!int '80'", 1, "port has a tag; a value that begins with *, & or ! needs quotes"),
        ("revision: null", 1, "revision has no value; give one, or leave the key out"),
        ("model: ~", 1, "model has no value"),
        ("served-model-name: [a, Null]", 1, "served-model-name has no value"),
        ("cors-origin: [NULL]", 1, "cors-origin has no value"),
        ("port: 1\nmodel: |\n  a\n", 2, "model has a line break or another control character; write it without"),
        ('served-model-name: ["\\e[2J"]', 1, "served-model-name has a line break or another control character"),
        ('"po\\nrt": 80', 1, "the key 'po\\nrt' has control characters; remove them"),
        (f"port: {'x' * 999}", 1, f"port is '{'x' * 200}...', it must be 0 to 65535"),
        (f"{'x' * 999}: 1", 1, f"there is no {'x' * 200}...; --help-all names all flags"),
        ("served_model_name: {a: b}", 1, "served_model_name is a mapping, it must be a text or a list of texts"),
        ("cors-origin: [[a]]", 1, "cors-origin is a list, it must be a text or a list of texts"),
        ("deterministic: maybe", 1, "deterministic is 'maybe', it must be true or false"),
        ("depth: 9", 1, "depth is 9, it must be 0 to 8"),
        ("depth: 3\nmax-depth: 2", 1, "depth is 3, it must be auto or at most --max-depth, which is 2"),
        ("host: ::1\nmax_running: 0", 2, "max_running is 0, it must be 1 to 4096"),
        ("max-depth: 1\nmax_depth: 2", 2, "max_depth is given a second time; leave one out"),
        ("tp: 2", 1, "there is no tp; use --tensor-parallel-size"),
        ("max-num-seqs: 3", 1, "max-num-seqs is a flag of other servers: use --max-running"),
        ("enforce-eager: maybe", 1, "enforce-eager is 'maybe', only true or false is accepted"),
        ("enforce-eager: [true]", 1, "enforce-eager is a list, it must be true or false"),
        ("cache_prompt: no", 1, "cache_prompt is 'no', only true is accepted; use --no-prefix-caching"),
        ("download_dir: /d", 1, "download_dir was removed: use the variable HF_HUB_CACHE"),
        ("max-runing: 3", 1, "there is no max-runing; did you mean max-running?"),
        ("config: other.yaml", 1, "config names another file; write its keys here"),
        ("help: true", 1, "there is no help"),
        ("? [a]\n: 1", 1, "a key is a list or a mapping, it must be the name of a flag"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_file_line_and_key(
    served: list[Served], file: Path, capsys: pytest.CaptureFixture[str], text: str, line: int, told: str
) -> None:
    file.write_text(text)
    assert cli.main(["serve", "--config", str(file)]) == 1
    assert capsys.readouterr().err.startswith(f"headway: {file}, line {line}: {told}")
    assert not served


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "No such file or directory"),
        (b"port: 1\n---\nport: 2", "but found another document in line 2"),
        (b"port: 'x", "found unexpected end of stream in line 1"),
        (b"port: 1\n\tdepth: 2", "found character '\\t' that cannot start any token in line 2"),
        (b"just a text", "such as max-running: 64"),
        (b"- port: 1", "such as max-running: 64"),
        (b"\xff\xfe", "invalid start byte"),
        (b"port: \x00", "it has characters that YAML does not allow"),
        (b"port: " + b"[" * 9999, "its lists or mappings are nested too deeply"),
        (b"#" * (2**20 + 1), "it is larger than 1 MiB"),
    ],
    ids=["missing", "two-documents", "open-quote", "tab", "text", "list", "no-utf8", "nul", "deep", "large"],
)
def test_a_file_that_is_no_settings_is_refused_in_a_line(
    served: list[Served], file: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, told: str
) -> None:
    if content is not None:
        file.write_bytes(content)
    assert cli.main(["serve", "--config", str(file)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"headway: --config is {str(file)!r}, it must be a YAML file with one key a flag")
    assert told in error
    assert len(error.splitlines()) == 1
    assert not served


@pytest.mark.parametrize(
    "text",
    [f"api-key: '{SECRET} '", f"admin_key: [{SECRET}]", f"apikey: {SECRET}", f"api-key: '{SECRET}", f"hf-token: {SECRET}",
     f"api-key: *{SECRET}", f"api-key: &{SECRET}", f"a: &{SECRET} 1\nb: &{SECRET} 2", f"api-key: !{SECRET}", f"api-key: !{SECRET}! a"],
    ids=["value", "list", "key", "syntax", "foreign", "alias", "anchor", "anchors", "tag", "tag-handle"],
)  # fmt: skip
def test_no_secret_of_the_file_is_told(
    served: list[Served], file: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    file.write_text(text)
    assert cli.main(["serve", "--config", str(file)]) == 1
    captured = capsys.readouterr()
    assert str(file) in captured.err
    assert SECRET not in captured.out + captured.err
    assert not served


@pytest.mark.parametrize(
    ("text", "complaint", "told"),
    [
        ("max-running: 9", "--max-running is 9, it needs more memory; lower --max-running to 5",
         "{file}, line 1: max-running is 9, it needs more memory; lower --max-running to 5"),
        ("depth: 0", "--require-speculation is set, but --depth is 0",
         "--require-speculation is set, but --depth is 0 (set by {file}, line 1: depth)"),
        ("tls-cert: /c\ntls-key: /k", "--tls-cert and --tls-key come together",
         "--tls-cert and --tls-key come together (set by {file}, line 1: tls-cert and {file}, line 2: tls-key)"),
        ("depth: 0", "--max-depth has no use", "--max-depth has no use"),
    ],
    ids=["value", "cause", "two", "another"],
)  # fmt: skip
def test_a_complaint_of_the_start_names_the_key_and_leaves_its_remedy(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, complaint: str, told: str
) -> None:  # fmt: skip
    def refuse(*_: object) -> int:
        raise ConfigError(complaint)

    file.write_text(text)
    monkeypatch.setattr(serve, "serve", refuse)
    assert cli.main(["serve", "--config", str(file)]) == 1
    assert capsys.readouterr().err == f"headway: {told.format(file=file)}\n"


def test_no_more_than_the_limit_is_read_of_what_never_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--config", "/dev/zero"]) == 1
    assert "it is larger than 1 MiB" in capsys.readouterr().err


def test_the_same_file_serves_warmup_and_inspect(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its keys are those of serve, whatever the command takes of them."""
    file.write_text(f"model: {file.parent / 'nowhere'}\nport: 1\ndepth: 0\ndevice: cpu")
    calls: list[EngineConfig] = []
    monkeypatch.setattr(warmup, "warm_up", lambda _, config: calls.append(config) or 0)
    assert cli.main(["warmup", "--config", str(file)]) == 0
    assert [(config.depth, config.device) for config in calls] == [(0, "cpu")]
    assert cli.main(["inspect", "--config", str(file)]) == 1
    assert "nowhere is neither a folder nor" in capsys.readouterr().err
    file.write_text("device: cpu\ndepth: 9")
    assert cli.main(["inspect", "--config", str(file)]) == 1
    assert capsys.readouterr().err.startswith(f"headway: {file}, line 2: depth is 9")
    file.write_text("device: cpu\nkv-cache-memory: 1KiB")
    assert cli.main(["inspect", "--config", str(file)]) == NOT_SERVABLE
