"""`headway fleet` where it cannot start."""

from __future__ import annotations

import sys

import pytest

from headway.server import cli


def test_without_ray_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli.main(["fleet"]) == 1
    error = capsys.readouterr().err
    assert "headway: headway fleet needs Ray Serve" in error
    assert "pip install 'headway[ray]'" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--replicas", "0"], "--replicas is '0', it must be a whole number, 1 or more"),
        (["--routing", "best"], "--routing is 'best', it must be one of prefix, least-loaded, round-robin"),
        (["--max-running", "many"], "--max-running is 'many', it must be a whole number"),
    ],
)
def test_a_wrong_flag_is_named(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fleet", *flags]) == 1
    assert f"headway: {message}" in capsys.readouterr().err
