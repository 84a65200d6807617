"""Drives llama.cpp through its C API, below ``Llama``: what tests need of models and contexts."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beaconkv_gguf import _library, _native, llama_cpp

GGML_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}


@llama_cpp.llama_log_callback
def _log(level: int, text: bytes, _user_data: Any) -> None:
    for lines in _listeners:
        lines.append(text.decode("utf-8", "replace"))


_listeners: list[list[str]] = []
llama_cpp.llama_log_set(_log, ctypes.c_void_p(0))
llama_cpp.llama_backend_init()


def child_environment(**variables: str) -> dict[str, str]:
    """Environment of another Python that is to import the package that is tested here."""
    root = str(Path(_library.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    library = str(_library.library_dir())
    return {**os.environ, "PYTHONPATH": path, "BEACONKV_LIB_DIR": library, **variables}


@contextmanager
def log() -> Iterator[list[str]]:
    """What llama.cpp logs inside; outside, tests are quiet."""
    lines: list[str] = []
    _listeners.append(lines)
    try:
        yield lines
    finally:
        _listeners.remove(lines)


class Model:
    """A loaded GGUF file."""

    def __init__(self, path: Path) -> None:
        params = llama_cpp.llama_model_default_params()
        self.ptr = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not self.ptr:
            raise RuntimeError(f"cannot load {path}")
        self.vocab = llama_cpp.llama_model_get_vocab(self.ptr)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(self.vocab)

    def tokenize(self, text: str) -> list[int]:
        raw = text.encode()
        tokens = (ctypes.c_int32 * (len(raw) + 8))()
        n = llama_cpp.llama_tokenize(self.vocab, raw, len(raw), tokens, len(tokens), True, False)
        assert n > 0
        return list(tokens[:n])

    def close(self) -> None:
        if self.ptr:
            llama_cpp.llama_model_free(self.ptr)
        self.ptr = None


class Context:
    """A context of a model; with parameters of :func:`budget`, one that lives in a budget."""

    def __init__(
        self,
        model: Model,
        params: Any = None,
        *,
        n_ctx: int = 4096,
        n_batch: int = 512,
        n_seq_max: int = 1,
        kv_unified: bool = False,
        type_k: str = "f16",
        type_v: str = "f16",
        flash_attn: bool = True,
        cb_eval: Any = None,
    ) -> None:
        p = llama_cpp.llama_context_default_params()
        p.n_ctx, p.n_batch, p.n_ubatch = n_ctx * n_seq_max, n_batch, n_batch
        p.n_seq_max, p.kv_unified, p.swa_full = n_seq_max, kv_unified, False
        p.n_threads = p.n_threads_batch = 1  # threads that wait for each other spin
        p.type_k, p.type_v = GGML_TYPES[type_k], GGML_TYPES[type_v]
        p.flash_attn_type = int(flash_attn)
        if cb_eval is not None:
            p.cb_eval = cb_eval
        self._keep_alive = cb_eval
        self.model = model
        with _native.scope(params) if params is not None else nullcontext():
            self.ptr = llama_cpp.llama_init_from_model(model.ptr, p)
        if not self.ptr:
            raise RuntimeError(_native.last_error() or "llama_init_from_model failed")
        self.memory = llama_cpp.llama_get_memory(self.ptr)
        self.n_batch = llama_cpp.llama_n_batch(self.ptr)
        self._batch = llama_cpp.llama_batch_init(self.n_batch, 0, 1)
        self.length = dict.fromkeys(range(n_seq_max), 0)  # next position of each sequence

    def close(self) -> None:
        if self.ptr:
            llama_cpp.llama_batch_free(self._batch)
            llama_cpp.llama_free(self.ptr)
        self.ptr = None

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def try_decode(self, tokens: dict[int, Sequence[int]]) -> int:
        """One ``llama_decode`` of tokens by sequence; its status, 0 if it went well."""
        i = 0
        for seq_id, ids in tokens.items():
            for j, token in enumerate(ids):
                self._batch.token[i] = token
                self._batch.pos[i] = self.length[seq_id] + j
                self._batch.n_seq_id[i] = 1
                self._batch.seq_id[i][0] = seq_id
                self._batch.logits[i] = j == len(ids) - 1
                i += 1
        self._batch.n_tokens = i
        status = llama_cpp.llama_decode(self.ptr, self._batch)
        if status == 0:
            for seq_id, ids in tokens.items():
                self.length[seq_id] += len(ids)
        return status

    def decode(self, tokens: Sequence[int], seq_id: int = 0) -> NDArray[np.float32]:
        """Append tokens, in chunks of the context's n_batch; logits of the last one, [n_vocab]."""
        for i in range(0, len(tokens), self.n_batch):
            status = self.try_decode({seq_id: tokens[i : i + self.n_batch]})
            if status != 0:
                raise RuntimeError(f"llama_decode returned {status}: {_native.last_error()}")
        return self.logits()

    def step(self, tokens: Sequence[int], seq_id: int = 0) -> NDArray[np.float32]:
        """Append tokens one by one; the logits after each, [tokens, n_vocab]."""
        return np.stack([self.decode([token], seq_id) for token in tokens])

    def logits(self, i: int = -1) -> NDArray[np.float32]:
        values = llama_cpp.llama_get_logits_ith(self.ptr, i)
        return np.ctypeslib.as_array(values, (self.model.n_vocab,)).copy()

    def seq_rm(self, p0: int, p1: int = -1, seq_id: int = 0) -> bool:
        """Remove positions; the next token comes at `p0` if the end went."""
        ok = llama_cpp.llama_memory_seq_rm(self.memory, seq_id, p0, p1)
        if ok:
            self.length[seq_id] = max(self.seq_pos_max(seq_id) + 1, 0)
        return ok

    def seq_pos_max(self, seq_id: int = 0) -> int:
        return llama_cpp.llama_memory_seq_pos_max(self.memory, seq_id)

    def save(self, seq_id: int | None = None, flags: int = 0) -> bytes:
        """State of a sequence, or of the whole context; b"" if that is refused."""
        if seq_id is None:
            size = llama_cpp.llama_state_get_size(self.ptr)
        else:
            size = llama_cpp.llama_state_seq_get_size_ext(self.ptr, seq_id, flags)
        data = (ctypes.c_uint8 * size)()
        if seq_id is None:
            n = llama_cpp.llama_state_get_data(self.ptr, data, size)
        else:
            n = llama_cpp.llama_state_seq_get_data_ext(self.ptr, data, size, seq_id, flags)
        assert n == size
        return bytes(data)

    def load(self, state: bytes, seq_id: int | None = None, flags: int = 0) -> bool:
        """Replace a sequence, or the whole context; False if that is refused."""
        data = (ctypes.c_uint8 * len(state)).from_buffer_copy(state)
        if seq_id is None:
            n = llama_cpp.llama_state_set_data(self.ptr, data, len(state))
        else:
            n = llama_cpp.llama_state_seq_set_data_ext(self.ptr, data, len(state), seq_id, flags)
        for s in self.length:
            self.length[s] = self.seq_pos_max(s) + 1
        return n == len(state) > 0

    def stats(self, seq_id: int = 0) -> dict[str, int]:
        return _native.stats(self.ptr, seq_id)

    def positions(self, seq_id: int = 0) -> dict[tuple[int, int], list[int]]:
        """Held positions by layer and KV head."""
        return {
            (il, h): _native.positions(self.ptr, seq_id, il, h).tolist()
            for il in _native.layers(self.ptr).tolist()
            for h in range(_native.n_head_kv(self.ptr, il))
        }


