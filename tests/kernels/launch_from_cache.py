"""Compiles kernels in worker processes for one NVIDIA architecture without a GPU; fails where a launch
afterwards does not find its kernel in Triton's cache.

python -P tests/kernels/launch_from_cache.py 90 [operation ...]

The kernels, and the types of their arguments, are the first case of each kernel in compile_ahead.py.
"""

import importlib
import logging
import re
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headway.kernels import compile_in_workers
from headway.kernels.runtime._precompile_worker import OfflineDriver

sys.path.insert(0, str(Path(__file__).parent))
from compile_ahead import CASES, MODULES, Case, bytes_of, firsts

DTYPES = {
    "i1": torch.bool,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "fp8e4nv": torch.float8_e4m3fn,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


class Driver(OfflineDriver):
    def get_current_stream(self, device: int) -> int:
        return 0


def argument(name: str, case: Case) -> Any:
    """What a launch gives for a parameter that is no constant, so that it has the type of the case."""
    kind = case.types.get(name, "i32")
    if kind.startswith("*"):
        return triton.MockTensor(DTYPES[kind[1:]])
    if found := re.match(r"tensordesc<(\w+)\[([\d, ]+)\]", kind):
        block = [int(size) for size in found[2].split(",")]
        layout = NVMMASharedLayout(
            swizzle_byte_width=128, element_bitwidth=8 * bytes_of(found[1]), rank=len(block)
        )
        base = torch.empty([max(2 * size, 16) for size in block], dtype=DTYPES[found[1]])
        return TensorDescriptor(base, list(base.shape), list(base.stride()), block, layout)
    if kind == "fp32":
        return 1.5
    return 32 if name in case.divisible else 33


def launch(case: Case, capability: int) -> Any:
    """Triton's own launch up to the kernel that would run: from the cache, else compiled, else (recorded)
    None."""
    module = importlib.import_module(MODULES[case.op])
    kernel = getattr(module, case.kernel)
    arguments = {name: case.constants.get(name) for name in kernel.arg_names if name in case.constants}
    if capability < 90:  # launches that overlap came with sm_90
        arguments |= {name: False for name in ("OVERLAPS", "FETCHES_AHEAD") if name in arguments}
    arguments |= {name: argument(name, case) for name in kernel.arg_names if name not in arguments}
    own_options = f"{case.kernel.removesuffix('_kernel').upper()}_OPTIONS"
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    options |= getattr(module, own_options, getattr(module, "_OPTIONS", {}))
    return kernel.warmup(grid=(1,), **arguments, **options)


def main(capability: int, ops: list[str]) -> int:
    logging.basicConfig()
    triton.runtime.driver.set_active(Driver(("cuda", capability, 32)))
    cases = [c for c in CASES if c.least_capability <= capability <= c.most_capability]
    cases = firsts([c for c in cases if c.op in (ops or [c.op])])
    assert cases, f"no kernel of {', '.join(ops)} is for {capability}"
    with compile_in_workers() as precompiler:
        for case in cases:
            assert launch(case, capability) is None, f"{case.kernel} was not recorded only"
    missing: list[str] = []
    triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: cache_hit or missing.append(src.name)
    for case in cases:
        assert launch(case, capability) is not None
    print(
        f"sm_{capability}: {len(cases)} kernels, {precompiler.num_compiled} compiled by {precompiler.num_workers} workers"
    )
    print(f"not found by launches: {', '.join(missing) or 'none'}")
    return min(len(missing) + (precompiler.num_compiled != len(cases)), 1)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
