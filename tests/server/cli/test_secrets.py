"""Keys are never shown: not in errors, not in the log, not in a repr."""

from __future__ import annotations

import sys

import pytest

from headway.server import cli
from headway.server.base.config import ChatConfig, ServerConfig
from headway.server.http.keys import Keys

SECRET = "correct-horse"


@pytest.mark.parametrize(
    ("command", "flag", "value", "told"),
    [
        ("serve", "--api-key", f"{SECRET}\n", "is a text of 14 characters (not shown), it must be"),
        ("serve", "--api-key", f"{SECRET}\r\n", "line break, which echo adds: `printf %s KEY | base64`"),
        ("serve", "--admin-key", f"{SECRET} ", "is a text of 14 characters (not shown), it must be"),
        ("chat", "--api-key", f"{SECRET}\n", "line break, which echo adds: `printf %s KEY | base64`"),
        ("serve", "--tls-key", f"-----BEGIN PRIVATE KEY-----\n{SECRET}", "the path of a file in PEM form"),
        ("serve", "--cors-origin", f"https://me:{SECRET}@example.org/path", "https://***@example.org/path"),
        ("chat", "--url", f"ftp://me:{SECRET}@example.org", "ftp://***@example.org"),
        ("chat", "--url", f"me:{SECRET}@example.org", "is '***@example.org', it must be a URL"),
        ("serve", "--cors-origin", f"me:{SECRET}@example.org", "is '***@example.org', it must be"),
        (
            "serve",
            "--model",
            f"https://me:{SECRET}@example.org/model",
            "https://***@example.org/model is neither",
        ),
        ("serve", "--otlp-endpoint", f"me:{SECRET}@example.org", "is '***@example.org', it must be"),
        ("serve", "--otlp-endpoint", f"http://me:{SECRET}@example.org", "http://***@example.org"),
    ],
)
@pytest.mark.parametrize("is_variable", [True, False], ids=["variable", "flag"])
def test_a_secret_that_cannot_be_used_is_told_by_its_length_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    command: str, flag: str, value: str, told: str, is_variable: bool,
) -> None:  # fmt: skip
    """The last needs a package that is not there."""
    monkeypatch.setitem(sys.modules, "headway.server.requests.tracing", None)
    arguments = [command, "--port", "0"] if command == "serve" else [command]
    if is_variable:
        monkeypatch.setenv("HEADWAY_" + flag[2:].replace("-", "_").upper(), value)
    else:
        arguments.append(value if flag == "--model" else f"{flag}={value}")
    assert cli.main(arguments) == 1
    captured = capsys.readouterr()
    assert told in captured.err
    assert SECRET not in captured.out + captured.err


def test_no_configuration_shows_its_keys() -> None:
    shown = [
        ServerConfig(api_key=[SECRET], admin_key=SECRET),
        ChatConfig(api_key=SECRET),
        Keys((SECRET,), SECRET),
    ]
    assert SECRET not in repr(shown)
