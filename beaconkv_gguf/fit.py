"""What of a model's KV cache fits into memory: the bytes of a context, and the budget to take.

No weights are loaded and no context is created; see ``gguf_layout`` for what is known of a model.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import re
from dataclasses import dataclass
from pathlib import Path

from . import _library, _native
from .config import CELL_STEP, BeaconConfig, auto_budget, min_budget
from .gguf_layout import Layout, read_layout
from .stats import MIB

F16 = 1  # ggml's number of the type

#: Bytes for what no formula has: the program, its libraries, the vocabulary.
PROCESS_BYTES = 128 * MIB

#: How `Needs.compute` comes by its figure.
COMPUTE_RULE = (
    "an estimate: 4 bytes x batch x (vocabulary + embedding + 2 x widest feed-forward), "
    "6 bytes x batch x cells of the mask (or, where that is more, 12 bytes x K and V of one layer "
    "of a budget), 12 bytes of host tables per KV head and cell of a budget, and 128 MiB; flash "
    "attention on"
)


@functools.cache
def _block(ggml_type: int) -> tuple[int, int]:
    """Numbers in one block of a ggml type, and its bytes."""
    n = _library.function("ggml-base", "ggml_blck_size", ctypes.c_int64, ctypes.c_int)
    n_bytes = _library.function("ggml-base", "ggml_type_size", ctypes.c_size_t, ctypes.c_int)
    return n(ggml_type), n_bytes(ggml_type)


def _row_bytes(ggml_type: int, n: int) -> int:
    """Bytes of `n` numbers, whole blocks, of a ggml type."""
    size, n_bytes = _block(ggml_type)
    return n // size * n_bytes


def _pad(n: int) -> int:
    return -(-n // CELL_STEP) * CELL_STEP


@dataclass(frozen=True)
class Cache:
    """What a context's caches are made with.

    Parameters
    ----------
    n_ctx : int
        Logical context per sequence, tokens.
    budget : int, optional
        Cells per full-attention layer and sequence; None: no budget.
    type_k, type_v : int, default 1 (f16)
        ggml's numbers of the cache types.
    n_seq : int, default 1
        Sequences, each with cells of its own.
    n_ubatch : int, default 512
        Tokens that one graph takes; a budget lowers it.
    swa_full : bool, optional
        Sliding-window layers hold `n_ctx` cells. Default, as `Llama`'s: only without a budget.
    beacon : BeaconConfig
        The rest of a budget's settings.
    """

    n_ctx: int
    budget: int | None = None
    type_k: int = F16
    type_v: int = F16
    n_seq: int = 1
    n_ubatch: int = 512
    swa_full: bool | None = None
    beacon: BeaconConfig = dataclasses.field(default_factory=BeaconConfig)

    @property
    def cells(self) -> int:
        """Cells of a full-attention layer per sequence."""
        return _pad(self.n_ctx) if self.budget is None else self.budget

    @property
    def batch(self) -> int:
        """Tokens that one graph takes, as the context clamps them."""
        most = min(self.n_ubatch, _pad(self.n_ctx) * self.n_seq)
        if self.budget is None:
            return most
        return min(most, _native.max_batch(self.beacon.params(self.budget)))

    def cells_swa(self, n_swa: int) -> int:
        """Cells of a layer with a window of `n_swa` tokens, per sequence."""
        full = self.budget is None if self.swa_full is None else self.swa_full
        # Upstream takes the smaller of window and whole context; the budget does not matter here.
        return _pad(self.n_ctx) if full else _pad(min(_pad(self.n_ctx), n_swa + self.batch))

    def fits_heads(self, layout: Layout) -> bool:
        """Whether the heads are whole blocks of the cache types."""
        return all(
            layer.head_k % _block(self.type_k)[0] == 0 == layer.head_v % _block(self.type_v)[0]
            for layer in layout.attention
        )


@dataclass(frozen=True)
class Needs:
    """Bytes that a model and its context take, buffers' padding left out."""

    k: int  # keys of the full-attention layers
    v: int
    ring: int  # a budget's query rows
    beacon: int  # a budget's centroids with their counts and norms
    swa: int  # sliding-window caches: a budget leaves them alone, and these
    recurrent: int
    compute: int  # allowance for all that is neither weights nor caches: see COMPUTE_RULE
    weights: int  # the model's files

    @property
    def kv(self) -> int:
        """All caches."""
        return self.k + self.v + self.ring + self.beacon + self.swa + self.recurrent

    @property
    def total(self) -> int:
        return self.kv + self.compute + self.weights


