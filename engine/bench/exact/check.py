"""Runs every text once as a reference and every trial under its combination, and compares them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headway.engine.bench.exact.combinations import Group, Trial
from headway.engine.bench.exact.compare import Difference, difference
from headway.engine.bench.exact.session import Answer, Session
from headway.engine.bench.exact.texts import Companions, Job, Text, nearly

MOST_ARRIVALS_A_STEP = 6  # where requests arrive over many steps
MAX_PRIMING_TOKENS = 8  # generated when the prefix cache is warmed
PREEMPTED_WITHIN = 0.75  # of the output
TOLD_EVERY_SECONDS = 10.0


@dataclass(slots=True)
class Coverage:
    """Counts what the trials have exercised. Mutable: the check is its only writer. num_drafted,
    num_accepted: drafts of the trials, not of their company. num_mixed_steps: rounds that shared their pass
    with prompts; num_masked_steps: steps with rows under a grammar. num_probe_hits: probes that found a
    cached prefix."""

    num_tokens: int = 0
    num_scored: int = 0
    num_probes: int = 0
    num_probe_hits: int = 0
    num_warm_hits: int = 0
    num_preempted: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_mixed_steps: int = 0
    num_masked_steps: int = 0


@dataclass(slots=True)
class Outcome:
    """Mutable: the check is its only writer. scored: trials whose log-probabilities were compared at each
    token; those of others are compared at one token after the run, computed with the cache that it wrote.
    restarted: the trials of another engine than that of the references."""

    differences: list[Difference] = field(default_factory=list)
    coverage: Coverage = field(default_factory=Coverage)
    scored: set[int] = field(default_factory=set)
    restarted: set[int] = field(default_factory=set)


class Check:
    """Mutable: keeps the references."""

    def __init__(
        self,
        session: Session,
        texts: Sequence[Text],
        companions: Companions,
        chance: random.Random,
        *,
        num_tokens: int,
        second_engine: str,
        tell: Callable[[str], None],
    ) -> None:
        """second_engine: its name in reports of differences."""
        self.outcome = Outcome()
        self.references: dict[int, Answer] = {}
        self.predictions: dict[int, list[int]] = {}
        self._second_engine = second_engine
        self._session, self._texts, self._companions = session, texts, companions
        self._chance, self._num_tokens, self._tell = chance, num_tokens, tell
        self._told = time.monotonic()

    def run_references(self, indices: Sequence[int]) -> None:
        """Runs these texts at depth 0, alone, each with a cache of its own. They get one token more than
        trials, with which the token after a trial is compared."""
        self._session.choose(0, None)
        began = time.monotonic()
        for done, index in enumerate(indices):
            text = self._texts[index]
            job = Job(text.prompt, text.sampling(is_scored=True), self._num_tokens + 1, f"reference-{index}")
            self.references[index] = self._session.run([job])[0]
            self._tell_now_and_then("runs alone", done + 1, len(indices), began)

    def predict(self, vocab_size: int) -> None:
        """Makes n-gram lookup draft from the outputs of the references from now on."""
        self.predictions = {
            index: nearly(answer.token_ids, vocab_size) for index, answer in self.references.items()
        }

    def run_groups(self, groups: Sequence[Group], *, is_restarted: bool = False) -> None:
        """is_restarted: the session's engine is another one than that of the references."""
        if is_restarted:
            self.outcome.restarted |= {trial.index for group in groups for trial in group.trials}
        began = time.monotonic()
        for done, group in enumerate(groups):
            self._run_group(group)
            half = "second" if is_restarted else "first"
            differ = f"; {len(self.outcome.differences)} requests differ so far"
            self._tell_now_and_then(f"groups, {half} half", done + 1, len(groups), began, differ)
        coverage, counting = self.outcome.coverage, self._session.counting
        coverage.num_mixed_steps += counting.num_mixed
        coverage.num_masked_steps += counting.num_masked

    def _run_group(self, group: Group) -> None:
        setting, session = group.setting, self._session
        session.choose(setting.depth, setting.chunk)
        self._warm_up(group)
        jobs = [self._job(trial, group) for trial in group.trials]
        others = self._companions.draw(setting.company - len(jobs), is_scored=group.is_scored)
        order = list(range(setting.company))
        self._chance.shuffle(order)
        gaps = self._gaps(setting.company) if group.is_spread else []
        answers = session.run([[*jobs, *others][i] for i in order], gaps)
        by_job = dict(zip(order, answers, strict=True))
        self._compare(group, jobs, [by_job[i] for i in range(len(jobs))])

    def _gaps(self, count: int) -> list[int]:
        """Returns steps before each arrival: one or several arrive at a step."""
        gaps = [0]
        while len(gaps) < count:
            gaps += [1, *[0] * self._chance.randrange(MOST_ARRIVALS_A_STEP)]
        return gaps[:count]

    def _warm_up(self, group: Group) -> None:
        """Fills the cache with the prompts of warm trials, or with their beginnings, all at once."""
        jobs = []
        for trial in group.trials:
            if trial.combination.is_warm:
                text = self._texts[trial.text]
                cut = self._cut(len(text.prompt))
                num_tokens = self._chance.randint(1, min(MAX_PRIMING_TOKENS, self._num_tokens))
                sampling = text.sampling(is_scored=False)
                jobs.append(Job(text.prompt[:cut], sampling, num_tokens, _salt(trial)))
        self._session.run(jobs)

    def _cut(self, length: int) -> int:
        """Returns how much of a prompt of that length is in the cache: all, more than half, or up to about a
        border at which a cached prefix may end."""
        chance, border = self._chance, self._session.border
        if chance.random() < 0.5:
            return length
        if length <= border or chance.random() < 0.5:
            return chance.randint(-(-length // 2), length)
        return min(border * chance.randint(1, length // border) + chance.choice((-1, 0, 1)), length)

    def _job(self, trial: Trial, group: Group) -> Job:
        text, combination = self._texts[trial.text], trial.combination
        preempt_at = None
        if combination.is_preempted:
            preempt_at = self._chance.randrange(max(int(PREEMPTED_WITHIN * self._num_tokens), 1))
        return Job(
            text.prompt,
            text.sampling(is_scored=group.is_scored),
            self._num_tokens,
            _salt(trial),
            preempt_at=preempt_at,
            forgets_blocks=not combination.is_warm,
            prediction=self.predictions.get(trial.text, []),
        )

    def _compare(self, group: Group, jobs: Sequence[Job], answers: Sequence[Answer]) -> None:
        coverage = self.outcome.coverage
        found: dict[int, Difference | None] = {}
        for trial, answer in zip(group.trials, answers, strict=True):
            found[trial.index] = self._difference(trial, group, answer)
            coverage.num_tokens += len(answer.token_ids)
            coverage.num_scored += len(answer.token_ids) if answer.scores else 0
            coverage.num_warm_hits += trial.combination.is_warm and answer.num_cached > 0
            coverage.num_preempted += answer.was_preempted
            coverage.num_drafted += answer.num_drafted
            coverage.num_accepted += answer.num_accepted
        if group.is_scored:
            self.outcome.scored |= found.keys()
        else:
            same = [trial for trial in group.trials if found[trial.index] is None]
            start = 0 if self._session.prompt_grid is not None else self._num_tokens
            for trial, answer in zip(same, self._probe(same, start), strict=True):
                found[trial.index] = self._difference(trial, group, answer, start=start, is_probe=True)
                coverage.num_probe_hits += answer.num_cached > 0
            coverage.num_probes += len(same)
        self.outcome.differences += [one for one in found.values() if one is not None]

    def _probe(self, trials: Sequence[Trial], start: int) -> list[Answer]:
        """Returns the token at position `start` of each trial's output with its log-probabilities, computed
        with the cache that the trial wrote. start: 0 for models whose prompts cannot continue after generated
        tokens, which are computed in another form: the prompt then continues from the recurrent state that
        the trial stored."""
        jobs = []
        for trial in trials:
            text = self._texts[trial.text]
            output = self.references[trial.text].token_ids[:start]
            jobs.append(Job([*text.prompt, *output], text.sampling(is_scored=True), 1, _salt(trial)))
        return self._session.run(jobs)

    def _difference(
        self, trial: Trial, group: Group, answer: Answer, *, start: int = 0, is_probe: bool = False
    ) -> Difference | None:
        others = "scored among adjusted, scored and masked rows" if group.is_scored else "among plain rows"
        arrival = "arriving over many steps" if group.is_spread else "arriving at once"
        alone = group.setting.company == 1
        circumstances = trial.combination.describe() + ("" if alone else f", {others}, {arrival}")
        if trial.index in self.outcome.restarted:
            circumstances += f", in {self._second_engine}"
        if is_probe:
            place = "at the token after its output" if start > 0 else "at its first token, computed once more"
            circumstances += f"; seen {place}, behind the cache that it wrote"
        wanted = self.references[trial.text]
        return difference(trial.index, trial.text, wanted, answer, circumstances, start=start)

    def _tell_now_and_then(
        self, what: str, num_done: int, num_all: int, began: float, more: str = ""
    ) -> None:
        """Shows the progress now and then. began: the start of the first of them, by the monotonic clock."""
        now = time.monotonic()
        if now - self._told > TOLD_EVERY_SECONDS:
            self._told = now
            left = (now - began) / num_done * (num_all - num_done)
            self._tell(f"{what}: {num_done} of {num_all}, about {left:.0f} s left{more}")


def _salt(trial: Trial) -> str:
    """Returns the salt that keeps the trial's cached prefix apart from all others."""
    return f"trial-{trial.index}"
