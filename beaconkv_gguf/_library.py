"""Find the shared libraries and make llama_cpp load ours.

llama_cpp reads ``LLAMA_CPP_LIB_PATH`` once, when it is first imported, so the order of imports
decides which libllama a process has. There can be only one: two copies of ggml under one SONAME
bind to whichever was loaded first.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parent  # below sys._MEIPASS in a program of PyInstaller

#: Development override: a folder that holds our libraries, such as a build tree's ``bin``.
LIB_DIR_VARIABLE = "BEACONKV_LIB_DIR"


def _file_names(base: str) -> list[str]:
    if sys.platform == "win32":
        return [f"{base}.dll", f"lib{base}.dll"]
    if sys.platform == "darwin":
        return [f"lib{base}.dylib", f"lib{base}.so"]
    return [f"lib{base}.so"]


def library_dir() -> Path:
    """Folder of our shared libraries: ``BEACONKV_LIB_DIR`` if set, else the package's ``lib``."""
    override = os.environ.get(LIB_DIR_VARIABLE)
    return Path(override).resolve() if override else _PACKAGE / "lib"


def library_path(base: str) -> Path:
    """Path of one of our shared libraries.

    Parameters
    ----------
    base : str
        Name without prefix and suffix: ``"llama"``, ``"ggml"``, ``"ggml-base"``.

    Raises
    ------
    ImportError
        No such file; the message lists every path that was searched.
    """
    paths = [library_dir() / name for name in _file_names(base)]
    for path in paths:
        if path.exists():
            return path
    searched = "".join(f"\n  {path}" for path in paths)
    remedy = "Install a wheel of beaconkv-gguf, or build from source with 'pip install .'"
    if getattr(sys, "frozen", False):
        remedy = (
            "The program was frozen without it. PyInstaller collects it by our hook: freeze where "
            "'import beaconkv_gguf' works and the package was installed from a wheel"
        )
    raise ImportError(
        f"beaconkv_gguf: shared library '{base}' not found. Searched:{searched}\n"
        f"{remedy}; {LIB_DIR_VARIABLE} names another folder."
    )


def load(base: str) -> ctypes.CDLL:
    """Load one of our shared libraries; a second call returns the same one.

    Raises
    ------
    ImportError
        The file is missing, or the system cannot load it; the message has the system's reason,
        which names a missing dependency.
    """
    path = library_path(base)
    if sys.platform == "win32":
        os.add_dll_directory(str(path.parent))
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(
            f"beaconkv_gguf: cannot load {path}: {error}\n"
            "A library that it depends on is missing or does not fit: install it, or put it on the "
            "system's library search path."
        ) from error


def prepare() -> None:
    """Make the ``llama_cpp`` that is imported next use our libllama, or check that it does.

    An ``LLAMA_CPP_LIB_PATH`` that names another folder is set aside with a warning. The variable
    stays set: llama_cpp's multimodal module reads it when it is imported.

    Raises
    ------
    ImportError
        llama_cpp is already loaded with another library, or ours cannot be loaded.
    """
    ours = library_path("llama")
    loaded = sys.modules.get("llama_cpp.llama_cpp")
    if loaded is not None:
        theirs = loaded._lib._name
        if not os.path.exists(theirs) or not os.path.samefile(theirs, ours):
            raise ImportError(
                f"beaconkv_gguf: llama_cpp is already loaded with another library, {theirs}, and a "
                "process can hold only one. Import beaconkv_gguf before anything that imports "
                "llama_cpp, or import from beaconkv_gguf in its place: it exports the same names."
            )
        return

    load("llama")
    variable = os.environ.get("LLAMA_CPP_LIB_PATH")
    if variable and Path(variable).resolve() != ours.parent:
        warnings.warn(
            f"LLAMA_CPP_LIB_PATH={variable} is set aside: beaconkv_gguf loads its own library from "
            f"{ours.parent} ({LIB_DIR_VARIABLE} names another folder)",
            RuntimeWarning,
            stacklevel=3,
        )
    os.environ["LLAMA_CPP_LIB_PATH"] = str(ours.parent)


@contextlib.contextmanager
def guard_dll_directories() -> Iterator[None]:
    """On Windows, hide a stale ``CUDA_PATH`` or ``HIP_PATH`` while llama_cpp is imported.

    llama_cpp adds their ``bin`` and ``lib`` folders to the search path and fails if one is missing.
    Those that do exist are added here.
    """
    hidden: dict[str, str] = {}
    if sys.platform == "win32":
        for name in {"CUDA_PATH", "HIP_PATH"} & os.environ.keys():
            folders = [Path(os.environ[name], sub) for sub in ("bin", "lib")]
            present = [folder for folder in folders if folder.is_dir()]
            if present != folders:
                hidden[name] = os.environ.pop(name)
                for folder in present:
                    os.add_dll_directory(str(folder))
    try:
        yield
    finally:
        os.environ.update(hidden)


def function(library: str, name: str, restype: Any, *argtypes: Any) -> Any:
    """C function `name` of the `library` that defines it, "ggml" or "ggml-base"."""
    result = getattr(load(library), name)
    result.restype, result.argtypes = restype, argtypes
    return result