def needs(layout: Layout, cache: Cache) -> Needs:
    """Bytes that a model takes with a context that is made with `cache`."""
    k = v = ring = beacon = swa = tables = widest = 0  # per sequence
    for layer in layout.attention:
        k_row = _row_bytes(cache.type_k, layer.n_head_kv * layer.head_k)
        v_row = _row_bytes(cache.type_v, layer.n_head_kv * layer.head_v)
        if layer.is_swa:
            swa += (k_row + v_row) * cache.cells_swa(layout.n_swa)
            continue
        k += k_row * cache.cells
        v += v_row * cache.cells
        if cache.budget is not None:
            n_row = 2 * cache.beacon.n_probe + 1  # f16, the last one for scrap
            ring += 2 * layer.n_head * layer.head_k * n_row
            n_mean = cache.beacon.n_beacon * layer.n_head_kv
            if cache.beacon.policy == "expected":  # mean and second moment of each query head
                n_mean = layer.n_head
                beacon += 4 * layer.head_k**2 * layer.n_head
            beacon += 4 * (layer.head_k + 2) * n_mean
            tables += 12 * layer.n_head_kv * cache.budget
            widest = max(widest, layer.n_head_kv * (layer.head_k + layer.head_v))
    per_token = 4 * (layout.n_vocab + layout.n_embd + 2 * layout.n_ff) + 6 * cache.cells
    compaction = 12 * widest * cache.cells  # a layer's K and V in f32, turned back and of length 1
    return Needs(
        k=k * cache.n_seq,
        v=v * cache.n_seq,
        ring=ring * cache.n_seq,
        beacon=beacon * cache.n_seq,
        swa=swa * cache.n_seq,
        recurrent=4 * layout.n_state * layout.n_recurrent * cache.n_seq,
        compute=max(cache.batch * per_token, compaction) + tables * cache.n_seq + PROCESS_BYTES,
        weights=layout.weights,
    )


@dataclass(frozen=True)
class Memory:
    """Memory that a model may take: its bytes, and where the figure is from."""

    n_bytes: int
    source: str


_CPU, _GPU, _IGPU = 0, 1, 2  # enum ggml_backend_dev_type


def _device_memories(*kinds: int) -> list[Memory]:
    """Free memory of ggml's devices of these kinds, the largest first."""
    device, size_p = ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)
    count = _library.function("ggml", "ggml_backend_dev_count", ctypes.c_size_t)
    get = _library.function("ggml", "ggml_backend_dev_get", device, ctypes.c_size_t)
    kind_of = _library.function("ggml-base", "ggml_backend_dev_type", ctypes.c_int, device)
    name_of = _library.function("ggml-base", "ggml_backend_dev_name", ctypes.c_char_p, device)
    ask = _library.function("ggml-base", "ggml_backend_dev_memory", None, device, size_p, size_p)
    result = []
    for i in range(count()):
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        if kind_of(get(i)) in kinds:
            ask(get(i), ctypes.byref(free), ctypes.byref(total))
            result.append(Memory(free.value, f"free on {name_of(get(i)).decode()}"))
    return sorted(result, key=lambda memory: -memory.n_bytes)


def gpu_memories() -> list[Memory]:
    """Free memory of each GPU, the largest first."""
    return _device_memories(_GPU, _IGPU)


