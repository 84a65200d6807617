"""``beaconkv-gguf chat``."""

import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Callable, Optional

import platformdirs
import typer
from rich.text import Text

from ..llama import Llama
from .common import (
    GpuLayers,
    ModelArgument,
    Threads,
    TypeK,
    TypeV,
    errors,
    fetch_default_model,
    one_line_errors,
    one_line_warnings,
    parse_budget,
    parse_type,
)
from .display import panel

Message = dict[str, str]


def chat(
    model: ModelArgument = None,
    system: Annotated[Optional[str], typer.Option(help="System message.")] = None,
    n_ctx: Annotated[
        int, typer.Option(min=0, help="Logical context in tokens; 0: what the model names.")
    ] = 8192,
    kv_budget: Annotated[
        str, typer.Option(help="KV cells per layer, a share of n-ctx, 'auto' or 'off'.")
    ] = "auto",
    max_tokens: Annotated[
        Optional[int], typer.Option(min=1, help="Tokens of a reply. Default: up to n-ctx.")
    ] = None,
    type_k: TypeK = "f16",
    type_v: TypeV = "f16",
    threads: Threads = None,
    n_gpu_layers: GpuLayers = 0,
    seed: Annotated[
        Optional[int], typer.Option(min=1, help="Seed of the sampler. Default: another each time.")
    ] = None,
    temp: Annotated[float, typer.Option(min=0.0, help="Temperature; 0: greedy.")] = 0.8,
) -> None:
    """Chat with a model in the terminal; /help lists the commands in it.

    Ctrl-C stops a reply, and keeps what was written; at the prompt it leaves, as Ctrl-D does.

    Without a terminal each line of the input is a message. Replies go to stdout; thinking and
    statistics to stderr.
    """
    is_terminal = sys.stdin.isatty()
    with one_line_errors():
        path = model if model is not None else fetch_default_model()
        with one_line_warnings(), errors.status("loading the model"):
            llm = Llama(
                path,
                n_ctx=n_ctx,
                kv_budget=parse_budget(kv_budget),
                n_threads=threads,
                n_threads_batch=threads,
                n_gpu_layers=n_gpu_layers,
                type_k=parse_type(type_k),
                type_v=parse_type(type_v),
                flash_attn=type_v not in ("f16", "bf16", "f32"),
                seed=random.randrange(1, 1 << 31) if seed is None else seed,
                verbose=False,
            )
        with llm:
            conversation = Conversation(llm, system, temperature=temp, max_tokens=max_tokens)
            if is_terminal:
                note(f"{path.name}: {llm.kv_stats()}\n/help lists the commands")
            try:
                _talk(conversation, is_terminal)
            except KeyboardInterrupt:
                raise typer.Exit(0 if is_terminal else 130) from None


def _talk(conversation: "Conversation", is_terminal: bool) -> None:
    """Take lines until there are no more; whoever types them goes on after Ctrl-C and errors."""
    for line in _typed_lines() if is_terminal else sys.stdin:
        try:
            with one_line_errors():
                conversation.take(line.strip("\r\n"))
        except EOFError:
            return
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            note("stopped")
        except typer.Exit:
            if not is_terminal:
                raise


def note(text: str) -> None:
    """What is not a reply goes to stderr, dim."""
    errors.print(Text(text, style="dim"))


