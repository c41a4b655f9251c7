"""The command `headway quantize`."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from headway.engine.loading.formats import FORMATS
from headway.engine.protocol.errors import HeadwayError
from headway.engine.protocol.exit_status import reports
from headway.engine.quantize.folder import Written, quantize_folder
from headway.engine.state.memory import format_bytes


@reports(HeadwayError, OSError)
def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="headway quantize",
        description="Writes a model folder anew with narrower weights, in the format of compressed-tensors, which other engines "
        "read, too. Embeddings, norms and biases stay as they are.",
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("model", type=Path, metavar="MODEL", help="a folder in Hugging Face layout")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="made if it is not there")
    parser.add_argument(
        "--format", choices=tuple(FORMATS), default="fp8",
        help="fp8: e4m3 with a scale for 128 x 128 weights; int8: a scale for each output; int4: a scale for 128 inputs of an "
        "output (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--quantize-lm-head", action="store_true", help="the weight before the logits, too")
    arguments = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    started = time.monotonic()
    written = quantize_folder(
        arguments.model, arguments.folder, arguments.format,
        with_lm_head=arguments.quantize_lm_head, device=device, progress=_show,
    )  # fmt: skip
    print(_told(written, time.monotonic() - started))
    print(shlex.join(["headway", "serve", str(arguments.folder)]))
    return 0


def _show(share: float) -> None:
    if sys.stderr.isatty():
        print(f"\r{share:4.0%}", end="" if share < 1 else "\n", file=sys.stderr, flush=True)


def _told(written: Written, seconds: float) -> str:
    sizes = f"{format_bytes(written.bytes_before)} -> {format_bytes(written.bytes_after)}"
    kept = (
        f"{len(written.kept)} linear layers stay as they are"
        if written.kept
        else "no linear layer stays as it is"
    )
    return f"{written.num_quantized} weights quantized in {seconds:.0f} s: {sizes}; {kept}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
