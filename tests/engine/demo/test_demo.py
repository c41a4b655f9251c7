"""The embedded model's files are what a MiMo loader expects, and its figures are those of its card."""

from __future__ import annotations

import ast
import json
import math
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from headway_testing.demo_model import TINY
from tokenizers import Tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

from demo_model import evaluate, model, prepare, train
from demo_model.corpus import Corpus
from demo_model.learning import losses
from demo_model.lessons import LEARN
from demo_model.optimizer import Schedule

DEMO = Path(str(files("headway.engine.demo")))
TOOLS = Path(model.__file__).parent
CARD = (DEMO / "README.md").read_text()
METRICS = json.loads((DEMO / "metrics.json").read_text())
PROMPTS = json.loads((DEMO / "heldout_prompts.json").read_text())
CPU = torch.device("cpu")
# float32 sums in another order
TOLERANCE = 1e-4
# bits per byte of the same text with the same weights, by another implementation
BITS_TOLERANCE = 0.002


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


@pytest.fixture(scope="module")
def demo() -> model.DemoModel:
    return model.load_checkpoint(DEMO)


def block_shapes(prefix: str) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.input_layernorm.weight": (256,),
        f"{prefix}.post_attention_layernorm.weight": (256,),
        f"{prefix}.self_attn.q_proj.weight": (256, 256),
        f"{prefix}.self_attn.q_proj.bias": (256,),
        f"{prefix}.self_attn.k_proj.weight": (128, 256),
        f"{prefix}.self_attn.k_proj.bias": (128,),
        f"{prefix}.self_attn.v_proj.weight": (128, 256),
        f"{prefix}.self_attn.v_proj.bias": (128,),
        f"{prefix}.self_attn.o_proj.weight": (256, 256),
        f"{prefix}.mlp.gate_proj.weight": (704, 256),
        f"{prefix}.mlp.up_proj.weight": (704, 256),
        f"{prefix}.mlp.down_proj.weight": (256, 704),
    }


def test_the_files_stay_small() -> None:
    assert (DEMO / "model.safetensors").stat().st_size <= 17_000_000
    assert (DEMO / "heldout_prompts.json").stat().st_size <= 300_000


def test_the_tensors_are_those_of_mimo() -> None:
    data = (DEMO / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    header.pop("__metadata__")
    expected: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (4096, 256),
        "model.norm.weight": (256,),
        "lm_head.weight": (4096, 256),
        "model.mtp_layers.0.token_layernorm.weight": (256,),
        "model.mtp_layers.0.hidden_layernorm.weight": (256,),
        "model.mtp_layers.0.input_proj.weight": (256, 512),
        "model.mtp_layers.0.final_layernorm.weight": (256,),
        **block_shapes("model.mtp_layers.0"),
    }
    for layer in range(7):
        expected |= block_shapes(f"model.layers.{layer}")
    assert {name: tuple(entry["shape"]) for name, entry in header.items()} == expected
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}


def test_the_config_is_a_mimo_config() -> None:
    config = json.loads((DEMO / "config.json").read_text())
    assert config == model.ModelConfig().as_mimo()
    assert config["architectures"] == ["MiMoForCausalLM"]
    assert (config["model_type"], config["num_nextn_predict_layers"]) == ("mimo", 1)
    assert (config["tie_word_embeddings"], config["max_position_embeddings"]) == (False, 2048)
    assert json.loads((DEMO / "generation_config.json").read_text()) == train.GENERATION_CONFIG
    assert json.loads((DEMO / "tokenizer_config.json").read_text()) == train.TOKENIZER_CONFIG


@pytest.mark.parametrize(
    "text",
    [
        "",
        "def f(x):\n\treturn x  \n\n\n",
        " \r\n leading and trailing ",
        "naïve Ωμέγα 中文 🙂 \u200b\x00\x07",
        b"\xff\xfe broken \xc3".decode(errors="replace"),
        "1_000_000 0x7f __init__ a.b_c<|endof",
    ],
)
def test_the_tokenizer_round_trips_any_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < 4096 for i in ids)


