"""What an instruct model is asked to write: short stories, plain facts and answers, combined from lists of words."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Ask", "asks"]


def _listed(words: str) -> list[str]:
    return [" ".join(one.split()) for one in words.split("|")]


ANIMALS = _listed("""
fox|rabbit|hedgehog|owl|mouse|bear|frog|duck|squirrel|turtle|cat|dog|goat|sheep|horse|elephant|lion|penguin|bee|
ant|snail|crow|swan|wolf|deer|beaver|badger|otter|parrot|whale|dolphin|crab|donkey|camel|monkey
""")
PEOPLE = _listed("""
baker|farmer|fisherman|teacher|doctor|gardener|king|queen|princess|knight|sailor|painter|shepherd|tailor|miller|
postman|grandmother|grandfather|girl|boy|singer|carpenter|clockmaker|cook|dancer|soldier|librarian
""")
NAMES = _listed("""
Anna|Tom|Lily|Ben|Mia|Sam|Lucy|Max|Emma|Jack|Sara|Leo|Nina|Oscar|Rosa|Peter|Clara|Hugo|Ella|Felix|Ida|Paul|Maya|
Otto|Ruth|Finn|Alma|Carl|Vera|Noah|June|Amir|Lena|Omar|Kim|Theo|Zoe|Adam|Iris|Jonas
""")
TRAITS = _listed("""
shy|brave|curious|lazy|kind|clever|lonely|proud|greedy|gentle|noisy|careful|forgetful|cheerful|stubborn|patient|
hungry|sleepy|honest|grumpy|tiny|old|young|helpful|impatient|polite|worried|playful
""")
PLACES = _listed("""
a garden|a forest|a small village|a castle|a farm|the seaside|a mountain|an island|a school|a market|a river|a
lighthouse|a snowy field|a big city|a meadow|a cave|a ship|a train|a library|a mill|a harbour|a desert|a
kitchen|a pond|an old house|a bridge|a valley|a toy shop|a bakery|a playground
""")
THINGS = _listed("""
lantern|key|boat|hat|kite|bell|book|map|apple|drum|ladder|letter|candle|basket|coat|ring|mirror|wheel|feather|
stone|bread|blanket|box|ball|umbrella|clock|cup|flower|seed|shoe|song|rope|window|door|egg|coin|cake|tree|
pencil|bucket|scarf|picture|spoon|button|star|moon|rain|snow|wind|fire|promise|secret|dream|race|party|birthday|
storm|gift|nest|puddle|bridge|path
""")
LESSONS = _listed("""
sharing makes friends|it is good to tell the truth|asking for help is brave|small ones can do great things|
being patient pays|everyone is good at something|work is easier together|one should not be greedy|saying sorry
mends a friendship|being different is fine|practice makes things easier|kindness comes back|one should listen
before speaking|fear goes away when you look at it|promises must be kept|home is where friends are|rest is as
important as work|waste is foolish
""")
OPENINGS = _listed("""
Once upon a time|One windy morning|Long ago|It was the first day of spring|Late one evening|Every morning|On a
cold winter day|There once was|In a quiet valley|Nobody knew why|It had rained all night|One summer|Far away
from here|At the end of the road|When the sun came up|On the day of the fair
""")
TOPICS = _listed("""
volcanoes|rivers|lakes|bridges|bees|whales|the moon|the sun|rain|snow|bread|paper|glass|iron|gold|salt|cheese|
milk|wheat|rice|tea|coffee|the heart|the lungs|bones|teeth|sleep|eyes|ears|plants|seeds|trees|leaves|flowers|
mushrooms|insects|spiders|birds|fish|frogs|snakes|horses|cows|dogs|cats|elephants|lions|wolves|bears|penguins|
ants|butterflies|dinosaurs|fossils|mountains|deserts|forests|islands|oceans|tides|clouds|thunderstorms|rainbows|
wind|ice|earthquakes|caves|soil|coal|oil|electricity|magnets|batteries|light|sound|heat|colours|mirrors|lenses|
telescopes|microscopes|clocks|wheels|boats|ships|trains|bicycles|cars|aeroplanes|balloons|rockets|satellites|
planets|stars|comets|gravity|maps|compasses|money|markets|farms|mills|windmills|castles|pyramids|cathedrals|
museums|libraries|schools|hospitals|post offices|newspapers|books|printing|writing|alphabets|numbers|music|
pianos|violins|drums|painting|sculpture|theatre|films|photographs|football|chess|swimming|the Olympic Games|
clothes|wool|cotton|silk|leather|wood|stone|bricks|houses|roads|tunnels|dams|wells|lighthouses|harbours|cities|
villages|kings|parliaments|laws|judges|elections|police|firefighters|doctors|teachers|sailors|bakers|carpenters|
Africa|Asia|Europe|Australia|South America|North America|Antarctica|the Nile|the Amazon|the Alps|the Sahara|
Paris|London|Rome|Egypt|China|India|Japan|Brazil|Greece|France|Germany|Canada|Spain|Italy|Norway|Iceland|Mexico|
Kenya
""")
FACETS = _listed("""
what one sees first|where one finds it|how it came about|what it is used for|what few people know|why it matters|
what it is like in winter|what children like about it|how it changes over time|what it needs|what is dangerous about it|
how it was in the past
""")
QUESTIONS = _listed("""
What is known about {0}?|What are {0} good for?|Why do {0} matter to people?|What do children learn about {0}?|
Where does one find {0}?|What is surprising about {0}?|How would you explain {0} to a child?|
What would happen without {0}?|What is the first thing to know about {0}?|Who works with {0}?|
What has changed about {0} over time?|What is difficult about {0}?|What do people enjoy about {0}?
""")
LENGTHS = ("two", "three", "four", "five")


class Ask(NamedTuple):
    """What the model is asked, and what stands before its answer in the text that is kept."""

    kind: str
    words: str
    before: str = ""


def asks(seed: int) -> Iterator[Ask]:
    """Endless: six of ten are stories, two are facts, two are questions; the same for the same seed."""
    chance = random.Random(seed)
    makers = (_story, _story, _story, _fact, _question)
    while True:
        yield chance.choice(makers)(chance)


def _story(chance: random.Random) -> Ask:
    kind = chance.choice(chance.choice((ANIMALS, PEOPLE)))
    who = f"{chance.choice(TRAITS)} {kind}" + (
        f" named {chance.choice(NAMES)}" if chance.random() < 0.7 else ""
    )
    words = f"Write a short story for small children about a {who} in {chance.choice(PLACES)}"
    if chance.random() < 0.5:
        words += f", which shows that {chance.choice(LESSONS)}"
    words += ". Use short, simple sentences"
    if chance.random() < 0.6:
        words += ", and the words " + ", ".join(chance.sample(THINGS, 3))
    if chance.random() < 0.5:
        words += f". Begin with: {chance.choice(OPENINGS)}"
    return Ask("story", f"{words}. Do not give it a title.")


def _fact(chance: random.Random) -> Ask:
    topic, length = chance.choice(TOPICS), chance.choice(LENGTHS)
    words = f"Tell a child about {topic} in {length} plain sentences."
    if chance.random() < 0.8:
        words += f" Say {chance.choice(FACETS)}."
    return Ask("fact", f"{words} Do not make a list.")


def _question(chance: random.Random) -> Ask:
    question = chance.choice(QUESTIONS).format(chance.choice(TOPICS))
    length = chance.choice(LENGTHS[:3])
    return Ask(
        "question", f"{question} Answer in {length} simple sentences.", f"Question: {question}\nAnswer: "
    )
