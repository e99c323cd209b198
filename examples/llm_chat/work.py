"""What is asked: questions about passages of one text, prompts and answers of very different lengths."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

TEXT = """A lighthouse keeper on the northern coast wrote a diary for forty years. Most of its pages tell of the weather, of ships that passed and of oil that
was delivered late. In the spring of the seventh year a fishing boat ran onto the rocks below the tower, and he rowed out alone to bring five people
ashore. The youngest of them, a girl of nine, later became an engineer and came back to build the breakwater that is still there. It is made of
granite blocks, each as heavy as a bus, which were brought by barge from a quarry across the bay. The work took six summers, because in winter the sea
took away what had been built by autumn. When it was finished the village got a harbour, and with the harbour came a market, a school and a railway
station. The lamp itself was lit by hand until a cable was laid under the sea. Since then a clockwork has turned the lens, and a sensor tells it when
dusk has come. Visitors may climb the two hundred and twelve steps on Sundays. From the gallery one can see the islands where seals raise their young,
the fields of rye behind the dunes, and on clear days the mountains of the next country. The keeper's diary is shown in a glass case at the foot of
the stairs. It is open at a page on which he had written only one sentence: the wind has turned, and the bread is good. Scientists have read the other
pages with great care, as nobody else had noted the temperature of the water there twice a day. They found that the first frost now comes three weeks
later than it did, and that the herring leave earlier. A copy of the figures is kept in the library of the university, where students learn from it
how to treat old measurements: which thermometer was used, who read it, and what was going on that day."""

QUESTIONS = (
    "What is this about?",
    "Sum it up in one sentence.",
    "Write a short poem about it.",
    "Which facts does this text give? Make a list.",
    "Continue the story.",
    "Explain it to a child.",
)

LENGTHS = (8, 128)
"""Least and most: tokens of an answer, and about as many words of a passage."""


class Request(NamedTuple):
    """prompt: as client.generate takes it; max_tokens: exactly so many are generated, whatever they are, so that every way has the same work."""

    prompt: Any
    max_tokens: int


def requests(count: int, seed: int = 0) -> list[Request]:
    """Conversations, as messages."""
    choice, words = random.Random(seed), TEXT.split()
    made = []
    for number in range(count):
        length = choice.randint(*LENGTHS) * 2 // 3
        start = choice.randrange(len(words) - length)
        passage = " ".join(words[start : start + length])
        content = f"{passage}\n\n{QUESTIONS[number % len(QUESTIONS)]}"
        made.append(Request([{"role": "user", "content": content}], choice.randint(*LENGTHS)))
    return made
