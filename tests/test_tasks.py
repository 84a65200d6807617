"""Task accuracy: the exams, how answers are judged, and that questions don't disturb each other."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import exams
import tasks
from exams import Exam, Question
from tasks import FULL, WINDOW, Mark, Paper

from beaconkv_gguf import BeaconConfig, Llama

BUDGET, N_TOKENS = 512, 1024
ARGUMENTS = ["--task", "retrieval", "--n-tokens", str(N_TOKENS), "--n-facts", "1", "--n-steps", "1"]


def n_words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("4512. Adding 3 to it gives 4515", True),
        ("It is 4,512 kilograms.", True),
        ("4512", True),
        ("45123", False),
        ("4511, no, 4512", False),
        ("unknown", False),
        ("", False),
    ],
)
def test_a_fact_is_judged_by_the_first_number(answer: str, right: bool) -> None:
    assert exams.gives_number("4512", answer) is right


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("count the missing pages of the survey.", True),
        ("It says: count the missing pages of the survey", True),
        ("count the missing pages of the surveyor", False),
        ("count the missing pages", False),
        ("", False),
    ],
)
def test_a_plan_item_is_judged_word_for_word(answer: str, right: bool) -> None:
    assert exams.gives_text("count the missing pages of the survey", answer) is right


def test_retrieval_asks_for_each_fact_and_plan_item_and_takes_the_stated_answer() -> None:
    exam = exams.retrieval(1, 1000, n_facts=5, n_steps=3)
    assert [question.kind for question in exam.questions] == ["fact"] * 5 + ["plan"] * 3
    prompt = exam.text[: exam.n_prompt].splitlines()
    facts = [line for line in prompt if line.startswith("- ")]
    items = [line for line in prompt if line.startswith("Plan item")]
    for question, line in zip(exam.questions, [*facts, *items]):
        asked, mark, answer = line.rstrip(".").rpartition(": " if line in items else " is ")
        assert question.text.endswith(asked.replace("- The", "the") + mark.rstrip())
        assert answer not in question.text
        assert question.is_right(f" {answer}. ")
        assert not question.is_right(" 17 of them. ")


def test_retrieval_knows_where_the_work_says_an_answer_again() -> None:
    exam = exams.retrieval(2, 1500, n_facts=8, n_steps=12)
    assert {question.restated_at is None for question in exam.questions} == {False, True}
    for question in exam.questions:
        asked = re.split(r"start[,.] ", question.text)[1].replace(" is", "")
        first = exam.text.find(asked, exam.n_prompt)
        assert (first == -1) == (question.restated_at is None)
        if question.restated_at is not None:
            assert question.is_right(exam.text[first + len(asked) : question.restated_at])


def test_the_same_seed_gives_the_same_exam_and_another_seed_another() -> None:
    first, again, other = (exams.retrieval(seed, 800) for seed in (1, 1, 2))
    assert first.text == again.text
    assert [q.text for q in first.questions] == [q.text for q in again.questions]
    assert first.text != other.text


def test_chat_questions_stand_for_themselves() -> None:
    questions = exams.retrieval(1, 800, n_facts=2, n_steps=1, chat=True).questions
    assert all(question.text.endswith("only.") for question in questions)


def test_gym_asks_nothing_that_an_example_shows() -> None:
    pytest.importorskip("reasoning_gym")
    exam = exams.gym(1, 2000, n_words, n_questions=3)
    assert [q.kind for q in exam.questions] == [name for name in exams.FAMILIES for _ in range(3)]
    assert n_words(exam.text) >= 2000
    for question in exam.questions:
        assert question.text not in exam.text
    assert exam.text == exams.gym(1, 2000, n_words, n_questions=3).text
    assert exam.text != exams.gym(2, 2000, n_words, n_questions=3).text


def test_gym_gives_the_full_mark_only() -> None:
    gym = pytest.importorskip("reasoning_gym")
    settings, _ = exams.FAMILIES["gcd"]
    item = gym.create_dataset("gcd", seed=exams._SEED_STEP, size=1, **settings)[0]
    question = exams.gym(1, 50, n_words, ["gcd"], n_questions=1).questions[0]
    assert question.text == f"Question: {item['question']}\nAnswer:"
    assert question.is_right(item["answer"])
    assert not question.is_right(f"The answer is {item['answer']}")
    assert not question.is_right("")


@pytest.mark.parametrize(
    ("n_right", "n", "low", "high"),
    [(0, 10, 0.0, 0.278), (5, 10, 0.237, 0.763), (10, 10, 0.722, 1)],
)
def test_the_interval_is_wilsons(n_right: int, n: int, low: float, high: float) -> None:
    assert tasks.wilson(n_right, n) == pytest.approx((low, high), abs=1e-3)


def test_rows_begin_with_the_full_cache_and_tell_the_share_of_it() -> None:
    def marks(policy: str, kind: str, rights: list[bool]) -> list[Mark]:
        budget = None if policy == FULL else 512
        return [Mark("retrieval", kind, 1, policy, budget, 0, "", "", right) for right in rights]

    results = tasks.rows(
        [
            *marks(FULL, "fact", [True, True, False, False]),
            *marks(FULL, "plan", [False]),
            *marks("beacon", "fact", [True, False, False, False]),
            *marks("beacon", "plan", [True]),
        ]
    )
    told = [(row.label, row.policy, row.n, row.accuracy, row.relative) for row in results]
    assert told == [
        ("fact", FULL, 4, 0.5, 1.0),
        ("fact", "beacon", 4, 0.25, 0.5),
        ("plan", FULL, 1, 0.0, None),
        ("plan", "beacon", 1, 1.0, None),
        ("retrieval, all", FULL, 5, 0.4, 1.0),
        ("retrieval, all", "beacon", 5, 0.4, 1.0),
    ]


@pytest.fixture
def bounded(request: pytest.FixtureRequest, tiny_path: Callable[[str], Path]) -> Iterator[Llama]:
    """A tiny model under a budget; its parameter is the model's name and the `pin_share`."""
    name, pin_share = getattr(request, "param", ("llama", 0.0))
    with Llama(
        tiny_path(name),
        n_ctx=N_TOKENS + WINDOW,
        n_batch=WINDOW,
        kv_budget=BUDGET,
        beacon=BeaconConfig(pin_share=pin_share),
        verbose=False,
    ) as llm:
        yield llm