def budget(cells: int, **fields: Any) -> Any:
    """Parameters of a budget: the defaults but for the given fields."""
    return _native.params(budget=cells, **fields)


def random_tokens(n: int, seed: int = 0) -> list[int]:
    """Ids of byte tokens of the tiny models."""
    return np.random.default_rng(seed).integers(3, 259, n).tolist()


def prose(n_lines: int, seed: int = 0) -> str:
    """A log of a small workshop: facts at first, then long work that goes back to them."""
    rng = np.random.default_rng(seed)
    people = ["Ada", "Bruno", "Chen", "Dora", "Emil", "Fatima", "Goran", "Hana", "Igor", "Jana"]
    things = [
        "lamp",
        "kettle",
        "clock",
        "violin",
        "pump",
        "radio",
        "loom",
        "compass",
        "drill",
        "scale",
    ]
    places = ["the red shelf", "the cellar", "box nine", "the window", "the long bench"]
    owner = {thing: people[int(rng.integers(10))] for thing in things}
    price = {thing: int(rng.integers(11, 99)) for thing in things}
    lines = [f"The {thing} belongs to {owner[thing]} and costs {price[thing]}." for thing in things]
    for i in range(n_lines):
        a, b = (things[int(j)] for j in rng.integers(0, 10, 2))
        place = places[int(rng.integers(5))]
        total = price[a] + price[b]
        lines.append(
            f"Step {i}: {owner[a]} takes the {a} from {place}, and with the {b} of {owner[b]} "
            f"that makes {price[a]} + {price[b]} = {total}."
        )
    return "\n".join(lines)


