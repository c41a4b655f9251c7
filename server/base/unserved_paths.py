"""Paths of other servers' APIs, and the endpoints of this server that serve the same purpose."""

from __future__ import annotations

import re

_SERVED = (
    "POST /v1/completions", "POST /v1/chat/completions", "POST /v1/responses", "POST /v1/messages", "GET /v1/models", "POST /tokenize",
    "POST /detokenize",
)  # fmt: skip
_NOTHING = "nothing here does that"
_MANAGEMENT = "what it does is set when the server starts, by the flags of `headway serve`"

# The paths of OpenAI, Anthropic, vLLM, SGLang, llama.cpp, Ollama, TGI, TEI, KoboldCpp, LM Studio and others
# by what replaces them. The first pattern that matches counts.
_FITTING = {
    "no answer is kept here: send the whole conversation as the input of POST /v1/responses": r"(/v1)?/responses/.+",
    "use POST /v1/chat/completions": (
        r"(/v1)?/chat/completions/.+|/api/chat|(/api)?/v\d/chat|/api(/v\d)?/chat/completions|/chat"
        r"|(/v1)?/engines/.+/chat/completions|/openai(/v1|/deployments/[^/]+)?/chat/completions|/apply-template|/chat_tokenize|/vertex_generate|/predict"
        r"|/v1beta/.+|(/v1)?/(threads|assistants|conversations|realtime|agents|live)(/.*)?|/parse_function_call|/separate_reasoning"
        r"|/.+/chat/completions|(/v1)?/chat/completion"
    ),
    "use POST /v1/completions with `prompt` and `suffix`": r"/infill|/v1/fim/completions|/fim/completions",
    "use POST /v1/completions": (
        r"/completion|(/v1)?/(generate|generate_stream|complete|edits)|/inference/v1/generate|/api(/v\d)?/(generate|completions?)|/api/extra/generate/.+"
        r"|(/v1)?/engines/.+|/openai(/v1|/deployments/[^/]+)?/completions|(/v1)?/invocations|/v2/models/.+|/v1/completions/render"
        r"|/.+/v1/completions|/v1//completions|/v1/completion"
    ),
    "use POST /v1/responses": r"/openai(/v1)?/responses|/.+/v1/responses|/v1//responses|(/v1)?/response",
    "use POST /v1/messages": r"(/v1)?/messages/.+|/api(/v1)?/messages|/.+/v1/messages|/v1//messages|(/v1)?/message",
    "use POST /tokenize": r"/v1/(token|internal)/(encode|token-count)|/api/(extra/)?(tokenize|tokencount)|/api/v1/tokenize",
    "use POST /detokenize": r"/decode|/v1/(token|internal)/decode|/api/(extra/)?detokenize",
    "use GET /v1/models": (
        r"/api/(tags|show|ps|me)|/api(/v\d)?/models?(/.*)?|(/v1)?/(props|info|get_model_info|model_info|model|server_info|get_server_info|get_server_args)"
        r"|/openai(/v1)?/models|/openai/deployments|/v1/internal/model/.+|/api/v1/config/.+|/models/(load|unload)"
    ),
    "use GET /health": r"/v1/health|/healthz|/livez|/api/health|/v2/health/.+|/is_sleeping|/is_paused",
    "use GET /ready": r"/readyz|/readiness",
    "use GET /health/generate": r"/health_generate",
    "use GET /load": r"/slots(/.*)?|/get_load|/v1/loads|/get_memory_pool_size",
    "use GET /version": r"/api(/extra)?/version",
    "use POST /abort/{id}, with the admin key": r"/abort_requests?|/api/extra/abort|/v1/internal/stop-generation",
    "use POST /pause or /resume, with the admin key": r"/pause_generation|/continue_generation|/sleep|/wake_up|/slow_down",
    _NOTHING: (
        r"(/v1)?/(embeddings|embedding|embed|embed_all|embed_sparse|encode|pooling|classify|score|rerank|reranking|similarity|audio|images|videos|files"
        r"|uploads|batches|moderations|fine_tuning|vector_stores|evals|containers|skills|chatkit|organization|projects|decisions|safety"
        r"|content_provenance_checks|vaults|webhook_endpoints|webhook_event_types)(/.*)?|/v2/(rerank|embed)|/api(/v\d)?/(embed|embeddings)"
        r"|/openai(/v1|/deployments/[^/]+)?/(embeddings|audio|images|files|batches|assistants|threads)(/.*)?|/api/web_(search|fetch)|/sdapi/.+"
    ),
    _MANAGEMENT: (
        r"/api/(create|copy|delete|pull|push|signout|blobs/.+)|/lora-adapters|(/v1)?/(load|unload)_lora_adapter|/reset_(prefix|mm|encoder)_cache|/flush_cache"
        r"|/clear_hicache_storage_backend|/collective_rpc|/(start|stop)_profile|/freeze_gc|/(start|stop|dump)_expert_distribution_record"
        r"|/(init|destroy|update|get)_weight.*|/update_weights.*|/(release|resume)_memory_occupation|/(open|close)_session|/configure_logging"
        r"|/set_internal_state|/scale_elastic_ep|/is_scaling_elastic_ep|/v1/(model|template|lora|sampling)/.+"
    ),
}  # fmt: skip
_PATTERNS = {fit: re.compile(paths) for fit, paths in _FITTING.items()}


def help_for(path: str) -> str | None:
    """Returns what a client of the path should use instead, the best first; None for a path of no known
    server."""
    fit = next((fit for fit, pattern in _PATTERNS.items() if pattern.fullmatch(path)), None)
    if fit is None:
        return None
    others = ", ".join(served for served in _SERVED if f"use {served}" != fit)
    return f"{fit}; also served: {others}. /docs/api.md describes them"
