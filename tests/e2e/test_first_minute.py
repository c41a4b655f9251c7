"""What a newcomer sees first: the README's first command and the live page's first prompt do not repeat
themselves."""

from __future__ import annotations

import json
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from headway_testing.api_examples import examples
from headway_testing.daemon import Server

pytestmark = pytest.mark.slow

README = (Path(__file__).parents[2] / "README.md").read_text()
LINE = 8  # characters; `else:` may come again


def readme_body() -> dict[str, Any]:
    match = re.search(r"^curl localhost:8000/v1/completions -d '(.+)'$", README, re.MULTILINE)
    assert match is not None
    body: dict[str, Any] = json.loads(match[1])
    return body


def page_body() -> dict[str, Any]:
    page = files("headway.server").joinpath("dashboard/index.html").read_text()
    prompt = re.search(r'<textarea id="prompt".*?>(.+?)</textarea>', page, re.DOTALL)
    assert prompt is not None
    values = dict(re.findall(r'<input id="([\w-]+)" type="number".*? value="([\d.]+)"', page))
    return {"prompt": unescape(prompt[1])} | {
        name.replace("-", "_"): json.loads(value) for name, value in values.items()
    }


@pytest.mark.parametrize("num_seeds", [8, pytest.param(24, marks=pytest.mark.long)])
@pytest.mark.parametrize("body_of", [readme_body, page_body])
def test_the_first_text_does_not_repeat_itself(server: Server, body_of: Any, num_seeds: int) -> None:
    """No line three times for any seed, and a line twice for few."""
    body = body_of()
    assert {"prompt", "max_tokens"} <= set(body)

    def most_frequent_line(seed: int) -> int:
        answer = httpx.post(f"{server.url}/v1/completions", json=body | {"seed": seed}, timeout=300).json()
        lines = (line.strip() for line in answer["choices"][0]["text"].splitlines())
        return max(Counter(line for line in lines if len(line) >= LINE).values(), default=1)

    with ThreadPoolExecutor(8) as pool:
        counts = list(pool.map(most_frequent_line, range(num_seeds)))
    assert max(counts) <= 2
    assert sum(count == 2 for count in counts) <= num_seeds // 6


def test_the_forms_that_the_page_of_the_api_asks_for_come(server: Server) -> None:
    forms = [
        (path, body) for path, body in examples() if {"response_format", "structured_outputs"} & set(body)
    ]
    assert len(forms) == 2
    for path, body in forms:
        answer = httpx.post(f"{server.url}{path}", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        if "structured_outputs" in body:
            assert re.fullmatch(body["structured_outputs"]["regex"], choice["text"])
        else:
            schema = body["response_format"]["json_schema"]["schema"]
            jsonschema.validate(json.loads(choice["message"]["content"]), schema)
