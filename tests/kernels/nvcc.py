"""Compiles the CUDA kernels against llama.cpp's own headers, and tells what each kernel takes.

    python tests/kernels/nvcc.py [--tree FOLDER] [--cublas FOLDER] [--arch 75 86 ..]

Needs nvcc with the headers of CUDA's runtime, but no GPU. cuBLAS, whose headers llama.cpp's
include, is a wheel that pip fetches into the folder. Exits with 1 on a warning or a register that
is spilled.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent))

from cuda_build import cublas, tool  # noqa: E402

KERNELS = ROOT / "native" / "ggml" / "cuda" / "beacon.cu"
ARCHITECTURES = ["75", "86", "89", "90", "120"]

# as llama.cpp's CMakeLists.txt has them, and warnings as errors
FLAGS = ["-std=c++17", "-O3", "-use_fast_math", "-extended-lambda", "-Werror", "all-warnings"]
HOST_FLAGS = "-Wall,-Wextra,-Werror,-Wno-unused-function"  # ggml-impl.h has functions for others


def find_tree() -> Path:
    """The patched llama.cpp that the project's build unpacked."""
    for header in (ROOT / "build").glob("**/ggml/src/ggml-cuda/common.cuh"):
        return header.parents[3]
    sys.exit("error: found no llama.cpp, give its folder as --tree")


def compile_for(arch: str, tree: Path, blas: Path, folder: Path) -> str:
    """What ptxas says of the kernels."""
    system = [tree / "ggml/src/ggml-cuda", tree / "ggml/src", tree / "ggml/include"]
    command = [tool("nvcc"), *FLAGS, "-Xcompiler", HOST_FLAGS, "-Xptxas", "-v,-warn-spills"]
    command += [f"-arch=sm_{arch}", f"-I{ROOT / 'native/ggml'}"]
    for include in [*system, blas / "include"]:
        command += ["-isystem", str(include)]
    command += ["-c", str(KERNELS), "-o", str(folder / f"beacon-{arch}.o")]
    done = subprocess.run(command, text=True, capture_output=True)
    if done.returncode != 0 or "warning" in done.stderr:
        sys.exit(f"{done.stdout}{done.stderr}error: failed: {' '.join(command)}")
    return subprocess.run(
        [tool("c++filt")], input=done.stderr, text=True, stdout=subprocess.PIPE
    ).stdout


def numbers(report: str) -> dict[str, tuple[int, int, int]]:
    """Registers, bytes of shared memory and bytes spilled, of each kernel."""
    found = {}
    for part in re.split(r"Compiling entry function ", report)[1:]:
        name = re.sub(r"^'(void )?([\w<> ]+).*", r"\2", part.splitlines()[0])
        spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", part))
        registers = re.search(r"Used (\d+) registers", part)
        shared = re.search(r"(\d+) bytes smem", part)
        assert registers is not None, part
        found[name] = (int(registers[1]), int(shared[1]) if shared else 0, spills)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, help="llama.cpp; by default that of the last build")
    default = Path(tempfile.gettempdir()) / "beaconkv-cuda" / "cublas"
    parser.add_argument("--cublas", type=Path, default=default, help="folder for its headers")
    parser.add_argument("--arch", nargs="+", default=ARCHITECTURES)
    options = parser.parse_args()
    tree = options.tree or find_tree()
    blas = cublas(options.cublas)

    with tempfile.TemporaryDirectory() as folder:
        table = {
            arch: numbers(compile_for(arch, tree, blas, Path(folder))) for arch in options.arch
        }
    print("registers, by compute capability; bytes of shared memory; bytes spilled")
    print(f"{'':20}", *(f"{arch:>5}" for arch in table), " shared spilled")
    n_spilled = 0
    for name in next(iter(table.values())):
        kernel = [table[arch][name] for arch in table]
        spilled = sum(spills for _, _, spills in kernel)
        registers = " ".join(f"{registers:5}" for registers, _, _ in kernel)
        print(f"{name:20} {registers} {max(shared for _, shared, _ in kernel):7} {spilled:7}")
        n_spilled += spilled
    if n_spilled:
        sys.exit("error: registers are spilled")


if __name__ == "__main__":
    main()
