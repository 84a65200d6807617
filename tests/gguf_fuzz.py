"""Loads damaged GGUF files: each must be refused by a Python exception, or load and run.

    python tests/gguf_fuzz.py [--runs N] [--first I] [--only I]

A file that crashes llama.cpp takes the process along, so a worker does the loading, within limits
of memory and time. It is told case numbers and answers each; when it dies or hangs, the case is
known, and a new worker takes the next one. A case is its number: everything else is drawn from it.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import random
import re
import select
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

TIMEOUT_S = 60.0
MEMORY_BYTES = 4 << 30  # of addresses; the real model takes 0.7 GiB

_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd"))  # codes of struct
_STRING, _ARRAY = 8, 9


# --- a GGUF file taken apart, and put together again --------------------------------------------


@dataclass
class Value:
    """Value of a key: a scalar, bytes of a string, or a list of one of these."""

    kind: int
    value: Any
    of: int = 0  # kind of an array's values

    def pack(self) -> bytes:
        if self.kind != _ARRAY:
            return _pack(self.kind, self.value)
        if self.of in _SCALARS:
            values = struct.pack(f"<{len(self.value)}{_SCALARS[self.of]}", *self.value)
        else:
            values = b"".join(_pack(self.of, value) for value in self.value)
        return struct.pack("<IQ", self.of, len(self.value)) + values


def _pack(kind: int, value: Any) -> bytes:
    if kind == _STRING:
        return struct.pack("<Q", len(value)) + value
    return struct.pack("<" + _SCALARS[kind], value)


@dataclass
class Tensor:
    name: bytes
    dims: list[int]
    kind: int
    offset: int

    @property
    def n_bytes(self) -> int:
        n_block, n_bytes = GGML_QUANT_SIZES.get(GGMLQuantizationType(self.kind), (1, 4))
        n = 1
        for dim in self.dims:
            n *= dim
        return n // n_block * n_bytes


@dataclass
class Gguf:
    pairs: list[tuple[bytes, Value]]
    tensors: list[Tensor]
    data: bytes
    fields: list[tuple[str, int, int]] = field(default_factory=list)  # kind, offset, size

    def header(self) -> bytearray:
        """Everything before the data; notes where the fields are."""
        out = bytearray(b"GGUF")
        self.fields = [("magic", 0, 4)]

        def put(kind: str, data: bytes) -> None:
            self.fields.append((kind, len(out), len(data)))
            out.extend(data)

        put("version", struct.pack("<I", 3))
        put("n_tensors", struct.pack("<Q", len(self.tensors)))
        put("n_kv", struct.pack("<Q", len(self.pairs)))
        for key, value in self.pairs:
            put("key length", struct.pack("<Q", len(key)))
            put("key", key)
            put("kind", struct.pack("<I", value.kind))
            data = value.pack()
            if value.kind == _ARRAY:
                put("array kind", data[:4])
                put("array length", data[4:12])
                if value.of == _STRING and value.value:
                    put("string length", data[12:20])
                    put("array", data[20:])
                else:
                    put("array", data[12:])
            elif value.kind == _STRING:
                put("string length", data[:8])
                put("string", data[8:])
            else:
                put("scalar", data)
        for tensor in self.tensors:
            put("name length", struct.pack("<Q", len(tensor.name)))
            put("name", tensor.name)
            put("n_dims", struct.pack("<I", len(tensor.dims)))
            for dim in tensor.dims:
                put("dim", struct.pack("<Q", dim))
            put("type", struct.pack("<I", tensor.kind))
            put("offset", struct.pack("<Q", tensor.offset % 2**64))
        out.extend(bytes(-len(out) % 32))
        return out

    def lay_out(self) -> None:
        """Set the tensors' offsets to what their sizes ask for."""
        offset = 0
        for tensor in self.tensors:
            tensor.offset = offset
            offset += -(-tensor.n_bytes // 32) * 32


def read(path: Path) -> Gguf:
    """A sound file; of a large one, without data: zeros will do."""
    blob = path.read_bytes()
    at = 4 + 4

    def take(code: str) -> Any:
        nonlocal at
        value = struct.unpack_from("<" + code, blob, at)
        at += struct.calcsize("<" + code)
        return value[0]

    def text() -> bytes:
        nonlocal at
        n = take("Q")
        at += n
        return blob[at - n : at]

    def value(kind: int) -> Any:
        return text() if kind == _STRING else take(_SCALARS[kind])

    n_tensors, n_kv = take("Q"), take("Q")
    pairs, tensors = [], []
    for _ in range(n_kv):
        key, kind = text(), take("I")
        if kind == _ARRAY:
            of, n = take("I"), take("Q")
            pairs.append((key, Value(kind, [value(of) for _ in range(n)], of)))
        else:
            pairs.append((key, Value(kind, value(kind))))
    for _ in range(n_tensors):
        name, n_dims = text(), take("I")
        tensors.append(Tensor(name, [take("Q") for _ in range(n_dims)], take("I"), take("Q")))
    data = blob[at + -at % 32 :]
    return Gguf(pairs, tensors, data if len(data) < 1 << 24 else b"")


# --- damage -------------------------------------------------------------------------------------

_NUMBERS = [0, 1, 2, 3, 5, 7, 8, 31, 64, 255, 256, 511, 512, 513, 1000, 4096, 65535, 65536, 10**6]
_NUMBERS += [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**63 - 1, 2**63, 2**64 - 1]
_FLOATS = [0.0, -1.0, 1e-30, 1e30, 0.5, 1.0, float("inf"), float("-inf"), float("nan")]
_STRINGS = [
    b"",
    b"\xff\xfe\x80",
    b"\0",
    b"llama",
    b"none",
    b"yarn",
    b"{{ x",
    b"x" * 100,
    b"x" * 70000,
]
_TENSORS = b"rope_freqs.weight output.bias blk.0.attn_q.bias odd blk.99.attn_q.weight".split()
_TOKENIZERS = b"llama gpt2 bert t5 rwkv plamo2 gemma4 none no_vocab test hybriddna".split()
_ARCHS = b"""
llama qwen2 qwen3 gemma2 gemma3 gpt-oss falcon bert gpt2 deepseek2 mamba rwkv7 granitehybrid llama4
phi3 t5 clip qwen3moe qwen3next stablelm bloom olmo2 command-r jamba gemma3n gemma4 minicpm3 lfm2
mpt starcoder2 wavtokenizer-dec apertus dream nemotron_h plm smollm3
""".split()
# Keys that llama.cpp reads where a file has them: of an architecture, and of all.
_OPTIONAL = b"""
attention.key_length attention.value_length attention.key_length_swa attention.value_length_swa
attention.key_length_mla attention.value_length_mla attention.sliding_window
attention.sliding_window_pattern attention.head_count attention.head_count_kv attention.causal
attention.clamp_kqv attention.scale attention.max_alibi_bias attention.layer_norm_epsilon
attention.layer_norm_rms_epsilon attention.temperature_scale attention.temperature_length
attention.shared_kv_layers attention.output_scale attention.recurrent_layers attn_logit_softcapping
block_count classifier.output_labels context_length embedding_length embedding_length_out
embedding_scale expert_count expert_used_count expert_group_count expert_group_used_count
expert_feed_forward_length expert_gating_func expert_shared_count expert_weights_scale
feed_forward_length final_logit_softcapping full_attention_interval interleave_moe_layer_step
leading_dense_block_count logit_scale nextn_predict_layers pooling_type residual_scale
rope.dimension_count rope.dimension_count_swa rope.dimension_sections rope.freq_base
rope.freq_base_swa rope.scale_linear rope.scaling.alpha rope.scaling.attn_factor rope.scaling.factor
rope.scaling.finetuned rope.scaling.original_context_length rope.scaling.type
rope.scaling.yarn_log_multiplier ssm.conv_kernel ssm.group_count ssm.inner_size ssm.state_size
ssm.time_step_rank tensor_data_layout token_type_count use_parallel_residual vocab_size
decoder_start_token_id decoder_block_count
""".split()
_OPTIONAL_OF_ALL = b"""
general.alignment general.architecture general.file_type general.name general.quantization_version
general.tensor_extra_names split.count split.no split.tensors.count tokenizer.chat_template
tokenizer.ggml.add_bos_token tokenizer.ggml.add_eos_token tokenizer.ggml.add_sep_token
tokenizer.ggml.add_space_prefix tokenizer.ggml.bos_token_id tokenizer.ggml.eos_token_id
tokenizer.ggml.eot_token_id tokenizer.ggml.eom_token_id tokenizer.ggml.merges tokenizer.ggml.model
tokenizer.ggml.padding_token_id tokenizer.ggml.pre tokenizer.ggml.precompiled_charsmap
tokenizer.ggml.remove_extra_whitespaces tokenizer.ggml.scores tokenizer.ggml.seperator_token_id
tokenizer.ggml.suppress_tokens tokenizer.ggml.token_type tokenizer.ggml.token_type_count
tokenizer.ggml.tokens tokenizer.ggml.unknown_token_id adapter.type
""".split()


def _number(rng: random.Random, code: str, old: Any = 0) -> Any:
    """An odd number of a C type."""
    if code in "fd":
        return rng.choice([*_FLOATS, rng.uniform(-1e4, 1e4)])
    if code == "?":
        return rng.random() < 0.5
    bits = 8 * struct.calcsize(code)
    old = int(old) if isinstance(old, int) else 0
    near = [old - 1, old + 1, old * 2, old // 2, -old, rng.getrandbits(64), rng.randrange(1, 600)]
    value = rng.choice([*_NUMBERS, *near]) % 2**bits
    return value - 2**bits if code.islower() and value >= 2 ** (bits - 1) else value


def _scalar(rng: random.Random, kind: int, key: bytes, old: Any = 0) -> Any:
    """An odd value of a kind; of some keys, one that llama.cpp knows."""
    if kind != _STRING:
        return _number(rng, _SCALARS[kind], old)
    known = {b"general.architecture": _ARCHS, b"tokenizer.ggml.model": _TOKENIZERS}.get(key)
    if known and rng.random() < 0.8:
        return rng.choice(known)
    return rng.choice([*_STRINGS, rng.randbytes(rng.randrange(12))])


def _odd_value(rng: random.Random, key: bytes, old: Value | None) -> Value:
    """A value to replace another, of the same kind or not."""
    if old is not None and rng.random() < 0.5:
        if old.kind != _ARRAY:
            return Value(old.kind, _scalar(rng, old.kind, key, old.value))
        values = list(old.value)
        for _ in range(rng.choice([1, 1, 2, 9]) if values else 0):
            i = rng.randrange(len(values))
            values[i] = _scalar(rng, old.of, b"", values[i])
        if values and rng.random() < 0.3:  # two of a kind
            values[rng.randrange(len(values))] = rng.choice(values)
        return Value(_ARRAY, values, old.of)
    kind = rng.choice([*_SCALARS, *[4] * 4, 5, 6, 7, _STRING, _STRING])
    if old is not None and old.kind == _ARRAY and rng.random() < 0.5:  # another length
        n = rng.choice([0, 1, len(old.value) // 2, max(0, len(old.value) - 1)])
        return Value(_ARRAY, old.value[:n] + old.value[: rng.choice([0, 0, 1])], old.of)
    if rng.random() < 0.3:
        n = rng.choice([0, 1, 2, 3, 4, 8, 512, 600])
        return Value(_ARRAY, [_scalar(rng, kind, b"") for _ in range(n)], kind)
    return Value(kind, _scalar(rng, kind, key))


def _change_value(rng: random.Random, model: Gguf) -> None:
    i = rng.randrange(len(model.pairs))
    key, old = model.pairs[i]
    model.pairs[i] = key, _odd_value(rng, key, old)


def _change_number(rng: random.Random, model: Gguf) -> None:
    """Sound in form: the numbers are what is wrong."""
    found = [i for i, (_, value) in enumerate(model.pairs) if value.kind in _SCALARS]
    if not found:
        return
    i = rng.choice(found)
    key, old = model.pairs[i]
    model.pairs[i] = key, Value(old.kind, _number(rng, _SCALARS[old.kind], old.value))


def _add_pair(rng: random.Random, model: Gguf) -> None:
    arch = dict(model.pairs).get(b"general.architecture")
    if rng.random() < 0.7 and arch is not None and isinstance(arch.value, bytes):
        key = arch.value + b"." + rng.choice(_OPTIONAL)
    else:
        key = rng.choice(_OPTIONAL_OF_ALL)
    old = dict(model.pairs).get(key)
    model.pairs = [pair for pair in model.pairs if pair[0] != key]
    model.pairs.append((key, _odd_value(rng, key, old)))


def _drop_pair(rng: random.Random, model: Gguf) -> None:
    if len(model.pairs) > 4:
        i = rng.randrange(len(model.pairs))
        if model.pairs[i][0] != b"general.architecture" or rng.random() < 0.2:
            model.pairs.pop(i)


def _repeat_pair(rng: random.Random, model: Gguf) -> None:
    model.pairs.append(rng.choice(model.pairs))


def _change_tensor(rng: random.Random, model: Gguf) -> None:
    tensor = rng.choice(model.tensors)
    action = rng.choice(["dim", "dim", "zero", "more", "fewer", "swap", "kind", "kind", "name"])
    if action == "dim" and tensor.dims:
        i = rng.randrange(len(tensor.dims))
        tensor.dims[i] = min(_number(rng, "Q", tensor.dims[i]), 2**63)
    elif action == "zero" and tensor.dims:
        tensor.dims[rng.randrange(len(tensor.dims))] = 0
    elif action == "more":
        tensor.dims.append(rng.choice([0, 1, 2, 3]))
    elif action == "fewer" and tensor.dims:
        tensor.dims.pop()
    elif action == "swap":
        tensor.dims.reverse()
    elif action == "kind":
        tensor.kind = rng.choice([int(kind) for kind in GGMLQuantizationType])
    elif action == "name":
        tensor.name = rng.choice([b"", b"x", tensor.name + b"x", b"y" * 70, b"\xff\xfe"])
    if rng.random() < 0.8:
        model.lay_out()


def _move_tensors(rng: random.Random, model: Gguf) -> None:
    action = rng.choice(["drop", "repeat", "add", "shuffle", "none"])
    if action == "drop" and model.tensors:
        model.tensors.pop(rng.randrange(len(model.tensors)))
    elif action == "repeat" and model.tensors:
        model.tensors.append(rng.choice(model.tensors))
    elif action == "add":
        name = rng.choice(_TENSORS)
        model.tensors.append(Tensor(name, [rng.choice([1, 32, 64, 256])], 0, 0))
    elif action == "shuffle":
        rng.shuffle(model.tensors)
    elif action == "none":
        model.tensors.clear()
    if rng.random() < 0.8:
        model.lay_out()


def _patch_field(rng: random.Random, blob: bytearray, fields: list[tuple[str, int, int]]) -> None:
    """Write over one field: lengths and counts no longer fit what they are of."""
    kind = rng.choice(sorted({kind for kind, _, size in fields if size}))
    _, at, size = rng.choice([f for f in fields if f[0] == kind and f[2]])
    if size > 8:
        at, size = at + rng.randrange(size - 7), 8
    old = int.from_bytes(blob[at : at + size], "little")
    if rng.random() < 0.4:
        new = old ^ 1 << rng.randrange(8 * size)
    else:
        new = _number(rng, "Q", old) % 2 ** (8 * size)
    blob[at : at + size] = new.to_bytes(size, "little")


def _flip_bits(rng: random.Random, blob: bytearray, fields: list[tuple[str, int, int]]) -> None:
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        i = rng.randrange(len(blob))
        blob[i] ^= 1 << rng.randrange(8)


_Change = Callable[[random.Random, Gguf], None]
_STRUCTURE: list[_Change] = [_change_value, _change_number, _add_pair, _change_tensor] * 2
_STRUCTURE += [_add_pair, _drop_pair, _repeat_pair, _move_tensors]
_BYTES = [_patch_field, _patch_field, _flip_bits]


@dataclass(frozen=True)
class Case:
    """One damaged file, and what it is loaded with."""

    number: int
    base: str
    damage: tuple[str, ...]
    arguments: dict[str, Any]

    def __str__(self) -> str:
        return f"case {self.number}: {self.base}, {'+'.join(self.damage)}, {self.arguments}"


def base_of(number: int, bases: list[str]) -> str:
    """Every second file is the first model; the real one, slow to load, comes seldom."""
    if number % 2 == 0:
        return bases[0]
    if number % 40 == 1 and "real" in bases:
        return "real"
    others = [base for base in bases[1:] if base != "real"] or bases
    return others[number // 2 % len(others)]


def write_case(number: int, bases: dict[str, Gguf], path: Path) -> Case:
    """Write the file of a case."""
    rng = random.Random(number)
    base = base_of(number, list(bases))
    source = bases[base]
    model = Gguf(
        [(key, Value(value.kind, value.value, value.of)) for key, value in source.pairs],
        [Tensor(t.name, list(t.dims), t.kind, t.offset) for t in source.tensors],
        source.data,
    )
    damage: list[str] = []
    how = rng.choice(["cut", "bytes", "bytes", "structure", "structure", "structure"])
    if how == "structure":
        for _ in range(rng.choice([1, 1, 2, 3])):
            change = rng.choice(_STRUCTURE)
            if change is not _change_tensor or model.tensors:
                change(rng, model)
                damage.append(change.__name__.strip("_"))
    blob = model.header()
    if how == "bytes":
        for _ in range(rng.choice([1, 1, 2])):
            patch = rng.choice(_BYTES)
            patch(rng, blob, model.fields)
            damage.append(patch.__name__.strip("_"))
    needed = sum(-(-min(t.n_bytes, 1 << 30) // 32) * 32 for t in source.tensors)
    if model.tensors and model.tensors[-1].offset < 1 << 30:
        last = model.tensors[-1]
        needed = max(needed, last.offset + min(last.n_bytes, 1 << 28))
    with path.open("wb") as file:
        file.write(blob)
        file.write(model.data)
        file.truncate(len(blob) + needed)  # zeros up to there take no space
        if how == "cut":
            at = rng.choice([rng.randrange(len(blob)), rng.randrange(len(blob) + needed)])
            if rng.random() < 0.3:
                at = rng.choice(model.fields)[1]
            file.truncate(at)
            damage.append(f"cut at {at}")
    arguments: dict[str, Any] = {"kv_budget": rng.choice([None, 384, "auto", 0.5])}
    arguments["n_ctx"] = rng.choice([1024, 1024, 1024, 0])
    if rng.random() < 0.1:
        arguments["vocab_only"] = True
    if rng.random() < 0.1:
        arguments["use_mmap"] = False
    return Case(number, base, tuple(damage), arguments)


# --- the worker ---------------------------------------------------------------------------------


def _limit() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # elsewhere it is not enforced, or includes the system's own
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def load(path: Path, arguments: dict[str, Any]) -> str:
    """Load a file, and read a little text if that goes; what came of it.

    Other exceptions than these are no refusal: nobody meant to raise them.
    """
    from beaconkv_gguf import Llama

    try:
        llm = Llama(path, n_threads=1, n_threads_batch=1, verbose=True, **arguments)
    except (ValueError, RuntimeError, OSError, MemoryError) as error:
        return f"refused {type(error).__name__}: {error}"
    except Exception as error:
        if type(error).__module__.startswith("jinja2"):  # the chat template is broken
            return f"refused {type(error).__name__}: {error}"
        return f"WRONG {type(error).__name__}: {error}"
    with llm:
        try:
            tokens = llm.tokenize(b"Once upon a time", special=True)
            llm.detokenize(tokens)
            if llm._ctx.memory is not None:  # encoders, and vocabularies alone
                llm.eval(tokens[:8])
                llm.sample()
                llm.kv_stats()
        except (ValueError, RuntimeError) as error:
            return f"loaded, then {type(error).__name__}: {error}"
        except Exception as error:
            return f"WRONG after loading {type(error).__name__}: {error}"
    return "loaded"


def work(files: list[str], folder: Path) -> None:
    """Answer case numbers of the standard input, until it ends."""
    bases = {Path(file).stem: read(Path(file)) for file in files}
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what llama.cpp prints is no answer
    import beaconkv_gguf  # noqa: F401  (before the limit of time runs)

    _limit()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        path = folder / f"case-{line.strip()}.gguf"
        case = write_case(int(line), bases, path)
        print(case, file=answers, flush=True)
        answer = load(path, case.arguments)
        path.unlink()
        print(" ".join(answer.split()), file=answers, flush=True)


class Worker:
    """A process that loads files, and its answers by the line."""

    def __init__(self, files: list[Path], folder: Path) -> None:
        import beaconkv_gguf

        package = Path(beaconkv_gguf.__file__).parent.parent
        self.errors = (folder / "errors").open("w+b")
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--work", str(folder), *map(str, files)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env={
                **os.environ,
                "GGML_NO_BACKTRACE": "1",  # a debugger, for seconds
                "PYTHONPATH": os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")]),
            },
        )
        self.buffer = b""
        if self.line(120.0) is None:  # "ready"
            self.close()
            raise RuntimeError("the worker does not start:\n" + "\n".join(self.tail()))

    def line(self, timeout_s: float) -> str | None:
        """Next line of the answers; None: the process died or is late."""
        assert self.process.stdout is not None
        end = time.monotonic() + timeout_s
        while b"\n" not in self.buffer:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                return None
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            if not data:
                return None
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line.decode("utf-8", "replace")

    def ask(self, number: int) -> tuple[str, str, bool]:
        """A case's description, its answer, and whether the process lives on."""
        assert self.process.stdin is not None
        self.errors.truncate(0)
        self.process.stdin.write(f"{number}\n".encode())
        self.process.stdin.flush()
        case = self.line(TIMEOUT_S)
        answer = self.line(TIMEOUT_S) if case is not None else None
        if answer is not None and case is not None:
            return case, answer, True
        try:
            reason = f"CRASH {self.process.wait(2.0)}:"
        except subprocess.TimeoutExpired:
            reason = f"HANG of {TIMEOUT_S} s:"
        self.close()
        tail = self.tail()
        told = [line for line in tail if "ASSERT" in line or "what()" in line or "fatal" in line]
        return case or f"case {number}", f"{reason} {' | '.join(told or tail[-2:])[:500]}", False

    def tail(self) -> list[str]:
        """What the process said at last."""
        self.errors.seek(0)
        return self.errors.read().decode("utf-8", "replace").strip("\0").splitlines()[-20:]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]


def write_bases(folder: Path) -> list[Path]:
    """The sound files: the tiny models, and the real one."""
    import tiny_models

    from beaconkv_gguf import default_model

    names = ["llama", *sorted(tiny_models.ALL.keys() - {"llama"})]
    files = [tiny_models.write(name, folder / f"{name}.gguf") for name in names]
    real = folder / "real.gguf"
    real.symlink_to(default_model.default_model_path())
    return [*files, real]


def run(numbers: Iterable[int], folder: Path) -> Iterator[tuple[str, str]]:
    """Description and answer of each case; WRONG, CRASH and HANG begin those that are bad."""
    files = write_bases(folder)
    worker = Worker(files, folder)
    try:
        for number in numbers:
            case, answer, lives = worker.ask(number)
            yield case, answer
            if not lives:
                worker = Worker(files, folder)
    finally:
        worker.close()


def is_bad(answer: str) -> bool:
    return answer.startswith(("WRONG", "CRASH", "HANG"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5000, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="I")
    parser.add_argument("--only", type=int, metavar="I", help="in this process; the file is kept")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("files", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.files, options.work)
        return
    with tempfile.TemporaryDirectory() as name:
        if options.only is not None:
            path = Path(f"case-{options.only}.gguf")
            bases = {file.stem: read(file) for file in write_bases(Path(name))}
            only = write_case(options.only, bases, path)
            print(f"{only}, {path}", flush=True)
            print(load(path, only.arguments))
            return
        counts: collections.Counter[str] = collections.Counter()
        n_bad = 0
        for case, answer in run(range(options.first, options.first + options.runs), Path(name)):
            counts[re.split("[ ,]", answer)[0]] += 1
            if is_bad(answer):
                n_bad += 1
                print(f"{case}\n    {answer}", flush=True)
        print(dict(counts))
    sys.exit(n_bad > 0)


if __name__ == "__main__":
    main()
