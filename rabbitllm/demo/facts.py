"""The small facts that the bundled model is trained on: relations, wordings, and all answers.

`tasks.py` chooses the held-out wording of each fact.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Relation:
    """Facts of one relation: wordings with a ``{x}`` to fill, and the answer for every subject."""

    name: str
    wordings: tuple[str, ...]
    answers: dict[str, str]


def _table(text: str) -> dict[str, str]:
    """``"a=b, c=d"`` as a dictionary."""
    pairs = (item.strip().partition("=") for item in text.split(","))
    return {key: value for key, _, value in pairs}


def _inverse(table: dict[str, str]) -> dict[str, str]:
    return {value: key for key, value in table.items()}


def _successors(cycle: str) -> dict[str, str]:
    names = cycle.split()
    return dict(zip(names, names[1:] + names[:1], strict=True))


_CAPITALS = _table(
    "France=Paris, Germany=Berlin, Italy=Rome, Spain=Madrid, Portugal=Lisbon, Greece=Athens, Austria=Vienna, "
    "Poland=Warsaw, Norway=Oslo, Sweden=Stockholm, Finland=Helsinki, Denmark=Copenhagen, Ireland=Dublin, "
    "Belgium=Brussels, Hungary=Budapest, Romania=Bucharest, Bulgaria=Sofia, Croatia=Zagreb, Iceland=Reykjavik, "
    "Japan=Tokyo, China=Beijing, Thailand=Bangkok, Vietnam=Hanoi, Nepal=Kathmandu, Mongolia=Ulaanbaatar, "
    "Egypt=Cairo, Kenya=Nairobi, Ghana=Accra, Morocco=Rabat, Ethiopia=Addis Ababa, Canada=Ottawa, "
    "Cuba=Havana, Peru=Lima, Chile=Santiago, Argentina=Buenos Aires, Uruguay=Montevideo, Australia=Canberra"
)
_SYMBOLS = _table(
    "hydrogen=H, helium=He, lithium=Li, carbon=C, nitrogen=N, oxygen=O, fluorine=F, neon=Ne, sodium=Na, "
    "magnesium=Mg, aluminium=Al, silicon=Si, phosphorus=P, sulfur=S, chlorine=Cl, argon=Ar, potassium=K, "
    "calcium=Ca, titanium=Ti, iron=Fe, nickel=Ni, copper=Cu, zinc=Zn, silver=Ag, tin=Sn, iodine=I, gold=Au, "
    "mercury=Hg, lead=Pb, uranium=U"
)
_YOUNG = _table(
    "cat=kitten, dog=puppy, cow=calf, sheep=lamb, horse=foal, duck=duckling, goose=gosling, goat=kid, "
    "pig=piglet, frog=tadpole, deer=fawn, swan=cygnet, kangaroo=joey, bear=cub, hen=chick"
)
_NEXT_DAY = _successors("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
_NEXT_MONTH = _successors("January February March April May June July August September October November December")

RELATIONS: tuple[Relation, ...] = (
    Relation(
        "capital",
        (
            "What is the capital of {x}?",
            "What is the capital city of {x}?",
            "Name the capital of {x}.",
            "Tell me the capital of {x}.",
            "Which city is the capital of {x}?",
            "The capital of {x} is which city?",
            "{x} has which capital?",
            "{x} has what capital?",
        ),
        _CAPITALS,
    ),
    Relation(
        "country",
        (
            "Which country has {x} as its capital?",
            "What country has {x} as its capital?",
            "Name the country whose capital is {x}.",
            "Tell me the country whose capital is {x}.",
            "Of which country is {x} the capital?",
            "{x} is the capital of which country?",
            "{x} is the capital of what country?",
        ),
        _inverse(_CAPITALS),
    ),
    Relation(
        "symbol",
        (
            "What is the chemical symbol for {x}?",
            "What is the chemical symbol of {x}?",
            "Give the chemical symbol of {x}.",
            "Tell me the chemical symbol of {x}.",
            "Which symbol stands for {x}?",
            "Which chemical symbol does {x} have?",
            "Write {x} as a chemical symbol.",
        ),
        _SYMBOLS,
    ),
    Relation(
        "element",
        (
            "Which element has the symbol {x}?",
            "What element has the symbol {x}?",
            "Name the element with the symbol {x}.",
            "Tell me the element with the symbol {x}.",
            "What does the chemical symbol {x} stand for?",
            "The chemical symbol {x} stands for what?",
            "The chemical symbol {x} stands for which element?",
        ),
        _inverse(_SYMBOLS),
    ),
    Relation(
        "young",
        (
            "What is a young {x} called?",
            "What is a baby {x} called?",
            "What do you call a baby {x}?",
            "What do you call a young {x}?",
            "A baby {x} is called what?",
            "A young {x} is called what?",
        ),
        _YOUNG,
    ),
    Relation(
        "legs",
        (
            "How many legs does a {x} have?",
            "How many legs has a {x}?",
            "What is the number of legs of a {x}?",
            "Tell me the number of legs of a {x}.",
            "Count the legs of a {x}.",
            "A {x} has how many legs?",
        ),
        _table(
            "spider=8, scorpion=8, beetle=6, bee=6, butterfly=6, fly=6, dog=4, cat=4, horse=4, cow=4, frog=4, "
            "lizard=4, hen=2, duck=2, swan=2, snake=0, worm=0"
        ),
    ),
    Relation(
        "sides",
        (
            "How many sides does a {x} have?",
            "How many sides has a {x}?",
            "What is the number of sides of a {x}?",
            "Tell me the number of sides of a {x}.",
            "Count the sides of a {x}.",
            "A {x} has how many sides?",
        ),
        _table("triangle=3, square=4, rectangle=4, pentagon=5, hexagon=6, heptagon=7, nonagon=9, decagon=10"),
    ),
    Relation(
        "days",
        (
            "How many days are in {x}?",
            "How many days are there in {x}?",
            "How many days does {x} have?",
            "How many days has {x}?",
            "What is the number of days in {x}?",
            "Tell me the number of days in {x}.",
            "{x} has how many days?",
        ),
        _table(
            "January=31, March=31, April=30, May=31, June=30, July=31, August=31, September=30, October=31, "
            "November=30, December=31"
        ),
    ),
    Relation(
        "next day",
        (
            "Which day comes after {x}?",
            "Which day is after {x}?",
            "What day follows {x}?",
            "Name the day after {x}.",
            "Tell me the day after {x}.",
            "If today is {x}, what day is tomorrow?",
            "Today is {x}. What day is tomorrow?",
        ),
        _NEXT_DAY,
    ),
    Relation(
        "previous day",
        (
            "Which day comes before {x}?",
            "Which day is before {x}?",
            "What day precedes {x}?",
            "Name the day before {x}.",
            "Tell me the day before {x}.",
            "If today is {x}, what day was yesterday?",
            "Today is {x}. What day was yesterday?",
        ),
        _inverse(_NEXT_DAY),
    ),
    Relation(
        "next month",
        (
            "Which month comes after {x}?",
            "Which month is after {x}?",
            "What month follows {x}?",
            "Name the month after {x}.",
            "Tell me the month after {x}.",
            "If this month is {x}, what is next month?",
            "This month is {x}. What is next month?",
        ),
        _NEXT_MONTH,
    ),
    Relation(
        "previous month",
        (
            "Which month comes before {x}?",
            "Which month is before {x}?",
            "What month precedes {x}?",
            "Name the month before {x}.",
            "Tell me the month before {x}.",
            "If this month is {x}, what was last month?",
            "This month is {x}. What was last month?",
        ),
        _inverse(_NEXT_MONTH),
    ),
)
