"""Texts to measure on: a plan and facts at the start that later steps go back to.

Such steps are the paper's *thought revisiting tokens*: what they need stands far back, and nothing
just before them foretells it. Where a text is made here, its revisits are known by construction.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

ATTRIBUTES = (
    "weight in kilograms",
    "access code",
    "year of construction",
    "number of rooms",
    "distance to the harbour in metres",
)
STEPS = (
    "compare the sealed crates with the harbour ledger",
    "measure the slope of the northern channel",
    "list every guard who signed the blue register",
    "recalculate the toll for barges longer than nine metres",
    "discard the readings taken during the storm",
    "convert the old coinage into silver marks",
    "check the lantern schedule against the tide table",
    "count the missing pages of the survey",
    "estimate the rope needed for the eastern crane",
    "interview the keeper about the broken seal",
    "average the depth soundings from three boats",
    "write the verdict for the council in plain words",
)
_FACT_LEADS = (
    "Now I need a known fact again. Looking back at the list at the start, the {a} of {e} is ",
    "Wait, which value was given for {e}? From the facts at the beginning: the {a} of {e} is ",
    "To continue I recall the {a} of {e}, which according to the given facts is ",
)
_PLAN_LEADS = (
    "Let me go back to the plan that I wrote at the start. ",
    "That part is finished. What did the plan say next? ",
    "Before going on, I re-read my plan. ",
)
_ASIDES = (
    "Hmm, let me slow down and make sure that I did not slip a sign here. Checking the last line "
    "again, it looks fine, so I can go on with the next part of the computation. ",
    "Alternatively, I could organise the work as a loop over cases, but the number of cases is "
    "small, so I will simply write them out one after another. ",
    "Wait, is that consistent with what I wrote two lines above? Yes, the units match, and the "
    "order of magnitude is right. ",
    "Okay, so that sub-result is settled. It is not the final answer yet, but it reduces the "
    "remaining work by a good amount. ",
)


MAX_FACTS = 1000  # each about an entity of its own, of some 34,000 names


@dataclass(frozen=True)
class Fact:
    """The `attribute` of `entity` is `value`."""

    entity: str
    attribute: str
    value: str


@dataclass(frozen=True)
class Revisit:
    """Characters [start, end) that say again what stands at `source`."""

    start: int
    end: int
    kind: str  # "fact" or "plan"
    source: int


@dataclass(frozen=True)
class Trace:
    """A text, the end of its prompt part in characters, and its revisits."""

    name: str
    text: str
    n_prompt: int = 0
    facts: tuple[Fact, ...] = ()
    plan: tuple[str, ...] = ()
    revisits: tuple[Revisit, ...] = field(default=(), repr=False)


def synthetic(seed: int, n_words: int = 3000, n_facts: int = 26, n_steps: int = 12) -> Trace:
    """A problem with facts and a plan, then long work that goes back to them now and then.

    The work is sums, halvings, divisions and asides with numbers of their own; between two
    revisits lie 15 to 200 words or a little more, irregularly.

    Parameters
    ----------
    seed : int
        The same seed gives the same text.
    n_words : int, default 3000
        Length of the whole text in words; a word is about 1.7 tokens here.
    n_facts, n_steps : int
        Facts (1 to 1,000) and plan items (1 to 12) at the start.

    Raises
    ------
    ValueError
        A count is out of its range.
    """
    if not 1 <= n_facts <= MAX_FACTS:
        raise ValueError(f"n_facts must be from 1 to {MAX_FACTS}, not {n_facts}")
    if not 1 <= n_steps <= len(STEPS):
        raise ValueError(f"n_steps must be from 1 to {len(STEPS)}, not {n_steps}")
    rng = random.Random(seed)
    entities: list[str] = []
    while len(entities) < n_facts:
        name = _name(rng)
        if name not in entities:
            entities.append(name)
    facts = tuple(Fact(e, rng.choice(ATTRIBUTES), str(rng.randint(1003, 9899))) for e in entities)
    steps = rng.sample(STEPS, n_steps)

    text = "Problem. The following facts are known and will be needed later.\n"
    sources: dict[object, int] = {}
    for fact in facts:
        sources[fact] = len(text)
        text += f"- The {fact.attribute} of {fact.entity} is {fact.value}.\n"
    text += "\nHere is my plan for the solution.\n"
    for i, step in enumerate(steps):
        sources[step] = len(text)
        text += f"Plan item {i + 1}: {step}.\n"
    text += "\nNow I start working through it in order, thinking out loud.\n\n"
    n_prompt = len(text)

    parts = [text]
    length, words = n_prompt, len(text.split())
    revisits: list[Revisit] = []

    def write(piece: str) -> None:
        nonlocal length, words
        parts.append(piece)
        length += len(piece)
        words += len(piece.split())

    def revisit(piece: str, kind: str, source: int) -> None:
        start = length
        write(piece)
        revisits.append(Revisit(start, length, kind, source))

    current = 1
    since, until = 0, rng.randint(30, 60)
    while words < n_words:
        before = words
        write(_work(rng))
        if rng.random() < 0.18:
            write("\n\n")
        since += words - before
        if since < until:
            continue
        since, until = 0, int(min(200, 15 + rng.expovariate(1 / 30)))
        if rng.random() < 0.62:
            fact = rng.choice(facts)
            write("\n\n" + rng.choice(_FACT_LEADS).format(a=fact.attribute, e=fact.entity))
            revisit(fact.value, "fact", sources[fact])
            n = rng.randint(3, 9)
            write(f". Adding {n} to it gives {int(fact.value) + n}, which I keep for the moment. ")
        else:
            i = current % n_steps if rng.random() < 0.6 else rng.randrange(n_steps)
            current += 1
            write("\n\n" + rng.choice(_PLAN_LEADS) + f"Plan item {i + 1}:")
            revisit(f" {steps[i]}", "plan", sources[steps[i]])
            write(". Good, so that is what I have to do in this part.\n\n")
    return Trace(
        f"synthetic-{seed}", "".join(parts), n_prompt, facts, tuple(steps), tuple(revisits)
    )


def problem(seed: int) -> str:
    """A long problem for a model to write about: facts, rules, a plan to follow item by item."""
    rng = random.Random(seed)
    names = [_name(rng) for _ in range(8)]
    days = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
    facts = "\n".join(
        f"F{i + 1}. Depot {name}: stock {rng.randint(110, 990)} crates, capacity "
        f"{rng.randint(1000, 1900)} crates, cost per crate {rng.randint(11, 58)} dollars, closed "
        f"on {rng.choice(days)}."
        for i, name in enumerate(names)
    )
    plan = "\n".join(f"Plan item {i + 1}: {step}." for i, step in enumerate(rng.sample(STEPS, 6)))
    return (
        "Solve a long planning problem. Show every computation, do not skip a depot, and never "
        f"summarise.\n\nFACTS\n{facts}\n\nPLAN\n{plan}\n\nFollow the plan item by item. Before "
        "each item, restate it and the facts that you need from the list above. Think step by "
        "step at full length."
    )


def _name(rng: random.Random) -> str:
    consonants, vowels = "bdfgklmnprstvz", "aeiou"
    start = "".join(rng.choice(letters) for letters in (consonants, vowels, consonants, vowels))
    return (start + rng.choice(("n", "r", "l", "x", "th", "sk", ""))).capitalize()


def _work(rng: random.Random) -> str:
    """One piece of reasoning that needs nothing from far back."""
    a, b = rng.randint(12, 99), rng.randint(12, 99)
    kind = rng.randrange(7)
    if kind == 0:
        tens, ones = 10 * (b // 10), b % 10
        return (
            f"Let me multiply {a} by {b}. First {a} times {tens} is {a * tens}, then {a} times "
            f"{ones} is {a * ones}. Adding the two parts gives {a * tens} + {a * ones} = {a * b}. "
            f"So the product is {a * b}. "
        )
    if kind == 1:
        n, primes = rng.randint(101, 999), (2, 3, 5, 7, 11, 13)
        checks = "".join(f"{n} divided by {p} leaves {n % p}, " for p in primes)
        found = any(n % p == 0 for p in primes)
        verdict = "it has a small divisor and is not prime" if found else "no small divisor works"
        return f"Is {n} prime? I check small divisors: {checks}so {verdict}. "
    if kind == 2:
        total, steps = 0, ""
        for n in (rng.randint(3, 40) for _ in range(6)):
            steps += f"{total} plus {n} is {total + n}; "
            total += n
        return f"Running total: {steps}the sum of these six values is {total}. "
    if kind == 3:
        n = rng.randint(200, 900)
        steps = ""
        start = n
        while n > 5:
            steps += f"{n} -> {n // 2}, "
            n //= 2
        return f"Halving step by step from {start}: {steps}and then I stop. "
    if kind == 4:
        return rng.choice(_ASIDES)
    if kind == 5:
        x, y, z = rng.randint(2, 9), rng.randint(10, 60), rng.randint(3, 20)
        c = x * z + y
        return (
            f"Solve {x}x + {y} = {c}. Subtract {y} on both sides: {x}x = {c - y}. Divide by {x}: "
            f"x = {z}. Plugging back: {x} times {z} plus {y} equals {c}, which is right. "
        )
    return (
        f"Compare {a * b} with {b * (a + 1)}: the second is larger by {b}, because one more copy "
        f"of {b} was added. So the ordering does not change. "
    )
