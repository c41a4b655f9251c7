"""The process that reads one InspectionRequest from stdin and writes an Inspection to stdout, both as JSON.

It is started before the request is known, so that it imports torch meanwhile.
"""

from __future__ import annotations

import sys

import msgspec

from headway.engine.inspection.inspector import inspect_model
from headway.engine.protocol.inspection import InspectionRequest


def main() -> int:
    """Returns the exit status. It gives no answer without a request, whose sender has then failed."""
    question = sys.stdin.buffer.read()
    if question:
        request = msgspec.json.decode(question, type=InspectionRequest)
        sys.stdout.buffer.write(msgspec.json.encode(inspect_model(request)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
