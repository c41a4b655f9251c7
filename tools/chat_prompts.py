"""Writes prompts as users type them to a small chat model, for `headway head data`, one JSON object per line.

The prompts come from the templates and topics below, from Python's own documentation, and from the model,
which continues the beginning of a user's turn. The same seed gives the same lines on the same machine and
Python.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import random
import re
import string
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from headway.engine.build import assemble
from headway.engine.protocol.config import EngineConfig
from headway.engine.protocol.errors import ConfigError, HeadwayError
from headway.engine.protocol.messages import Submit
from headway.engine.protocol.sampling_params import SamplingParams
from headway.engine.training.answers import Defaults, sample

NUM_FROM_TEMPLATES, NUM_FROM_DOCUMENTATION = 9_000, 3_000
MAX_TOKENS, MIN_CHARACTERS, MAX_CHARACTERS = 80, 8, 400  # of the model's own prompts
PARAGRAPH_CHARACTERS, MIN_SHARE_OF_LETTERS = range(80, 601), 0.8  # spaces count as letters
MARKER = "THE USER WRITES HERE"

# Braces in templates stand for one of these words, for a word of a group, or for a number; {name2} differs
# from {name}.
WORDS = {name: [word.strip() for word in words.split("|" if "|" in words else ",")] for name, words in {
    "science": "photosynthesis, gravity, black holes, the water cycle, DNA, evolution, atoms, magnetism, volcanoes, climate change, electricity, bacteria, "
    "sound waves, the solar system, the moon, Mars, the big bang, cells, viruses, fossils, acids and bases, relativity, ecosystems, rainbows, glaciers",
    "history": "the Roman Empire, ancient Egypt, the French Revolution, World War I, World War II, the Cold War, the Industrial Revolution, "
    "the Renaissance, the Silk Road, the Vikings, the Black Death, the Aztecs, the moon landing, the fall of the Berlin Wall, the Great Depression",
    "country": "France, Japan, Brazil, Canada, Kenya, Norway, India, Mexico, Egypt, Australia, Italy, Germany, Thailand, Peru, Greece, Morocco",
    "city": "Paris, Tokyo, New York, London, Rome, Berlin, Istanbul, Bangkok, Sydney, Cairo, Vienna, Chicago, Mumbai", "tone": "funny, sad, friendly, short, calm",
    "animal": "dogs, cats, elephants, penguins, dolphins, bees, owls, wolves, sharks, horses, octopuses, butterflies, tigers, spiders, whales, frogs",
    "food": "pancakes, chicken soup, vegetable curry, banana bread, pizza, spaghetti, chocolate cake, fried rice, tacos, apple pie, sushi, lentil soup",
    "sport": "football, basketball, tennis, swimming, running, cycling, yoga, chess, volleyball, baseball, boxing, skiing, golf, rock climbing, karate",
    "job": "teacher, nurse, software developer, chef, firefighter, lawyer, farmer, journalist, electrician, accountant, pilot, dentist, bus driver, architect",
    "hobby": "gardening, painting, photography, knitting, cooking, hiking, bird watching, fishing, board games, dancing, camping, stargazing, video games",
    "life": "friendship, saving money, time management, getting a pet, school uniforms, social media, recycling, homework, electric cars, small talk",
    "programming": "recursion, loops, variables, object-oriented programming, APIs, databases, SQL, Git, HTML, CSS, JavaScript, Python lists, pointers, "
    "exceptions, unit tests, binary search, hash tables, linked lists, machine learning, neural networks, encryption, Linux, regular expressions, JSON",
    "maths": "prime numbers, fractions, the Pythagorean theorem, probability, percentages, algebra, calculus, geometry, statistics, pi, averages, vectors",
    "health": "sleep, vitamins, stress, a balanced diet, back pain, headaches, exercise, the immune system, allergies, meditation, caffeine, sugar, first aid",
    "music": "jazz, classical music, the piano, hip hop, rock music, the violin, Mozart, Beethoven, opera, folk songs, reggae, drums, film music, choirs",
    "work": "a late delivery, a job application, a day off, a meeting next week, a broken laptop, a pay rise, a birthday party, a lost package, a refund",
    "name": "Anna, Tom, Maria, Ben, Lucy, Omar, Sofia, Jack, Mei, David, Priya, Sam, Emma, Carlos, Nina, Leo, Sarah, Ali, Julia, Max",
    "item": "apples, books, pencils, marbles, cookies, tickets, stamps, oranges, stickers, eggs, cards, balloons, bottles of water, coins, flowers",
    "language": "French, Spanish, German, Italian, Dutch, Latin, Japanese", "audience": "a child, a beginner, my grandmother, a student, a busy manager",
    "phrase": "Good morning, Thank you very much, Where is the train station?, How much does this cost?, My name is {name}, I am from {country}, "
    "I love {hobby}, What time is it?, We are going to {city} next week, Where can I buy {food}?, I am a {job}, Do you like {animal}?, I am hungry",
    "wrong": "She dont like {food}, me and {name} goes to {city} yesterday, I has {number} {item} in my bag, Their going to {country} next week, "
    "{name} and {name2} was playing {sport}, I am interesting in {hobby}, Yesterday I see many {animal}, {name} speak {language} very good",
    "function": "reverses a string, checks if a number is prime, counts the vowels in a string, finds the largest number in a list, reads a CSV file, "
    "sorts a list of names, removes duplicates from a list, computes the factorial of n, returns the first {number} Fibonacci numbers, finds the median, "
    "checks if a word is a palindrome, merges two dictionaries, multiplies all numbers by {digit}, computes the average of {item} sold a day",
    "form": "poem, haiku, story, song, limerick, fairy tale, dialogue, speech, riddle, joke, blog post, essay, paragraph, tweet, bedtime story",
    "role": "a pirate, a history teacher, a travel guide, a doctor, a friendly robot, a sports coach, a poet, a detective, Shakespeare, a {job}",
    "rude": "Send me the report now, You are late again, Give me my money back, Answer my email about {work}, Your {food} tasted awful, Stop talking about {any}",
    "feeling": "tired, stressed, bored, lonely, nervous about {work}, excited about {hobby}, angry with {name}, sad, stuck with {maths}",
    "sentence": "{name} is a {job} who lives in {city}. | Last year {name} travelled to {country} and learned a lot about {history}. | Many people in "
    "{country} enjoy {sport} and {hobby}. | Scientists have found new facts about {animal} and {science}. | In {city} the price of {food} rose by "
    "{number} percent. | Experts say that {health} is important for every {job}. | The course covers {programming} and {maths} in {digit} weeks. | "
    "{name} started a club for {hobby} with {number} members. | A new museum about {history} opened in {city}. | After work {name} likes to make {food}. | "
    "The company wrote to {name} about {work}. | Over {big} people came to {city} to see {sport}. | {big} people were asked about {life} and {music}.",
}.items()}  # fmt: skip
IDEAS = ["science", "history", "programming", "maths", "health", "music"]
THINGS = ["animal", "food", "sport", "hobby", "life", "country", "city"]
GROUPS = {"idea": IDEAS, "thing": THINGS, "any": IDEAS + THINGS}
NUMBERS = {"digit": (2, 9), "number": (2, 99), "big": (100, 9999)}
TEMPLATES = [template.strip() for template in """
What is {idea}? | What are the main causes of {history}? | Explain {idea} to {audience}. | Can you explain {idea} in simple terms? | Define {idea}.
How does {science} work? | Why is {idea} important? | Tell me about {any}. | Tell me something interesting about {any}. | List {digit} facts on {any}.
Give me {digit} examples of {idea} in everyday life. | Write a {tone} {form} about {any}. | Write a {form} about {name}, a {job} who loves {thing}.
Write an email to my boss about {work}. | Write a {tone} letter to {name} about {work}. | Write a {tone} {form} about {animal} in {city}.
Compare {thing} and {thing2}. | I feel {feeling}. What can I do? | What is the difference between {programming} and {programming2}?
How can I get better at {sport}? | How do I start with {hobby}? | I want to become a {job}. What should I do? | What does a {job} do all day?
{name} has {number} {item} and buys {number2} more. How many {item} does {name} have now? | What is {number} times {digit}? | What is {big} + {big2}?
{name} has {big} {item} and gives {number} to {name2}. How many are left? | A train goes {number} km an hour. How far does it go in {digit} hours?
{number} {item} cost {digit} dollars each. How much is that? | If {digit} boxes hold {number} {item} each, how many {item} are there?
What is {number}% of {big}? | {name} runs {digit} km every day. How far is that in {number} days? | Calculate {big} - {number}. | Is {big} a prime number?
{name} is {number} years old. {name2} is {digit} years older. How old is {name2}? | Solve for x: {digit}x + {number} = {big}{br}Show your steps.
Translate to {language}: {phrase} | How do you say "{phrase}" in {language}? | Translate this sentence into {language}:{br}{sentence}
Hi! My name is {name}. | Hello, how are you today? | Good morning! What can you do? | hey | Thank you! | Who are you? | Can you help me with {any}?
Hi, I am {name} from {city}, nice to meet you | Do you like {thing}? | Do you prefer {food} or {food2}? | I'm {feeling} today. | Tell me a joke about {any}.
Write a Python function that {function}. | Write a Python program that {function} and explain it step by step. | How do I write code that {function}?
Fix this sentence: {wrong} | Correct the grammar:{br}{wrong} | Is this correct English? "{wrong}" | Rewrite politely: {rude} | Make this polite:{br}{rude}
Can you make it shorter? | Can you give me another example with {any}? | And what about {any}? | Now do the same for {any}. | Please continue.
You said that {any} and {any2} are related. How? | I did not understand that. Explain {idea} again, please. | Now write it as a {form} for {audience}.
You are {role}. Tell me about {any}. | Act as {role} and answer: what do you think of {any}? | Pretend to be {role} who talks to {name} about {any}.
How do I make {food}? | Give me a simple recipe for {food}. | I have {number} minutes. How can I make {food} for {digit} people? | What goes well with {food}?
Plan a {digit} day trip to {city}. | What should I see in {city}? | What is the capital of {country}? | Give me travel tips for {country} for {audience}.
What do people eat in {country}? | How do I get from {city} to {city2}? | What are the pros and cons of {life}? | What are the advantages of {hobby}?
Summarise:{br}{sentence} {sentence2} {sentence3} | Summarize this in one sentence:{br}{sentence} {sentence2} | tl;dr {sentence} {sentence2} {sentence3}
Give me keywords for this text:{br}{sentence} {sentence2} | List the names and places in this text:{br}{sentence} {sentence2} {sentence3}
Is this text positive or negative?{br}{sentence} {sentence2} | Write a title for this article:{br}{sentence} {sentence2} {sentence3}
What do {animal} eat? | Where do {animal} live? | Why do {animal} and {animal2} behave differently? | What would the world be like without {idea}?
How did {history} change the world? | Write {digit} quiz questions about {any} with answers. | Make a study plan for {idea}. | Give me {digit} tips for {hobby}.
""".replace("\n", "|").split("|") if template.strip()]  # fmt: skip
OPENINGS = ["Hi, ", "Hello! ", "Quick question: ", "I have a question. ", "hey, ", "ok so "]
ENDINGS = [" Thanks!", " Keep it short.", " Use simple words.", " Please.", " In one paragraph.", " thx"]
MODULES = """argparse array ast asyncio base64 bisect builtins calendar collections concurrent.futures configparser contextlib copy csv datetime decimal
difflib email.message enum fileinput fractions functools gc gzip heapq html http.client inspect io ipaddress itertools json locale logging math operator os
pathlib pickle platform pprint queue random re sched secrets selectors shelve shlex shutil smtplib socket socketserver ssl statistics string struct
subprocess sys tarfile tempfile textwrap threading time types unicodedata unittest unittest.mock urllib.parse urllib.request weakref xml.etree.ElementTree
zipfile zlib"""
ON_NAMES = [
    "What does {name} of {module} do?", "Write an example that uses {module}.{name}.", "Explain {module}.{name} to a beginner.",
    "How do I use {module}.{name} in Python?", "what is {module}.{name} for?", "When should I use {name} from the {module} module?",
]  # fmt: skip
ON_PARAGRAPHS = [
    "Summarise this text: {text}", "Explain in simple words: {text}", "What is this about?\n\n{text}", "Rewrite this in one short sentence:\n{text}",
    "Give me three keywords for this text: {text}", "Turn this into a list of points:\n\n{text}", "{text}\n\nCan you explain this to me?",
]  # fmt: skip


def main() -> int:
    """Returns the exit status. Errors of the user or of the environment are reported in one line on
    stderr."""
    parser = argparse.ArgumentParser(prog="chat_prompts.py", description=__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL", help="a folder in Hugging Face layout")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--samples", type=int, default=20_000, metavar="N", help="of the model")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    given, found = parser.parse_args(), dict[str, str]()
    rng = random.Random(given.seed)
    try:
        _add(found, "templates", _from_templates(rng), NUM_FROM_TEMPLATES)
        _add(found, "documentation", _from_documentation(rng), NUM_FROM_DOCUMENTATION)
        _add(found, "the model", _from_model(given), given.samples)
        lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n" for prompt in found.values()]
        rng.shuffle(lines)
        given.out.write_text("".join(lines), encoding="utf-8")
    except (HeadwayError, OSError) as error:
        print(f"chat_prompts.py: {error}", file=sys.stderr)
        return 1
    return 0


def _add(found: dict[str, str], kind: str, prompts: Iterator[str], most: int) -> None:
    """Adds up to `most` prompts that differ from all found ones, ignoring case."""
    before = len(found)
    while len(found) < before + most and (prompt := next(prompts, None)) is not None:
        found.setdefault(prompt.casefold(), prompt)
    print(f"{len(found) - before:,} prompts from {kind}", file=sys.stderr)


def _from_templates(rng: random.Random) -> Iterator[str]:
    """Yields an infinite stream of prompts, some of them varied as people who type vary them."""
    while True:
        text = _filled(rng, rng.choice(TEMPLATES))
        if rng.random() < 0.1:
            text = rng.choice(OPENINGS) + text[0].lower() + text[1:]
        if rng.random() < 0.1 and "\n" not in text and text[-1] in ".?":
            text += rng.choice(ENDINGS)
        if rng.random() < 0.15:
            text = text.lower()
        yield text.rstrip(".?!") if rng.random() < 0.15 else text


def _filled(rng: random.Random, template: str) -> str:
    """Replaces braces by words, also within these words; {any} and {any2} become words of the same kind."""
    chosen: dict[str, str] = {}
    kinds = {group: rng.choice(kinds) for group, kinds in GROUPS.items()}

    def word(match: re.Match[str]) -> str:
        slot, kind = match[1], match[1].rstrip(string.digits)
        if kind == "br":
            return rng.choice(["\n\n", "\n", " "])
        if slot not in chosen and kind in NUMBERS:
            chosen[slot] = str(rng.randint(*NUMBERS[kind]))
        elif slot not in chosen:
            chosen[slot] = rng.choice([w for w in WORDS[kinds.get(kind, kind)] if w not in chosen.values()])
        return chosen[slot]

    while "{" in template:
        template = re.sub(r"\{(\w+)\}", word, template)
    return re.sub(r"\b([Aa]) (?=[aeiouAEIOU8])", r"\1n ", template)


def _from_documentation(rng: random.Random) -> Iterator[str]:
    """Yields alternately a question about a name of the standard library and one about a paragraph of its
    documentation."""
    names: list[tuple[str, str]] = []
    paragraphs: dict[str, None] = {}
    for module_name in MODULES.split():
        module = importlib.import_module(module_name)
        for name, text in _documented(module, getattr(module, "__all__", dir(module))):
            names.append((module_name, name))
            parts = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
            paragraphs |= {p: None for p in parts if len(p) in PARAGRAPH_CHARACTERS and _is_prose(p)}
    rng.shuffle(names)
    for (module_name, name), text in zip(names, rng.sample(list(paragraphs), len(paragraphs)), strict=False):
        yield rng.choice(ON_NAMES).format(module=module_name, name=name)
        yield rng.choice(ON_PARAGRAPHS).format(text=text)


def _documented(owner: object, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yields (name, documentation) of public functions and classes, and of the methods of these classes."""
    for name in sorted(name for name in names if not name.startswith("_")):
        value = getattr(owner, name, None)
        if (inspect.isroutine(value) or inspect.isclass(value)) and (text := inspect.getdoc(value)):
            yield name, text
            if inspect.isclass(value) and inspect.ismodule(owner):
                yield from ((f"{name}.{method}", found) for method, found in _documented(value, vars(value)))


