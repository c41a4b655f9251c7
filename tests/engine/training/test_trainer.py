"""Training a head: what it learns from is what serving does, a run that stops goes on to the same bits, and
what it learns is accepted."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from headway_testing import tiny_tokenizers
from headway_testing.families import save, tiny_model
from headway_testing.tiny_tokenizers import END_OF_TEXT, byte_level, save_with_template
from headway_testing.trained_heads import TrainedHeadOracle

from headway.engine.build import Engine
from headway.engine.protocol.errors import ConfigError
from headway.engine.protocol.messages import Submit
from headway.engine.training import __main__ as command
from headway.engine.training.__main__ import load_target, main, measured_acceptance
from headway.engine.training.answers import Answer, Defaults, read_answers, read_prompts, sample, split
from headway.engine.training.folder import write_head
from headway.engine.training.head import UNROLLED, Head
from headway.engine.training.trainer import (
    CHECKPOINT,
    Scores,
    Settings,
    Trainer,
    batches_of,
    frequent_ids,
    scores,
    share_drafted,
)

VOCAB = 151
SETTINGS = Settings(draft_vocab=60, epochs=2, batch_tokens=128, max_length=64, learning_rate=5e-3, seed=0)


@pytest.mark.parametrize(
    "architecture",
    ["MistralForCausalLM", "Qwen3_5ForCausalLM", *(pytest.param(f"{name}ForCausalLM", marks=pytest.mark.slow) for name in ("Llama", "Qwen3", "Gemma3"))],
)  # fmt: skip
def test_each_unrolled_step_is_a_draft_of_a_round(architecture: str, tmp_path: Path) -> None:
    """Step s at a place has the logits of draft s + 1 of the round that began s tokens before, whose drafts
    are the text's tokens."""
    model = tiny_model(architecture)
    folder = save(model, architecture, tmp_path / "model")
    oracle = TrainedHeadOracle(model)
    target = load_target(folder, device="cpu", dtype="float32")
    head = Head(target, oracle.ids, seed=0)
    assert head.load_state_dict(oracle.state_dict()).missing_keys == []
    chance = torch.Generator().manual_seed(1)
    for length in (6, 15, 30):
        text = torch.randint(0, VOCAB, (length,), generator=chance)
        wanted = oracle.draft_logits(text, 3)
        drafts = [oracle.ids[logits.argmax()] for logits in wanted]
        whole = torch.cat([text, torch.stack(drafts), torch.zeros(4, dtype=torch.int64)])
        carries = head.unrolled(target.view(whole[None]))
        for step, (carry, logits) in enumerate(zip(carries, wanted, strict=True)):
            found = head.logits(carry[0, length - 2 + step])
            assert torch.allclose(found, logits, atol=2e-4), (length, step)


@torch.no_grad()
def test_scores_are_means_over_the_tokens_of_answers(tmp_path: Path) -> None:
    """Each token of an answer that all drafts can reach counts once, with the target's probabilities."""
    model = tiny_model("LlamaForCausalLM")
    folder, oracle = save(model, "LlamaForCausalLM", tmp_path / "model"), TrainedHeadOracle(model)
    target = load_target(folder, device="cpu", dtype="float32")
    head = Head(target, oracle.ids, seed=0)
    head.load_state_dict(oracle.state_dict())
    text = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    answers = [Answer(text[:7], text[7:13], 0.0), Answer(text[13:14], text[14:22], 0.8), Answer(text[22:30], text[30:], 0.8)]  # fmt: skip
    losses: list[list[float]] = []
    agreement: list[list[float]] = []
    for answer in answers:
        whole = (answer.prompt + answer.answer)[:16]
        for place in range(max(len(answer.prompt), UNROLLED + 1), len(whole)):
            before = torch.tensor(whole[:place])[None]
            wanted = model(before).logits[0, -1].double().softmax(-1)
            own = [head.logits(carry[0, -1]) for carry in head.unrolled(target.view(before))]
            losses.append(
                [-float((wanted[oracle.ids] * each.double().log_softmax(-1)).sum()) for each in own]
            )
            agreement.append([float(oracle.ids[each.argmax()] == wanted.argmax()) for each in own])
    found = scores(target, head, answers, 16)
    assert torch.allclose(found.losses, torch.tensor(losses).mean(0), atol=1e-5)
    assert torch.allclose(found.agreement, torch.tensor(agreement).mean(0))


