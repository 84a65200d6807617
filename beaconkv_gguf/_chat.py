"""What `Llama`'s completions have beyond llama_cpp's: thinking apart, template variables, usage."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from llama_cpp.llama_chat_format import (
    Jinja2ChatFormatter,
    chat_formatter_to_chat_completion_handler,
    get_chat_completion_handler,
)

from .reasoning import THINK, Format, Parser, check_format, format_of

#: What Jinja2ChatFormatter itself hands to a template.
_TEMPLATE_VARIABLES = {
    *("messages", "functions", "function_call", "tools", "tool_choice", "strftime_now"),
    *("bos_token", "eos_token", "add_generation_prompt", "raise_exception"),
}


class ChatView:
    """A `Llama` as a chat handler sees it during one call of create_chat_completion.

    Everything is the `Llama`'s own but the handler, which hands `template_kwargs` to the template,
    and the completion, whose text includes the tags where they are special tokens.

    Parameters
    ----------
    llm : Llama
        Its `chat_handler`, or the one of its `chat_format`, is in use.
    reasoning_format : str
        See ``reasoning.REASONING_FORMATS``.
    template_kwargs : mapping, optional
        More variables for the template.

    Raises
    ------
    ValueError
        `reasoning_format` is unknown, or `template_kwargs` can't reach a template.
    """

    llm: Any
    chat_handler: Any
    form: Format | None
    tokens: list[int]
    parser: Parser | None

    def __init__(
        self, llm: Any, reasoning_format: str, template_kwargs: Mapping[str, Any] | None
    ) -> None:
        check_format(reasoning_format)
        handler = (
            llm.chat_handler
            or llm._chat_handlers.get(llm.chat_format)
            or get_chat_completion_handler(llm.chat_format)
        )
        formatter = _jinja_formatter(handler)
        if template_kwargs:
            handler = _with_variables(llm, formatter, template_kwargs)
        form = None
        if reasoning_format != "none":
            # whatever template is in use, the model thinks in the tags of its own
            own = llm.metadata.get("tokenizer.chat_template", "")
            form = (formatter and format_of(formatter.template)) or format_of(own)
            if reasoning_format == "deepseek":
                form = form or THINK
        markers = "".join(form.markers) if form else ""
        tokens = llm.tokenize(markers.encode(), add_bos=False, special=True) if markers else []
        # not by attribute: those are the Llama's
        vars(self).update(llm=llm, chat_handler=handler, form=form, tokens=tokens, parser=None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.llm, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.llm, name, value)

    def create_completion(self, prompt: str | list[int], **kwargs: Any) -> Any:
        """As the `Llama`'s; from here on `parser` is that of its text."""
        grammar = kwargs.get("grammar")
        words = None if grammar is None else getattr(grammar, "_grammar", "")
        # a grammar without the tags, JSON's for instance, has no room for thinking
        if self.form is None or (
            words is not None and not any(marker in words for marker in self.form.markers)
        ):
            return self.llm.create_completion(prompt, **kwargs)
        if isinstance(prompt, str):
            text = prompt
        else:
            text = self.llm.detokenize(prompt[-32:], special=True).decode(errors="ignore")
        vars(self)["parser"] = self.form.parser(text)
        with self._tags_shown():
            result = self.llm.create_completion(prompt, **kwargs)
        return result if isinstance(result, dict) else self._chunks(result)

    def _chunks(self, chunks: Any) -> Iterator[Any]:
        with contextlib.closing(chunks):
            while True:
                with self._tags_shown():
                    chunk = next(chunks, None)
                if chunk is None:
                    return
                yield chunk

    def _tags_shown(self) -> contextlib.AbstractContextManager[None]:
        showing = getattr(self.llm.tokenizer_, "showing", None)  # not a tokenizer of the user's
        return showing(self.tokens) if showing else contextlib.nullcontext()

    def split(self, result: Any) -> Any:
        """A chat completion, or its chunks, with the thinking apart in "reasoning_content"."""
        if not isinstance(result, dict):
            return self._split_chunks(result)
        message = result["choices"][0]["message"]
        if self.parser is not None and isinstance(message.get("content"), str):
            reasoning, message["content"] = self._parts(message["content"], ends=True)
            if reasoning:
                message["reasoning_content"] = reasoning
        return result

    def _split_chunks(self, chunks: Any) -> Iterator[Any]:
        for chunk in chunks:
            if self.parser is None or not chunk["choices"]:
                yield chunk
                continue
            choice = chunk["choices"][0]
            text = choice["delta"].get("content")
            ends = choice.get("finish_reason") is not None
            if not (ends or isinstance(text, str)):
                yield chunk
                continue
            parts = zip(("reasoning_content", "content"), self._parts(text or "", ends))
            deltas: list[dict[str, str]] = [{key: part} for key, part in parts if part]
            if choice.get("logprobs") is not None and not deltas:
                deltas = [{}]
            for i, delta in enumerate(deltas):
                logprobs = choice.get("logprobs") if i == len(deltas) - 1 else None
                piece = {**choice, "delta": delta, "logprobs": logprobs, "finish_reason": None}
                yield {**chunk, "choices": [piece]}
            if ends:
                yield chunk

    def _parts(self, text: str, ends: bool) -> tuple[str, str]:
        assert self.parser is not None
        reasoning, content = self.parser.feed(text)
        rest = self.parser.close() if ends else ("", "")
        return reasoning + rest[0], content + rest[1]


