"""The process of the engine that inspects a model folder without reading weights."""

from __future__ import annotations

import subprocess
import sys

import msgspec

from headway.engine import EngineConfig, EngineDeadError, Inspection, InspectionRequest

ENGINE_COMMAND = (sys.executable, "-P", "-m", "headway.engine.inspection")


class EngineInspector:
    """A process of the engine, which imports torch as soon as it starts and then waits for the question.
    It must be closed."""

    def __init__(self) -> None:
        # In a session of its own: Ctrl-C in the terminal reaches only the parent, which ends it.
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
        with self._process:  # closes its pipes and waits for its end
            pass
