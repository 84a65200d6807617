"""Task accuracy under a budget: exact answers, next to the same model's full cache.

    python benchmarks/tasks.py [--policy NAME]... [--kv-budget CELLS]... [--seeds N] [--model FILE]

Two tasks. *retrieval*: facts and a plan at the start, long irregular work, then a question for each
fact and plan item. *reasoning-gym*: a long prompt of worked examples, then problems of the same
families (needs the extra `bench`). Each question is asked after the context alone: the sequence is
cut back to its end in between. Answers are greedy. The same arguments give the same numbers on the
same machine.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable

import exams
from exams import Exam, Question
from llama_cpp.llama_chat_format import Jinja2ChatFormatter
from rich import box
from rich.console import Console
from rich.table import Table

from beaconkv_gguf import BeaconConfig, Llama, llama_cpp
from beaconkv_gguf.config import POLICIES
from beaconkv_gguf.default_model import default_model_path

TASKS = ("retrieval", "reasoning-gym")
FULL = "full"
ALL = "all"
WINDOW = BeaconConfig().window


@dataclass(frozen=True)
class Paper:
    """An exam in tokens.

    Attributes
    ----------
    exam : Exam
    end : int
        Characters of the exam's text in the context.
    context : list of int
        Ends where a compaction was just due, so that none falls into a question.
    n_prompt : int
        Tokens of the problem statement.
    questions : list of list of int
        In the order of ``exam.questions``.
    """

    exam: Exam
    end: int
    context: list[int]
    n_prompt: int
    questions: list[list[int]]

    @property
    def n_room(self) -> int:
        """Most tokens that a question and its answer take."""
        answers = (question.n_answer for question in self.exam.questions)
        return max(len(tokens) + n for tokens, n in zip(self.questions, answers))


@dataclass(frozen=True)
class Mark:
    """One answer, the circumstances, and whether it is right. Budgets and pins are in cells."""

    task: str
    kind: str
    seed: int
    policy: str
    budget: int | None
    n_pinned: int
    question: str
    answer: str
    right: bool


@dataclass(frozen=True)
class Row:
    """Accuracy of one kind of question under one policy and budget.

    Attributes
    ----------
    task, kind : str
        The kind may be `ALL` of the task.
    policy : str
    budget : int or None
        Cells; None for the full cache.
    n : int
        Questions.
    accuracy : float
        Share of them that was answered right.
    low, high : float
        Its binomial 95 % interval.
    relative : float or None
        Accuracy by that of the full cache; None where that is 0.
    """

    task: str
    kind: str
    policy: str
    budget: int | None
    n: int
    accuracy: float
    low: float
    high: float
    relative: float | None

    @property
    def label(self) -> str:
        return f"{self.task}, all" if self.kind == ALL else self.kind


class PlainForm:
    """The text as it is; a question goes on with it."""

    def __init__(self, llm: Llama) -> None:
        self._llm = llm

    def context(self, exam: Exam, end: int) -> list[int]:
        return self._llm.tokenize(exam.text[:end].encode())

    def prompt(self, exam: Exam) -> list[int]:
        return self.context(exam, exam.n_prompt)

    def question(self, exam: Exam, question: Question) -> list[int]:
        return self._llm.tokenize(question.text.encode(), add_bos=False)


class ChatForm:
    """The model's chat template: the user's problem, the assistant's work, the user's question.

    Raises
    ------
    ValueError
        The model has no chat template.
    """

    _MARK = "QUESTION"

    def __init__(self, llm: Llama) -> None:
        template = llm.metadata.get("tokenizer.chat_template")
        if template is None:
            raise ValueError(f"{llm.model_path} has no chat template: leave --chat out")
        self._llm = llm
        self._formatter = Jinja2ChatFormatter(
            template=template,
            eos_token=self._text(llm.token_eos()),
            bos_token=self._text(llm.token_bos()),
        )

    def _text(self, token: int) -> str:
        return self._llm._model.token_get_text(token) if token != -1 else ""

    def _render(self, exam: Exam, end: int) -> tuple[str, str, bool]:
        """What the template puts before and after a question, and whether BOS is in it."""
        prompt, work = exam.text[: exam.n_prompt][:end], exam.text[exam.n_prompt : end]
        messages: list[Any] = [{"role": "user", "content": prompt}]
        if work:
            messages.append({"role": "assistant", "content": work})
            messages.append({"role": "user", "content": self._MARK})
        else:
            messages[0]["content"] += self._MARK
        result = self._formatter(messages=messages)
        before, after = result.prompt.rsplit(self._MARK, 1)
        return before, after, result.added_special

    def context(self, exam: Exam, end: int) -> list[int]:
        before, _, has_bos = self._render(exam, end)
        return self._llm.tokenize(before.encode(), add_bos=not has_bos, special=True)

    def prompt(self, exam: Exam) -> list[int]:
        return self.context(exam, exam.n_prompt)

    def question(self, exam: Exam, question: Question) -> list[int]:
        _, after, _ = self._render(exam, exam.ends[-1])
        text = question.text + after
        return self._llm.tokenize(text.encode(), add_bos=False, special=True)


def set_paper(form: PlainForm | ChatForm, exam: Exam, n_tokens: int) -> Paper:
    """Put an exam into tokens, with at most `n_tokens` of context.

    A compaction comes when cells run out and frees `WINDOW` of them, so under a budget that is a
    multiple of `WINDOW` the room after n tokens is the same as for any other such budget. The
    context ends where that room takes every question.

    Raises
    ------
    ValueError
        There is no such end.
    """
    questions = [form.question(exam, question) for question in exam.questions]
    n_prompt = len(form.prompt(exam))
    for end in reversed(exam.ends):
        context = form.context(exam, end)
        paper = Paper(exam, end, context, n_prompt, questions)
        if len(context) <= n_tokens and paper.n_room <= -len(context) % WINDOW:
            return paper
    raise ValueError(
        f"{exam.task}, seed {exam.seed}: no context of up to {n_tokens} tokens leaves the room of "
        f"{paper.n_room} tokens that its longest question needs before a compaction; "
        "try another number"
    )


def take(llm: Llama, paper: Paper, policy: str) -> list[Mark]:
    """Read the context, then answer each question after it.

    Raises
    ------
    ValueError
        The context fits into the budget, or leaves less room than a question needs.
    RuntimeError
        A compaction fell into a question, or the pins were lost.
    """
    exam, start = paper.exam, len(paper.context)
    llm.reset()
    if llm.kv_budget is not None and paper.n_prompt <= llm.beacon.pin_share * llm.kv_budget:
        llm.eval(paper.context[: paper.n_prompt])
        llm.pin(paper.n_prompt)
    llm.eval(paper.context[llm.n_tokens :])
    stats, boundary = llm.kv_stats(), llm.boundary
    if llm.kv_budget is not None:
        n_free = llm.kv_budget - stats.n_held
        if stats.n_evicted == 0:
            raise ValueError(f"{start} tokens fit into {llm.kv_budget} cells: nothing was evicted")
        if n_free < paper.n_room:
            raise ValueError(
                f"a question needs {paper.n_room} cells, but only {n_free} of {llm.kv_budget} are "
                "free before the next compaction"
            )

    marks = []
    for question, tokens in zip(exam.questions, paper.questions):
        llm.n_tokens = start  # where the cache can't go back there, llama_cpp reads all again
        answer = write(llm, paper.context + tokens, question.n_answer)
        if (llm.boundary, llm.kv_stats().n_pinned) != (boundary, stats.n_pinned):
            raise RuntimeError(
                "a compaction fell into a question, or the cache could not go back and lost its "
                f"pins: {question.text!r}"
            )
        restated = question.restated_at is not None and question.restated_at <= paper.end
        kind = f"{question.kind}, restated" if restated else question.kind
        marks.append(
            Mark(
                exam.task,
                kind,
                exam.seed,
                policy,
                llm.kv_budget,
                stats.n_pinned,
                question.text,
                answer,
                question.is_right(answer),
            )
        )
    return marks


def write(llm: Llama, tokens: Sequence[int], n_max: int) -> str:
    """First line that the model writes, greedily and in up to `n_max` tokens."""
    text = b""
    for n, token in enumerate(llm.generate(tokens, temp=0.0), start=1):
        if llama_cpp.llama_vocab_is_eog(llm._model.vocab, token):
            break
        text += llm.detokenize([token])
        if n == n_max or b"\n" in text.lstrip():
            break
    return text.decode("utf-8", "replace").strip().split("\n", 1)[0]


def wilson(n_right: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Binomial 95 % interval of ``n_right / n``."""
    share = n_right / n
    middle = share + z * z / (2 * n)
    spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def rows(marks: Sequence[Mark]) -> list[Row]:
    """Accuracy by kind, policy and budget, then of all kinds of a task; full cache first."""

    def ordered(key: Callable[[Mark], Any]) -> list[Any]:
        return list(dict.fromkeys(map(key, marks)))

    result = []
    for task in ordered(lambda mark: mark.task):
        kinds = sorted({mark.kind for mark in marks if mark.task == task})
        for kind in [*kinds, ALL]:
            full = None
            for policy, budget in ordered(lambda mark: (mark.policy, mark.budget)):
                rights = [
                    mark.right
                    for mark in marks
                    if (mark.task, mark.policy, mark.budget) == (task, policy, budget)
                    and kind in (mark.kind, ALL)
                ]
                accuracy = sum(rights) / len(rights)
                full = accuracy if policy == FULL else full
                relative = accuracy / full if full else None
                interval = wilson(sum(rights), len(rights))
                result.append(
                    Row(task, kind, policy, budget, len(rights), accuracy, *interval, relative)
                )
    return result