def ram() -> Memory:
    """RAM that is available; where the system does not say, what ggml reports for the CPU."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        text = ""
    match = re.search(r"^MemAvailable: +(\d+) kB$", text, re.MULTILINE)
    if match:
        return Memory(int(match[1]) * 1024, "available RAM")
    return _device_memories(_CPU)[0]


def device_memory() -> Memory:
    """Memory that a model may take here: of the largest GPU if there is one, else of the RAM."""
    return (gpu_memories() or [ram()])[0]


def recommend_budget(cache: Cache, layout: Layout, memory: Memory) -> int | None:
    """Budget for a context: `auto_budget`'s, unless the memory can't hold it beside the weights.

    Then it is the largest multiple of 256 cells that fits. As long as `auto_budget`'s figure
    fits, nothing but the context's length decides, so a program behaves alike on all such
    machines. So it does where the model's sizes are unsure or it takes no budget.

    Parameters
    ----------
    cache : Cache
        What the context is made with; its `budget` is not looked at.
    layout : Layout
        The model.
    memory : Memory
        What weights, caches and the compute buffers have to fit into.

    Returns
    -------
    int or None
        Cells per layer and sequence; None: no budget.

    Raises
    ------
    ValueError
        Not even the smallest budget fits; the message has the bytes.
    """

    def needed(budget: int | None) -> int:
        return needs(layout, dataclasses.replace(cache, budget=budget)).total

    budget = auto_budget(cache.n_ctx)
    if layout.unsure or layout.declined or needed(budget) <= memory.n_bytes:
        return budget
    least = _pad(min_budget(cache.beacon))
    most = (budget or cache.n_ctx) // CELL_STEP * CELL_STEP
    if least <= most and needed(least) <= memory.n_bytes:
        fits, too_many = least, most + CELL_STEP  # a context out of a damaged file has no bounds
        while too_many - fits > CELL_STEP:
            cells = (fits + too_many) // (2 * CELL_STEP) * CELL_STEP
            if needed(cells) <= memory.n_bytes:
                fits = cells
            else:
                too_many = cells
        return fits
    raise ValueError(
        f"a context of {cache.n_ctx} tokens does not fit into {memory.n_bytes / MIB:,.0f} MiB "
        f"({memory.source}) under any KV budget: {least} cells need about "
        f"{needed(least) / MIB:,.0f} MiB, {layout.weights / MIB:,.0f} of them weights; "
        "a budget given as a number of cells is tried all the same"
    )


def model_budget(
    path: str, cache: Cache, n_gpu_layers: int = 0, offload_kqv: bool = True
) -> int | None:
    """What ``Llama(kv_budget="auto")`` takes: `recommend_budget` for a file and this machine.

    Falls back to the rule of `auto_budget` where the file can't be read (loading it then says
    why), where the model is shared out among several devices, and where nothing fits into the RAM:
    the weights are mapped there, and paged in as far as they are needed.

    Parameters
    ----------
    path : str
        A GGUF file.
    cache : Cache
        What the context is made with; its `budget` is not looked at.
    n_gpu_layers : int, default 0
        Layers on the GPU; negative: all.
    offload_kqv : bool, default True
        Caches are where their layers are, not in RAM.

    Returns
    -------
    int or None
        Cells per layer and sequence; None: no budget.

    Raises
    ------
    ValueError
        Not even the smallest budget fits into the GPU's memory.
    """
    try:
        layout = read_layout(path)
    except (OSError, ValueError):
        return auto_budget(cache.n_ctx)
    gpus = gpu_memories() if n_gpu_layers else []
    if not gpus:
        try:
            return recommend_budget(cache, layout, ram())
        except ValueError:
            return auto_budget(cache.n_ctx)
    if len(gpus) > 1 or not offload_kqv or 0 < n_gpu_layers <= layout.n_layer:
        return auto_budget(cache.n_ctx)
    return recommend_budget(cache, layout, gpus[0])


def recommend(layout: Layout, memory: Memory, caches: list[Cache]) -> Cache | None:
    """The one of `caches` to take, with its budget; None: nothing fits.

    `caches` are choices of context and cache types, the best types first. Of the first types that
    fit, it is the longest context whose `auto_budget` fits, else the shortest with the largest
    budget that does.
    """
    for types in dict.fromkeys((cache.type_k, cache.type_v) for cache in caches):
        same = [cache for cache in caches if (cache.type_k, cache.type_v) == types]
        same.sort(key=lambda cache: -cache.n_ctx)
        for cache in same:
            budget = None if layout.declined else auto_budget(cache.n_ctx)
            whole = dataclasses.replace(cache, budget=budget)
            if needs(layout, whole).total <= memory.n_bytes:
                return whole
        if not layout.declined:
            try:
                budget = recommend_budget(same[-1], layout, memory)
                return dataclasses.replace(same[-1], budget=budget)
            except ValueError:
                continue
    return None
