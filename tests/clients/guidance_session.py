"""guidance's model of a vLLM server as its users have it; prints what came as JSON.

Argument: the URL of a server of the real model.
"""

from __future__ import annotations

import json
import sys

from guidance import assistant, gen, select, system, user
from guidance import json as guided_json
from guidance.models.experimental import VLLMModel

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"],
          "additionalProperties": False}  # fmt: skip


def main(url: str) -> None:
    lm = VLLMModel("demo-tools", base_url=f"{url}/v1", api_key="none", echo=False)
    with system():
        lm += "Be brief."
    with user():
        lm += "import os"
    with assistant():
        number, colour = gen("number", regex="[0-9]{3}"), select(["red", "green"], name="colour")
        lm += "The number is " + number + " and the colour " + colour + "."
    with user():
        lm += "import sys"
    with assistant():
        lm += guided_json(name="object", schema=SCHEMA)
    print(json.dumps({name: lm[name] for name in ("number", "colour", "object")}))


main(*sys.argv[1:])
