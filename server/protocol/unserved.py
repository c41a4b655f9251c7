"""Fields that clients send and this server does not serve: what each is for, and what to do instead.

The one table that defines decoding, error messages, the OpenAPI description and docs/api.md. A field passes when it is
null or has a value that changes nothing; any other value is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

PAGE = "docs/api.md#known-and-not-served"

Values = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Fields of one purpose. values: by field name, the values that change nothing; null always passes.

    origin: the APIs that have the fields. instead: what a client should do; empty for ignored fields.
    is_ignored: every value passes.
    """

    origin: str
    purpose: str
    instead: str
    values: Mapping[str, Values] = field(default_factory=dict)
    is_ignored: bool = False

    def passes(self, name: str, value: object) -> bool:
        if value is None or self.is_ignored:
            return True
        if isinstance(value, dict):
            value = {key: entry for key, entry in value.items() if entry is not None}
        return any(_same(value, one) for one in self.values[name])


Table = Mapping[str, Group]


def table(groups: Iterable[Group]) -> dict[str, Group]:
    """The groups by field name. Raises ValueError if a name occurs twice."""
    found: dict[str, Group] = {}
    for group in groups:
        for name in group.values:
            if name in found:
                raise ValueError(f"{name} is in two groups of unserved fields")
            found[name] = group
    return found


