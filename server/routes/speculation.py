"""GET and PUT /v1/speculation: how far is drafted, and how often drafts are right."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headway.engine import DRAFTER_TRAITS, DraftCheck, DrafterName, EngineStats
from headway.server.http.json_response import JsonResponse
from headway.server.http.keys import credentials
from headway.server.protocol.checks import check_range
from headway.server.requests.body import body_of
from headway.server.requests.services import Services, engine_info, max_draft_tokens, services_of

router = APIRouter(prefix="/v1/speculation")


class SpeculationState(msgspec.Struct):
    """Counters are those of /metrics, over all requests. has_mtp: an MTP head is loaded. drafter: mtp,
    eagle3, trained_head or draft_model, each also with ,ngram where n-gram lookup joins it; ngram or none.
    depth: the most drafts of a round, with which the server was started; chooses_depth: it chooses how many
    each round has, else each has as many as it may.

    max_draft_tokens: what a round gets at most now. acceptance_per_position: None where nothing was drafted.
    acceptance_length: tokens a row got in a round, on average; None before the first round. check: how the
    engine found the drafter when it started.
    """

    has_mtp: bool
    drafter: DrafterName
    depth: int
    chooses_depth: bool
    max_draft_tokens: int
    drafted_per_position: list[int]
    accepted_per_position: list[int]
    acceptance_per_position: list[float | None]
    acceptance_length: float | None
    check: DraftCheck


class SpeculationLimit(msgspec.Struct, forbid_unknown_fields=True):
    """max_draft_tokens: of every round from now on, 0 to the server's depth, also where the drafter failed
    its check; null lifts the limit."""

    max_draft_tokens: int | None


@router.get("")
async def show_speculation(request: Request) -> Response:
    return JsonResponse(_state(services_of(request)))


@router.put("")
async def limit_speculation(request: Request) -> Response:
    """Changes the depth of running requests, too: it never changes a text. The limit survives a restart of
    the engine."""
    services = services_of(request)
    services.keys.check_admin(credentials(request.headers))
    body = await body_of(request, SpeculationLimit)
    check_range("max_draft_tokens", body.max_draft_tokens, 0, engine_info(services).depth)
    services.depth_limit.max_draft_tokens = body.max_draft_tokens
    has_limit = body.max_draft_tokens is not None
    services.engine.set_depth(max_draft_tokens(services), survives_restart=has_limit)
    return JsonResponse(_state(services))


def _state(services: Services) -> SpeculationState:
    info = engine_info(services)
    stats = services.engine.stats
    drafted, accepted = stats.draft_tokens_per_position, stats.accepted_tokens_per_position
    return SpeculationState(
        has_mtp=DRAFTER_TRAITS[info.drafter].reads_head,
        drafter=info.drafter,
        depth=info.depth,
        chooses_depth=info.chooses_depth,
        max_draft_tokens=max_draft_tokens(services),
        drafted_per_position=drafted,
        accepted_per_position=accepted,
        acceptance_per_position=[a / d if d else None for d, a in zip(drafted, accepted, strict=True)],
        acceptance_length=_acceptance_length(stats),
        check=info.draft_check,
    )


def _acceptance_length(stats: EngineStats) -> float | None:
    by_tokens = stats.row_rounds_by_emitted_tokens
    num_rounds = sum(by_tokens.values())
    return sum(tokens * rounds for tokens, rounds in by_tokens.items()) / num_rounds if num_rounds else None