def small_paper(llm: Llama) -> Paper:
    """Three short questions about a long text."""
    text = "The keeper counts the boats. He writes their number down, then he rests. " * 20
    questions = tuple(
        Question("boats", f"\n{start}", 8, lambda answer: "boats" in answer)
        for start in ("He counts", "His number is", "Then the keeper")
    )
    exam = Exam("retrieval", 1, text, exams._ends(text, ". ", 0), 29, questions)
    return tasks.set_paper(tasks.PlainForm(llm), exam, N_TOKENS)


@pytest.mark.parametrize(
    "bounded",
    [("llama", 0.0), ("llama", 0.25), ("gemma3", 0.25), ("granite_hybrid", 0.0)],
    indirect=True,
)
def test_answers_do_not_depend_on_what_was_asked_before(bounded: Llama) -> None:
    paper = small_paper(bounded)
    questions = paper.exam.questions[::-1]
    backwards = dataclasses.replace(
        paper,
        exam=dataclasses.replace(paper.exam, questions=questions),
        questions=paper.questions[::-1],
    )
    first = tasks.take(bounded, paper, "beacon")
    assert len({mark.answer for mark in first}) > 1
    assert tasks.take(bounded, backwards, "beacon") == first[::-1]


def test_a_context_ends_where_each_question_has_room(bounded: Llama) -> None:
    paper = small_paper(bounded)
    longest = max(len(tokens) for tokens in paper.questions) + 8
    assert paper.n_room == longest <= -len(paper.context) % WINDOW
    assert len(paper.context) <= N_TOKENS
    assert paper.exam.text[: paper.end].endswith(". ")


