"""The engine's process that tells of a model folder without reading weights."""

from __future__ import annotations

import subprocess
import sys

import msgspec

from headway.engine import EngineConfig, EngineDeadError, Inspection, InspectionRequest

ENGINE_COMMAND = (sys.executable, "-P", "-m", "headway.engine.inspection")


class EngineInspector:
    """The engine's process, which imports torch from its start on and then waits for the question. To be
    closed."""

    def __init__(self) -> None:
        # A session of its own: Ctrl-C in the terminal reaches the one who asks, who ends it.
        self._process = subprocess.Popen(
            ENGINE_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )

    def ask(self, config: EngineConfig, gpu_memory_bytes: int | None) -> Inspection:
        """Raises EngineDeadError."""
        question = msgspec.json.encode(InspectionRequest(config, gpu_memory_bytes))
        answer, _ = self._process.communicate(question)
        if self._process.returncode != 0:
            raise EngineDeadError(
                f"the process that inspects models left with status {self._process.returncode}; its last lines on stderr say why"
            )
        return msgspec.json.decode(answer, type=Inspection)

    def close(self) -> None:
        self._process.kill()
        with self._process:  # its pipes are closed and its end awaited
            pass
