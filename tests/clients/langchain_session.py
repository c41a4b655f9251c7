"""Uses LangChain's OpenAI classes as their users do; prints what came as JSON. Argument: the server's URL."""

from __future__ import annotations

import json
import sys

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI


def main(url: str) -> None:
    settings = {"base_url": f"{url}/v1", "api_key": "none", "model": "demo-chat", "max_retries": 0, "seed": 3}
    chat = ChatOpenAI(max_tokens=16, temperature=0, stream_usage=True, **settings)
    question = [SystemMessage("x = 1"), HumanMessage("import os")]
    answer = chat.invoke(question)
    chunks = list(chat.stream(question))
    with_probabilities = chat.bind(logprobs=True, top_logprobs=2).invoke(question)
    chain = ChatPromptTemplate.from_messages([("system", "x = 1"), ("human", "{text}")]) | chat
    history = chat.invoke([*question, answer, HumanMessage("import sys")])
    from_elsewhere = chat.invoke([*question, AIMessage("y = 2", name="helper"), HumanMessage("import sys")])
    told = {
        "invoke": answer.content,
        "usage": answer.usage_metadata,
        "stream": "".join(chunk.content for chunk in chunks),
        "stream_usage": [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata],
        "tokens": [entry["token"] for entry in with_probabilities.response_metadata["logprobs"]["content"]],
        "batch": [one.content for one in chain.batch([{"text": "import os"}, {"text": "import sys"}])],
        "history": history.response_metadata["finish_reason"],
        "from_elsewhere": from_elsewhere.response_metadata["finish_reason"],
        "completion": OpenAI(max_tokens=16, **settings).invoke("def read_config(path):\n"),
    }
    print(json.dumps(told))


main(*sys.argv[1:])
