"""Questions with exact answers about long contexts, made by seed; ``tasks.py`` asks them."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable

from beaconkv_gguf import traces

# reasoning-gym's families that a model of 135M parameters answers at times with its full cache, in
# settings easy enough for it, and the tokens that an answer may take. Left out: families where it
# scores next to nothing (spell_backward, leg_counting, basic_arithmetic, simple_equations,
# number_sorting, fraction_simplification, ...), and those with two answers, where it guesses.
FAMILIES: dict[str, tuple[dict[str, Any], int]] = {
    "chain_sum": ({"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, 8),
    "products": ({"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, 8),
    "gcd": ({"min_numbers": 2, "max_numbers": 2, "max_value": 30}, 8),
    "lcm": ({"min_numbers": 2, "max_numbers": 2, "max_value": 12}, 8),
    "letter_counting": ({"min_words": 5, "max_words": 8}, 8),
}
#: Items of two seeds never overlap: reasoning-gym makes item i of seed s from s + i.
_SEED_STEP = 1_000_000


@dataclass(frozen=True)
class Question:
    """What follows a context, and how its answer is judged.

    Attributes
    ----------
    kind : str
        What it asks for; accuracy is told by kind.
    text : str
        Written after the context.
    n_answer : int
        Tokens that an answer may take.
    is_right : callable
        Judges the first line of an answer.
    restated_at : int or None
        Characters of the text after which the answer stood in it once more.
    """

    kind: str
    text: str
    n_answer: int
    is_right: Callable[[str], bool]
    restated_at: int | None = None


@dataclass(frozen=True)
class Exam:
    """Questions about one context.

    Attributes
    ----------
    task : str
        Which kind of exam this is.
    seed : int
        What it was made from.
    text : str
        The context, longer than it need be.
    ends : tuple of int
        Characters after which it may be cut, ascending.
    n_prompt : int
        Characters of the problem statement; the rest is work on it.
    questions : tuple of Question
        Each is asked after the context alone.
    """

    task: str
    seed: int
    text: str
    ends: tuple[int, ...]
    n_prompt: int
    questions: tuple[Question, ...]


def gives_number(value: str, answer: str) -> bool:
    """Whether the first number of an answer is `value`; commas between its digits don't count."""
    number = re.search(r"\d[\d,]*", answer)
    return number is not None and number.group().replace(",", "") == value


def gives_text(value: str, answer: str) -> bool:
    """Whether an answer has `value` word for word."""
    return re.search(rf"\b{re.escape(value)}\b", answer) is not None


def retrieval(
    seed: int, n_tokens: int, n_facts: int = 26, n_steps: int = 12, chat: bool = False
) -> Exam:
    """Facts and a plan, long irregular work, then a question for each fact and plan item.

    Parameters
    ----------
    seed : int
        The same seed gives the same exam.
    n_tokens : int
        Tokens that the context is to have; the text is a little longer.
    n_facts, n_steps : int
        Facts and plan items at the start.
    chat : bool, default False
        Ask as a user would; otherwise as the text itself goes on.

    Raises
    ------
    ValueError
        A count is out of the range of ``traces.synthetic``.
    """
    trace = traces.synthetic(seed, int(n_tokens / 1.3), n_facts, n_steps)
    restated: dict[int, int] = {}
    for revisit in trace.revisits:
        restated.setdefault(revisit.source, revisit.end)

    questions = []
    for fact in trace.facts:
        if chat:
            text = f"What is the {fact.attribute} of {fact.entity}? Answer with the number only."
        else:
            text = (
                "\n\nLooking back at the list at the start, "
                f"the {fact.attribute} of {fact.entity} is"
            )
        source = trace.text.index(f"- The {fact.attribute} of {fact.entity} is")
        is_right = functools.partial(gives_number, fact.value)
        questions.append(Question("fact", text, 24 if chat else 8, is_right, restated.get(source)))
    for i, step in enumerate(trace.plan):
        item = f"Plan item {i + 1}:"
        if chat:
            text = f"Which step is plan item {i + 1}? Answer with its words only."
        else:
            text = f"\n\nLet me go back to the plan that I wrote at the start. {item}"
        source = trace.text.index(item)
        is_right = functools.partial(gives_text, step)
        questions.append(Question("plan", text, 32 if chat else 20, is_right, restated.get(source)))
    ends = _ends(trace.text, ". ", trace.n_prompt)
    return Exam("retrieval", seed, trace.text, ends, trace.n_prompt, tuple(questions))


def gym(
    seed: int,
    n_tokens: int,
    count: Callable[[str], int],
    families: Sequence[str] = tuple(FAMILIES),
    n_questions: int = 8,
) -> Exam:
    """Worked examples of reasoning-gym's families, a block for each, then questions of them all.

    A question of a family whose block stands far back needs what the cache kept of it.

    Parameters
    ----------
    seed : int
        The same seed gives the same exam, and no two seeds share an item.
    n_tokens : int
        Tokens that the context is to have.
    count : callable
        Tokens of a text.
    families : sequence of str
        In the order of their blocks; each is one of `FAMILIES`.
    n_questions : int, default 8
        Questions of each family.

    Raises
    ------
    ModuleNotFoundError
        reasoning-gym is not installed.
    """
    import reasoning_gym

    text, start, n_text = "", 0, 0
    questions = []
    for i, family in enumerate(families, start=1):
        settings, n_answer = FAMILIES[family]
        data = reasoning_gym.create_dataset(
            family, seed=seed * _SEED_STEP, size=_SEED_STEP, **settings
        )
        items = iter(data)
        asked: dict[str, Any] = {}
        while len(asked) < n_questions:
            item = next(items)
            asked.setdefault(item["question"], item)
        for question, item in asked.items():
            is_right = functools.partial(_has_full_score, data, item)
            questions.append(Question(family, f"Question: {question}\nAnswer:", n_answer, is_right))
        start = len(text)
        while n_text < i * n_tokens / len(families):
            item = next(items)
            if item["question"] not in asked:  # else its answer could be copied
                example = f"Question: {item['question']}\nAnswer: {item['answer']}\n\n"
                text += example
                n_text += count(example)
    return Exam(
        "reasoning-gym", seed, text, _ends(text, "\n\n", start), len(text), tuple(questions)
    )


def _has_full_score(data: Any, item: dict[str, Any], answer: str) -> bool:
    """Whether reasoning-gym gives the full mark; it gives parts of one for a right form."""
    return data.score_answer(answer, item) >= 1.0


def _ends(text: str, mark: str, start: int) -> tuple[int, ...]:
    """Ends of the marks after character `start`."""
    return tuple(m.end() for m in re.finditer(re.escape(mark), text) if m.start() >= start)