def test_a_context_without_room_for_a_question_is_refused(bounded: Llama) -> None:
    paper = small_paper(bounded)
    with pytest.raises(ValueError, match="only 0 of 512 are free before the next compaction"):
        tasks.take(
            bounded, dataclasses.replace(paper, context=paper.context[: 6 * WINDOW]), "beacon"
        )
    with pytest.raises(ValueError, match="300 tokens fit into 512 cells: nothing was evicted"):
        tasks.take(bounded, dataclasses.replace(paper, context=paper.context[:300]), "beacon")

    questions = (dataclasses.replace(paper.exam.questions[0], n_answer=WINDOW),)
    exam = dataclasses.replace(paper.exam, questions=questions)
    with pytest.raises(ValueError, match="no context of up to 1024 tokens leaves the room"):
        tasks.set_paper(tasks.PlainForm(bounded), exam, N_TOKENS)


def test_a_run_prints_a_table_and_writes_each_answer(
    tiny_path: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    command = [*ARGUMENTS, "--model", str(tiny_path("llama")), "--seeds", "1"]
    command += ["--kv-budget", str(BUDGET), "--json", str(report)]
    assert tasks.main(command) == 0
    printed = capsys.readouterr().out
    assert tasks.main(command) == 0
    assert capsys.readouterr().out == printed

    data = json.loads(report.read_text())
    assert len(data["answers"]) == 2 * 2
    assert {(row["policy"], row["budget"]) for row in data["rows"]} == {
        (FULL, None),
        ("beacon", BUDGET),
    }
    assert "retrieval, all" in printed
    assert "nothing pinned" in printed


@pytest.mark.parametrize(
    ("bounded", "n_pinned"),
    [(("llama", 0.0), 0), (("llama", 0.05), 0), (("llama", 0.25), 43)],
    indirect=["bounded"],
)
def test_the_problem_statement_is_pinned_where_it_fits(bounded: Llama, n_pinned: int) -> None:
    marks = tasks.take(bounded, small_paper(bounded), "beacon")
    assert {mark.n_pinned for mark in marks} == {n_pinned}


@pytest.mark.parametrize("bounded", [("granite_hybrid", 0.25)], indirect=True)
def test_pins_that_a_model_without_a_way_back_loses_are_told(bounded: Llama) -> None:
    with pytest.raises(RuntimeError, match="could not go back and lost its pins"):
        tasks.take(bounded, small_paper(bounded), "beacon")


def test_a_missing_reasoning_gym_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert tasks.main(["--task", "reasoning-gym"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "beaconkv_gguf[bench]" in error


@pytest.mark.parametrize("budget", ["1000", "0", "4096"])
def test_a_budget_that_makes_no_sense_is_refused(
    budget: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        tasks.parse(["--kv-budget", budget])
    assert "must be a multiple of 128 cells and below --n-tokens" in capsys.readouterr().err


def test_the_chat_form_asks_in_the_models_template(smollm2_path: Path) -> None:
    exam = exams.retrieval(1, 300, n_facts=1, n_steps=1, chat=True)
    question, end = exam.questions[0], exam.ends[0]
    with Llama(smollm2_path, n_ctx=256, verbose=False) as llm:
        form = tasks.ChatForm(llm)
        tokens = form.context(exam, end) + form.question(exam, question)
        text = llm.detokenize(tokens, special=True).decode()
        prompt = llm.detokenize(form.prompt(exam), special=True).decode()
    assert text.startswith(prompt)
    assert prompt.endswith(exam.text[: exam.n_prompt])
    work, asked = text[len(prompt) :].split("<|im_start|>user\n")
    assert exam.text[exam.n_prompt : end] in work
    assert asked == f"{question.text}<|im_end|>\n<|im_start|>assistant\n"


def test_the_chat_form_needs_a_template(bounded: Llama) -> None:
    with pytest.raises(ValueError, match="has no chat template: leave --chat out"):
        tasks.ChatForm(bounded)
