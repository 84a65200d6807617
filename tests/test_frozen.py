"""A program that PyInstaller froze, by the package's hook: it runs without a Python around it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from beaconkv_gguf import _library

pytestmark = pytest.mark.slow

BUDGET = 256

PROGRAM = """
import dataclasses, json, os, sys, urllib.request
from beaconkv_gguf import Llama, Server

path, budget, *rest = sys.argv[1:]
if rest == ["serve"]:
    with Server(path, n_ctx=512, kv_budget=int(budget), threads=1) as server:
        page = urllib.request.urlopen(server.url).read().decode()
        slots = json.load(urllib.request.urlopen(f"{server.url}/slots"))
    print(json.dumps({"page": page, "slots": slots, "code": server.poll()}))
    sys.exit()
llm = Llama(
    path, n_ctx=512, kv_budget=int(budget), n_threads=1, n_threads_batch=1, verbose=False
)
tokens = [token for token, _ in zip(llm.generate(range(100), temp=0.0), range(300))]
maps = open("/proc/self/maps").read().split() if sys.platform == "linux" else []
libraries = sorted({word for word in maps if "ggml" in word or "libllama" in word})
stats = dataclasses.asdict(llm.kv_stats())
home = os.path.realpath(getattr(sys, "_MEIPASS", "."))
print(json.dumps({"tokens": tokens, "stats": stats, "libraries": libraries, "home": home}))
"""

# One analysis, and of it a folder and a file: as `pyinstaller app.py` and `... --onefile app.py`.
SPEC = """
a = Analysis(["app.py"])
pyz = PYZ(a.pure)
program = EXE(pyz, a.scripts, exclude_binaries=True, name="folder")
COLLECT(program, a.binaries, a.datas, name="app")
EXE(pyz, a.scripts, a.binaries, a.datas, name="file")
"""


def is_installed() -> bool:
    """Whether the package is a wheel's, with all of its files in place."""
    try:
        files = importlib.metadata.distribution("beaconkv_gguf").files or []
    except importlib.metadata.PackageNotFoundError:
        return False
    installed = {Path(str(file.locate())).resolve() for file in files}
    return {Path(_library.__file__).resolve(), _library.library_path("llama")} <= installed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the program: app.py, and what PyInstaller made of it in dist."""
    if not is_installed():
        pytest.skip("PyInstaller collects an installed wheel; this package is a source tree")
    pytest.importorskip("PyInstaller")
    folder = tmp_path_factory.mktemp("frozen")
    (folder / "app.py").write_text(PROGRAM, encoding="utf-8")
    (folder / "app.spec").write_text(SPEC, encoding="utf-8")
    environment = {**os.environ, "PYINSTALLER_CONFIG_DIR": str(folder / "cache")}
    environment["PYINSTALLER_ZLIB_COMPRESSION_LEVEL"] = "1"  # half of the time goes into it
    environment.pop("PYTHONPATH", None)
    result = subprocess.run(
        [sys.executable, "-m", "PyInstaller", "--log-level=WARN", "app.spec"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if "Python library not found" in result.stderr:
        pytest.skip("PyInstaller needs a shared library of Python; this Python has none")
    assert result.returncode == 0, result.stderr
    return folder


def answer(*command: str | Path, **environment: str) -> dict[str, Any]:
    result = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, env=environment, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return dict(json.loads(result.stdout))


@pytest.mark.parametrize("kind", ["app/folder", "file"])
def test_frozen_program_computes_what_its_source_does(
    folder: Path, tiny_path: Callable[[str], Path], kind: str
) -> None:
    arguments = (tiny_path("llama"), str(BUDGET))
    expected = answer(sys.executable, folder / "app.py", *arguments, **os.environ)

    suffix = ".exe" if sys.platform == "win32" else ""
    program = folder / "dist" / f"{kind}{suffix}"
    system = {name: os.environ[name] for name in ("SYSTEMROOT", "TEMP") if name in os.environ}
    frozen = answer(program, *arguments, **system)

    assert frozen["tokens"] == expected["tokens"]
    for name, value in expected["stats"].items():
        if not name.startswith("us_"):
            assert frozen["stats"][name] == value, name
    assert frozen["stats"]["n_compact"] > 0
    assert frozen["stats"]["n_held"] <= BUDGET

    if sys.platform == "linux":
        # each once, out of the program: a second copy of ggml would have backends of its own
        collected = Path(frozen["home"], "beaconkv_gguf", "lib")
        names = [path.name for path in _library.library_dir().iterdir() if "ggml" in path.name]
        names.append(_library.library_path("llama").name)
        assert frozen["libraries"] == sorted(str(collected / name) for name in names)


@pytest.mark.parametrize("kind", ["app/folder", "file"])
def test_frozen_program_serves(folder: Path, tiny_path: Callable[[str], Path], kind: str) -> None:
    suffix = ".exe" if sys.platform == "win32" else ""
    system = {name: os.environ[name] for name in ("SYSTEMROOT", "TEMP") if name in os.environ}
    program = folder / "dist" / f"{kind}{suffix}"
    served = answer(program, tiny_path("llama"), str(BUDGET), "serve", **system)
    assert "<title>" in served["page"]
    assert [slot["beaconkv"]["budget"] for slot in served["slots"]] == [BUDGET]
    assert served["code"] == 0


def test_frozen_program_holds_the_libraries_once(folder: Path) -> None:
    collected = folder / "dist" / "app" / "_internal" / "beaconkv_gguf"
    package = Path(_library.__file__).parent
    for name in ("lib", "include", "licenses", "page"):
        found = sorted(path.name for path in (collected / name).iterdir())
        assert found == sorted(path.name for path in (package / name).iterdir())
    for library in (collected / "lib").iterdir():
        copies = [p for p in (folder / "dist" / "app").rglob(library.name) if not p.is_symlink()]
        assert copies == [library]
