"""What `headway --print-completion` prints, in shells that complete command lines."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from headway_testing.tools import installed

from headway.server import cli

COMPLETE = """
source completion
declare -a COMP_WORDS=({words}) COMPREPLY=()
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
function=$(complete -p headway | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$function headway "${{COMP_WORDS[-1]}}" "${{COMP_WORDS[-2]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("headway se", {"serve"}),
        ("headway serve --max-r", {"--max-running"}),
        ("headway serve --block", {"--block-size"}),  # which --help does not show
        ("headway serve mod", {"models"}),
        ("headway bench ex", {"exact"}),
    ],
)
def test_bash_completes_commands_flags_and_folders(
    words: str, completed: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--print-completion", "bash"])
    assert exit_.value.code == 0
    (tmp_path / "completion").write_text(capsys.readouterr().out)
    (tmp_path / "models").mkdir()
    (tmp_path / "module.py").touch()
    script = COMPLETE.format(words=words)
    done = subprocess.run(
        [installed("bash"), "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == completed, done.stderr