def table(results: Sequence[Row], title: str) -> Table:
    view = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for name in ("question", "policy", "budget"):
        view.add_column(name, no_wrap=True)
    for name in ("accuracy", "95 %", "n", "of full"):
        view.add_column(name, justify="right", no_wrap=True)
    for row in results:
        is_first = row.policy == FULL
        if is_first:
            view.add_section()
        view.add_row(
            row.label if is_first else "",
            row.policy,
            "" if row.budget is None else f"{row.budget:,}",
            f"{row.accuracy:.3f}",
            f"{row.low:.2f}-{row.high:.2f}",
            str(row.n),
            "" if row.relative is None else f"{row.relative:.2f}",
        )
    return view


def measure(arguments: argparse.Namespace) -> list[Mark]:
    """Set the papers, and have them taken with the full cache and under every policy and budget."""

    def load(kv_budget: int | None = None, beacon: BeaconConfig | None = None) -> Llama:
        return Llama(
            arguments.model or str(default_model_path()),
            n_ctx=arguments.n_tokens + WINDOW,
            n_batch=WINDOW,  # one compaction for each window, as when a model writes
            n_threads=arguments.threads,
            n_threads_batch=arguments.threads,
            kv_budget=kv_budget,
            beacon=beacon,
            flash_attn=True,  # as under a budget
            verbose=False,
        )

    marks: list[Mark] = []

    def take_all(llm: Llama, policy: str) -> None:
        for paper in papers:
            since = time.perf_counter()
            new = take(llm, paper, policy)
            marks.extend(new)
            stats = llm.kv_stats()
            print(
                f"{paper.exam.task}, seed {paper.exam.seed}, {policy} {llm.kv_budget or 'cache'}: "
                f"{sum(mark.right for mark in new)} of {len(new)} right, {stats.n_logical} tokens "
                f"in {stats.n_held} cells, {time.perf_counter() - since:.0f} s",
                file=sys.stderr,
                flush=True,
            )

    with load() as llm:
        form = ChatForm(llm) if arguments.chat else PlainForm(llm)
        papers = []
        for task in arguments.task:
            for seed in range(1, arguments.seeds + 1):
                exam = make_exam(task, seed, llm, arguments)
                papers.append(set_paper(form, exam, arguments.n_tokens))
        take_all(llm, FULL)
    for policy in arguments.policy:
        pin_share = BeaconConfig.pin_share if arguments.pin else 0.0
        config = BeaconConfig(policy=policy, pin_share=pin_share)
        for budget in arguments.kv_budget:
            with load(budget, config) as llm:
                take_all(llm, policy)
    return marks


