"""llama.cpp with a bounded KV cache: what ``llama_cpp`` exports, and a `Llama` with a budget.

>>> from beaconkv_gguf import Llama
>>> llm = Llama("model.gguf", n_ctx=32768, kv_budget="auto")
"""
# ruff: noqa: E402, F403

from __future__ import annotations

from . import _library

_library.prepare()  # before llama_cpp is imported: it loads its library then
with _library.guard_dll_directories():
    from llama_cpp import *

from ._guard import Aborted as Aborted
from ._native import BeaconError as BeaconError
from .config import BeaconConfig as BeaconConfig
from .llama import Llama as Llama
from .server import Server as Server
from .states import LlamaState as LlamaState
from .stats import KVStats as KVStats

__version__ = "0.1.0"
