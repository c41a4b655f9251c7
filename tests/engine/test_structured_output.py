"""Grammars under speculation: at any depth, in any company, in any shape of a step the text is that of one
token at a time."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from threading import Event
from typing import Any

import jsonschema
import msgspec
import pytest
import torch
from headway_testing.checkpoints import constructed_mimo
from headway_testing.local import LocalEngine, Output
from headway_testing.padded import PaddedLaunches
from llguidance import LLMatcher, LLTokenizer

from headway.engine.execution import step as step_module
from headway.engine.execution.step_key import StepGrid, row_counts
from headway.engine.grammar import compiler
from headway.engine.grammar.compile import compile_matcher, json_schema_source, regex_source
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.grammar import Grammar, Thinking, TokenTable
from headway.engine.protocol.messages import Abort, Shutdown
from headway.engine.protocol.sampling_params import FinishReason, SamplingParams, ThinkingBudget
from headway.engine.sampling.sampler import pick_tokens

VOCAB_SIZE, END, THINK, CLOSE = 128, 3, 1, 2
# The printable characters stand for themselves; the control characters for nothing, but three of them for
# what they are.
TABLE = TokenTable([bytes([i]) if i >= 32 else b"" for i in range(VOCAB_SIZE)], [THINK, CLOSE, END], [END])
NUM_WISHES = 14
REASONING = Thinking(end_ids=[CLOSE], is_open=True)
SCHEMAS = (
    {"type": "object", "properties": {"a": {"type": "string", "maxLength": 12}, "b": {"enum": [1, 2, "three"]}}, "required": ["a", "b"], "additionalProperties": False},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 5},
    {"type": "object", "properties": {"n": {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 0, "maximum": 999}]}}, "required": ["n"], "additionalProperties": False},
)  # fmt: skip


@dataclass(frozen=True)
class Wish:
    prompt: tuple[int, ...]
    grammar: Grammar | None
    sampling: SamplingParams
    max_tokens: int = 60


def wishes(count: int, *, masked: float = 0.7, seed: int = 0) -> list[Wish]:
    chance = random.Random(seed)
    found = []
    for number in range(count):
        prompt = tuple(chance.randrange(4, VOCAB_SIZE) for _ in range(chance.choice([1, 5, 20, 40])))
        sampling = SamplingParams(temperature=chance.choice([0.0, 0.8, 1.5]), seed=number)
        source = chance.choice(
            [*(json_schema_source(json.dumps(s)) for s in SCHEMAS), regex_source("(ab|[x-z]{2}){3,9}")]
        )
        grammar = Grammar(
            source, chance.choice([None, None, REASONING, Thinking([CLOSE], is_open=False, start_id=THINK)])
        )
        found.append(Wish(prompt, grammar if chance.random() < masked else None, sampling))
    return found


@cache
def model(folder: Path) -> str:
    return str(constructed_mimo(folder / "model", noise=0.1))


def engine_of(folder: Path, *, reads_late: bool = False, **options: object) -> LocalEngine:
    fixed = {
        "model_path": model(folder), "dtype": "float64", "device": "cpu", "depth": 3, "kv_cache_memory_bytes": 1 << 24,
    }  # fmt: skip
    return LocalEngine(EngineConfig(**(fixed | options)), token_table=TABLE, reads_late=reads_late)  # type: ignore[arg-type]


def submit(engine: LocalEngine, wish: Wish) -> int:
    stops = [END] if wish.grammar else []
    return engine.submit(
        wish.prompt,
        max_tokens=wish.max_tokens,
        sampling=wish.sampling,
        stop_token_ids=stops,
        grammar=wish.grammar,
    )


def together(engine: LocalEngine, wanted: Sequence[Wish], *, every: int = 1) -> list[Output]:
    """One request more with each step."""
    for wish in wanted:
        submit(engine, wish)
        for _ in range(every):
            engine.step()
    outputs = engine.run()
    return [outputs[i] for i in sorted(outputs)]


def alone(engine: LocalEngine, wanted: Sequence[Wish]) -> list[Output]:
    outputs = []
    for wish in wanted:
        request_id = submit(engine, wish)
        engine.run()
        outputs.append(engine.outputs[request_id])
    return outputs


def texts(outputs: Sequence[Output]) -> list[tuple[list[int], FinishReason | None]]:
    return [(output.token_ids, output.finish_reason) for output in outputs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("structured")


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[tuple[list[int], FinishReason | None]]:
    """Of fourteen requests, each alone and one token at a time."""
    return texts(alone(engine_of(folder, depth=0), wishes(NUM_WISHES)))


def test_a_text_that_ends_by_itself_is_of_its_grammar(
    plain: list[tuple[list[int], FinishReason | None]],
) -> None:
    num_ended = 0
    for wish, (token_ids, reason) in zip(wishes(NUM_WISHES), plain, strict=True):
        if wish.grammar is None or reason is not FinishReason.STOP:
            continue
        num_ended += 1
        assert token_ids[-1] == END
        start = token_ids.index(CLOSE) + 1 if CLOSE in token_ids else 0
        text = bytes(token_ids[start:-1]).decode()
        schema = next((s for s in SCHEMAS if json_schema_source(json.dumps(s)) == wish.grammar.source), None)
        if schema is not None:
            jsonschema.validate(json.loads(text), schema)
    assert num_ended >= NUM_WISHES * 2 // 5


@pytest.mark.parametrize(
    ("depth", "drafter"),
    [
        pytest.param(1, "auto", marks=pytest.mark.long),
        (3, "auto"),
        pytest.param(3, "auto,ngram", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("reads_late", [False, True])
def test_a_depth_changes_no_masked_text(
    folder: Path,
    plain: list[tuple[list[int], FinishReason | None]],
    depth: int,
    drafter: str,
    *,
    reads_late: bool,
) -> None:
    engine = engine_of(folder, depth=depth, drafter=drafter, reads_late=reads_late)
    outputs = together(engine, wishes(NUM_WISHES))
    assert texts(outputs) == plain
    masked = [output for output, wish in zip(outputs, wishes(NUM_WISHES), strict=True) if wish.grammar]
    assert sum(output.num_accepted for output in masked) > 20, "drafts of masked rows are accepted, too"


def test_preemption_changes_no_masked_text(
    folder: Path, plain: list[tuple[list[int], FinishReason | None]]
) -> None:
    engine = engine_of(
        folder, kv_cache_memory_bytes=300_000, max_model_len=128, max_running=6, reads_late=True
    )
    assert texts(together(engine, wishes(NUM_WISHES), every=0)) == plain
    assert engine.engine.scheduler.snapshot().num_preemptions > 0


def test_padded_and_mixed_steps_change_no_masked_text(
    folder: Path, plain: list[tuple[list[int], FinishReason | None]]
) -> None:
    engine = engine_of(folder, reads_late=True, mixed_above_tokens=0, prefill_chunk=16)
    runner = engine.engine.runner
    PaddedLaunches(runner, StepGrid(row_counts(len(runner.table)), (16,), (16,)))
    assert texts(together(engine, wishes(NUM_WISHES))) == plain


def test_logprobs_are_those_of_the_raw_logits(folder: Path) -> None:
    wish = wishes(1, masked=1.0)[0]
    sampling = SamplingParams(temperature=0.0, num_logprobs=3)
    engine = engine_of(folder)
    request_id = engine.submit(
        wish.prompt, max_tokens=6, sampling=sampling, grammar=Grammar(regex_source("[a-c]{8}"))
    )
    engine.run()
    output = engine.outputs[request_id]
    text = [*wish.prompt, *output.token_ids]
    scored = engine.submit(
        text, max_tokens=1, sampling=SamplingParams(temperature=0.0, num_prompt_logprobs=3)
    )
    engine.run()
    expected = engine.outputs[scored].prompt_logprobs
    assert expected is not None
    assert output.logprobs.logprobs == pytest.approx(expected.logprobs[len(wish.prompt) - 1 :], abs=1e-5)
    assert output.logprobs.top_ids == expected.top_ids[3 * (len(wish.prompt) - 1) :]


def test_penalties_come_before_the_mask(folder: Path) -> None:
    sampling = SamplingParams(temperature=0.0, frequency_penalty=2.0)
    grammar = Grammar(regex_source("[ab]{10}"))
    found = []
    for depth in (0, 3):
        engine = engine_of(folder, depth=depth)
        found.append(engine.generate(range(40, 50), max_tokens=10, sampling=sampling, grammar=grammar))
    assert found[0] == found[1]
    assert {bytes([token]) for token in found[0]} == {b"a", b"b"}, "the penalty makes them take turns"


def test_logits_that_all_graphs_share_give_the_same_text(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where masked rounds and those with log-probabilities copy their logits to one tensor."""
    wanted = wishes(8)
    for number in (1, 4, 5):
        sampling = msgspec.structs.replace(wanted[number].sampling, num_logprobs=2)
        wanted[number] = replace(wanted[number], sampling=sampling)
    engines = [engine_of(folder, depth=3) for _ in range(2)]
    launcher = engines[1].engine.runner.launcher
    model, num_rows = launcher.context.model, len(engines[1].engine.runner.table)
    kept = torch.full((num_rows * 4, model.spec.vocab_size), torch.nan, dtype=model.dtype)
    launcher.context = replace(launcher.context, kept_logits=kept)
    found: list[tuple[bool, bool]] = []

    def noting(logits: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        is_kept = logits.data_ptr() == kept.data_ptr()
        found.append((is_kept, options["masks"] is not None or options["keeps_logits"]))
        return pick_tokens(logits, *rest, **options)

    outputs = [together(engines[0], wanted)]
    monkeypatch.setattr(step_module, "pick_tokens", noting)
    outputs.append(together(engines[1], wanted))
    assert texts(outputs[0]) == texts(outputs[1])
    assert [output.logprobs for output in outputs[0]] == [output.logprobs for output in outputs[1]]
    assert outputs[1][1].logprobs is not None
    assert set(found) == {(True, True)}
    alone(engines[1], [replace(wanted[0], grammar=None)])
    assert set(found) == {(True, True), (False, False)}


@pytest.mark.parametrize("depth", [0, 3])
def test_a_budget_leaves_a_grammar_alone_that_no_reasoning_precedes(folder: Path, depth: int) -> None:
    """The model may open its reasoning, and is biased one way or the other."""
    thinking = Thinking([CLOSE], is_open=False, start_id=THINK)
    found = []
    for bias in (-100.0, 100.0):
        sampling = SamplingParams(
            temperature=0.0, logit_bias={THINK: bias, CLOSE: -100.0}, thinking_budget=ThinkingBudget(6, CLOSE, THINK)
        )  # fmt: skip
        engine = engine_of(folder, depth=depth)
        request = engine.submit(
            [40, 41], max_tokens=12, sampling=sampling, grammar=Grammar(regex_source("[ab]{12}"), thinking)
        )
        found.append(engine.run()[request].token_ids)
    assert len(found[0]) == 12
    assert set(bytes(found[0])) <= set(b"ab")
    assert (found[1][0], found[1].index(CLOSE)) == (THINK, 6)
    assert set(bytes(found[1][7:])) <= set(b"ab")


def test_a_dead_end_ends_its_request_alone(folder: Path) -> None:
    engine = engine_of(folder)
    dead = engine.submit([40], max_tokens=20, grammar=Grammar(regex_source("ab\n")))  # no token is a line end
    other = engine.submit([50], max_tokens=20)
    engine.run()
    event = engine.outputs[dead].events[-1]
    assert event.finish_reason is FinishReason.ERROR
    assert event.error_code == "grammar_dead_end"
    assert "cannot be continued within its grammar" in str(event.error)
    assert len(engine.outputs[other].token_ids) == 20


def test_a_grammar_that_cannot_be_compiled_is_refused(folder: Path) -> None:
    engine = engine_of(folder)
    refused = engine.submit([40], max_tokens=20, grammar=Grammar(regex_source("(")))
    engine.run()
    assert engine.outputs[refused].events[-1].error_code == "invalid_grammar"


def test_an_abort_before_the_grammar_is_compiled_leaves_nothing(folder: Path) -> None:
    engine = engine_of(folder)
    request_id = engine.submit([40], max_tokens=20, grammar=Grammar(regex_source("[ab]{9}")))
    engine.post.inbox.append(Abort(request_id))
    del engine.outputs[request_id]
    assert engine.generate([50], max_tokens=3)
    assert not engine.engine.scheduler.has_work


class SlowCompiler:
    """Stands in for `compile_matcher`."""

    def __init__(self) -> None:
        self.may_go_on = Event()
        self.sources: list[str] = []

    def __call__(self, tokenizer: LLTokenizer, source: str) -> LLMatcher:
        self.sources.append(source)
        assert self.may_go_on.wait(30)
        return compile_matcher(tokenizer, source)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowCompiler]:
    slow = SlowCompiler()
    monkeypatch.setattr(compiler, "compile_matcher", slow)
    yield slow
    slow.may_go_on.set()


