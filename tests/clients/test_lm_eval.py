"""lm-evaluation-harness against the server: its loglikelihoods are those of transformers on the same
weights."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from headway_testing.daemon import Server
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

NUM_ITEMS = 50
END_ID = 0
TASK = {
    "task": "continuations",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "loglikelihood",
    "doc_to_text": "{{context}}",
    "doc_to_target": "{{continuation}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}],
}
Items = list[dict[str, str]]


@pytest.fixture(scope="module")
def items(chat_folder: Path) -> Items:
    """Beginnings of source files, and the line that follows there. A context does not end in a space: lm-eval
    would give it to the continuation."""
    texts = [entry["text"] for entry in json.loads((chat_folder / "heldout_prompts.json").read_text())]
    made = []
    for text in texts:
        middle = len(text[: len(text) // 2].rstrip())
        made.append({"context": text[:middle], "continuation": text[middle:][:60]})
    assert len(made) >= NUM_ITEMS
    return made[:NUM_ITEMS]


@pytest.fixture(scope="module")
def oracle(chat_folder: Path) -> Qwen2ForCausalLM:
    """The weights without the MTP head are those of a Qwen2."""
    content = json.loads((chat_folder / "config.json").read_text())
    content |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    model = Qwen2ForCausalLM(Qwen2Config(**content)).float().eval()
    weights = load_file(chat_folder / "model.safetensors")
    model.load_state_dict({n: t.float() for n, t in weights.items() if "mtp_layers" not in n})
    return model


def parts(tokenizer: Tokenizer, item: dict[str, str]) -> tuple[list[int], list[int]]:
    """Ids of context and continuation as lm-eval makes them: the whole text's behind as many as the context
    has."""
    context = tokenizer.encode(item["context"]).ids
    whole = tokenizer.encode(item["context"] + item["continuation"]).ids
    return context, whole[len(context) :]


@torch.inference_mode()
def next_token(model: Qwen2ForCausalLM, ids: list[int]) -> int:
    return int(model(torch.tensor([ids])).logits[0, -1].argmax())


@torch.inference_mode()
def expected(model: Qwen2ForCausalLM, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """The log-probability of the continuation's ids, and whether each is the most probable."""
    logits = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
    ids = torch.tensor(continuation)
    values = logits.log_softmax(-1)[torch.arange(len(ids)), ids]
    return float(values.sum()), bool((logits.argmax(-1) == ids).all())


def assert_equal(found: list[tuple[float, bool]], told: list[tuple[float, bool]]) -> None:
    assert [value for value, _ in found] == pytest.approx([value for value, _ in told], abs=2e-3)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in told]


def evaluate(
    folder: Path, environment: Path, server: Server, items: Items, model_args: str
) -> list[tuple[float, bool]]:
    """(loglikelihood, is_greedy) of each item, by lm-eval's own command."""
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    task = TASK | {"dataset_kwargs": {"data_files": {"test": str(folder / "items.jsonl")}}}
    (folder / "continuations.yaml").write_text(json.dumps(task))
    command = [
        environment / "lm_eval", "run", "--model", "local-completions", "--tasks", "continuations",
        "--model_args", f"model=demo-chat,base_url={server.url}/v1/completions,num_concurrent=1,max_retries=1,{model_args}",
        "--include_path", folder, "--batch_size", "8", "--log_samples", "--output_path", folder / "out",
    ]  # fmt: skip
    environ = os.environ | {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    (samples,) = (folder / "out").rglob("samples_*.jsonl")
    found = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    return [_pair(sample["resps"][0][0]) for sample in found]


def _pair(response: list[object]) -> tuple[float, bool]:
    value, is_greedy = response
    return float(str(value)), str(is_greedy) == "True"


@pytest.mark.parametrize("backend", ["huggingface", "remote"])
def test_loglikelihoods_are_those_of_transformers(
    backend: str, tmp_path: Path, environment: Path, chat_folder: Path, chat_server: Server, items: Items,
    oracle: Qwen2ForCausalLM,
) -> None:  # fmt: skip
    """remote: lm-eval encodes by /tokenize, after it has asked /tokenizer_info."""
    where = f",tokenizer={chat_folder}" if backend == "huggingface" else ""
    found = evaluate(tmp_path, environment, chat_server, items, f"tokenizer_backend={backend}{where}")
    assert len(found) == NUM_ITEMS
    tokenizer = Tokenizer.from_file(str(chat_folder / "tokenizer.json"))
    assert_equal(found, [expected(oracle, *parts(tokenizer, item)) for item in items])


def test_a_text_that_ends_after_its_continuation_is_scored_like_any_other(
    tmp_path: Path, environment: Path, chat_folder: Path, chat_server: Server, oracle: Qwen2ForCausalLM
) -> None:
    """lm-eval asks for one token more and drops its entry, so there must be one when that token is the end,
    too."""
    items = [
        {"context": f"{before}if __name__ == '__main__':", "continuation": f"\n    {call}()\n"}
        for before in ("\n\n", "import unittest\n\n\n")
        for call in ("main", "unittest.main", "test_main")
    ]
    tokenizer = Tokenizer.from_file(str(chat_folder / "tokenizer.json"))
    halves = [parts(tokenizer, item) for item in items]
    assert [next_token(oracle, [*context, *continuation]) for context, continuation in halves] == [END_ID] * 6
    where = f"tokenizer_backend=huggingface,tokenizer={chat_folder}"
    found = evaluate(tmp_path, environment, chat_server, items, where)
    assert_equal(found, [expected(oracle, *half) for half in halves])
