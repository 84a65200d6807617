"""Which libllama a process gets. Each case needs a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from beaconkv_gguf import _library


def run_python(code: str, **environment: str | Path) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "BEACONKV_LIB_DIR": str(_library.library_dir())}
    variables.pop("LLAMA_CPP_LIB_PATH", None)
    variables.update({name: str(value) for name, value in environment.items()})
    root = Path(_library.__file__).parents[1]
    variables["PYTHONPATH"] = os.pathsep.join([str(root), variables.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=variables, timeout=60
    )


@pytest.fixture(scope="module")
def other_libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A second copy of the libraries: another file is another library to the loader."""
    folder = tmp_path_factory.mktemp("other") / "lib"
    shutil.copytree(_library.library_dir(), folder, ignore=shutil.ignore_patterns("*test*"))
    return folder


def test_import_uses_our_library() -> None:
    result = run_python(
        "import beaconkv_gguf, llama_cpp.llama_cpp as low, os\n"
        "print(os.path.dirname(low._lib._name))\n"
        "from beaconkv_gguf import _native\n"
        "import ctypes\n"
        "ours = int(_native.ffi.cast('uintptr_t', _native.ffi.addressof(_native.lib, "
        "'beacon_version')))\n"
        "print(ours == ctypes.cast(low._lib.beacon_version, ctypes.c_void_p).value)\n"
    )
    assert result.stderr == ""
    folder, same = result.stdout.splitlines()
    assert Path(folder) == _library.library_dir()
    assert same == "True", "both bindings have the same copy in memory"


def test_llama_cpp_loaded_first_with_another_library(other_libraries: Path) -> None:
    result = run_python(
        "import llama_cpp\n"
        "try:\n"
        "    import beaconkv_gguf\n"
        "except ImportError as error:\n"
        "    print(error)\n",
        LLAMA_CPP_LIB_PATH=other_libraries,
    )
    assert result.returncode == 0, result.stderr
    assert str(other_libraries) in result.stdout
    assert "Import beaconkv_gguf before anything that imports llama_cpp" in result.stdout


def test_llama_cpp_loaded_first_with_our_library() -> None:
    result = run_python(
        "import llama_cpp, beaconkv_gguf; print(issubclass(beaconkv_gguf.Llama, llama_cpp.Llama))",
        LLAMA_CPP_LIB_PATH=_library.library_dir(),
    )
    assert (result.stdout, result.stderr) == ("True\n", "")


def test_another_lib_path_is_set_aside_with_a_warning(other_libraries: Path) -> None:
    result = run_python(
        "import beaconkv_gguf, llama_cpp.llama_cpp as low; print(low._lib._name)",
        LLAMA_CPP_LIB_PATH=other_libraries,
    )
    assert Path(result.stdout.strip()).parent == _library.library_dir()
    assert f"LLAMA_CPP_LIB_PATH={other_libraries} is set aside" in result.stderr


def test_missing_library_lists_the_searched_paths(tmp_path: Path) -> None:
    result = run_python("import beaconkv_gguf", BEACONKV_LIB_DIR=tmp_path)
    assert result.returncode == 1
    assert "ImportError" in result.stderr
    assert str(tmp_path) in result.stderr
    assert "pip install" in result.stderr


def test_frozen_program_without_the_library_names_the_hook(tmp_path: Path) -> None:
    result = run_python(
        "import sys; sys.frozen = True; import beaconkv_gguf", BEACONKV_LIB_DIR=tmp_path
    )
    assert str(tmp_path) in result.stderr
    assert "frozen without it" in result.stderr
    assert "pip install" not in result.stderr


def test_library_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    name = _library.library_path("llama").name
    (tmp_path / name).write_bytes(b"not a library")
    result = run_python("import beaconkv_gguf", BEACONKV_LIB_DIR=tmp_path)
    assert result.returncode == 1
    assert f"cannot load {tmp_path / name}: " in result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="the loader's message is Linux's")
def test_missing_dependency_is_named(tmp_path: Path) -> None:
    ours = _library.library_path("llama")
    shutil.copy(ours, tmp_path / ours.name)  # without ggml beside it
    result = run_python("import beaconkv_gguf", BEACONKV_LIB_DIR=tmp_path)
    if result.returncode == 0:
        pytest.skip("this build's run path is absolute and finds ggml")
    assert "libggml" in result.stderr
    assert "depends on is missing" in result.stderr


def test_stock_library_is_recognised(tmp_path: Path) -> None:
    result = run_python(
        "import pathlib\n"
        "from beaconkv_gguf import _library, _native\n"
        "ffi = type(_native.ffi)()\n"
        "ffi.cdef('const char * beacon_version(void);')\n"
        "_library.library_path = lambda base: pathlib.Path(_library.library_dir(), "
        f"{_library.library_path('ggml').name!r})\n"
        "try:\n"
        "    _native._open(ffi)\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    assert "no symbol beacon_version" in result.stdout, result.stderr