def test_a_new_head_begins_as_the_models_own_layer(tmp_path: Path) -> None:
    folder = save(tiny_model("LlamaForCausalLM"), "LlamaForCausalLM", tmp_path / "model")
    target = load_target(folder, device="cpu", dtype="float32")
    own, head = target.layer.state_dict(), Head(target, torch.arange(9), seed=0)
    assert all(torch.equal(own[name], tensor) for name, tensor in head.layers[0].state_dict().items())
    assert head.layers[0] is not target.layer


def answers_of(count: int) -> list[Answer]:
    """Texts that walk the circle of 40 tokens that `circle` makes a model walk."""
    return [
        Answer([n % 40, (n + 1) % 40], [(n + 2 + place) % 40 for place in range(10 + n % 9)], 0.0)
        for n in range(count)
    ]


def circle(folder: Path) -> Path:
    """Saves a tiny model that says t + 1 after t, modulo 40, and is sure of it."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 4}
    model = tiny_model("LlamaForCausalLM", eos_token_id=63, **sizes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        model.model.norm.weight.fill_(1)
        model.model.embed_tokens.weight.copy_(torch.eye(64))
        successors = (torch.arange(64) + 1) % 40
        model.lm_head.weight.copy_(torch.eye(64)[successors].T)
    return save(model, "LlamaForCausalLM", folder)


def trainer_of(model: Path) -> Trainer:
    return Trainer(load_target(model, device="cpu", dtype="float32"), answers_of(160), SETTINGS)


def steps(count: int) -> Callable[[], bool]:
    """Returns what allows that number of steps."""
    left = iter(range(count))
    return lambda: next(left, None) is not None


def interrupted(function: Callable[..., Scores]) -> Callable[..., Scores]:
    """The function, in the midst of which Ctrl-C comes."""

    def run(*arguments: Any) -> Scores:
        signal.raise_signal(signal.SIGINT)
        return function(*arguments)

    return run


def killed_after(count: int, function: Callable[..., Scores]) -> Callable[..., Scores]:
    """The function, which works for that number of calls."""
    left = iter(range(count))

    def run(*arguments: Any) -> Scores:
        if next(left, None) is None:
            raise RuntimeError("killed")
        return function(*arguments)

    return run


def test_answers_that_are_finished_outlive_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = circle(tmp_path / "model")
    monkeypatch.setattr(command, "read_prompts", lambda file, folder: [[n, n + 1] for n in range(36)])
    monkeypatch.setattr(command, "sample", interrupted_sampling)
    arguments = ["data", str(model), "--prompts", "-", "--out", str(tmp_path), "--max-tokens", "20"]
    assert main([*arguments, "--device", "cpu", "--dtype", "float32"]) == 130
    found = read_answers([tmp_path / "answers-0.jsonl"], 64)
    assert 1 <= len(found) < 36
    assert all(len(answer.answer) == 20 for answer in found)


def interrupted_sampling(
    engine: Engine, requests: Iterable[Submit], tell: Callable[[Submit, list[int]], None]
) -> None:
    def tell_once(request: Submit, ids: list[int]) -> None:
        tell(request, ids)
        raise KeyboardInterrupt

    sample(engine, requests, tell_once)


def test_a_run_that_stops_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    model = circle(tmp_path / "model")
    whole = trainer_of(model)
    whole.run(steps(9), lambda *_: None)
    for count in (0, 4, 5):
        part = trainer_of(model)
        part.resume(tmp_path)
        part.run(steps(count), lambda *_: None)
        part.save(tmp_path)
    assert (whole.step, part.step) == (9, 9)
    wanted, found = whole.head.state_dict(), part.head.state_dict()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    began = trainer_of(model).head.state_dict()
    assert not any(torch.equal(began[name], wanted[name]) for name in wanted)


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    model = circle(tmp_path / "model")
    trainer_of(model).save(tmp_path)
    other = Trainer(
        load_target(model, device="cpu", dtype="float32"),
        answers_of(160),
        replace(SETTINGS, learning_rate=0.1),
    )
    with pytest.raises(ConfigError, match=r"learning_rate 0\.005, not 0\.1; give the same model"):
        other.resume(tmp_path)
    changed = answers_of(160)
    changed[0].answer[0] = (changed[0].answer[0] + 1) % 16
    of_other_data = Trainer(load_target(model, device="cpu", dtype="float32"), changed, SETTINGS)
    with pytest.raises(ConfigError, match=r"answers \w+, not \w+; give the same model, settings and data"):
        of_other_data.resume(tmp_path)
    larger = save(tiny_model("LlamaForCausalLM", vocab_size=64), "LlamaForCausalLM", tmp_path / "larger")
    with pytest.raises(ConfigError, match=r"model \w+, not \w+; give the same model"):
        trainer_of(larger).resume(tmp_path)
    for content in (b"PK", b"hello"):
        (tmp_path / CHECKPOINT).write_bytes(content)
        with pytest.raises(ConfigError, match="cannot be read"):
            other.resume(tmp_path)


def test_a_loss_that_is_not_finite_ends_the_training(tmp_path: Path) -> None:
    target = load_target(circle(tmp_path / "model"), device="cpu", dtype="float32")
    trainer = Trainer(target, answers_of(160), replace(SETTINGS, learning_rate=1e30))
    with pytest.raises(ConfigError, match=r"the loss is \[.*nan.*\] at step 10 with --learning-rate 1e\+30"):
        trainer.run(lambda: True, lambda *_: None)


def test_a_full_disk_is_reported_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data, out = circle(tmp_path / "model"), tmp_path / "data.jsonl", tmp_path / "head"
    data.write_bytes(b"".join(msgspec.json.encode(answer) + b"\n" for answer in answers_of(160)))
    arguments = ["train", str(model), "--data", str(data), "--out", str(out), "--held-out", "6"]
    arguments += ["--device", "cpu", "--batch-tokens", "512"]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", refused)
        patch.setattr(Trainer, "_learn", None)
        assert main(arguments) == 1
    assert ".checkpoint.pt cannot be written; is the disk full? unexpected pos" in capsys.readouterr().err
    assert list(out.iterdir()) == []
    assert main([*arguments[:4], "--out", str(model), *arguments[6:]]) == 1
    assert f"{model} has a model or a finished head; give another --out" in capsys.readouterr().err


def refused(content: object, file: Path) -> None:
    """What torch.save does on a full disk."""
    file.write_bytes(b"a part")
    raise RuntimeError("unexpected pos 53248 vs 53200")


def test_answers_with_tokens_that_the_model_lacks_are_refused(tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_bytes(msgspec.json.encode(Answer([1, 64], [2], 0.0)))
    with pytest.raises(
        ConfigError, match="has token 64, the model has 64 tokens; give answers of this model"
    ):
        read_answers([tmp_path / "answers.jsonl"], 64)


def test_time_that_is_over_before_the_first_answer_writes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = circle(tmp_path / "model"), tmp_path / "data"
    monkeypatch.setattr(command, "read_prompts", lambda file, folder: [[1, 2]])
    arguments = ["data", str(model), "--prompts", "-", "--out", str(out), "--max-tokens", "20"]
    assert main([*arguments, "--device", "cpu", "--dtype", "float32", "--minutes", "0"]) == 1
    assert "--minutes 0 was over before the first answer began; give more" in capsys.readouterr().err
    assert list(out.iterdir()) == []


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--temperatures", "x", "'x' is no list of numbers from 0 to 2, such as 0,0.8"),
        ("--temperatures", "0,nan", "'0,nan' is no list of numbers from 0 to 2"),
        *(
            ("--learning-rate", value, f"'{value}' is no number above 0")
            for value in ("0", "nan", "inf", "x")
        ),
    ],
)
def test_a_flag_names_the_numbers_that_it_takes(
    flag: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["data", "-", "--prompts", "-"] if flag == "--temperatures" else ["train", "-", "--data", "-"]
    with pytest.raises(SystemExit):
        main([*own, "--out", "-", flag, value])
    assert message in capsys.readouterr().err


def test_a_head_is_trained_from_prompts_to_a_card_and_drafts_what_the_model_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "MEASURED_TOKENS", 24)
    model = circle(tmp_path / "model")
    prompts = [[n, n + 1] for n in range(36)]
    monkeypatch.setattr(command, "read_prompts", lambda file, folder: prompts)
    where = ["--device", "cpu", "--dtype", "float32"]
    assert (
        main(
            [
                "data",
                str(model),
                "--prompts",
                "-",
                "--out",
                str(tmp_path / "data"),
                "--max-tokens",
                "20",
                *where,
            ]
        )
        == 0
    )
    data = Path(capsys.readouterr().out.strip())
    greedy = [a for a in read_answers([data], 64) if a.temperature == 0]
    assert len(greedy) == 18
    assert all(a.answer == [(a.prompt[-1] + 1 + n) % 40 for n in range(20)] for a in greedy)

    out = tmp_path / "head"
    arguments = [
        "train",
        str(model),
        "--data",
        str(data),
        "--out",
        str(out),
        "--held-out",
        "6",
        "--epochs",
        "40",
        *where,
    ]
    arguments += [
        "--draft-vocab",
        "48",
        "--batch-tokens",
        "512",
        "--max-length",
        "32",
        "--learning-rate",
        "5e-3",
    ]
    assert main([*arguments, "--minutes", "0"]) == 0
    assert "stopped after step 0 of" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_learn", interrupted(Trainer._learn))
        assert main(arguments) == 130
    assert "stopped after step 1 of" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(command, "SAVED_EVERY_SECONDS", 0.0)
        patch.setattr(Trainer, "_learn", killed_after(14, Trainer._learn))
        with pytest.raises(RuntimeError, match="killed"):
            main(arguments)
    assert torch.load(out / CHECKPOINT, weights_only=True)["step"] == 10
    untrained = tmp_path / "untrained"
    untrained.mkdir()
    target = load_target(model, device="cpu", dtype="float32")
    write_head(untrained, target, Trainer(target, greedy, SETTINGS).head)
    assert (untrained / "model.safetensors").stat().st_mode & 0o777 == 0o644, "a server may be another user"
    before = measured_acceptance(model, untrained, prompts[:4], device="cpu", dtype="float32")
    assert main(arguments) == 0
    assert (out / "README.md").read_text() in capsys.readouterr().out
    assert sorted(file.name for file in out.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    after = measured_acceptance(model, out, prompts[:4], device="cpu", dtype="float32")
    assert before[0.0][0] < 0.2
    assert min(after[0.0]) > 0.9
    assert after[0.8] == sorted(after[0.8], reverse=True)
    assert f"| {after[0.0][0]:.2f}"[:5] in (out / "README.md").read_text()


def test_batches_have_every_answer_once_an_epoch_and_few_tokens() -> None:
    answers = answers_of(100)
    batches = batches_of(answers, SETTINGS)
    assert sorted(index for batch in batches for index in batch) == sorted([*range(100), *range(100)])
    sizes = [len(b) * max(len(answers[i].prompt + answers[i].answer) for i in b) for b in batches]
    assert max(sizes) <= SETTINGS.batch_tokens
    assert batches == batches_of(answers, SETTINGS) != batches_of(answers, replace(SETTINGS, seed=1))


def test_held_out_prompts_are_in_no_answer_that_is_trained_on() -> None:
    answers = answers_of(160)
    trained, held_out = split(answers, 10)
    prompts = {tuple(a.prompt) for a in held_out}
    assert len(prompts) == 10
    assert not prompts & {tuple(a.prompt) for a in trained}
    assert len(trained) + len(held_out) == 160
    with pytest.raises(ConfigError, match="the data has 40 different prompts and 40 are held out"):
        split(answers, 40)


def test_the_drafted_tokens_are_the_most_frequent_ones() -> None:
    answers = [Answer([9], [5, 5, 5, 7, 7, 3], 0.0), Answer([9], [7], 0.0)]
    assert frequent_ids(answers, 2, 10).tolist() == [5, 7]
    assert frequent_ids(answers, 4, 10).tolist() == [0, 3, 5, 7]
    assert share_drafted(answers, torch.tensor([5, 3])) == 4 / 7


def test_prompts_are_read_from_texts_and_messages(tmp_path: Path) -> None:
    chat, plain = (
        save_with_template(tmp_path / "chat"),
        tiny_tokenizers.save(tmp_path / "plain", byte_level()),
    )
    tokenizer, text = byte_level(), "the quick brown fox"
    asked = tokenizer.encode(f"user: {text}{END_OF_TEXT}\nassistant: ").ids
    (tmp_path / "texts.txt").write_text(f"{text}\n\n{text}\nimport os\n")
    (tmp_path / "chats.jsonl").write_text(
        "\n".join(json.dumps(line) for line in (
            [{"role": "user", "content": text}], {"messages": [{"role": "user", "content": "import os"}]}, {"prompt": text},
        ))
    )  # fmt: skip
    assert read_prompts(tmp_path / "texts.txt", plain) == [
        tokenizer.encode(text).ids,
        tokenizer.encode("import os").ids,
    ]
    assert read_prompts(tmp_path / "texts.txt", chat)[0] == asked
    assert read_prompts(tmp_path / "chats.jsonl", chat)[0] == asked
    assert len(read_prompts(tmp_path / "chats.jsonl", chat)) == 2
    with pytest.raises(
        ConfigError, match=r"line 1 of .* is neither a prompt nor messages for a model with a chat template"
    ):
        read_prompts(tmp_path / "chats.jsonl", plain)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("\n \n", "has no prompts; give a file with one on each line"),
        ('{"prompt": "a"}\n{"prompt": \n', "line 2 of .* is no JSON"),
        ("[1, 2]", "line 1 of .* does not fit the model's chat template: 'int' object has no"),
        ("[]", "line 1 of .* does not fit the model's chat template: .*empty conversation"),
        (
            '[{"role": "assistant", "content": "x"}]',
            "line 1 of .* does not fit the model's chat template: the first message must not be an answer",
        ),
    ],
    ids=["empty", "no JSON", "numbers", "no messages", "refused by the template"],
)
def test_a_prompt_that_cannot_be_read_is_refused_with_its_line(
    content: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "prompts.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_prompts(tmp_path / "prompts.jsonl", save_with_template(tmp_path / "chat"))


def test_answers_end_and_are_penalised_as_a_server_would_have_it(tmp_path: Path) -> None:
    folder = tiny_tokenizers.save(tmp_path / "model", byte_level(), repetition_penalty=1.1)
    assert Defaults.of(folder) == Defaults([0], 1.1)
    tiny_tokenizers.save(folder, byte_level(), eos_token_id=[2, 3])
    assert Defaults.of(folder) == Defaults([2, 3], 1.0)