def make_exam(task: str, seed: int, llm: Llama, arguments: argparse.Namespace) -> Exam:
    if task == "retrieval":
        return exams.retrieval(
            seed, arguments.n_tokens, arguments.n_facts, arguments.n_steps, arguments.chat
        )
    return exams.gym(
        seed, arguments.n_tokens, lambda text: len(llm.tokenize(text.encode(), add_bos=False))
    )


def gym_version() -> str:
    """Version of reasoning-gym.

    Raises
    ------
    RuntimeError
        It is not installed.
    """
    try:
        return importlib.metadata.version("reasoning-gym")
    except importlib.metadata.PackageNotFoundError:
        raise RuntimeError(
            "the task reasoning-gym needs the extra 'bench' (Python 3.10 or newer): pip install "
            '"beaconkv_gguf[bench]", or leave it out with --task retrieval'
        ) from None


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", action="append", choices=TASKS, help="repeatable; default: both")
    parser.add_argument(
        "--policy", action="append", choices=POLICIES, help="repeatable; default: beacon"
    )
    parser.add_argument(
        "--kv-budget", action="append", type=int, help="cells, repeatable; default: 1024"
    )
    parser.add_argument("--seeds", type=int, default=3, help="exams of each task, from seed 1 on")
    parser.add_argument("--n-tokens", type=int, default=4096, help="most tokens of a context")
    parser.add_argument("--n-facts", type=int, default=26)
    parser.add_argument("--n-steps", type=int, default=12, help="plan items, 1 to 12")
    parser.add_argument("--model", help="GGUF file; default: the embedded default model")
    parser.add_argument("--chat", action="store_true", help="ask in the model's chat template")
    parser.add_argument(
        "--pin",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="pin the problem statement where the default share of the budget takes it; "
        "by default every policy has to choose what to keep of it",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write every answer and the table to this file")
    arguments = parser.parse_args(argv)
    arguments.task = arguments.task or list(TASKS)
    arguments.policy = arguments.policy or ["beacon"]
    arguments.kv_budget = arguments.kv_budget or [1024]
    if arguments.seeds < 1:
        parser.error("--seeds: at least 1")
    for budget in arguments.kv_budget:
        if budget % WINDOW or not 0 < budget < arguments.n_tokens:
            parser.error(
                f"--kv-budget {budget}: must be a multiple of {WINDOW} cells and below --n-tokens "
                f"({arguments.n_tokens}), else nothing is evicted"
            )
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    try:
        version = gym_version() if "reasoning-gym" in arguments.task else None
        marks = measure(arguments)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    results = rows(marks)
    model = Path(arguments.model or default_model_path()).name
    n_pinned = max(mark.n_pinned for mark in marks)
    title = (
        f"{model}, contexts of up to {arguments.n_tokens:,} tokens, "
        f"{'chat template' if arguments.chat else 'plain text'}, "
        f"{f'up to {n_pinned} tokens pinned' if n_pinned else 'nothing pinned'}"
    )
    Console(soft_wrap=True).print(table(results, title))
    if arguments.json:
        report = {
            "title": title,
            "reasoning_gym": version,
            "rows": [asdict(row) for row in results],
            "answers": [asdict(mark) for mark in marks],
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
