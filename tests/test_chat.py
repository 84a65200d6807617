from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from beaconkv_gguf import BeaconError, KVStats, cli
from beaconkv_gguf.cli.chat import Conversation
from native import child_environment

OPTIONS = ["--threads", "1", "--temp", "0", "--max-tokens", "8", "--n-ctx", "1024"]


def chat(*lines: str, options: list[str] = OPTIONS) -> Result:
    """A chat whose input is no terminal."""
    try:
        runner = CliRunner(mix_stderr=False)  # before click 8.2
    except TypeError:
        runner = CliRunner()
    return runner.invoke(cli.app, ["chat", *options], input="".join(f"{line}\n" for line in lines))


def read_tokens(result: Result) -> list[tuple[int, int]]:
    """Tokens of each prompt that were read, and all of them."""
    found = re.findall(r"([\d,]+) of ([\d,]+) prompt tokens read", result.stderr)
    return [(int(read.replace(",", "")), int(n.replace(",", ""))) for read, n in found]


def test_each_line_is_a_message(smollm2_path: Path) -> None:
    result = chat("What is two and two?", "", "And three and three?")
    assert result.exit_code == 0, result.output
    (first, n_first), (second, n_second) = read_tokens(result)
    assert first == n_first > 0
    assert second < n_first < n_second, "the chat goes on: what it holds is not read again"
    assert "tokens/s" not in result.stdout
    assert len(result.stdout.strip()) > 10


def test_stats_show_the_budget(smollm2_path: Path) -> None:
    result = chat("Hi", "/stats", options=[*OPTIONS, "--kv-budget", "512"])
    assert result.exit_code == 0, result.output
    assert "of 512 in 30 layers" in result.stderr


def test_exit_ends_the_chat(smollm2_path: Path) -> None:
    result = chat("/exit", "Hi")
    assert result.exit_code == 0, result.output
    assert result.stdout == ""


def test_a_saved_chat_goes_on_as_if_it_had_not_stopped(smollm2_path: Path, tmp_path: Path) -> None:
    lines = ["My name is Ada.", "I like lamps.", "What is my name?"]
    whole = chat(*lines)
    first = chat(*lines[:2], f"/save {tmp_path / 'a chat.json'}")
    second = chat(f"/load {tmp_path / 'a chat.json'}", lines[2])
    assert whole.exit_code == first.exit_code == second.exit_code == 0, second.output
    assert first.stdout + second.stdout == whole.stdout
    assert read_tokens(second) == read_tokens(whole)[2:]
    read, n_prompt = read_tokens(second)[0]
    assert read < n_prompt


