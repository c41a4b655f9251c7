"""Every name of a drafter stands for one."""

from __future__ import annotations

from typing import get_args

from headway.engine.protocol.drafters import DRAFTER_TRAITS, DrafterName


def test_every_name_but_auto_has_its_traits() -> None:
    assert (*DRAFTER_TRAITS, "auto") == (*get_args(DrafterName)[1:], get_args(DrafterName)[0])