THREE = [regex_source(pattern) for pattern in ("a{3}", "b{3}", "c{3}")]


def test_a_grammar_that_nobody_waits_for_any_more_is_not_compiled(folder: Path, slow: SlowCompiler) -> None:
    engine = engine_of(folder)
    first, left, last = (engine.submit([40], max_tokens=3, grammar=Grammar(source)) for source in THREE)
    engine.step()
    engine.post.inbox.append(Abort(left))
    engine.step()
    slow.may_go_on.set()
    del engine.outputs[left]
    outputs = engine.run()
    assert [bytes(outputs[i].token_ids) for i in (first, last)] == [b"aaa", b"ccc"]
    assert slow.sources == [THREE[0], THREE[2]]


def test_a_shutdown_waits_for_no_grammar_that_is_queued(folder: Path, slow: SlowCompiler) -> None:
    engine = engine_of(folder)
    for source in THREE:
        engine.submit([40], max_tokens=3, grammar=Grammar(source))
    engine.step()
    engine.post.inbox.append(Shutdown())
    assert not engine.loop.step()
    slow.may_go_on.set()
    assert all(guide.cancelled() for _, guide in list(engine.loop._compiling.values())[1:])


def test_the_second_half_is_launched_whatever_happens_between(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(folder)
    request_id = engine.submit([40], max_tokens=20, grammar=Grammar(regex_source("[ab]{30}")))
    finished: list[int] = []
    runner, scheduler = engine.engine.runner, engine.engine.scheduler
    begin = runner.begin

    def noting(plan):  # type: ignore[no-untyped-def]
        begun = begin(plan)
        finish = begun.finish
        begun.finish = lambda entries: finished.append(plan.step) or finish(entries)
        return begun

    def failing(*args: object) -> dict[int, int]:
        raise MemoryError

    monkeypatch.setattr(runner, "begin", noting)
    for _ in range(100):
        engine.step()
        if len(finished) == 3:
            break
    monkeypatch.setattr(scheduler, "fill_masks", failing)
    with pytest.raises(MemoryError):
        engine.step()
    assert len(finished) == 4, "three steps, and the one that failed between its halves"
    assert torch.is_tensor(runner.rows.limits)
    assert engine.outputs[request_id].token_ids


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_halves_replayed_as_graphs_give_the_same_text(
    folder: Path, plain: list[tuple[list[int], FinishReason | None]], depth: int
) -> None:
    """plain: of the CPU, in float64. Each size is launched once kernel by kernel, then captured, then
    replayed."""
    engine = engine_of(folder, dtype="float32", depth=depth, device="cuda")
    engine.engine.runner.capture([depth], progress=lambda _: None)
    for _ in range(3):
        engine.outputs.clear()
        assert texts(together(engine, wishes(NUM_WISHES))) == plain
    masked_step = engine.engine.runner._masked_step
    assert masked_step._second is not None
    assert masked_step._second._graphs, "second halves were captured"
    assert engine.engine.scheduler.snapshot().stage_seconds["mask"] > 0