def test_messages_are_loaded_where_their_cache_is_refused(
    smollm2_path: Path, tmp_path: Path
) -> None:
    file = tmp_path / "chat.json"
    chat("My name is Ada.", f"/save {file}", options=[*OPTIONS, "--kv-budget", "512"])
    other = chat(f"/load {file}", "Hi", options=[*OPTIONS, "--kv-budget", "768"])
    assert other.exit_code == 0, other.output
    line = other.stderr.splitlines()[0]
    assert line.startswith("loaded 2 messages; they will be read again: ")
    assert "budget" in line
    (tmp_path / "chat.json.state").unlink()
    without = chat(f"/load {file}", "Hi", options=[*OPTIONS, "--kv-budget", "768"])
    assert without.exit_code == 0, without.output
    assert read_tokens(without) == read_tokens(other)
    read, n_prompt = read_tokens(other)[0]
    assert read == n_prompt > 30


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("/nonsense", "there is no command /nonsense"),
        ("/load missing.json", "missing.json"),
        ("/load {text}", "no saved chat"),
        ("/load", "name of a file is missing"),
        ("/save /no/such/folder/chat.json", "folder"),
        ("/regenerate", "no message to reply to"),
        ("word " * 1100, "1024"),
    ],
)
def test_errors_are_one_line(smollm2_path: Path, tmp_path: Path, line: str, text: str) -> None:
    (tmp_path / "text").write_text('{"messages": [{"role": 1}]}')
    result = chat(line.format(text=tmp_path / "text"))
    assert result.exit_code == 1
    assert text in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_input_that_is_no_text_is_one_line(smollm2_path: Path) -> None:
    with start(Path(), stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        _, errors = process.communicate(b"\xff\xfe\n", timeout=30)
    assert process.returncode == 1
    assert errors.startswith(b"error: ")
    assert len(errors.splitlines()) == 1


# --- without a model ------------------------------------------------------------------------------


class Replies:
    """Stands in for a `Llama` that has its replies ready: pieces of thinking and of text."""

    n_tokens = 0
    _n_prompt_and_written = (0, 0)

    def __init__(self, *replies: list[dict[str, str]]) -> None:
        self.replies = list(replies)
        self.asked: list[list[dict[str, str]]] = []

    def create_chat_completion(self, messages: Any, **_: Any) -> Iterator[Any]:
        self.asked.append(messages)
        for delta in [{"role": "assistant"}, *self.replies.pop(0), {}]:
            if "stop" in delta:
                raise KeyboardInterrupt
            yield {"choices": [{"delta": delta}]}

    def kv_stats(self) -> KVStats:
        return KVStats(*[0] * 24)

    def save_state_file(self, path: Path) -> None:
        path.touch()

    def load_state_file(self, path: Path) -> None:
        raise BeaconError("not this one")


def texts(conversation: Conversation) -> list[str]:
    return [f"{message['role']}: {message['content']}" for message in conversation.messages]


def test_thinking_is_shown_apart(capsys: pytest.CaptureFixture[str]) -> None:
    llm = Replies(
        [{"reasoning_content": "[red] hm"}, {"reasoning_content": "m"}, {"content": "Ten"}]
    )
    conversation = Conversation(llm)  # type: ignore[arg-type]
    conversation.take("How many?")
    output = capsys.readouterr()
    assert output.out == "Ten\n"
    assert output.err.startswith("[red] hmm\n")
    assert conversation.messages[1] == {
        "role": "assistant",
        "reasoning_content": "[red] hmm",
        "content": "Ten",
    }


def test_commands_change_the_messages(tmp_path: Path) -> None:
    replies = [[{"content": text}] for text in ("a", "b", "c", "d", "e")]
    llm = Replies(*replies)
    conversation = Conversation(llm, "Be brief.")  # type: ignore[arg-type]
    conversation.take("1")
    conversation.take("2")
    conversation.take("/regenerate")
    expected = ["system: Be brief.", "user: 1", "assistant: a", "user: 2", "assistant: c"]
    assert texts(conversation) == expected
    assert [message["content"] for message in llm.asked[2]] == ["Be brief.", "1", "a", "2"]

    conversation.take(f"/save {tmp_path / 'chat.json'}")
    conversation.take("/system Be verbose.")
    assert texts(conversation) == ["system: Be verbose.", *expected[1:]]
    conversation.take("/clear")
    assert texts(conversation) == ["system: Be verbose."]
    conversation.take("/system")
    conversation.take(" /etc is a folder")
    assert texts(conversation) == ["user:  /etc is a folder", "assistant: d"]
    conversation.take(f"/load {tmp_path / 'chat.json'}")
    assert texts(conversation) == expected
    assert json.loads((tmp_path / "chat.json").read_text()) == {"messages": conversation.messages}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["chat.json", "chat.json.state"]


def test_a_stopped_reply_is_kept_and_an_empty_one_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stop = {"stop": ""}
    llm = Replies([{"content": "One, "}, {"content": "two"}, stop], [stop], [], [{"content": "a"}])
    conversation = Conversation(llm)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        conversation.take("Count.")
    assert texts(conversation) == ["user: Count.", "assistant: One, two"]
    with pytest.raises(KeyboardInterrupt):
        conversation.take("Go on.")
    conversation.take("And on.")
    assert texts(conversation) == ["user: Count.", "assistant: One, two"]
    assert "wrote nothing" in capsys.readouterr().err


# --- signals and terminals ------------------------------------------------------------------------

LONG = ["--threads", "1", "--temp", "0", "--n-ctx", "4096"]
STORY = "Tell a very long story."


@contextmanager
def start(tmp_path: Path, **streams: Any) -> Iterator[subprocess.Popen[bytes]]:
    environment = child_environment(
        TERM="xterm", COLUMNS="100", PROMPT_TOOLKIT_NO_CPR="1", XDG_STATE_HOME=str(tmp_path)
    )
    command = [sys.executable, "-m", "beaconkv_gguf", "chat", *LONG]
    with subprocess.Popen(
        command, env=environment, cwd=Path(__file__).parent, **streams
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.skipif(os.name == "nt", reason="no SIGINT for one process")
def test_ctrl_c_ends_a_chat_without_a_terminal(smollm2_path: Path, tmp_path: Path) -> None:
    pipe = subprocess.PIPE
    with start(tmp_path, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{STORY}\n".encode())
        process.stdin.flush()
        process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"tokens/s" in errors
    assert b"Traceback" not in errors


class Terminal:
    """The other side of a pseudo terminal."""

    def __init__(self, master: int) -> None:
        self._master = master
        self._text = ""  # what was not waited for yet

    def wait_for(self, pattern: str) -> None:
        deadline = time.monotonic() + 30
        while not (match := re.search(pattern, self._text)):
            assert time.monotonic() < deadline, self._text
            if select.select([self._master], [], [], 0.1)[0]:
                self._text += os.read(self._master, 1 << 16).decode(errors="replace")
        self._text = self._text[match.end() :]

    def wait_for_prompt(self) -> None:
        self.wait_for(r"\x1b\[\?2004h")  # prompt_toolkit takes pasted text from here on

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())


@pytest.fixture
def terminal() -> Iterator[tuple[Terminal, dict[str, Any]]]:
    """A terminal, and the arguments that put a process into it."""
    master, slave = os.openpty()
    try:
        yield (
            Terminal(master),
            {"stdin": slave, "stdout": slave, "stderr": slave, "start_new_session": True},
        )
    finally:
        os.close(slave)
        os.close(master)


@pytest.mark.skipif(os.name == "nt", reason="no pseudo terminals")
def test_ctrl_c_stops_a_reply_and_keeps_it(
    smollm2_path: Path, tmp_path: Path, terminal: tuple[Terminal, dict[str, Any]]
) -> None:
    file = tmp_path / "chat.json"
    user, streams = terminal
    with start(tmp_path, **streams) as process:
        user.wait_for_prompt()
        user.type(f"{STORY}\r")
        user.wait_for("([a-z]+ ){6}")
        process.send_signal(signal.SIGINT)
        user.wait_for(r"tokens/s(?s:.*)stopped")
        user.wait_for_prompt()
        user.type("/nonsense\r")
        user.wait_for("there is no command")
        user.wait_for_prompt()
        user.type(f"/save {file}\r")
        user.wait_for("saved 2 messages")
        user.wait_for_prompt()
        user.type("\x04")
        assert process.wait(timeout=30) == 0
    question, answer = json.loads(file.read_text())["messages"]
    assert question["content"] == STORY
    assert answer["content"]
    history = tmp_path / "beaconkv_gguf" / "chat-history"
    assert f"+{STORY}" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


@pytest.mark.skipif(os.name == "nt", reason="no pseudo terminals")
def test_ctrl_c_at_the_prompt_leaves(
    smollm2_path: Path, tmp_path: Path, terminal: tuple[Terminal, dict[str, Any]]
) -> None:
    user, streams = terminal
    with start(tmp_path, **streams) as process:
        user.wait_for_prompt()
        user.type("\x03")
        assert process.wait(timeout=30) == 0