def _is_prose(text: str) -> bool:
    num_letters = sum(character in string.ascii_letters + " \n" for character in text)
    return num_letters >= MIN_SHARE_OF_LETTERS * len(text) and text.replace("\n", " ").isprintable()


def _from_model(given: argparse.Namespace) -> Iterator[str]:
    """Yields the prompts that the model writes as a user and ends by itself. Raises HeadwayError."""
    config = EngineConfig(model_path=str(given.model), depth=0, device=given.device, dtype=given.dtype)
    engine, ends = assemble(config, progress=lambda _: None), Defaults.of(given.model).stop_token_ids
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(given.model)
    if not tokenizer.chat_template:
        raise ConfigError(f"{given.model} has no chat template, so it writes no prompts; give --samples 0")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": MARKER}], tokenize=False)
    start = tokenizer.encode(str(chat).partition(MARKER)[0], add_special_tokens=False)
    texts: dict[int, str] = {}

    def tell(request: Submit, ids: list[int]) -> None:
        if ids[-1] in ends and not set(ids[:-1]) & set(tokenizer.all_special_ids):
            texts[request.request_id] = str(tokenizer.decode(ids[:-1])).strip()

    requests = (
        Submit(
            request_id=number, prompt_token_ids=start, max_tokens=MAX_TOKENS, stop_token_ids=ends,
            sampling=SamplingParams(temperature=1.0, top_p=0.95, seed=given.seed * given.samples + number),
        )
        for number in range(given.samples)
    )  # fmt: skip
    sample(engine, requests, tell)
    for _, text in sorted(texts.items()):
        if MIN_CHARACTERS <= len(text) <= MAX_CHARACTERS and _is_prose(text):
            yield text


if __name__ == "__main__":
    sys.exit(main())