def with_usage(llm: Any, chunks: Any) -> Iterator[Any]:
    """The chunks of a completion, and at the end one with the tokens of its prompt and text."""
    last = {}
    with contextlib.closing(chunks):
        for chunk in chunks:
            last = chunk
            yield {**chunk, "usage": None}
    n_prompt, n_written = llm._n_prompt_and_written
    usage = {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_written,
        "total_tokens": n_prompt + n_written,
    }
    yield {**last, "choices": [], "usage": usage}


def extends(parent: Any) -> Callable[[Any], Any]:
    """Decorator: the method takes what `parent` takes, and its own keywords; help() shows both."""

    def decorate(method: Any) -> Any:
        signature = inspect.signature(parent)
        own = inspect.signature(method).parameters.values()
        keywords = [parameter for parameter in own if parameter.kind is parameter.KEYWORD_ONLY]
        method.__signature__ = signature.replace(
            parameters=[*signature.parameters.values(), *keywords]
        )
        return method

    return decorate


def wants_usage(stream_options: Mapping[str, Any] | None) -> bool:
    """OpenAI's `stream_options`; TypeError if they are none."""
    if stream_options is None:
        return False
    if not isinstance(stream_options, Mapping):
        raise TypeError(f"stream_options must be a dict, not {stream_options!r}")
    return bool(stream_options.get("include_usage"))


def _jinja_formatter(handler: Any) -> Jinja2ChatFormatter | None:
    """The formatter of a handler that llama_cpp made of one."""
    if not inspect.isfunction(handler):
        return None
    formatter = inspect.getclosurevars(handler).nonlocals.get("chat_formatter")
    return formatter if isinstance(formatter, Jinja2ChatFormatter) else None


def _with_variables(
    llm: Any, formatter: Jinja2ChatFormatter | None, variables: Mapping[str, Any]
) -> Any:
    """A chat handler that hands more variables to the template."""
    if not isinstance(variables, Mapping):
        raise TypeError(f"chat_template_kwargs must be a dict, not {variables!r}")
    reserved = sorted(_TEMPLATE_VARIABLES.intersection(variables))
    if reserved:
        raise ValueError(f"chat_template_kwargs can't set {', '.join(reserved)}")
    if formatter is None:
        name = "this chat_handler" if llm.chat_handler else f"chat_format={llm.chat_format!r}"
        raise ValueError(
            f"chat_template_kwargs={dict(variables)!r} can't be honoured: "
            f"{name} has no Jinja template"
        )
    return chat_formatter_to_chat_completion_handler(functools.partial(formatter, **variables))
