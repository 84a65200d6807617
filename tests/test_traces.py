from __future__ import annotations

import re

import pytest

from beaconkv_gguf.traces import problem, synthetic


def test_a_seed_gives_the_same_text_and_another_seed_another() -> None:
    assert synthetic(1, 400) == synthetic(1, 400)
    assert synthetic(1, 400).text != synthetic(2, 400).text
    assert problem(3) == problem(3) != problem(4)


def test_revisits_say_again_what_stands_at_their_source() -> None:
    trace = synthetic(5, 2000)
    assert {revisit.kind for revisit in trace.revisits} == {"fact", "plan"}
    for revisit in trace.revisits:
        again = trace.text[revisit.start : revisit.end].strip()
        line = trace.text[revisit.source :].split("\n", 1)[0]
        assert again and again in line
        assert revisit.source < trace.n_prompt <= revisit.start


def test_the_prompt_holds_every_fact_and_plan_item_and_the_work_comes_after() -> None:
    trace = synthetic(2, 1200, n_facts=5, n_steps=3)
    head = trace.text[: trace.n_prompt]
    assert len(trace.facts) == 5 and len(trace.plan) == 3
    assert all(f"The {f.attribute} of {f.entity} is {f.value}." in head for f in trace.facts)
    assert all(f"Plan item {i + 1}: {step}." in head for i, step in enumerate(trace.plan))
    assert 1200 <= len(trace.text.split()) < 1350


def test_arithmetic_of_the_work_is_right() -> None:
    text = synthetic(7, 2000).text
    products = re.findall(r"multiply (\d+) by (\d+)\..*?So the product is (\d+)", text)
    assert len(products) > 5
    assert all(int(a) * int(b) == int(c) for a, b, c in products)
    sums = re.findall(r"(\d+) plus (\d+) is (\d+);", text)
    assert sums and all(int(a) + int(b) == int(c) for a, b, c in sums)


@pytest.mark.parametrize(
    "counts", [{"n_facts": 0}, {"n_facts": 1001}, {"n_steps": 0}, {"n_steps": 13}]
)
def test_counts_out_of_range_are_refused_by_name(counts: dict[str, int]) -> None:
    ((name, value),) = counts.items()
    with pytest.raises(ValueError, match=rf"{name} must be .* not {value}"):
        synthetic(1, 100, **counts)