def test_the_tokenizer_has_a_token_for_every_byte(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == 4096
    assert tokenizer.token_to_id("<|endoftext|>") == 0
    assert set(prepare.pre_tokenizers.ByteLevel.alphabet()) <= set(tokenizer.get_vocab())


def test_a_prompt_cut_after_a_line_has_the_tokens_of_the_whole(tokenizer: Tokenizer) -> None:
    head, tail = "def read_config(path):\n", "    return path\n\n\nclass A:\n"
    assert tokenizer.encode(head).ids + tokenizer.encode(tail).ids == tokenizer.encode(head + tail).ids


def test_the_prompts_are_whole_lines_of_held_out_modules(tokenizer: Tokenizer) -> None:
    assert len(PROMPTS) == 100
    assert {p["path"].split(":")[0] for p in PROMPTS} <= set(METRICS["corpus"]["heldout_modules"])
    for prompt in PROMPTS:
        assert 100 <= len(tokenizer.encode(prompt["text"]).ids) <= 250, prompt["path"]
        assert prompt["text"].endswith("\n")
        assert prepare.is_valid_so_far(prompt["text"]), prompt["path"]


def test_transformers_measures_the_bits_per_byte_of_the_card(tokenizer: Tokenizer) -> None:
    numbers = json.loads((DEMO / "config.json").read_text())
    oracle = Qwen2ForCausalLM(
        Qwen2Config(**{n: v for n, v in numbers.items() if n not in ("architectures", "model_type")})
    )
    state = model.load_checkpoint(DEMO).state_dict()
    oracle.load_state_dict({n: t for n, t in state.items() if "mtp_layers" not in n})
    nats, size = 0.0, 0
    for prompt in PROMPTS[: evaluate.SPOT_CHECK_PROMPTS]:
        ids = torch.tensor([[0, *tokenizer.encode(prompt["text"]).ids]])
        with torch.no_grad():
            logits = oracle(ids[:, :-1]).logits[0]
        nats += F.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        size += len(prompt["text"].encode())
    assert abs(nats / math.log(2) / size - METRICS["spot_check_bits_per_byte"]) < BITS_TOLERANCE


def test_the_card_tells_the_measured_figures() -> None:
    figures = [METRICS["bits_per_byte"], METRICS["spot_check_bits_per_byte"]]
    for kind in ("greedy", "sampled"):
        for name in ("at_every_position", "by_rounds_of_depth_3", "by_rounds_of_depth_4"):
            figures += METRICS[kind][f"acceptance_{name}"]
        figures += [METRICS[kind]["repeats_a_line"], METRICS[kind]["valid_syntax"]]
    missing = [f for f in figures if f"{f:.3f}" not in CARD and f"| {f} |" not in CARD]
    assert not missing
    assert METRICS["corpus"]["sha256"] == prepare.CORPUS_SHA256
    assert prepare.CORPUS_SHA256 in CARD


def test_the_model_meets_its_bars() -> None:
    assert METRICS["bits_per_byte"] <= 0.85
    for kind, bars in (("greedy", (0.80, 0.68, 0.60)), ("sampled", (0.70, 0.55, 0.46))):
        measured = METRICS[kind]["acceptance_by_rounds_of_depth_3"]
        assert all(m >= bar for m, bar in zip(measured, bars, strict=True)), (kind, measured)
    assert METRICS["sampled"]["valid_syntax"] >= 60
    assert METRICS["greedy"]["repeats_a_line"] < 25


@torch.no_grad()
def test_draft_steps_equal_a_drafter_that_goes_one_token_at_a_time(demo: model.DemoModel) -> None:
    ids = torch.tensor([list(range(300, 312))])
    hidden = demo.hidden(ids[:, :8])
    states = demo.draft_states(hidden, ids[:, :11], model.draft_masks(8, 3, CPU, is_sparse=False))
    layer = demo.model.mtp_layers[0]
    assert isinstance(layer, model.MTPLayer)
    for base in (0, 4, 7):
        pairs = layer.pair(hidden[:, : base + 1], demo.embed(ids[:, 1 : base + 2]))
        for step in range(3):
            rope = model.rope_table(demo.config, 1, pairs.shape[1], CPU)
            z = layer.final_layernorm(layer(pairs, rope))[:, -1:]
            torch.testing.assert_close(states[step][:, base], z[:, 0], atol=TOLERANCE, rtol=TOLERANCE)
            token = ids[:, base + 2 + step : base + 3 + step]
            pairs = torch.cat([pairs, layer.pair(z, demo.embed(token))], 1)


def test_acceptance_walks_from_round_to_round() -> None:
    # Rounds begin at positions 3, 6 (two drafts taken) and 7 (none); position 8 is past the last start.
    accepted = torch.tensor([[0, 0, 2, 3, 3, 0, 1, 3, 3]])
    shares = evaluate.acceptance(accepted, torch.tensor([3]), new_tokens=7, depth=2)
    assert shares == [round(2 / 3, 4), round(1 / 3, 4)]


@pytest.mark.parametrize(
    ("text", "repeats"), [("a\n b\na\n\n\n\n", False), ("a\n  a\nb\na", True), ("", False)]
)
def test_a_line_repeats_when_it_stands_there_three_times(text: str, repeats: bool) -> None:
    assert evaluate.repeats_a_line(text) is repeats


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ("def f(:\n", False),
        ("def f(x):\n    if x", True),
        ("x = (1,\n", True),
        ("x = )\n", False),
        ("y", True),
    ],
)
def test_unfinished_statements_are_no_syntax_errors(text: str, is_valid: bool) -> None:
    assert prepare.is_valid_so_far(text) is is_valid


