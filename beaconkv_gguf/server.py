"""`Server`: llama.cpp's HTTP server in a process of its own, with a KV budget for each chat."""

from __future__ import annotations

import contextlib
import errno
import http.client
import ipaddress
import json
import numbers
import os
import re
import socket
import subprocess
import tempfile
import time
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import llama_cpp

from . import _library
from .config import CELL_STEP, BeaconConfig, KVBudget, resolve_budget
from .fit import F16, Cache, model_budget
from .gguf_layout import check_model, read_metadata
from .llama import CACHE_TYPES, FLOAT_TYPES, cache_type, n_ctx_train, warn_without_gpu

#: Folder of the chat page that the server shows.
PAGE = Path(__file__).resolve().parent / "page"

#: llama-server's variable for the key: a command line can be read by every user of the machine.
API_KEY_VARIABLE = "LLAMA_API_KEY"

_BEACON_OPTIONS = {
    "policy": "--kv-policy",
    "window": "--kv-window",
    "n_sink": "--kv-sinks",
    "n_recent": "--kv-recent",
    "n_beacon": "--kv-beacons",
    "n_probe": "--kv-probes",
    "beacon_share": "--kv-beacon-share",
    "restated": "--kv-restated",
    "quota": "--kv-quota",
    "pin_share": "--kv-pin-share",
}

# What `args` can't have: the budget and the address are reckoned with ours.
_TAKEN = {
    "-m": "model_path",
    "--model": "model_path",
    "-c": "n_ctx",
    "--ctx-size": "n_ctx",
    "-np": "parallel",
    "--parallel": "parallel",
    "--kv-budget": "kv_budget",
    "--host": "host",
    "--port": "port",
    "--api-key": "api_key",
}
_UNREACHABLE = ("--api-prefix", "--ssl-key-file", "--ssl-cert-file")

# llama-server watches the standard input of a process that has this variable: it stops at this
# line, and ends when the other side of the pipe is gone. So it never outlives us, however we end,
# and it stops in good order where there is no SIGTERM.
_WATCH_VARIABLE = "LLAMA_SERVER_ROUTER_PORT"
_STOP_LINE = b"cmd_router_to_child:exit\n"
_STATE_PREFIX = "cmd_child_to_router:"  # what it tells the other side, in between its log

_STDERR = 2


