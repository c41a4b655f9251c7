"""Layers say what they compute, so that bench and defaults follow layers that nobody has told them of."""

from __future__ import annotations

from dataclasses import replace

import pytest
from headway_testing.outline import outline

from headway.engine.bench.floor import costs_of
from headway.engine.layers import decoder
from headway.engine.layers.mlp import GatedMlp
from headway.engine.layers.work import Work
from headway.engine.models.spec import DenseSpec
from headway.engine.protocol.config import EngineConfig
from headway.engine.resolve import resolve


class OneExpertOfEight(GatedMlp):
    """A token meets an eighth of the weights."""

    def work(self) -> Work:
        whole = super().work()
        return replace(whole, active_weights=whole.active_weights // 8, active_bytes=whole.active_bytes // 8)


def test_experts_that_a_token_does_not_meet_take_memory_but_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """36 layers with feed-forwards of 3 x 4,096 x 11,008 weights."""
    dense = outline(num_layers=36, num_multiprocessors=58)
    full = costs_of(dense.models)
    monkeypatch.setitem(decoder.FEED_FORWARDS, DenseSpec, OneExpertOfEight)
    sparse = outline(num_layers=36, num_multiprocessors=58)
    less = costs_of(sparse.models)
    unmet = 36 * 3 * 4096 * 11_008 * 7 // 8
    assert full.num_weights - less.num_weights == unmet
    assert full.trunk_bytes - less.trunk_bytes == 2 * unmet
    first, second = (resolve(EngineConfig(model_path=""), each) for each in (dense, sparse))
    assert first.weights_bytes == second.weights_bytes
    assert (first.prefill.separate, second.prefill.separate) == (512, 1024)
