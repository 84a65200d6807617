"""A model's thinking, split from its answer while the text comes in.

A format says how a family of models marks its thinking; ``format_of`` finds it by the model's chat
template. Its parser takes text in pieces of any size and returns what is sure: what may be the
beginning of a tag waits for the next piece. Tool calls stay in the content as they were written.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Protocol, Union

#: What `reasoning_format` may be.
REASONING_FORMATS = ("auto", "none", "deepseek")


class Parser(Protocol):
    """Splits one text. Both methods return (reasoning, content), each the next piece of it."""

    def feed(self, text: str) -> tuple[str, str]: ...

    def close(self) -> tuple[str, str]:
        """What still waited, at the end of the text."""


@dataclasses.dataclass(frozen=True)
class Tags:
    """Thinking between two tags at the beginning of a text.

    `start` counts before everything but white space, or where the prompt ends with it. White space
    around the tags belongs to neither part; text without a tag passes as it is.

    Attributes
    ----------
    start, end : str
        The tags.
    sign : str
        What a chat template has that uses them, where that is not `start` or `end`.
    """

    start: str
    end: str
    sign: str = ""

    def fits(self, template: str) -> bool:
        return any(sign in template for sign in ([self.sign] if self.sign else self.markers))

    @property
    def markers(self) -> tuple[str, ...]:
        """Text whose special tokens the parser must see."""
        return self.start, self.end

    def parser(self, prompt: str) -> Parser:
        """A parser of what follows the prompt, of which the last 100 characters suffice."""
        return _TagParser(self.start, self.end, prompt.rstrip().endswith(self.start))


class _TagParser:
    def __init__(self, start: str, end: str, opened: bool) -> None:
        self._start = start
        self._end = end
        self._opened = opened  # by the prompt; some models write the tag again
        self._state = "before"  # then "opened", "thinking", "closed", "content"
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        held = self._held + text
        reasoning = content = ""
        if self._state == "before":
            begin = held.lstrip()
            if begin.startswith(self._start):
                self._state, held = "opened", begin[len(self._start) :]
            elif not self._start.startswith(begin):
                self._state, held = ("thinking", begin) if self._opened else ("content", held)
        if self._state == "opened":
            held = held.lstrip()
            if held:
                self._state = "thinking"
        if self._state == "thinking":
            at, tag = _find(held, [self._end])
            size = len(held[:at].rstrip())
            reasoning, held = held[:size], held[size:]
            if tag:
                self._state, held = "closed", held.lstrip()[len(tag) :]
        if self._state == "closed":
            held = held.lstrip()
            if held:
                self._state = "content"
        if self._state == "content":
            content, held = held, ""
        self._held = held
        return reasoning, content

    def close(self) -> tuple[str, str]:
        held, self._held = self._held, ""
        if self._state == "before" and self._opened:
            return held.lstrip(), ""
        return (held, "") if self._state == "thinking" else ("", held)


class Harmony:
    """gpt-oss: messages with a channel each. "analysis" is thinking; a tool call keeps its tags."""

    markers = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>")

    def fits(self, template: str) -> bool:
        return "<|channel|>" in template and "<|message|>" in template

    def parser(self, prompt: str) -> Parser:
        parser = _HarmonyParser()
        if prompt.endswith("<|message|>"):  # of the assistant's: the text begins inside of it
            parser.feed(prompt.rpartition("<|start|>assistant")[2])
        return parser


class _HarmonyParser:
    _OPENINGS = ("<|start|>", "<|channel|>", "<|message|>", "to=")
    _ENDINGS = ("<|end|>", "<|start|>", "<|channel|>")  # at times the model forgets the first

    def __init__(self) -> None:
        self._state = "header"  # or the part that the message belongs to: "reasoning", "content"
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        self._held += text
        parts = {"reasoning": "", "content": ""}
        while self._step(parts):
            continue
        return parts["reasoning"], parts["content"]

    def _step(self, parts: dict[str, str]) -> bool:
        """Take the next header or body from what is held; False if there is no whole one."""
        if self._state != "header":
            at, tag = _find(self._held, self._ENDINGS)
            parts[self._state] += self._held[:at]
            self._held = self._held[at + len(tag if tag == "<|end|>" else "") :]
            if tag:
                self._state = "header"
            return bool(tag)
        begin = self._held.lstrip()
        if not any(o.startswith(begin) or begin.startswith(o) for o in self._OPENINGS):
            self._state = "content"  # no header at all
            return True
        header, tag, rest = begin.partition("<|message|>")
        if not tag:
            return False
        channels = re.findall(r"<\|channel\|>\s*(\w+)", header)  # the last one counts
        if re.search(r"\bto=(?!assistant\b)", header):
            self._state = "content"
            parts["content"] += re.sub(r"^<\|start\|>assistant\s*", "", header) + tag
        else:
            self._state = "reasoning" if channels[-1:] == ["analysis"] else "content"
        self._held = rest
        return True

    def close(self) -> tuple[str, str]:
        held, self._held = self._held, ""
        if self._state == "header":  # it is incomplete, and no part of the answer
            return "", "" if held.lstrip().startswith(self._OPENINGS) else held
        return (held, "") if self._state == "reasoning" else ("", held)


def _find(text: str, tags: Sequence[str]) -> tuple[int, str]:
    """Where the first tag begins, and which; "" if it is incomplete or there is none."""
    found = [(text.index(tag), tag) for tag in tags if tag in text]
    if found:
        return min(found)
    for at in range(max(0, len(text) - max(map(len, tags)) + 1), len(text)):
        if any(tag.startswith(text[at:]) for tag in tags):
            return at, ""
    return len(text), ""


Format = Union[Tags, Harmony]

#: DeepSeek, Qwen, SmolLM3, GLM, Kimi K2, Nemotron, Granite ...
THINK = Tags("<think>", "</think>")

#: The first whose signs a template has is its format.
FORMATS: tuple[Format, ...] = (
    Harmony(),
    Tags("<|channel>thought", "<channel|>", sign="<channel|>"),  # Gemma 4
    Tags("[THINK]", "[/THINK]"),  # Magistral, Ministral
    Tags("<|START_THINKING|>", "<|END_THINKING|>"),  # Command
    Tags("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    Tags("<|think|>", "<|end|><|begin|>assistant", sign="assistant<|think|>"),  # Solar Open
    Tags("<think:opensource>", "</think:opensource>", sign="<think{}>"),  # Hunyuan 3
    Tags("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),  # Apriel
    Tags("<seed:think>", "</seed:think>"),
    Tags("<mm:think>", "</mm:think>"),  # MiniMax M3
    Tags("◁think▷", "◁/think▷"),  # Kimi VL
    Tags("<|begin_of_thought|>", "<|end_of_thought|>"),
    THINK,
    Tags("<thought>", "</thought>"),  # EXAONE Deep
    Tags("<reasoning>", "</reasoning>"),
)


def format_of(template: str) -> Format | None:
    """How a model with this chat template marks its thinking; None if it has no sign of any."""
    return next((form for form in FORMATS if form.fits(template)), None)


def check_format(name: str) -> str:
    """The `reasoning_format` of a name; ValueError says what is allowed."""
    if name not in REASONING_FORMATS:
        raise ValueError(
            f"reasoning_format={name!r} is none of {', '.join(map(repr, REASONING_FORMATS))}"
        )
    return name
