"""Builds the libraries with CUDA on a machine without a GPU, and looks into what came out.

    python tests/cuda_build.py [--build FOLDER] [--arch 86] [--jobs N]

Needs Linux, nvcc with the headers and libraries of CUDA's runtime, cmake, ninja, and about an hour
on two cores. cuBLAS is a wheel that pip fetches into the folder; the driver's library is an empty
one. First, a build for the CPU alone must have no CUDA source in it. Exits with 1 where a library
lacks symbols other than the driver's, or the operators' kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sanitize import tool

ROOT = Path(__file__).resolve().parent.parent
OPERATORS = ("beacon_track", "beacon_score", "beacon_move")


def run(*command: str | Path) -> None:
    if subprocess.run(command).returncode != 0:
        sys.exit(f"error: failed: {' '.join(map(str, command))}")


def configure(folder: Path, **defined: str | Path) -> None:
    """Configure the project's own build, without the server."""
    defined = {
        "BEACONKV_SERVER": "OFF",
        "CMAKE_EXPORT_COMPILE_COMMANDS": "ON",
        "CMAKE_MAKE_PROGRAM": tool("ninja"),
        "Python_EXECUTABLE": sys.executable,
        "GGML_NATIVE": "OFF",
        **defined,
    }
    if ccache := shutil.which("ccache"):
        defined |= {f"CMAKE_{name}_COMPILER_LAUNCHER": ccache for name in ("C", "CXX", "CUDA")}
    flags = [f"-D{name}={value}" for name, value in defined.items()]
    run(tool("cmake"), "-S", ROOT, "-B", folder, "-G", "Ninja", *flags)


def sources(folder: Path) -> list[str]:
    """The files that a configured build compiles."""
    commands = json.loads((folder / "compile_commands.json").read_text())
    return [command["file"] for command in commands]


def cublas(folder: Path) -> Path:
    """cuBLAS of nvcc's release, as a folder with include/ and lib/."""
    version = subprocess.check_output([tool("nvcc"), "--version"], text=True)
    release = re.search(r"release ((\d+)\.\d+)", version)
    assert release is not None, version
    suffix = "" if int(release[2]) >= 13 else f"-cu{release[2]}"
    if not list(folder.rglob("cublas_v2.h")):
        package = f"nvidia-cublas{suffix}=={release[1]}.*"
        run(sys.executable, "-m", "pip", "install", "--no-deps", "--target", folder, package)
    return next(folder.rglob("cublas_v2.h")).parents[1]


def driver(folder: Path) -> Path:
    """An empty library in place of the driver's, which comes with a GPU."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libcuda.so.1"
    compiler = os.environ.get("CC", "cc")
    run(compiler, "-shared", "-x", "c", os.devnull, "-Wl,-soname,libcuda.so.1", "-o", library)
    return library


def check(folder: Path) -> bool:
    """Whether the built libraries are whole, and have the operators."""
    for library in sorted(folder.glob("lib*.so")):
        print(f"{library.name}: {library.stat().st_size / 2**20:.1f} MiB")
    linked = subprocess.run(["ldd", "-r", folder / "libllama.so"], text=True, capture_output=True)
    output = linked.stdout + linked.stderr
    missing = set(re.findall(r"undefined symbol: ([^\s,]+)|(\S+ => not found)", output))
    names = {symbol or library for symbol, library in missing}
    of_driver = {name for name in names if re.match(r"cu[A-Z]", name)}
    print(f"missing: {len(of_driver)} symbols of the driver")
    for name in sorted(names - of_driver):
        print(f"missing: {name}")
    library = folder / "libggml-cuda.so"
    symbols = subprocess.check_output(["nm", "-C", "--defined-only", library], text=True)
    ours = re.findall(r"(?<= T )\w*beacon\w*", symbols)
    print(f"{library.name} defines {', '.join(ours)}")
    return names == of_driver and all(re.search(name, " ".join(ours)) for name in OPERATORS)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build", type=Path, help="folder, kept for the next time")
    parser.add_argument("--arch", default="86", help="compute capability, without the dot")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    default = Path(tempfile.gettempdir()) / "beaconkv-cuda"
    folder = (options.build or default).resolve()
    started = time.monotonic()

    configure(folder / "cpu")
    if cuda := [file for file in sources(folder / "cpu") if file.endswith(".cu")]:
        sys.exit(f"error: a build without CUDA compiles {', '.join(cuda)}")
    print("a build without CUDA compiles no .cu file")

    blas, stub = cublas(folder / "cublas"), driver(folder / "driver")
    configure(
        folder / "cuda",
        GGML_CUDA="ON",
        GGML_CUDA_NCCL="OFF",
        CMAKE_CUDA_ARCHITECTURES=f"{options.arch}-real",
        CMAKE_CUDA_FLAGS=f"-isystem {blas / 'include'}",
        CUDA_cublas_LIBRARY=next((blas / "lib").glob("libcublas.so.*")),
        CUDA_cublasLt_LIBRARY=next((blas / "lib").glob("libcublasLt.so.*")),
        CUDA_cuda_driver_LIBRARY=stub,
    )
    n_cuda = sum(file.endswith(".cu") for file in sources(folder / "cuda"))
    run(tool("cmake"), "--build", folder / "cuda", "--target", "beaconkv", "-j", str(options.jobs))
    print(f"{n_cuda} .cu files for {options.arch}: {(time.monotonic() - started) / 60:.1f} minutes")
    if not check(folder / "cuda" / "bin"):
        sys.exit("error: the libraries are not whole")


if __name__ == "__main__":
    main()