class Server:
    """llama.cpp's ``llama-server`` on one model, started when this is made and stopped with it.

    It speaks OpenAI's API (and Anthropic's) and shows a chat page. It ends with this process, also
    if that is killed.

    >>> with Server("model.gguf", kv_budget="auto", n_ctx=32768) as server:
    ...     client = openai.OpenAI(base_url=server.base_url, api_key="none")

    Parameters
    ----------
    model_path : str or path
        A GGUF file.
    kv_budget : int, float, "auto" or None, default "auto"
        KV cells per attention layer of each chat, as `Llama`'s: a number of cells, a share of
        `n_ctx`, "auto" or no budget.
    n_ctx : int, default 8192
        Logical context of each chat in tokens; 0: what the model names.
    parallel : int, default 1
        Chats that are answered at the same time, each with a context and a budget of its own.
    host : str, default "127.0.0.1"
        Address to listen on; "0.0.0.0" is every one of this machine.
    port : int, default 0
        Port to listen on; 0 takes a free one, see `port`.
    api_key : str, optional
        What clients have to send. Default: the variable ``LLAMA_API_KEY``, else none is needed.
    beacon : BeaconConfig, optional
        How the cache chooses what to keep.
    type_k, type_v : int or str, optional
        Cache types, as `Llama`'s. A quantised `type_v` switches flash attention on.
    n_gpu_layers : int, default 0
        Layers on the GPU; negative: all.
    threads : int, optional
        CPU threads. Default: llama-server's choice.
    page : bool or path, default True
        The chat page at `url`: ours, another folder with an ``index.html``, or none.
    args : sequence of str, optional
        More arguments for llama-server, after ours: where both are given, these count.
    timeout : float, default 300
        Seconds that the start may take without a new line in the server's log.
    verbose : bool, default False
        The log goes to stderr instead of `log`.

    Attributes
    ----------
    url, base_url : str
        Of the page, and of the API (``.../v1``) for clients such as ``openai``.
    host, port : str, int
        Where it listens.
    api_key : str or None
        What clients have to send.
    model_path : str
        The model.
    cache : fit.Cache
        What the caches are made with: context, budget, types, number of chats.
    process : subprocess.Popen
        The server; `pid` is its number.

    Raises
    ------
    OSError
        The model, the server or the page is missing, or the port is in use.
    TypeError, ValueError
        An argument is wrong, or the file is no complete GGUF model.
    RuntimeError
        The server ended while it started, and the message has the reasons out of its log; or it
        made no progress.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        kv_budget: KVBudget = "auto",
        n_ctx: int = 8192,
        parallel: int = 1,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        beacon: BeaconConfig | None = None,
        type_k: int | str | None = None,
        type_v: int | str | None = None,
        n_gpu_layers: int = 0,
        threads: int | None = None,
        page: bool | str | os.PathLike[str] = True,
        args: Sequence[str] = (),
        timeout: float = 300.0,
        verbose: bool = False,
    ) -> None:
        _check_integer("n_ctx", n_ctx, 0)
        _check_integer("parallel", parallel, 1)
        _check_integer("port", port, 0, 65535)
        _check_integer("n_gpu_layers", n_gpu_layers)
        if threads is not None:
            _check_integer("threads", threads, 1)
        _check_args(args)
        program = server_path()
        pages = _page_arguments(page)
        self.model_path = os.fspath(model_path)
        read_metadata(self.model_path)  # complains if it is no model
        check_model(self.model_path, halves=llama_cpp.llama_supports_gpu_offload())
        n_ctx = n_ctx or n_ctx_train(self.model_path)
        cache = Cache(
            -(-n_ctx // CELL_STEP) * CELL_STEP,  # as llama.cpp rounds it
            type_k=cache_type("type_k", F16 if type_k is None else type_k) or 0,
            type_v=cache_type("type_v", F16 if type_v is None else type_v) or 0,
            n_seq=parallel,
            swa_full=False,
            beacon=beacon or BeaconConfig(),
        )
        if isinstance(kv_budget, str) and kv_budget == "auto":
            kv_budget = model_budget(self.model_path, cache, n_gpu_layers)
        budget = resolve_budget(kv_budget, cache.n_ctx, cache.beacon)
        self.cache = cache = replace(cache, budget=budget)
        if api_key == "":
            raise ValueError("api_key is empty; None: no key")
        self.api_key = api_key or os.environ.get(API_KEY_VARIABLE) or None
        self.host, self.port = host, _free_port(host, port)
        warn_without_gpu(n_gpu_layers, stacklevel=3)
        if not self.api_key and not _is_loopback(host):
            warnings.warn(
                f"the server listens on {host} without an API key: everyone who can reach this "
                "machine can use it",
                RuntimeWarning,
                stacklevel=2,
            )

        command = [str(program), "--model", self.model_path, "--host", host]
        command += ["--port", str(self.port), "--cors-origins", "localhost", *pages, "--metrics"]
        command += ["--ctx-size", str(cache.n_ctx * parallel), "--parallel", str(parallel)]
        command += ["--no-kv-unified", "--fit", "off"]  # the sizes are given
        if llama_cpp.llama_supports_gpu_offload():
            command += ["--n-gpu-layers", "all" if n_gpu_layers < 0 else str(n_gpu_layers)]
        command += ["--cache-type-k", _TYPE_NAMES[cache.type_k]]
        command += ["--cache-type-v", _TYPE_NAMES[cache.type_v]]
        command += ["--kv-budget", str(budget or 0), *_beacon_arguments(cache.beacon)]
        if budget is not None or cache.type_v not in FLOAT_TYPES:
            command += ["--flash-attn", "on"]
        if threads is not None:
            command += ["--threads", str(threads)]
        if not {"-a", "--alias"} & set(args):
            command += ["--alias", Path(self.model_path).stem]  # else its name would be the path

        self._log: Path | None = None
        if not verbose:
            handle, name = tempfile.mkstemp(prefix="llama-server-", suffix=".log")
            self._log = Path(name)
        output = _STDERR if verbose else handle
        try:
            self.process = subprocess.Popen(
                [*command, *args],
                stdin=subprocess.PIPE,
                bufsize=0,
                stdout=output,
                stderr=output,
                env=_environment(self.api_key),
                start_new_session=True,  # Ctrl-C is for us: the server is told to stop
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
        except BaseException:
            _remove(self._log)
            raise
        finally:
            if not verbose:
                os.close(handle)
        self._finish = weakref.finalize(self, _finish, self.process, self._log)
        self._n_ctx = cache.n_ctx
        try:
            self._wait_until_ready(timeout)
        except BaseException:
            self.process.kill()
            self._finish()
            raise
        if self._n_ctx < cache.n_ctx:
            warnings.warn(
                f"the model was trained on {self._n_ctx} tokens: a chat has that many, not the "
                f"{cache.n_ctx} that were asked for",
                RuntimeWarning,
                stacklevel=2,
            )

    @property
    def url(self) -> str:
        """Where the chat page is."""
        return f"http://{_client_host(self.host)}:{self.port}"

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes."""
        return f"{self.url}/v1"

    @property
    def kv_budget(self) -> int | None:
        """KV cells per attention layer of each chat; None: no budget."""
        return self.cache.budget

    @property
    def n_ctx(self) -> int:
        """Logical context of each chat in tokens; the model's own if that is smaller."""
        return self._n_ctx

    @property
    def pid(self) -> int:
        """Number of the server's process."""
        return self.process.pid

    @property
    def log(self) -> str:
        """What the server has logged; empty if it is `verbose`."""
        if self._log is None:
            return ""
        try:
            text = self._log.read_text("utf-8", "replace")
        except FileNotFoundError:  # the start failed, and the error has the reasons
            return ""
        lines = text.splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith(_STATE_PREFIX))

    @property
    def log_errors(self) -> str:
        """The errors of the log in one line, else its last lines."""
        lines = [line.strip() for line in self.log.splitlines() if line.strip()]
        errors = [match[1] for line in lines if (match := re.match(r"[\d.]+ E (.*)", line))]
        texts = dict.fromkeys(" ".join(line.split()) for line in errors or lines[-5:])
        return "; ".join(texts)

    def poll(self) -> int | None:
        """Exit code of the server; None while it runs."""
        return self.process.poll()

    def stop(self, timeout: float = 5.0) -> None:
        """Stop the server; a second call does nothing.

        Answers that are being written end. What does not stop within `timeout` seconds is killed.
        """
        _stop(self.process, timeout)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _wait_until_ready(self, timeout: float) -> None:
        """Wait for the model to be loaded."""
        n_logged, since = 0, time.monotonic()
        while not self._is_ready():
            code = self.poll()
            if code is not None:
                reasons = self.log_errors or ("it logged nothing" if self._log else "see its log")
                raise RuntimeError(
                    f"llama-server ended while it started, with exit code {code}: {reasons}"
                )
            n = self._log.stat().st_size if self._log else 0
            if n > n_logged:
                n_logged, since = n, time.monotonic()
            if time.monotonic() - since > timeout:
                raise RuntimeError(
                    f"llama-server made no progress for {timeout:g} s while it started; its log "
                    f"ends: {self.log_errors}"
                )
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        # no urllib: it would ask a proxy
        connection = http.client.HTTPConnection(
            _client_host(self.host).strip("[]"), self.port, timeout=5
        )
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        with contextlib.closing(connection):
            try:
                # it is healthy a little before its main loop runs, and would forget to stop then;
                # the loop answers the second
                for path in ("/health", "/slots"):
                    connection.request("GET", path, headers=headers)
                    answer = connection.getresponse()
                    text = answer.read()
                    if path == "/health" and answer.status != 200:
                        return False
                if answer.status == 200:  # else the slots are not to be told
                    self._n_ctx = int(json.loads(text)[0]["n_ctx"])
            except (OSError, http.client.HTTPException):
                return False
        return self.poll() is None  # else another program took the port


