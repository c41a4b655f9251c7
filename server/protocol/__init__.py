"""The wire format of the API: bodies in, bodies out, as OpenAI names their fields; one file an endpoint.

Knows no tokenizer and no engine's state; what a value means for a model is decided in `prompt` and
`sampling`.
"""
