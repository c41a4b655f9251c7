"""The wire format of the API: request and response bodies with OpenAI's field names, one file for each
endpoint.

It knows no tokenizer and no engine; the meaning of a value for a model is decided in `text` and `generation`.
"""