class Conversation:
    """The messages of a chat and the model that answers them.

    Parameters
    ----------
    llm : Llama
        Answers.
    system : str, optional
        System message.
    **sampling
        More arguments of ``create_chat_completion``.
    """

    def __init__(self, llm: Llama, system: Optional[str] = None, **sampling: Any) -> None:
        self._llm = llm
        self._sampling = sampling
        self._rate = 0.0  # of the last reply, tokens per second
        self.messages: list[Message] = []
        if system:
            self.messages.append({"role": "system", "content": system})

    def take(self, line: str) -> None:
        """Answer a message, or do what a command says; a blank line is none."""
        if not line.strip():
            return
        if not line.startswith("/"):
            self._answer([*self.messages, {"role": "user", "content": line}])
            return
        name, _, argument = line[1:].partition(" ")
        if name not in COMMANDS:
            raise ValueError(f"there is no command /{name}; /help lists them")
        COMMANDS[name](self, argument.strip())

    def _answer(self, messages: list[Message]) -> None:
        """Let the model answer; the conversation then has the messages and the answer."""
        parts = {"reasoning_content": "", "content": ""}
        times = []
        end = None
        waiting = errors.status("reading")
        waiting.start()
        try:
            with contextlib.closing(
                self._llm.create_chat_completion(messages, stream=True, **self._sampling)
            ) as chunks:
                for chunk in chunks:
                    end = chunk["choices"][0].get("finish_reason") or end
                    for kind, text in chunk["choices"][0]["delta"].items():
                        if kind not in parts or not text:
                            continue
                        waiting.stop()
                        times.append(time.perf_counter())
                        if kind == "content":
                            if parts["reasoning_content"] and not parts["content"]:
                                errors.print()
                            sys.stdout.write(text)
                            sys.stdout.flush()
                        else:
                            errors.print(Text(text, style="dim"), end="")
                        parts[kind] += text
            if not times:
                note("the model wrote nothing; the message is left out")
        finally:
            waiting.stop()
            if times:
                print(flush=True)
                answer = {"role": "assistant", **parts}
                if not answer["reasoning_content"]:
                    del answer["reasoning_content"]
                self.messages = [*messages, answer]
                if end == "length":
                    note("the reply ends here: the context, or --max-tokens, is used up")
                self._show_speed(times)

    def _show_speed(self, times: list[float]) -> None:
        n_prompt, n_written = self._llm._n_prompt_and_written
        seconds = times[-1] - times[0]
        self._rate = (n_written - 1) / seconds if seconds > 0 else 0.0
        stats = self._llm.kv_stats()
        note(
            f"{n_written:,} tokens, {self._rate:.1f} tokens/s; {n_prompt - stats.n_reused:,} of "
            f"{n_prompt:,} prompt tokens read; {stats.n_logical:,} tokens in {stats.n_held:,} "
            f"cells, compactions: {stats.n_compact}"
        )

    def help(self, _: str) -> None:
        """this list"""
        for name, command in COMMANDS.items():
            note(f"/{name:11} {command.__doc__}")

    def stats(self, _: str) -> None:
        """what the KV cache holds"""
        errors.print(panel(self._llm.kv_stats(), self._rate))

    def system(self, text: str) -> None:
        """TEXT: set the system message; without TEXT, have none"""
        rest = [message for message in self.messages if message["role"] != "system"]
        self.messages = [{"role": "system", "content": text}, *rest] if text else rest
        note("the system message is set" if text else "there is no system message")

    def regenerate(self, _: str) -> None:
        """another reply to the last message"""
        last = max((i for i, m in enumerate(self.messages) if m["role"] == "user"), default=None)
        if last is None:
            raise ValueError("there is no message to reply to")
        self._answer(self.messages[: last + 1])

    def clear(self, _: str) -> None:
        """begin anew, with the same system message"""
        self.messages = [message for message in self.messages if message["role"] == "system"]
        note("the chat begins anew")

    def save(self, path: str) -> None:
        """FILE: save the messages there, and the cache to FILE.state"""
        file = _path(path)
        text = json.dumps({"messages": self.messages}, ensure_ascii=False, indent=2)
        written = file.with_name(f".{file.name}.tmp")
        written.write_text(text + "\n", encoding="utf-8")
        os.replace(written, file)  # a failure leaves what was there
        self._llm.save_state_file(_state_path(file))
        note(f"saved {len(self.messages)} messages and {self._llm.n_tokens:,} tokens of cache")

    def load(self, path: str) -> None:
        """FILE: go on with a chat that was saved"""
        file = _path(path)
        text = file.read_text(encoding="utf-8")
        try:
            messages = json.loads(text)["messages"]
            if not all(
                isinstance(m["role"], str) and isinstance(m["content"], str) for m in messages
            ):
                raise TypeError
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{file} is no saved chat") from None
        self.messages = messages
        text = f"loaded {len(messages)} messages"
        try:
            self._llm.load_state_file(_state_path(file))
            note(f"{text} and {self._llm.n_tokens:,} tokens of cache")
        except (OSError, RuntimeError, ValueError) as error:
            note(f"{text}; they will be read again: {error}")

    def exit(self, _: str) -> None:
        """leave, as Ctrl-D does"""
        raise EOFError


COMMANDS: dict[str, Callable[[Conversation, str], None]] = {
    "stats": Conversation.stats,
    "system": Conversation.system,
    "regenerate": Conversation.regenerate,
    "clear": Conversation.clear,
    "save": Conversation.save,
    "load": Conversation.load,
    "help": Conversation.help,
    "exit": Conversation.exit,
}


def _path(text: str) -> Path:
    if not text:
        raise ValueError("the name of a file is missing")
    return Path(text).expanduser()


def _state_path(file: Path) -> Path:
    return file.with_name(f"{file.name}.state")


def _typed_lines() -> Iterator[str]:
    """Lines that a user types, with a history that the next chat has too."""
    # imported here: it takes a tenth of a second, and the other commands don't need it
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory

    file = Path(platformdirs.user_state_dir("beaconkv_gguf"), "chat-history")
    history: History
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)  # what is typed is nobody else's
        history = FileHistory(str(file))
    except OSError:
        history = InMemoryHistory()
    session: PromptSession[str] = PromptSession(history=history)
    while True:
        try:
            yield session.prompt("> ")
        except EOFError:
            return
