"""Builds the libraries with Vulkan, and compares a run within a budget there with one on the CPU.

    python tests/vulkan.py [--build FOLDER] [--jobs N] [--vulkan-headers FOLDER] [--model FILE]

Vulkan's CPU device will do, slowly. Needs Linux, cmake, ninja and Debian's packages
mesa-vulkan-drivers, glslc, spirv-headers and libvulkan-dev; where the latter is older than 1.4, the
headers of a newer one too, unpacked: --vulkan-headers takes the folder that has vulkan/ in it.
Takes half an hour on two cores. Exits with 1 where the two runs differ by more than rounding
explains.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cuda_build import ROOT, configure, run
from numpy.typing import NDArray
from sanitize import tool

PACKAGES = "mesa-vulkan-drivers glslc spirv-headers libvulkan-dev"
BUDGET, WINDOW, BATCH = 256, 64, 32
N_TEXT, N_WRITE = 512, 96  # tokens that are read, and then written
# Before any eviction the two differ by 1e-3: the CPU multiplies with eight bits, Vulkan with ten.
MOST_KL, LEAST_SAME = 0.03, 0.9  # on average; at any time


class Life(NamedTuple):
    """What a context did in its budget."""

    logits: NDArray[np.float32]  # after each batch of the text, [n, n_vocab]
    kept: list[dict[tuple[int, int], list[int]]]  # then, positions by layer and KV head
    written: list[int]
    stats: dict[str, int]
    log: str


def build(folder: Path, headers: Path | None, jobs: int) -> None:
    if shutil.which("glslc") is None:
        sys.exit(f"error: glslc is needed, and was not found; Debian's packages: {PACKAGES}")
    newer = {"Vulkan_INCLUDE_DIR": headers.resolve()} if headers else {}
    configure(folder, GGML_VULKAN="ON", **newer)
    run(tool("cmake"), "--build", folder, "--target", "beaconkv", "-j", str(jobs))


def load(path: Path, on_vulkan: bool) -> Any:
    """A model with all of its layers on Vulkan's device, or none."""
    import native  # loads the libraries
    from beaconkv_gguf import llama_cpp

    class Model(native.Model):
        def __init__(self) -> None:
            params = llama_cpp.llama_model_default_params()
            params.n_gpu_layers = 999
            no_device = ctypes.c_void_p()
            if not on_vulkan:
                params.devices = ctypes.addressof(no_device)
            self.ptr = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
            self.vocab = llama_cpp.llama_model_get_vocab(self.ptr)
            self.n_vocab = llama_cpp.llama_vocab_n_tokens(self.vocab)

    return Model()


def open_context(model: Any) -> Any:
    import native

    params = native.budget(BUDGET, window=WINDOW)
    return native.Context(model, params, n_ctx=1024, n_batch=BATCH)


def live(path: Path, on_vulkan: bool) -> Life:
    """Read a text past the budget, then write."""
    import native

    logits, kept = [], []
    written: list[int] = []
    start = time.monotonic()
    with native.log() as lines:
        model = load(path, on_vulkan)
        text = model.tokenize(native.prose(40))[:N_TEXT]
        with open_context(model) as context:
            for i in range(0, N_TEXT, BATCH):
                logits.append(context.decode(text[i : i + BATCH]))
                kept.append(context.positions())
            row = logits[-1]
            while len(written) < N_WRITE:
                written.append(int(row.argmax()))
                row = context.decode(written[-1:])
            stats = context.stats()
        model.close()
    log = "".join(lines)
    for line in re.findall(r"^.*(?:using device|offloaded|KV buffer|beaconkv:).*$", log, re.M):
        print(f"    {line.strip()}")
    print(f"    {stats['n_compact']} compactions, {time.monotonic() - start:.0f} s", flush=True)
    return Life(np.stack(logits), kept, written, stats, log)


def refusal(path: Path) -> str:
    """What a context on Vulkan says that must have fused operators."""
    os.environ["BEACONKV_FUSED"] = "require"
    model = load(path, on_vulkan=True)
    try:
        open_context(model).close()
    except RuntimeError as error:
        return str(error)
    finally:
        model.close()
        del os.environ["BEACONKV_FUSED"]
    return ""


def divergence(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> NDArray[np.float64]:
    """KL divergence of each row's distribution."""

    def log_softmax(x: NDArray[np.float32]) -> NDArray[np.float64]:
        shifted = x.astype(np.float64) - x.max(-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))

    p, q = log_softmax(theirs), log_softmax(ours)
    return (np.exp(p) * (p - q)).sum(-1)


def repeats(tokens: list[int]) -> int:
    """How often in a row the text says the same few tokens at most."""
    most = 1
    for size in range(1, 9):
        for i in range(len(tokens)):
            n = 1
            while tokens[i + n * size : i + (n + 1) * size] == tokens[i : i + size]:
                n += 1
            most = max(most, n)
    return most


def compare(path: Path) -> bool:
    """Whether Vulkan does what the CPU does."""
    print("CPU:")
    cpu = live(path, on_vulkan=False)
    print("Vulkan:")
    gpu = live(path, on_vulkan=True)

    kl = divergence(gpu.logits, cpu.logits)
    same = [
        float(np.mean([len({*a[key]} & {*b[key]}) / len(a[key]) for key in a]))
        for a, b in zip(cpu.kept, gpu.kept)
    ]
    equal = next((i for i, (a, b) in enumerate(zip(cpu.written, gpu.written)) if a != b), N_WRITE)
    refused = refusal(path)
    print("KL divergence after each batch:", " ".join(f"{value:.1e}" for value in kl))
    print("share of the same cells:", " ".join(f"{value:.3f}" for value in same))
    print(f"written tokens: the first {equal} of {N_WRITE} are equal")
    print(f"BEACONKV_FUSED=require: {refused}")
    n_fused = gpu.stats["n_fused"]
    checks = [
        ("all layers are on Vulkan", re.search(r"offloaded (\d+)/\1 layers", gpu.log) is not None),
        ("none of them is fused", n_fused == 0 and "beaconkv: 0 of " in gpu.log),
        ("fused ones are refused where required", "BEACONKV_FUSED=require" in refused),
        ("as many compactions", gpu.stats["n_compact"] == cpu.stats["n_compact"]),
        ("logits as near", float(kl.mean()) < MOST_KL),
        ("the same cells", min(same) > LEAST_SAME),
        ("no loop", repeats(gpu.written) <= max(3, repeats(cpu.written))),
    ]
    for what, holds in checks:
        print(f"{'ok  ' if holds else 'FAIL'}  {what}")
    return all(holds for _, holds in checks)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build", type=Path, help="folder, kept for the next time")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--vulkan-headers", type=Path, help="folder with newer vulkan/vulkan.h")
    parser.add_argument("--model", type=Path, help="GGUF file (default: the default model)")
    options = parser.parse_args()
    default = Path(tempfile.gettempdir()) / "beaconkv-vulkan"
    folder = (options.build or default).resolve()
    build(folder, options.vulkan_headers, options.jobs)

    os.environ["BEACONKV_LIB_DIR"] = str(folder / "bin")
    os.environ.setdefault("GGML_VK_VISIBLE_DEVICES", "0")  # or a CPU device would be left out
    sys.path.insert(0, str(ROOT))  # the package of these sources
    from beaconkv_gguf.default_model import default_model_path

    if not compare(options.model or default_model_path()):
        sys.exit(1)


if __name__ == "__main__":
    main()
