"""GET and PUT /v1/speculation: the depth of speculation, and the acceptance of drafts."""

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
    eagle3, trained_head or draft_model, each also with ,ngram if n-gram lookup joins it; ngram or none.
    depth: the most drafts of a round, set at start; chooses_depth: the server chooses the depth of each round
    up to it, instead of always drafting as many as allowed.

    max_draft_tokens: the most drafts that a round gets now. acceptance_per_position: None where nothing was
    drafted. acceptance_length: the mean number of tokens a row got in a round; None before the first round.
    check: the result of the drafter's check at start.
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
    """max_draft_tokens: the limit for every round from now on, 0 to the server's depth, even if the
    drafter failed its check; null removes the limit."""

    max_draft_tokens: int | None


@router.get("")
async def show_speculation(request: Request) -> Response:
    return JsonResponse(_state(services_of(request)))


@router.put("")
async def limit_speculation(request: Request) -> Response:
    """Sets the limit, also for running requests: it never changes a text. The limit survives a restart of
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