def test_copies_of_held_out_modules_are_not_trained_on() -> None:
    lines = [f"value_{n} = compute({n})\n" for n in range(300)]
    names = (f"module{n}.py" for n in range(1000))
    held_out = next(n for n in names if prepare._hash(n) % prepare.HELD_OUT_MODULUS == 0)
    trained = next(n for n in names if prepare._hash(n) % prepare.HELD_OUT_MODULUS != 0)
    copied = next(n for n in names if prepare._hash(n) % prepare.HELD_OUT_MODULUS != 0)
    modules = [
        prepare.Module(held_out, "".join(lines)),
        prepare.Module(f"test/{held_out}", "".join(f"other_{n} = {n}\n" for n in range(300))),
        prepare.Module(trained, "import os\n"),
        prepare.Module(copied, "".join(lines[:200])),
    ]
    rest, kept_back, dropped = prepare.split(modules)
    assert [m.path for m in kept_back] == [held_out]
    assert [m.path for m in rest] == [f"test/{held_out}", trained]
    assert dropped == [copied]


def test_another_python_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(prepare.platform, "python_version", lambda: "3.12.0")
    with pytest.raises(SystemExit, match=r"CPython 3\.11\.7, this is 3\.12\.0"):
        prepare.read_corpus(tmp_path)


def test_training_learns_and_is_seeded(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name in ("library", "tests"):
        np.save(tmp_path / f"{name}.npy", rng.integers(300, 310, size=2000, dtype=np.uint16))
    (tmp_path / "tokenizer.json").write_text((DEMO / "tokenizer.json").read_text())
    corpus = Corpus.read(tmp_path, 0.45)
    schedule = Schedule(steps=8, warmup_steps=2, muon_lr=0.02, adam_lr=3e-3)
    recipe = train.Recipe(schedule=schedule, batch_size=4, tokens=32)
    first, _ = train.train(TINY, recipe, corpus, CPU)
    second, _ = train.train(TINY, recipe, corpus, CPU)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    ids = torch.from_numpy(rng.integers(300, 310, size=(4, 36)))
    masks = model.draft_masks(32, 3, CPU, is_sparse=False)
    assert (losses(first.eval(), ids, torch.full_like(ids, LEARN), masks)[:-1] < math.log(4096)).all()
    model.save_checkpoint(first, tmp_path)
    loaded = model.load_checkpoint(tmp_path).state_dict()
    assert all(torch.equal(loaded[n], p.bfloat16().float()) for n, p in first.state_dict().items())


def test_the_training_scripts_need_nothing_of_headway() -> None:
    paths = list(TOOLS.glob("*.py"))
    assert paths
    for path in paths:
        imported = [
            n.module or "" for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)
        ]
        others = [m for m in imported if m.startswith("headway")]
        assert not others, path
