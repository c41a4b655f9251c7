"""Fields that clients send and this server does not serve: their purposes, and what to do instead.

This table defines decoding, error messages, the OpenAPI description and docs/api.md. Fields that could change
the text are refused unless they are null or have a value without effect; all others are ignored.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace

PAGE = "/docs/api.md#known-and-not-served"
CHATS = "/v1/chat/completions"
TEXTS = "/v1/completions"

Values = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Fields of one purpose. values: the values without effect by field name; null is always accepted.
    origin: the APIs that have the fields. instead: what a client should do; empty for ignored fields.
    example: fields of a body that does so; path: its endpoint, "" for the same one. is_ignored: every
    value is accepted, and effective ones are reported."""

    origin: str
    purpose: str
    instead: str
    values: Mapping[str, Values] = field(default_factory=dict)
    is_ignored: bool = False
    example: Mapping[str, object] = field(default_factory=dict)
    path: str = ""

    def is_neutral(self, name: str, value: object) -> bool:
        if value is None:
            return True
        if isinstance(value, dict):
            value = {key: entry for key, entry in value.items() if entry is not None}
        return any(_same(value, one) for one in self.values[name])


Table = Mapping[str, Group]


def table(groups: Iterable[Group], own: Container[str] = ()) -> dict[str, Group]:
    """Returns the groups by field name, without the API's own fields. Raises ValueError if a name occurs
    twice."""
    found: dict[str, Group] = {}
    for group in groups:
        for name in group.values:
            if name in own:
                continue
            if name in found:
                raise ValueError(f"{name} is in two groups of unserved fields")
            found[name] = group
    return found