def server_path() -> Path:
    """Path of llama-server, beside our libraries.

    Raises
    ------
    FileNotFoundError
        The package was built without it.
    """
    path = _library.library_dir() / ("llama-server.exe" if os.name == "nt" else "llama-server")
    if not path.is_file():
        raise FileNotFoundError(
            f"llama-server is not at {path}: the package was built without the server "
            "(-DBEACONKV_SERVER=OFF); install it with the server built"
        )
    return path


_TYPE_NAMES = {number: name for name, number in CACHE_TYPES.items()}


def _check_integer(name: str, value: object, least: int | None = None, most: int = 1 << 31) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    if least is not None and not least <= int(value) <= most:
        raise ValueError(f"{name} must be from {least} to {most}, not {value}")


def _check_args(args: Sequence[str]) -> None:
    """Refuse arguments that would move the server away from where we look for it."""
    if isinstance(args, str):
        raise TypeError(f"args must be a sequence of strings, not one: {args!r}")
    for arg in args:
        name = arg.replace("_", "-") if arg.startswith("--") else arg  # as llama-server does
        if name in _TAKEN:
            raise ValueError(f"llama-server's {arg} can't be handed on: set {_TAKEN[name]} here")
        if name in _UNREACHABLE:
            raise ValueError(f"llama-server's {arg} can't be handed on: put a proxy before it")


