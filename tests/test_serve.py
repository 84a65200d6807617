from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_cli import invoke

import beaconkv_gguf.server
from beaconkv_gguf import BeaconConfig
from beaconkv_gguf.server import Server, server_path
from native import child_environment

try:
    server_path()
except FileNotFoundError as error:
    pytest.skip(str(error), allow_module_level=True)

SMALL: dict[str, Any] = {"n_ctx": 2048, "kv_budget": 512, "threads": 1}
posix = pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")


@pytest.fixture(scope="module")
def model(tiny_path: Callable[[str], Path]) -> Path:
    return tiny_path("llama")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with Server(model, **SMALL) as server:
        yield server


def get(url: str, key: str | None = None) -> Any:
    """A JSON answer, or the status of a refusal."""
    request = urllib.request.Request(url)
    if key is not None:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code


def complete(url: str, n: int) -> Any:
    """A completion of `n` tokens."""
    body = {"prompt": "Once upon a time", "n_predict": n, "ignore_eos": True}
    request = urllib.request.Request(f"{url}/completion", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def ends(pid: int, within: float = 10) -> bool:
    """Whether a process ends in that many seconds."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def test_a_server_answers_at_its_url(server: Server) -> None:
    assert server.url == f"http://127.0.0.1:{server.port}"
    assert server.poll() is None
    assert get(f"{server.url}/health") == {"status": "ok"}
    assert len(get(f"{server.base_url}/models")["data"]) == 1
    assert f"listening on {server.url}" in server.log


def test_a_completion_goes_on_past_the_budget(server: Server) -> None:
    answer = complete(server.url, 700)
    assert answer["tokens_predicted"] == 700
    assert answer["tokens_evaluated"] + 700 > SMALL["kv_budget"]
    assert answer["stop_type"] == "limit"
    assert not answer["truncated"]


def test_each_chat_has_the_whole_context(model: Path) -> None:
    with Server(model, n_ctx=1024, kv_budget=None, parallel=2, threads=1) as server:
        slots = get(f"{server.url}/slots")
    assert [slot["n_ctx"] for slot in slots] == [1024, 1024]


def test_a_context_is_what_the_chats_really_have(model: Path, smollm2_path: Path) -> None:
    with Server(model, n_ctx=300, kv_budget=None, threads=1) as server:
        assert server.n_ctx == get(f"{server.url}/slots")[0]["n_ctx"] == 512
        assert [entry["id"] for entry in get(f"{server.base_url}/models")["data"]] == ["llama"]
    with pytest.warns(RuntimeWarning, match="trained on 8192 tokens: .* not the 16384"):
        server = Server(smollm2_path, n_ctx=16384, kv_budget=512, threads=1)
    with server:
        assert server.n_ctx == 8192


def test_n_ctx_of_0_is_what_the_model_names(model: Path) -> None:
    with Server(model, n_ctx=0, kv_budget="auto", threads=1) as server:
        n_ctx = get(f"{server.url}/slots")[0]["n_ctx"]
    assert server.n_ctx == n_ctx > 0


def test_settings_reach_the_server(model: Path) -> None:
    beacon = BeaconConfig(window=64, n_sink=2, restated=0.5, pin_share=0.125)
    with Server(
        model, **SMALL, beacon=beacon, type_k="q8_0", type_v=8, args=["--alias", "mine"]
    ) as server:
        command = psutil.Process(server.pid).cmdline()
        names = [entry["id"] for entry in get(f"{server.base_url}/models")["data"]]
    options = dict(zip(command, command[1:]))
    assert options["--kv-budget"] == "512"
    given = {name: value for name, value in options.items() if name.startswith("--kv-")}
    del given["--kv-budget"]
    assert given == {
        "--kv-window": "64", "--kv-sinks": "2", "--kv-restated": "0.5", "--kv-pin-share": "0.125"
    }  # fmt: skip
    assert options["--cache-type-k"] == options["--cache-type-v"] == "q8_0"
    assert names == ["mine"]


def test_stop_ends_the_server_in_good_order_once(model: Path) -> None:
    server = Server(model, **SMALL)
    pid = server.pid
    began = time.monotonic()
    server.stop()
    assert time.monotonic() - began < 5
    assert server.poll() == 0
    assert not psutil.pid_exists(pid)
    server.stop()
    assert server.poll() == 0
    assert "cleaning up" in server.log


@posix
def test_stop_kills_a_server_that_hangs(model: Path) -> None:
    server = Server(model, **SMALL)
    os.kill(server.pid, signal.SIGSTOP)
    server.stop(timeout=0.2)
    assert server.poll() == -signal.SIGKILL


def test_stop_ends_answers_that_are_being_written(model: Path) -> None:
    server = Server(model, n_ctx=8192, kv_budget=512, threads=1)
    body = {"prompt": "Once", "n_predict": 1000000, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(f"{server.url}/completion", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.readline().startswith(b"data: ")
        server.stop(timeout=1)
        assert server.poll() is not None
        with contextlib.suppress(OSError, http.client.IncompleteRead):
            assert b"[DONE]" not in answer.read()


def test_a_server_that_nobody_has_is_stopped(model: Path) -> None:
    server = Server(model, **SMALL)
    pid, log = server.pid, server._log
    assert log is not None and log.exists()
    del server
    assert ends(pid)
    assert not log.exists()


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_a_server_does_not_outlive_its_program(model: Path, end: str) -> None:
    program = (
        "import sys, time\nfrom beaconkv_gguf.server import Server\n"
        f"server = Server(sys.argv[1], **{SMALL!r})\nprint(server.pid, flush=True)\n"
    )
    program += "time.sleep(60)" if end == "kill" else ""
    with subprocess.Popen(
        [sys.executable, "-c", program, str(model)],
        stdout=subprocess.PIPE,
        env=child_environment(),
        cwd=Path(__file__).parent,
        text=True,
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        if end == "kill":
            assert psutil.pid_exists(pid)
            process.kill()
        process.wait(timeout=30)
        assert ends(pid)


def test_two_servers_take_a_port_each(server: Server, model: Path) -> None:
    with Server(model, **SMALL) as other:
        assert other.port != server.port
        assert get(f"{other.url}/health") == get(f"{server.url}/health") == {"status": "ok"}


def test_a_port_can_be_taken_again_at_once(model: Path) -> None:
    with Server(model, **SMALL) as server:
        complete(server.url, 1)
    with Server(model, **SMALL, port=server.port) as again:
        assert again.port == server.port


def test_a_busy_port_is_named(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port}: another program listens there"):
            Server(model, **SMALL, port=port)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"model_path": "missing.gguf"}, OSError, "missing.gguf"),
        ({"model_path": __file__}, ValueError, "no GGUF file"),
        ({"n_ctx": -1}, ValueError, "n_ctx must be from 0"),
        ({"n_ctx": 8.5}, TypeError, "n_ctx must be an integer"),
        ({"parallel": 0}, ValueError, "parallel must be from 1"),
        ({"port": 70000}, ValueError, "port must be from 0 to 65535"),
        ({"threads": 0}, ValueError, "threads must be from 1"),
        ({"kv_budget": 4096}, ValueError, "4096 cells is above n_ctx=2048"),
        ({"type_k": "q9"}, ValueError, "type_k='q9' is no cache type"),
        ({"api_key": ""}, ValueError, "api_key is empty"),
        ({"page": "missing"}, OSError, "no index.html in .missing."),
        ({"host": "no such host"}, ValueError, "no such host"),
        ({"args": ["--ctx_size", "1"]}, ValueError, "--ctx_size can't be handed on: set n_ctx"),
        ({"args": ["--api-prefix", "/a"]}, ValueError, "--api-prefix can't be handed on"),
        ({"args": "--mlock"}, TypeError, "sequence of strings"),
    ],
)
def test_wrong_arguments_start_nothing(
    model: Path, arguments: dict[str, Any], kind: type[Exception], text: str
) -> None:
    children = psutil.Process().children()
    with pytest.raises(kind, match=text):
        Server(**{"model_path": model, **SMALL, **arguments})
    assert psutil.Process().children() == children


def test_a_missing_server_is_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEACONKV_LIB_DIR", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="BEACONKV_SERVER=OFF") as caught:
        Server(model)
    assert str(tmp_path) in str(caught.value)


def test_a_server_that_dies_while_starting_says_why(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"exit code 1: .*invalid argument: --nonsense"):
        Server(model, **SMALL, args=["--nonsense"])
    assert not list(tmp_path.iterdir())


@posix
def test_a_server_that_makes_no_progress_is_given_up(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "llama-server"
    program.write_text(
        f"#!/bin/sh\necho waiting for a disk; echo $$ >{tmp_path}/pid; exec sleep 60\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(beaconkv_gguf.server, "server_path", lambda: program)
    with pytest.raises(RuntimeError, match=r"no progress for 0\.5 s.*waiting for a disk"):
        Server(model, **SMALL, timeout=0.5)
    assert ends(int((tmp_path / "pid").read_text()), within=1)


@pytest.mark.parametrize("source", ["argument", "variable"])
def test_an_api_key_is_needed_and_not_shown(
    model: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    if source == "variable":
        monkeypatch.setenv("LLAMA_API_KEY", "secret-key")
    with Server(model, **SMALL, api_key="secret-key" if source == "argument" else None) as server:
        assert get(f"{server.url}/slots") == get(f"{server.url}/slots", "another") == 401
        assert len(get(f"{server.url}/slots", "secret-key")) == 1
        assert not any("secret-key" in word for word in psutil.Process(server.pid).cmdline())
        assert server.api_key == "secret-key"


def test_an_open_server_without_a_key_warns(model: Path) -> None:
    with (
        pytest.warns(RuntimeWarning, match=r"0\.0\.0\.0 without an API key"),
        Server(model, **SMALL, host="0.0.0.0") as server,
    ):
        assert get(f"{server.url}/health") == {"status": "ok"}


def test_variables_do_not_move_the_server(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_API_PREFIX", "/elsewhere")
    monkeypatch.setenv("LLAMA_ARG_PORT", "1")
    monkeypatch.setenv("LLAMA_ARG_KV_BUDGET", "99999")
    with Server(model, **{**SMALL, "kv_budget": None}) as server:
        assert get(f"{server.url}/health") == {"status": "ok"}


def test_the_page_is_shown_or_left_out(server: Server, model: Path, tmp_path: Path) -> None:
    def shown(server: Server) -> bytes | int:
        try:
            with urllib.request.urlopen(server.url, timeout=30) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            return error.code

    assert b"<html" in shown(server).lower()
    (tmp_path / "index.html").write_text("mine")
    with Server(model, **SMALL, page=tmp_path) as other:
        assert shown(other) == b"mine"
    with Server(model, **SMALL, page=False) as other:
        assert shown(other) == 404


def test_the_page_itself_needs_no_key(model: Path, tmp_path: Path) -> None:
    (tmp_path / "index.html").touch()
    (tmp_path / "app.json").write_text("[1]")
    with Server(model, **SMALL, page=tmp_path, api_key="secret-key") as server:
        assert get(f"{server.url}/app.json") == [1]
        assert get(f"{server.url}/slots") == 401


# --- the command ----------------------------------------------------------------------------------


class Launched:
    """``beaconkv-gguf serve`` in a process, ready."""

    def __init__(self, *arguments: str | Path) -> None:
        command = [sys.executable, "-m", "beaconkv_gguf", "serve", *map(str, arguments)]
        self.process = subprocess.Popen(
            [*command[:4], "--port", "0", "--threads", "1", *command[4:]],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=child_environment(),
            cwd=Path(__file__).parent,
            text=True,
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        self.url = self.line.partition(" ")[0]
        self.servers = psutil.Process(self.process.pid).children()

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def finish(self) -> tuple[int, str]:
        """Exit code and stderr."""
        _, text = self.process.communicate(timeout=30)
        return self.process.returncode, text


def test_serve_says_where_and_what(model: Path) -> None:
    with Launched(model, "--n-ctx", "2048", "--kv-budget", "512", "--", "--alias", "x") as launched:
        assert launched.line == (
            f"{launched.url} serves llama.gguf: 2,048 tokens in 512 cells, "
            f"{launched.line.split()[-2]} MiB\n"
        )
        assert float(launched.line.split()[-2]) > 0
        assert complete(launched.url, 3)["tokens_predicted"] == 3
        assert get(f"{launched.url}/v1/models")["data"][0]["id"] == "x"


@posix
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_signals_to_serve_stop_the_server(model: Path, name: str) -> None:
    with Launched(model) as launched:
        (server,) = launched.servers
        launched.process.send_signal(getattr(signal, name))
        assert launched.finish() == (0, "")
        assert ends(server.pid, within=1)


@posix
@pytest.mark.parametrize("verbose", [True, False])
def test_the_log_is_shown_if_wanted(model: Path, verbose: bool) -> None:
    with Launched(model, *["--verbose"] * verbose) as launched:
        launched.process.terminate()
        code, text = launched.finish()
    assert code == 0
    assert (f"listening on {launched.url}" in text) == verbose


@posix
def test_a_second_signal_kills_the_server(model: Path) -> None:
    with Launched(model) as launched:
        (server,) = launched.servers
        server.suspend()
        launched.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        launched.process.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert launched.finish() == (128 + signal.SIGKILL, "")
        assert time.monotonic() - began < 4
        assert ends(server.pid, within=1)


@posix
def test_serve_ends_with_the_code_of_its_server(model: Path) -> None:
    with Launched(model) as launched:
        launched.servers[0].kill()
        code, text = launched.finish()
    assert code == 128 + signal.SIGKILL
    assert text.startswith("error: llama-server ended with exit code -9")


def test_serve_explains_options_of_the_other_program(model: Path) -> None:
    result = invoke("serve", model, "--mlock")
    assert result.exit_code == 2
    assert "No such option: --mlock" in result.stderr
    assert "after --" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["missing.gguf"], "missing.gguf"),
        (["{model}", "--kv-budget", "20"], "minimum"),
        (["{model}", "--kv-policy", "none"], "policy must be one of"),
        (["{model}", "--port", "{busy}"], "another program listens there"),
        (["{model}", "--", "--nonsense"], "invalid argument: --nonsense"),
    ],
)
def test_errors_of_serve_are_one_line(model: Path, arguments: list[str], text: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        words = [word.format(model=model, busy=port) for word in arguments]
        result = invoke("serve", *words[:1], "--port", "0", *words[1:])
    assert result.exit_code == 1
    assert text in result.stderr
    assert len(result.stderr.splitlines()) == 1