def _same(value: object, other: object) -> bool:
    """Returns whether JSON values are equal: 1 and 1.0 are equal, 1 and true are not."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _never(*names: str) -> dict[str, Values]:
    return dict.fromkeys(names, ())


def _with(value: object, *names: str) -> dict[str, Values]:
    return dict.fromkeys(names, (value,))


def _by_a_chat(group: Group) -> Group:
    """Returns the group for an API of conversations that lacks the fields of its remedy."""
    if group.is_ignored or group.path:
        return group
    return replace(group, instead=f"send the conversation to {CHATS}, and there {group.instead}", path=CHATS)


_OWN_TEMPLATE = f"render the messages yourself and send the text to {TEXTS}"
_TOOLS = "describe the tools in `tools` and choose among them with `tool_choice`"
_TOOL = {"type": "function", "function": {"name": "f"}}
_MESSAGES = [{"role": "user", "content": "hello"}]
_THINKING = (f"at {CHATS}, for a chat template that can turn thinking off, send `chat_template_kwargs` ({{\"enable_thinking\": false}}) or "
             "`reasoning_effort`; bound thinking with `thinking_budget_tokens`, and leave it out of the answer with `include_reasoning`")  # fmt: skip

SHARED = (
    Group("OpenAI, Anthropic, vLLM, llama.cpp", "hints about price, speed, storage and length, which change no token here", "",
          {"service_tier": ("auto", "default", "standard_only"), "store": (False,), "verbosity": ("medium",), "speed": ("standard",), "cache_prompt": (True,),
           "n_cache_reuse": (0,), "guided_decoding_backend": ("auto",), "structured_outputs_backend": ("auto",), "inference_geo": ("global",),
           "billing_policy": ({},)} | _never("prediction", "moderation", "prompt_cache_retention", "prompt_cache_options"), is_ignored=True),
    Group("OpenAI, vLLM, SGLang, llama.cpp, LiteLLM, Ollama", "names and labels", "",
          _never("user", "metadata", "safety_identifier", "prompt_cache_key", "request_id", "rid", "session_id", "custom_labels", "id_slot", "slot_id",
                 "litellm_metadata", "litellm_call_id", "litellm_session_id", "litellm_trace_id", "tags"), is_ignored=True),
    Group("OpenRouter, LiteLLM, Ollama, llama.cpp, others", "settings of proxies, clients and of how other servers run", "",
          _never("models", "mode", "route", "provider", "transforms", "plugins", "usage", "drop_params", "num_retries", "timeout", "extra_query",
                 "extra_headers", "keep_alive", "stream_interval", "return_full_text", "num_thread", "num_gpu", "num_batch", "num_ctx", "num_keep", "n_keep",
                 "n_discard", "speculative.n_max", "speculative.n_min", "speculative.p_min", "speculative.type", "num_speculative_tokens",
                 "kv_transfer_params", "ec_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room", "routed_dp_rank",
                 "disagg_prefill_dp_rank", "data_parallel_rank"), is_ignored=True),
    Group("vLLM, SGLang, llama.cpp, TGI", "figures beside the answer", "",
          {"return_progress": (False,), "return_meta_info": (False,), "return_cached_tokens_details": (False,), "return_spec_tokens_details": (False,),
           "return_weight_versions": (False,), "timings_per_token": (False,), "verbose": (False,), "__verbose": (False,), "details": (False,),
           "routed_experts_start_len": (0,), "routed_experts_prompt_start": (0,), "response_fields": ([],)}, is_ignored=True),
    Group("llama.cpp, vLLM, others", "settings of what is itself off, or refused", "",
          _never("mirostat_tau", "mirostat_eta", "xtc_threshold", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers",
                 "dynatemp_exponent", "smoothing_curve", "adaptive_decay", "length_penalty", "early_stopping", "beam_width", "mm_processor_kwargs", "media_io_kwargs", "mm_payload", "images_config", "video_config",
                 "max_dynamic_patch", "min_dynamic_patch", "use_audio_in_video", "return_mm_kwargs", "backend_sampling"), is_ignored=True),
    Group("vLLM, llama.cpp", "output in a given form, by another name", "use `structured_outputs` with `json`, `regex`, `choice` or `grammar`",
          _never("structural_tag", "guided_whitespace_pattern", "grammar_type")
          | {"grammar_lazy": (False,), "grammar_triggers": ([],)}, example={"structured_outputs": {"choice": ["yes", "no"]}}),
    Group("vLLM, others", "beam search", "sample several answers with `n`", {"use_beam_search": (False,), "num_beams": (1,)}, example={"n": 2}),
    Group("vLLM, SGLang, llama.cpp", "log-probabilities of other kinds", f"use `logprobs` and, for those of the prompt, `echo`, at {TEXTS}",
          _never("prompt_logprobs", "sampling_logprobs_mode")
          | {"logprob_token_ids": ([],), "return_tokens_as_token_ids": (False,), "n_probs": (0,), "top_n_tokens": (0,), "logprob_start_len": (-1, 0),
             "post_sampling_probs": (False,), "return_sampling_mask": (False,), "return_flat_raw_output_top_logprobs": (False,),
             "return_flat_raw_top_logprobs_b64": (True, False), "decoder_input_details": (False,)}, example={"logprobs": 1, "echo": True}, path=TEXTS),
    Group("vLLM, SGLang, llama.cpp", "tokens and inner states in the answer", "read token ids with `return_token_ids`",
          {"return_token_offsets": (False,), "return_prompt_text": (False,), "return_tokens": (False,), "return_prompt_token_ids": (False,),
           "return_input_ids_in_sglext": (False,), "return_output_ids_in_sglext": (False,), "return_hidden_states": (False,),
           "return_routed_experts": (False,)}, example={"return_token_ids": True}),
    Group("vLLM", "how special tokens are joined to text", "use `skip_special_tokens`", {"spaces_between_special_tokens": (True,)},
          example={"skip_special_tokens": False}),
    Group("vLLM, TGI", "cutting a prompt at another side", "use `truncate_prompt_tokens`, which cuts the beginning",
          {"truncation_side": ("left",), "truncate": ()}, example={"truncate_prompt_tokens": 100}),
    Group("vLLM, SGLang", "other ways to end a text", "use `stop` and `stop_token_ids`, with `include_stop_str_in_output` to see the stop",
          {"stop_regex": ("", []), "repetition_detection": (), "t_max_predict_ms": (0, -1), "n_indent": (0,)},
          example={"stop": ["."], "stop_token_ids": [5], "include_stop_str_in_output": True}),
    Group("llama.cpp, Ollama, others", "the window of the repetition penalty", "use `repetition_penalty`, which holds for the whole text",
          {"repeat_last_n": (64, -1), "penalize_nl": (False,), "penalty_last_n": (64, -1), "repetition_penalty_range": (0,)},
          example={"repetition_penalty": 1.1}),
    Group("TGI, transformers", "greedy decoding", "send `temperature` 0", {"do_sample": (True,)}, example={"temperature": 0}),
    Group("llama.cpp, TGI, text-generation-webui, others", "samplers that are not built in", "use `temperature`, `top_p`, `top_k` and `min_p`",
          {"typical_p": (1.0,), "typ_p": (1.0,), "typical": (1.0,), "tfs_z": (1.0,), "tfs": (1.0,), "top_n_sigma": (-1.0,), "nsigma": (0, -1.0),
           "dynatemp_range": (0.0,), "dynamic_temperature": (False,), "mirostat": (0,), "mirostat_mode": (0,), "xtc_probability": (0.0,),
           "dry_multiplier": (0.0,), "top_a": (0.0,), "samplers": ([],), "sampler_order": ([],), "sampler_priority": ([],),
           "temperature_last": (False,), "adaptive_target": (-1.0,), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "smoothing_factor": (0,), "min_keep": (0,),
           "penalty_alpha": (0,), "no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1.0,), "guidance_scale": (1,),
           "negative_prompt": ("",), "watermark": (False, {}), "watermarking": (False,), "logits_processors": ([],),
           "custom_logit_processor": (), "custom_params": ({},)}, example={"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05}),
    Group("text-generation-webui, KoboldCpp", "tokens and texts that never come", "use `bad_words`, or `logit_bias` of -100",
          {"banned_tokens": ("", []), "custom_token_bans": ("", []), "banned_strings": ([], "")}, example={"bad_words": ["hello"]}),
    Group("llama.cpp, SGLang, Ollama", "adapters", "leave it out, and name in `model` a served model into which the adapter is merged",
          {"lora": ([],), "lora_path": (), "adapter_id": ()}, example={"model": "tiny"}),
    Group("SGLang", "a prompt that begins in the server's memory", "send the whole prompt", {"session_params": ({},)}),
    Group("vLLM, SGLang, llama.cpp", "images, sound and embeddings as input", f"send text, or token ids as `prompt` to {TEXTS}",
          _with([], "prompt_embeds", "image_data", "images", "multimodal_data") | {"input_ids": ()}, example={"prompt": [5, 6]}, path=TEXTS),
    Group("vLLM, SGLang, Ollama, llama.cpp", "thinking before the answer", _THINKING,
          {"separate_reasoning": (True,), "stream_reasoning": (True,), "thinking": ({},), "think": (), "reasoning": ({},),
           "reasoning_format": ("auto", "deepseek"), "enable_thinking": (), "thinking_forced_open": (False,), "chat_format": (),
           "parse_tool_calls": (True,)},
          example={"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "none", "include_reasoning": False}, path=CHATS),
    Group("vLLM, Ollama, TGI", "settings in an object of their own", "put the fields, such as `temperature`, into the body itself",
          _with({}, "vllm_xargs", "options", "parameters", "extra_body"), example={"temperature": 0.7}),
    Group("Ollama", "a prompt template in the request", f"render the text yourself and send it as `prompt` to {TEXTS}",
          {"template": ("",), "system": ("",), "raw": (False,), "context": ([],)}, example={"prompt": "hello"}, path=TEXTS),
)  # fmt: skip
# Fields within structured_outputs.
STRUCTURED_OUTPUTS = table((
    Group("vLLM", "forms that begin in the middle of a text", "use a Lark grammar as `grammar`", _never("structural_tag"),
          example={"structured_outputs": {"grammar": 'start: "a" | "b"'}}),
    Group("vLLM", "how a schema's text is written", "leave it out: a space, or a line break with its indent, may stand between two tokens",
          {"disable_any_whitespace": (False,), "whitespace_pattern": ()}, example={"structured_outputs": {"json": {"type": "object"}}}),
    Group("vLLM", "which library enforces a form, and what it does beyond it", "",
          {"disable_fallback": (False, True), "backend": ("auto",), "_backend": ("auto",), "backend_was_auto": (False, True)}, is_ignored=True),
    Group("vLLM", "how a schema is enforced", "leave it out, and say `additionalProperties: false` in the schema",
          {"disable_additional_properties": (False,)},
          example={"structured_outputs": {"json": {"type": "object", "additionalProperties": False}}}),
))  # fmt: skip
COMPLETIONS = table((
    *SHARED,
    Group("vLLM, llama.cpp", "thinking of a chat", f"send `messages` to {CHATS}",
          {"include_reasoning": (True,), "thinking_budget_tokens": (-1,)}, example={"messages": _MESSAGES}, path=CHATS),
    Group("llama.cpp", "filling a gap", "use `prompt` and, with a model that fills gaps, `suffix`",
          {"input_prefix": ("",), "input_suffix": ("",), "input_extra": ([],)}, example={"prompt": "hello", "suffix": ""}),
))  # fmt: skip
CHAT = table((
    *SHARED,
    Group("OpenAI, TGI", "calling tools, as before `tools`", _TOOLS,
          {"functions": ([],), "function_call": ("none", "auto"), "tool_prompt": ("",)}, example={"tools": [_TOOL], "tool_choice": "none"}),
    Group("OpenAI", "sound as output", "use the text", {"modalities": (["text"],), "audio": ()}),
    Group("OpenAI", "searching the web", "put what was found into a message", {"web_search_options": ()}),
    Group("Mistral", "a prompt that the server puts before the conversation", "write it as a message of the system", {"safe_prompt": (False,)},
          example={"messages": [{"role": "system", "content": "be safe"}, *_MESSAGES]}),
    Group("vLLM, SGLang, llama.cpp, TGI", "control over the chat template", f"start the server with `--chat-template`, or {_OWN_TEMPLATE}",
          {"chat_template": ("",), "add_special_tokens": (False,), "task": ()}, example={"prompt": "hello"}, path=TEXTS),
    Group("vLLM", "echo and the best of several in a chat", f"send a `prompt` to {TEXTS}", {"echo": (False,), "best_of": (1,)},
          example={"prompt": "hello", "echo": True, "best_of": 2}, path=TEXTS),
), own={"prediction"})  # fmt: skip
# Fields that vLLM's /tokenize accepts in addition to the messages.
TOKENIZE = {name: CHAT[name] for name in ("chat_template", "mm_processor_kwargs", "media_io_kwargs")}
MESSAGE = table((
    Group("Kimi", "tools that a message brings", _TOOLS, {"tools": ([],)}, example={"tools": [_TOOL], "tool_choice": "none"}),
    Group("OpenAI", "sound of an earlier answer", "send its transcript as content", {"audio": ({},)},
          example={"messages": [*_MESSAGES, {"role": "assistant", "content": "the transcript"}, *_MESSAGES]}),
    Group("DeepSeek, Mistral, SGLang", "an answer that is to be continued", "send `continue_final_message` beside `messages`",
          {"prefix": (False,), "partial": (False,)},
          example={"continue_final_message": True, "messages": [*_MESSAGES, {"role": "assistant", "content": "Well"}]}),
    Group("Ollama", "images beside the content", "send text", {"images": ([],)}),
    Group("OpenAI, LiteLLM, LangChain, Vercel, OpenRouter", "what clients keep with a message; it carries no text of the conversation", "",
          _never("annotations", "reasoning_details", "reasoning_signature", "thinking", "thinking_blocks",
                 "signature", "id", "provider_specific_fields", "provider_metadata", "providerMetadata", "providerOptions",
                 "experimental_providerMetadata", "cache_control", "prompt_cache_breakpoint", "parsed", "metadata", "additional_kwargs",
                 "response_metadata", "usage_metadata", "usage", "status", "phase", "created", "created_at", "createdAt", "timestamp", "model",
                 "finish_reason", "stop_reason", "logprobs", "index", "object", "weight", "example", "citations", "type",
                 "encrypted_content", "token_ids", "speculation", "moderation", "tool_name"),
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
CONTENT_PART = table((
    Group("Anthropic, LiteLLM, Vercel", "what clients keep with a part", "",
          _never("cache_control", "annotations", "logprobs", "id", "providerOptions", "provider_metadata", "signature", "thinking", "data"),
          is_ignored=True),
))  # fmt: skip
MESSAGES = table((
    Group("Anthropic", "conversations, programs and tools that the server keeps", "send the whole conversation, with `tools` of your own",
          {"container": (), "mcp_servers": ([],), "compaction": ({},)},
          example={"tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "none"}}),
    Group("Anthropic", "caching, diagnosis, versions of the API, and models for what Anthropic's classifiers refuse", "",
          _never("cache_control", "diagnostics", "anthropic_version", "anthropic_beta", "betas", "fallbacks", "fallback_credit_token"),
          is_ignored=True),
    Group("OpenAI, vLLM", "fields of chats", f"send the conversation to {CHATS}",
          {"n": (1,), "stop": ([],), "seed": (), "min_p": (0,), "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,),
           "logit_bias": ({},), "allowed_token_ids": (), "bad_words": ([],), "min_tokens": (0,), "stop_token_ids": ([],),
           "include_stop_str_in_output": (False,), "ignore_eos": (False,), "skip_special_tokens": (True,), "truncate_prompt_tokens": (),
           "logprobs": (False,), "top_logprobs": (0,), "response_format": ({"type": "text"},), "structured_outputs": ({},), "regex": ("",), "json_schema": ({},), "ebnf": ("",),
           "grammar": ("",), "format": ("",), "guided_json": ({}, ""), "guided_json_object": (False,), "guided_regex": ("",), "guided_choice": ([],),
           "guided_grammar": ("",), "chat_template_kwargs": ({},), "documents": ([],), "add_generation_prompt": (True,), "continue_final_message": (False,)},
          example={"seed": 7, "stop": ["."], "min_p": 0.1, "guided_choice": ["yes", "no"]}, path=CHATS),
    *map(_by_a_chat, SHARED),
), own={"thinking", "system"})  # fmt: skip
# Fields within blocks of content.
MESSAGES_BLOCK = table((
    Group("Anthropic", "what is kept with a block, and fields of blocks of other types", "",
          _never("cache_control", "citations", "caller", "signature", "data", "source", "title", "context", "file_id"), is_ignored=True),
))  # fmt: skip
# Fields within thinking and output_config.
MESSAGES_THINKING = table((
    Group("Anthropic", "what to do with a thinking block of another conversation", "", _never("block_binding"), is_ignored=True),
))  # fmt: skip
MESSAGES_OUTPUT = table((
    Group("Anthropic", "a budget of tokens that the model is told", "bound the answer with `max_tokens`", _never("task_budget"),
          example={"max_tokens": 5}),
))  # fmt: skip
RESPONSES = table((
    Group("OpenAI", "going on from an answer that the server keeps", "send the whole conversation as `input`: no answer is kept here",
          _never("previous_response_id", "conversation"), example={"input": _MESSAGES}),
    Group("OpenAI", "answers that are fetched later", "wait for the answer, or `stream` it", {"background": (False,)}, example={"stream": True}),
    Group("OpenAI", "prompts that the server keeps", "send the text as `instructions` and `input`", _never("prompt"),
          example={"instructions": "be brief", "input": "hello"}),
    Group("OpenAI", "dropping or compacting the beginning of a long conversation", "shorten `input`, or use `truncate_prompt_tokens`",
          {"truncation": ("disabled",), "context_management": ([],)}, example={"truncate_prompt_tokens": 100}),
    Group("OpenAI", "the conversation, as in chats", "send it as `input`, with `instructions`", {"messages": ([],)},
          example={"instructions": "be brief", "input": _MESSAGES}),
    Group("OpenAI", "several answers", "send the request several times", {"n": (1,)}),
    Group("OpenAI", "log-probabilities, as in chats", "use `include` with `message.output_text.logprobs`, and `top_logprobs`", {"logprobs": (False,)},
          example={"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    Group("OpenAI", "output in a given form, as in chats", "use `text.format`, or `structured_outputs`", {"response_format": ({"type": "text"},)},
          example={"text": {"format": {"type": "json_object"}}}),
    Group("vLLM, SGLang, llama.cpp", "output in a given form, by other names",
          "use `text.format`, or `structured_outputs` with `json`, `regex`, `choice` or `grammar`",
          {"guided_json": ({}, ""), "guided_json_object": (False,), "guided_regex": ("",), "guided_choice": ([],), "guided_grammar": ("",),
           "regex": ("",), "json_schema": ({}, ""), "ebnf": ("",), "grammar": ("",), "format": ("",)}, example={"structured_outputs": {"choice": ["yes", "no"]}}),
    Group("vLLM", "the ids of tokens, as in chats", f"use {CHATS}", {"return_token_ids": (False,)},
          example={"messages": _MESSAGES, "return_token_ids": True}, path=CHATS),
    Group("vLLM", "an answer that goes on with the last message, as in chats", f"use {CHATS}",
          {"add_generation_prompt": (True,), "continue_final_message": (False,)},
          example={"messages": [*_MESSAGES, {"role": "assistant", "content": "Well"}], "continue_final_message": True}, path=CHATS),
    Group("OpenAI, Codex", "limits, labels and hints that do not touch the text", "",
          _never("max_tool_calls", "image", "access_programs", "client_metadata"), is_ignored=True),
    *map(_by_a_chat, SHARED),
), own={"store", "user", "metadata", "safety_identifier", "prompt_cache_key", "reasoning"})  # fmt: skip
# Fields within an item of input: those of other types, which differ by one letter from known ones.
INPUT_ITEM = table(
    (Group("OpenAI", "fields of items of other types", "", _never("outputs", "actions"), is_ignored=True),)
)
# Fields within a tool of /v1/responses, including those of hosted tools, whose types are refused.
RESPONSES_TOOL = table((
    Group("OpenAI", "functions as chats define them", "put `name`, `description`, `parameters` and `strict` beside `type`", _never("function"),
          example={"tools": [{"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": False}], "tool_choice": "none"}),
    Group("OpenAI", "what clients keep with a function, and fields of tools of other types", "",
          _never("async", "allowed_callers", "defer_loading", "output_schema", "vector_store_ids", "filters", "max_num_results", "ranking_options",
                 "display_height", "display_width", "environment", "external_web_access", "search_context_size", "search_content_types",
                 "user_location", "server_label", "allowed_tools", "authorization", "connector_id", "headers", "require_approval",
                 "server_description", "server_url", "tunnel_id", "container", "action", "background", "complexity", "frame_count",
                 "frame_duration_ms", "input_fidelity", "input_image_mask", "model", "moderation", "output_compression", "output_format",
                 "partial_images", "quality", "size", "svg", "cache_control", "input_schema", "annotations"), is_ignored=True),
))  # fmt: skip
