"""The device of an inspection: the one on which an engine would run here, or a GPU of which only the memory
is known."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headway.engine.outline import DeviceFacts, wanted_device
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.inspection import DeviceReport
from headway.engine.state.memory import available_bytes
from headway.kernels import memory_bandwidth, reads_codes

CUDA_CONTEXT_BYTES = 528 << 20  # bytes that a process cannot allocate on an empty H200, driver 580
# An H100 or H200 has this number of multiprocessors.
RECENT_GPU = DeviceFacts(torch.device("cuda", 0), has_float8=True, num_multiprocessors=132)


@dataclass(frozen=True, slots=True)
class Device:
    """reads_codes: whether its kernels multiply by the codes of quantised weights."""

    facts: DeviceFacts
    report: DeviceReport
    reads_codes: bool

    def bytes_of_rank(self, num_ranks: int) -> int:
        """Returns the bytes that each rank can allocate: ranks share the memory of a CPU, and have a GPU
        each."""
        return self.report.available_bytes // (num_ranks if self.report.kind == "cpu" else 1)


def find_device(config: EngineConfig, gpu_memory_bytes: int | None) -> Device:
    """Returns the device of an inspection. gpu_memory_bytes: the memory of a recent GPU, which this machine
    may lack; None: the device that the configuration selects here.

    Raises ConfigError.
    """
    if gpu_memory_bytes is not None:
        report = DeviceReport(kind="cuda", available_bytes=max(0, gpu_memory_bytes - CUDA_CONTEXT_BYTES))
        return Device(RECENT_GPU, report, reads_codes=True)
    place = wanted_device(config)
    facts = DeviceFacts.of(place)
    if place.type == "cpu":
        report = DeviceReport(kind="cpu", available_bytes=available_bytes(place))
        return Device(facts, report, reads_codes=False)
    report = DeviceReport(
        kind="cuda",
        available_bytes=available_bytes(place),
        name=torch.cuda.get_device_name(place),
        read_bytes_a_second=memory_bandwidth(place) or None,
    )
    return Device(facts, report, reads_codes(place))