# --- tensors of the graph while it is computed ----------------------------------------------------


class _Tensor(ctypes.Structure):
    """The first fields of ``struct ggml_tensor``."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
    ]


_ggml = _library.load("ggml-base")
_ggml.ggml_get_name.restype = ctypes.c_char_p
_ggml.ggml_get_name.argtypes = [ctypes.c_void_p]
_ggml.ggml_op_desc.restype = ctypes.c_char_p
_ggml.ggml_op_desc.argtypes = [ctypes.c_void_p]
_ggml.ggml_backend_tensor_get.restype = None
_ggml.ggml_backend_tensor_get.argtypes = [
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_size_t,
]


class QueryCapture:
    """Collects each layer's queries as they are just before RoPE, from the model's own graph.

    Every tensor on the way is named "Qcur-<layer>": the one that counts is the source of the node
    that rotates. ``before[il]`` is the last batch's, [n_tokens, n_head, d].
    """

    def __init__(self) -> None:
        self.before: dict[int, NDArray[np.float32]] = {}
        self._seen: dict[int, NDArray[np.float32]] = {}
        self.callback = llama_cpp.ggml_backend_sched_eval_callback(self._on_tensor)

    def _on_tensor(self, address: int, ask: bool, _user_data: Any) -> bool:
        name = _ggml.ggml_get_name(address).decode()
        if not name.startswith("Qcur") or "-" not in name:
            return not ask  # not wanted; and go on
        t = _Tensor.from_address(address)
        if _ggml.ggml_op_desc(address) == b"ROPE":
            il = int(name.split("-")[1].split(" ")[0])
            if ask and t.src[0] in self._seen:
                self.before[il] = self._seen[t.src[0]]
            return not ask
        if not ask and t.type == GGML_TYPES["f32"]:
            d, n_head, n_tokens = t.ne[0], t.ne[1], t.ne[2]
            out = np.empty((n_tokens, n_head, d), np.float32)
            if t.nb[0] == 4 and t.nb[1] == 4 * d and t.nb[2] == 4 * d * n_head:
                _ggml.ggml_backend_tensor_get(address, out.ctypes.data, 0, out.nbytes)
            else:  # a view into fused queries, keys and values
                row = np.empty(d, np.float32)
                for i in range(n_tokens):
                    for h in range(n_head):
                        offset = i * t.nb[2] + h * t.nb[1]
                        _ggml.ggml_backend_tensor_get(address, row.ctypes.data, offset, 4 * d)
                        out[i, h] = row
            self._seen[address] = out
        return True
