"""The device properties that launchers need.

Knows no operation. Properties are queried once per device, without host synchronisation.
"""

from __future__ import annotations

import functools

import torch

_INTERPRETED_SHARED_MEMORY_BYTES = 232_448
# The interpreter runs programs one after the other, and few of them reach every path.
_INTERPRETED_MULTIPROCESSORS = 2
_TRANSFERS_A_CLOCK = 2  # double data rate


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Returns the number of multiprocessors; 2 for the interpreter."""
    if device.type != "cuda":
        return _INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def memory_bandwidth(device: torch.device) -> float:
    """Returns the nominal bandwidth of the device's memory in bytes per second; 0 if it is not known."""
    if device.type != "cuda":
        return 0.0
    properties = torch.cuda.get_device_properties(device)
    clock_khz, bus_bits = (getattr(properties, key, 0) for key in ("memory_clock_rate", "memory_bus_width"))
    return 1e3 * clock_khz * _TRANSFERS_A_CLOCK * bus_bits / 8


@functools.cache
def shared_memory_bytes(device: torch.device) -> int:
    """Returns the shared memory that one program may use, in bytes."""
    if device.type != "cuda":
        return _INTERPRETED_SHARED_MEMORY_BYTES
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Returns the compute capability of an NVIDIA GPU; (0, 0) for other devices."""
    is_nvidia = device.type == "cuda" and torch.version.cuda is not None
    return torch.cuda.get_device_capability(device) if is_nvidia else (0, 0)


def overlap(device: torch.device) -> tuple[bool, dict[str, bool]]:
    """Returns (a kernel's OVERLAPS, the options of its launch). From Hopper on a kernel may start while the
    preceding one drains (programmatic dependent launch, PDL)."""
    overlaps = _capability(device) >= (9, 0)
    return overlaps, {"launch_pdl": True} if overlaps else {}


def is_hopper(device: torch.device) -> bool:
    """Returns whether the device has Hopper's own instructions, of which Blackwell lacks some."""
    return _capability(device)[0] == 9


def has_float8_products(device: torch.device) -> bool:
    """Returns whether the device multiplies float8_e4m3fn, as Ada, Hopper and later do."""
    return _capability(device) >= (8, 9)
