from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import llama_cpp
import pytest
from typer.testing import CliRunner, Result

import beaconkv_gguf
from beaconkv_gguf import _library, cli

SMALL = ["--n-ctx", "1024", "--threads", "1"]


def invoke(*arguments: str | Path) -> Result:
    try:
        runner = CliRunner(mix_stderr=False)  # before click 8.2
    except TypeError:
        runner = CliRunner()
    return runner.invoke(cli.app, [str(argument) for argument in arguments])


def start(*arguments: str | Path, **kwargs: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "beaconkv_gguf", *map(str, arguments)]
    root = Path(beaconkv_gguf.__file__).parents[1]
    environment = {**os.environ, "BEACONKV_LIB_DIR": str(_library.library_dir())}
    environment["PYTHONPATH"] = os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])
    environment.update(COLUMNS="100", TERM="xterm")
    return subprocess.Popen(command, text=True, env=environment, **kwargs)  # type: ignore[call-overload]


def test_run_writes_past_its_budget(smollm2_path: Path) -> None:
    result = invoke(
        "run", "--model", smollm2_path, *SMALL, "--kv-budget", "384", "--max-tokens", "500",
        "--ignore-eos", "--prompt", "Tell a long story.",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert len(result.stdout) > 500
    assert "tokens/s" not in result.stdout
    assert "500 tokens written" in result.stderr
    match = re.search(
        r"(\d+) tokens in (\d+) of 384 cells, ([\d.]+) MiB \(full cache ([\d.]+) MiB.*"
        r"compactions: (\d+)",
        result.stderr.splitlines()[-1],
    )
    assert match, result.stderr
    n_logical, n_held, held, full, n_compact = map(float, match.groups())
    assert n_held <= 384 < n_logical
    assert held < full
    assert n_compact >= 1


def test_run_takes_the_default_model(smollm2_path: Path) -> None:
    result = invoke("run", "--max-tokens", "12", "--threads", "1")
    assert result.exit_code == 0, result.output
    assert "of 512 cells" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "cells"),
    [
        (["--kv-budget", "off"], "cells,"),
        (["--kv-budget", "0.5"], "of 512 cells"),
        (["--kv-budget", "auto", "--n-ctx", "4096"], "of 1024 cells"),
        (["--kv-budget", "512", "--type-k", "q8_0", "--type-v", "8"], "of 512 cells"),
        (["--kv-budget", "off", "--type-k", "q8_0", "--type-v", "q8_0"], "cells,"),
        (["--raw", "--temp", "0"], "cells"),
    ],
)
def test_options_of_run(smollm2_path: Path, arguments: list[str], cells: str) -> None:
    result = invoke(
        "run", "--model", smollm2_path, *SMALL, "--prompt", "Hi", "--max-tokens", "3", *arguments
    )
    assert result.exit_code == 0, result.output
    assert cells in result.stderr.splitlines()[-1]


def test_prompt_file(smollm2_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("What is the capital of France? Žluťoučký.", encoding="utf-8")
    result = invoke(
        "run", "--model", smollm2_path, *SMALL, "--prompt-file", file, "--max-tokens", "3"
    )
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--model", "missing.gguf"], 1, "does not exist"),
        (["--model", "{text}"], 1, "magic"),
        (["--kv-budget", "9000"], 1, "9000 cells is above n_ctx=1024"),
        (["--kv-budget", "20"], 1, "minimum"),
        (["--kv-budget", "nan"], 1, "nan"),
        (["--kv-budget", "much"], 2, "much"),
        (["--type-k", "q9"], 1, "q8_0"),
        (["--max-tokens", "0"], 2, "max-tokens"),
        (["--prompt", "a", "--prompt-file", "{text}"], 2, "exclude each other"),
        (["--prompt-file", "missing.txt"], 1, "missing.txt"),
        (["--prompt", "word " * 1100], 1, "1024"),
    ],
)
def test_errors_are_one_line(
    smollm2_path: Path, tmp_path: Path, arguments: list[str], code: int, text: str
) -> None:
    file = tmp_path / "text.txt"
    file.write_text("no model")
    arguments = [argument.format(text=file) for argument in arguments]
    model = [] if "--model" in arguments else ["--model", str(smollm2_path)]
    result = invoke("run", *SMALL, *model, *arguments)
    assert result.exit_code == code, result.output
    assert text in result.stderr
    assert "Traceback" not in result.output
    if code == 1:
        assert len(result.stderr.splitlines()) == 1
        assert result.stderr.startswith("error: ")


@pytest.mark.skipif(llama_cpp.llama_supports_gpu_offload(), reason="this build has a GPU")
def test_gpu_layers_warn(smollm2_path: Path) -> None:
    result = invoke(
        "run", "--model", smollm2_path, *SMALL, "--max-tokens", "1", "--n-gpu-layers", "5"
    )
    assert result.exit_code == 0
    assert result.stderr.startswith("warning: n_gpu_layers=5")


@pytest.mark.skipif(os.name == "nt", reason="no SIGINT for one process")
def test_ctrl_c_ends_with_the_statistics(smollm2_path: Path) -> None:
    process = start(
        "run", "--model", smollm2_path, *SMALL, "--ignore-eos",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.read(40)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "tokens written" in errors
    assert "Traceback" not in errors


@pytest.mark.skipif(os.name == "nt", reason="no pseudo terminals")
def test_terminal_shows_a_panel(smollm2_path: Path) -> None:
    master, slave = os.openpty()
    process = start(
        "run", "--model", smollm2_path, *SMALL, "--kv-budget", "384", "--max-tokens", "60",
        "--ignore-eos", stdin=slave, stdout=slave, stderr=slave,
    )  # fmt: skip
    os.close(slave)
    output = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            block = os.read(master, 1 << 16)
        except OSError:  # the other side is closed
            break
        if not block:
            break
        output += block
    os.close(master)
    assert process.wait(timeout=30) == 0
    text = output.decode(errors="replace")
    for part in ("KV cells", "of 384 in 30 layers", "a full cache takes", "compactions"):
        assert part in text
    assert "60 tokens written" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h"), "the cursor is shown again"


def test_info() -> None:
    result = invoke("info")
    assert result.exit_code == 0, result.output
    assert beaconkv_gguf.__version__ in result.stdout
    assert llama_cpp.__version__ in result.stdout
    assert "CPU" in result.stdout
    assert str(_library.library_dir())[:40] in result.stdout


def test_module_and_help() -> None:
    process = start("--help", stdout=subprocess.PIPE)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "run" in output
    assert "info" in output