def _page_arguments(page: bool | str | os.PathLike[str]) -> list[str]:
    if page is False:
        return ["--no-ui"]
    folder = PAGE if page is True else Path(page)
    if not (folder / "index.html").is_file() or str(page) == "":
        raise FileNotFoundError(f"there is no page: no index.html in {page!r}; page=False: none")
    return ["--path", str(folder)]


def _beacon_arguments(beacon: BeaconConfig) -> list[str]:
    default = asdict(BeaconConfig())
    arguments = []
    for name, value in asdict(beacon).items():
        if value != default[name]:
            arguments += [_BEACON_OPTIONS[name], str(value)]
    return arguments


def _environment(api_key: str | None) -> dict[str, str]:
    """Ours, less what would move the server or change the budget that was reckoned."""
    options = (*_UNREACHABLE, *_BEACON_OPTIONS.values())
    left_out = {f"LLAMA_ARG_{option[2:].replace('-', '_').upper()}" for option in options}
    left_out |= {"LLAMA_ARG_UI", "LLAMA_ARG_NO_UI"}
    environment = {
        name: text
        for name, text in os.environ.items()
        if name not in left_out and not name.startswith("AIP_")  # Vertex AI's: another port
    }
    environment[_WATCH_VARIABLE] = "0"
    if api_key:
        environment[API_KEY_VARIABLE] = api_key
    return environment


def _free_port(host: str, port: int) -> int:
    """`port` if it can be listened on, a free one for 0."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ValueError(f"host={host!r} is no address: {error}") from None
    with socket.socket(family, kind) as sock:
        # a port of connections that have just ended is free; on Windows the same option would
        # share the port with whoever listens there
        name = "SO_EXCLUSIVEADDRUSE" if os.name == "nt" else "SO_REUSEADDR"
        sock.setsockopt(socket.SOL_SOCKET, getattr(socket, name), 1)
        try:
            sock.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                reason = "another program listens there. Take another port; 0 takes a free one"
            else:
                reason = str(error.strerror)
            raise OSError(f"cannot listen on {host}, port {port}: {reason}") from None
        return int(sock.getsockname()[1])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _client_host(host: str) -> str:
    """Where this machine reaches a server that listens on `host`, as in a URL."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def _stop(process: subprocess.Popen[Any], timeout: float) -> None:
    assert process.stdin is not None
    try:
        if process.poll() is None:
            with contextlib.suppress(OSError):  # it has just ended
                process.stdin.write(_STOP_LINE)
            process.wait(timeout)
    except BaseException as error:  # a second Ctrl-C, too
        process.kill()
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
    finally:
        process.stdin.close()


def _finish(process: subprocess.Popen[Any], log: Path | None) -> None:
    """What is done when nobody has the `Server` any more, and at the interpreter's end."""
    try:
        _stop(process, 5.0)
    finally:
        _remove(log)


def _remove(log: Path | None) -> None:
    if log is not None:
        with contextlib.suppress(OSError):
            log.unlink()