def _same(value: object, other: object) -> bool:
    """Equality of JSON values: 1 and 1.0 are equal, 1 and true are not."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _never(*names: str) -> dict[str, Values]:
    return dict.fromkeys(names, ())


def _with(value: object, *names: str) -> dict[str, Values]:
    return dict.fromkeys(names, (value,))


_FORM = "use `response_format`, or `structured_outputs` with `json`, `regex`, `choice` or `grammar`"
_OWN_TEMPLATE = "render the messages yourself and send the text to /v1/completions"
_TOOLS = "describe the tools in `tools` and choose among them with `tool_choice`"
_THINKING = ("for a chat template that can turn thinking off send `chat_template_kwargs` ({\"enable_thinking\": false}); "
             "bound it with `thinking_budget_tokens`, and leave it out of the answer with `include_reasoning`")  # fmt: skip

_TIERS = Group(
    "OpenAI",
    "price and speed classes",
    "use `priority` for the order of service",
    {"service_tier": ("auto", "default")},
)
_LABELS = Group("vLLM, SGLang, llama.cpp, LiteLLM, Ollama", "names, labels and hints that do not touch the text", "",
                _never("request_id", "rid", "session_id", "custom_labels", "id_slot", "slot_id", "keep_alive", "stream_interval", "litellm_metadata",
                       "litellm_call_id", "litellm_session_id", "litellm_trace_id", "drop_params", "num_retries", "timeout", "tags", "return_full_text",
                       "num_thread", "num_gpu", "num_batch"), is_ignored=True)  # fmt: skip
_MODERATION = Group(
    "OpenAI",
    "moderation of input and output",
    "call a moderation service beside this server",
    _never("moderation"),
)

SHARED = (
    _TIERS,
    Group("OpenAI", "keeping answers on the server", "keep the answer yourself", {"store": (False,)}),
    Group("vLLM, SGLang, llama.cpp, TGI, Ollama", "output in a given form, by another name", _FORM,
          _never("structural_tag", "guided_whitespace_pattern", "ebnf", "grammar_type") | _with("", "regex", "grammar", "format")
          | _with({}, "json_schema") | {"grammar_lazy": (False,), "grammar_triggers": ([],)}),
    Group("vLLM", "which library enforces a form", "leave it out: there is one", _with("auto", "guided_decoding_backend")),
    Group("vLLM", "beam search", "ask for the likeliest of several samples with `best_of`, or sample with `n`",
          {"use_beam_search": (False,), "length_penalty": (1.0,), "early_stopping": (False,), "beam_width": (1,)}),
    Group("vLLM, SGLang, llama.cpp", "log-probabilities of other kinds",
          "use `logprobs`, with `echo` for those of the prompt (/v1/completions)",
          _never("prompt_logprobs", "sampling_logprobs_mode")
          | {"logprob_token_ids": ([],), "return_tokens_as_token_ids": (False,), "n_probs": (0,), "logprob_start_len": (-1, 0),
             "post_sampling_probs": (False,), "return_sampling_mask": (False,), "return_flat_raw_output_top_logprobs": (False,),
             "return_flat_raw_top_logprobs_b64": (True, False)}),
    Group("vLLM, SGLang, llama.cpp", "more in the answer", "read token ids with `return_token_ids` and counts from `usage`",
          {"return_token_offsets": (False,), "return_prompt_text": (False,), "return_tokens": (False,), "return_progress": (False,),
           "return_prompt_token_ids": (False,), "return_meta_info": (False,), "return_cached_tokens_details": (False,),
           "return_spec_tokens_details": (False,), "return_input_ids_in_sglext": (False,), "return_output_ids_in_sglext": (False,),
           "return_weight_versions": (False,), "return_hidden_states": (False,), "return_routed_experts": (False,),
           "routed_experts_start_len": (0,), "routed_experts_prompt_start": (0,), "return_mm_kwargs": (False,),
           "timings_per_token": (False,), "verbose": (False,), "__verbose": (False,), "details": (False,), "decoder_input_details": (False,),
           "response_fields": ([],)}),
    Group("vLLM", "how special tokens are joined to text", "use `skip_special_tokens`", {"spaces_between_special_tokens": (True,)}),
    Group("vLLM", "cutting a prompt at another side", "use `truncate_prompt_tokens`, which cuts the beginning",
          {"truncation_side": ("left",), "truncate": ()}),
    Group("vLLM, SGLang", "other ways to end a text", "use `stop` and `stop_token_ids`, with `include_stop_str_in_output` to see the stop",
          {"stop_regex": ("", []), "no_stop_trim": (False,), "repetition_detection": (), "min_new_tokens": (0,), "t_max_predict_ms": (0, -1),
           "n_indent": (0,)}),
    Group("llama.cpp, Ollama, TGI", "the limit of new tokens under another name", "use `max_tokens`",
          {"n_predict": (-1,), "num_predict": (-1,), "max_new_tokens": ()}),
    Group("llama.cpp, Ollama, TGI", "the repetition penalty under another name or over a window",
          "use `repetition_penalty`, `presence_penalty` and `frequency_penalty`, which hold for the whole text",
          {"repeat_penalty": (1.0,), "repeat_last_n": (64,), "penalize_nl": (False,), "penalty_last_n": (64,)}),
    Group("llama.cpp, TGI, others", "samplers that are not built in", "use `temperature`, `top_p`, `top_k` and `min_p`",
          {"typical_p": (1.0,), "typ_p": (1.0,), "tfs_z": (1.0,), "top_n_sigma": (-1.0,), "dynatemp_range": (0.0,), "dynatemp_exponent": (1.0,),
           "mirostat": (0,), "mirostat_tau": (5.0,), "mirostat_eta": (0.1,), "xtc_probability": (0.0,), "xtc_threshold": (0.1,),
           "dry_multiplier": (0.0,), "dry_base": (1.75,), "dry_allowed_length": (2,), "dry_penalty_last_n": (-1, 0), "top_a": (0.0,),
           "dry_sequence_breakers": (["\n", ":", '"', "*"], []), "samplers": ([],), "adaptive_target": (-1.0,), "adaptive_decay": (0.9,),
           "min_keep": (0,), "backend_sampling": (False,), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "smoothing_factor": (0,),
           "do_sample": (True,), "watermark": (False, {}), "watermarking": (False,), "logits_processors": ([],), "custom_logit_processor": (),
           "custom_params": ({},)}),
    Group("SGLang", "separating prefixes of the cache", "use `cache_salt`", {"extra_key": ("",)}),
    Group("llama.cpp", "computing a prompt without the prefix cache", "send a `cache_salt` of your own", {"cache_prompt": (True,), "n_cache_reuse": (0,)}),
    Group("llama.cpp, Ollama", "the size and the shift of the context", "start the server with `--max-model-len`",
          {"n_keep": (0,), "n_discard": (0,), "num_ctx": (), "num_keep": ()}),
    Group("llama.cpp, SGLang, Ollama", "adapters", "serve a model into which the adapter is merged", {"lora": ([],), "lora_path": (), "adapter_id": ()}),
    Group("llama.cpp", "settings of speculation", "use `speculation.max_draft_tokens`",
          _never("speculative.n_max", "speculative.n_min", "speculative.p_min", "speculative.type", "num_speculative_tokens")),
    Group("vLLM, SGLang", "moving a request between servers", "send the whole request to one server",
          {"kv_transfer_params": ({},), "ec_transfer_params": ({},), "bootstrap_host": (), "bootstrap_port": (), "bootstrap_room": (),
           "routed_dp_rank": (), "disagg_prefill_dp_rank": (), "data_parallel_rank": (), "session_params": ({},)}),
    Group("vLLM, SGLang, llama.cpp", "images, sound and embeddings as input", "send text, or token ids to /v1/completions",
          {"mm_processor_kwargs": ({},), "media_io_kwargs": ({},), "mm_payload": ("tensors",), "images_config": ({},), "video_config": ({},),
           "prompt_embeds": ([],), "image_data": ([],), "images": ([],), "multimodal_data": ([],), "max_dynamic_patch": (), "min_dynamic_patch": (),
           "use_audio_in_video": (False,), "input_ids": ()}),
    Group("vLLM, SGLang, Ollama, llama.cpp", "thinking before the answer", _THINKING,
          {"thinking_token_budget": (), "separate_reasoning": (True,), "stream_reasoning": (True,),
           "thinking": ({},), "think": (), "reasoning": ({},), "reasoning_format": ("auto", "deepseek"), "enable_thinking": (),
           "thinking_forced_open": (False,), "reasoning_budget": (-1,), "chat_format": (), "parse_tool_calls": (True,)}),
    Group("vLLM, Ollama, TGI", "settings in an object of their own", "put the fields into the body itself",
          {"vllm_xargs": ({},), "options": ({},), "parameters": ({},), "extra_body": ({},), "extra_query": ({},), "extra_headers": ({},)}),
    Group("Ollama", "a prompt template in the request", "render the text yourself and send it to /v1/completions",
          {"template": ("",), "system": ("",), "raw": (False,), "context": ([],)}),
    _LABELS,
)  # fmt: skip
# Within structured_outputs.
STRUCTURED_OUTPUTS = table((
    Group("vLLM", "forms that begin in the middle of a text", "use `tools`, or a Lark grammar as `grammar`", _never("structural_tag")),
    Group("vLLM", "how a schema's text is written", "leave it out: a space, or a line break with its indent, may stand between two tokens",
          {"disable_any_whitespace": (False,), "whitespace_pattern": ()}),
    Group("vLLM", "how a schema is enforced", "leave it out: every keyword is enforced or refused",
          {"disable_fallback": (False, True), "disable_additional_properties": (False,)}),
))  # fmt: skip
COMPLETIONS = table((
    *SHARED,
    Group("vLLM, llama.cpp", "thinking of a chat", "use /v1/chat/completions",
          {"include_reasoning": (True,), "thinking_budget_tokens": (-1,)}),
    Group("llama.cpp", "filling a gap", "use `prompt` and `suffix`",
          {"input_prefix": ("",), "input_suffix": ("",), "input_extra": ([],)}),
))  # fmt: skip
CHAT = table((
    *SHARED,
    Group("OpenAI, TGI", "calling tools, as before `tools`", _TOOLS,
          {"functions": ([],), "function_call": ("none", "auto"), "tool_prompt": ("",)}),
    Group("OpenAI", "sound as output", "use the text", {"modalities": (["text"],), "audio": ()}),
    Group("OpenAI", "drafts that the client makes", "leave it out: the server makes its own drafts", _never("prediction")),
    Group("OpenAI", "how much the model writes", "say it in a message, or bound it with `max_completion_tokens`",
          {"verbosity": ("medium",)}),
    Group("OpenAI", "searching the web", "put what was found into a message", _never("web_search_options")),
    _MODERATION,
    Group("vLLM, SGLang, llama.cpp, TGI", "control over the chat template", f"start the server with `--chat-template`, or {_OWN_TEMPLATE}",
          {"chat_template": ("",), "add_special_tokens": (False,), "task": ()}),
    Group("vLLM", "echo and the best of several in a chat", "use /v1/completions", {"echo": (False,), "best_of": (1,)}),
))  # fmt: skip
# vLLM's /tokenize accepts these in addition to the messages.
TOKENIZE = {name: CHAT[name] for name in ("chat_template", "mm_processor_kwargs", "media_io_kwargs")}
MESSAGE = table((
    Group("Kimi", "tools that a message brings", _TOOLS, {"tools": ([],)}),
    Group("OpenAI", "sound of an earlier answer", "send its transcript as content", {"audio": ({},)}),
    Group("DeepSeek, Mistral, SGLang", "an answer that is to be continued", "send `continue_final_message` beside `messages`", {"prefix": (False,), "partial": (False,)}),
    Group("Ollama", "images beside the content", "send text", {"images": ([],)}),
    Group("OpenAI, LiteLLM, LangChain, Vercel, OpenRouter", "what clients keep with a message; it carries no text of the conversation", "",
          _never("annotations", "reasoning_details", "reasoning_signature", "thinking", "thinking_blocks",
                 "signature", "id", "provider_specific_fields", "provider_metadata", "providerMetadata", "providerOptions",
                 "experimental_providerMetadata", "cache_control", "prompt_cache_breakpoint", "parsed", "metadata", "additional_kwargs",
                 "response_metadata", "usage_metadata", "usage", "status", "phase", "created", "created_at", "createdAt", "timestamp", "model",
                 "finish_reason", "stop_reason", "logprobs", "index", "object", "weight", "example", "citations", "type",
                 "encrypted_content", "token_ids", "speculation", "moderation"),
          is_ignored=True),
))  # fmt: skip
TOOL = table((
    Group("LiteLLM, Anthropic, others", "what clients keep with a tool", "",
          _never("cache_control", "defer_loading", "allowed_callers", "provider_options", "providerOptions", "id"), is_ignored=True),
))  # fmt: skip
FUNCTION = table((
    Group("LiteLLM, Google, others", "what clients keep with a function", "",
          _never("cache_control", "return", "response", "returns", "examples", "input_examples"), is_ignored=True),
))  # fmt: skip
MESSAGES = table((
    Group("Anthropic", "conversations, programs and tools that the server keeps", "send the whole conversation, with tools of your own",
          {"container": (), "mcp_servers": ([],), "compaction": ({},)}),
    Group("Anthropic", "where, how fast and at what price the answer is made", "leave it out: this server makes every answer itself",
          {"service_tier": ("auto", "standard_only"), "speed": ("standard",), "inference_geo": ("global",), "billing_policy": ({},)}),
    Group("Anthropic", "caching, diagnosis, versions of the API, and models for what Anthropic's classifiers refuse", "",
          _never("cache_control", "diagnostics", "anthropic_version", "anthropic_beta", "betas", "fallbacks", "fallback_credit_token"),
          is_ignored=True),
))  # fmt: skip
# Within thinking and output_config.
MESSAGES_THINKING = table((
    Group("Anthropic", "what to do with a thinking block of another conversation", "", _never("block_binding"), is_ignored=True),
))  # fmt: skip
MESSAGES_OUTPUT = table((
    Group("Anthropic", "a budget of tokens that the model is told", "bound the answer with `max_tokens`", _never("task_budget")),
))  # fmt: skip
RESPONSES = table((
    Group("OpenAI", "going on from an answer that the server keeps", "send the whole conversation as `input`: no answer is kept here",
          _never("previous_response_id", "conversation")),
    Group("OpenAI", "answers that are fetched later", "wait for the answer, or `stream` it", {"background": (False,)}),
    Group("OpenAI", "prompts that the server keeps", "send the text as `instructions` and `input`", _never("prompt")),
    Group("OpenAI", "dropping or compacting the beginning of a long conversation", "shorten `input`, or use `truncate_prompt_tokens`",
          {"truncation": ("disabled",), "context_management": ([],)}),
    _TIERS,
    _MODERATION,
    Group("OpenAI", "the conversation, as in chats", "send it as `input`, with `instructions`", {"messages": ([],)}),
    Group("OpenAI", "the limit of new tokens, as in chats", "use `max_output_tokens`", _never("max_tokens", "max_completion_tokens")),
    Group("OpenAI", "several answers", "send the request several times", {"n": (1,)}),
    Group("OpenAI", "log-probabilities, as in chats", "use `include` with `message.output_text.logprobs`, and `top_logprobs`", {"logprobs": (False,)}),
    Group("OpenAI", "how long to think, as in chats", "use `reasoning.effort`", _never("reasoning_effort")),
    Group("OpenAI", "output in a given form, as in chats", "use `text.format`, or `structured_outputs`", {"response_format": ({"type": "text"},)}),
    Group("vLLM", "output in a given form, by earlier names", "use `text.format`, or `structured_outputs` with `json`, `regex`, `choice` or `grammar`",
          {"guided_json": ({}, ""), "guided_json_object": (False,), "guided_regex": ("",), "guided_choice": ([],), "guided_grammar": ("",)}),
    Group("vLLM", "the ids of tokens, as in chats", "use /v1/chat/completions", {"return_token_ids": (False,)}),
    Group("vLLM", "an answer that goes on with the last message, as in chats", "use /v1/chat/completions",
          {"add_generation_prompt": (True,), "continue_final_message": (False,)}),
    Group("OpenAI, Codex", "limits, labels and hints that do not touch the text", "",
          _never("max_tool_calls", "prompt_cache_retention", "prompt_cache_options", "image", "access_programs", "client_metadata"), is_ignored=True),
    _LABELS,
))  # fmt: skip
# Within a tool of /v1/responses: also the fields of hosted tools, which are refused by their type.
RESPONSES_TOOL = table((
    Group("OpenAI", "functions as chats define them", "put `name`, `description`, `parameters` and `strict` beside `type`", _never("function")),
    Group("OpenAI", "what clients keep with a function, and fields of tools of other types", "",
          _never("async", "allowed_callers", "defer_loading", "output_schema", "vector_store_ids", "filters", "max_num_results", "ranking_options",
                 "display_height", "display_width", "environment", "external_web_access", "search_context_size", "search_content_types",
                 "user_location", "server_label", "allowed_tools", "authorization", "connector_id", "headers", "require_approval",
                 "server_description", "server_url", "tunnel_id", "container", "action", "background", "complexity", "frame_count",
                 "frame_duration_ms", "input_fidelity", "input_image_mask", "model", "moderation", "output_compression", "output_format",
                 "partial_images", "quality", "size", "svg", "format", "tools", "execution", "cache_control"), is_ignored=True),
))  # fmt: skip
