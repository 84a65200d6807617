"""``beaconkv-gguf info``."""

import ctypes
import os
from typing import Any

import llama_cpp
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import __version__, _library, _native
from ..default_model import cache_dir, cached_model_path
from ..stats import MIB
from .common import one_line_errors


def info() -> None:
    """Print versions, compiled backends, devices and paths."""
    with one_line_errors():
        cached = cached_model_path()
        rows = [
            ("beaconkv_gguf", f"{__version__} (native {_native.version()})"),
            ("llama.cpp", f"of llama-cpp-python {llama_cpp.__version__}"),
            ("backends", ", ".join(_backends())),
            ("devices", "\n".join(_devices())),
            ("operators", "\n".join(_operators())),
            ("system", llama_cpp.llama_print_system_info().decode().strip()),
            ("libraries", str(_library.library_dir())),
            ("default model", str(cached or f"not fetched yet, goes to {cache_dir()}")),
        ]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(name, Text(value))
    Console().print(grid)


def _backends() -> list[str]:
    """Names of the backends that are compiled in."""
    get = _library.function("ggml", "ggml_backend_reg_get", ctypes.c_void_p, ctypes.c_size_t)
    name = _library.function("ggml-base", "ggml_backend_reg_name", ctypes.c_char_p, ctypes.c_void_p)
    count = _library.function("ggml", "ggml_backend_reg_count", ctypes.c_size_t)()
    return [name(get(i)).decode() for i in range(count)]


def _device_handles() -> list[Any]:
    get = _library.function("ggml", "ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    count = _library.function("ggml", "ggml_backend_dev_count", ctypes.c_size_t)()
    return [get(i) for i in range(count)]


def _device_name(device: Any) -> str:
    name = _library.function("ggml-base", "ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)
    return name(device).decode()


def _operators() -> list[str]:
    """How each device compacts: by fused operators, or by graphs of ggml's own operators."""
    is_off = os.environ.get("BEACONKV_FUSED") == "0"
    how = {True: "fused", False: "composed"}
    names = [_device_name(device) for device in _device_handles()]
    result = [f"{name}: {how[_native.device_fused(name) and not is_off]}" for name in names]
    return [*result, "BEACONKV_FUSED=0 switches them off"] if is_off else result


def _devices() -> list[str]:
    """Name, description and memory of each device."""
    description = _library.function(
        "ggml-base", "ggml_backend_dev_description", ctypes.c_char_p, ctypes.c_void_p
    )
    size_p = ctypes.POINTER(ctypes.c_size_t)
    memory = _library.function(
        "ggml-base", "ggml_backend_dev_memory", None, ctypes.c_void_p, size_p, size_p
    )
    result = []
    for device in _device_handles():
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        memory(device, ctypes.byref(free), ctypes.byref(total))
        result.append(
            f"{_device_name(device)}: {description(device).decode()}, {total.value / MIB:,.0f} MiB"
        )
    return result
