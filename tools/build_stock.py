"""Build llama.cpp from the same sources without our patches, with llama-bench.

    python tools/build_stock.py [--out FOLDER] [--without-bench] [--server]

The tests for parity and the benchmarks compare with it: they look for the libraries in
BEACONKV_STOCK_LIB_DIR, which is FOLDER/bin. CMAKE_ARGS passes through as in the package's build.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "stock")
    parser.add_argument("--without-bench", action="store_true", help="takes half the time")
    parser.add_argument(
        "--server", action="store_true", help="llama-server too, for benchmarks/server.py"
    )
    options = parser.parse_args()
    out = options.out.resolve()
    # cmake and ninja may be the ones of this interpreter's environment.
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    cmake = shutil.which("cmake", path=search)
    if cmake is None:
        sys.exit("error: cmake is needed, and was not found (pip install cmake ninja)")
    configure = [cmake, "-S", str(ROOT), "-B", str(out), "-DBEACONKV_STOCK=ON"]
    configure += ["-DCMAKE_BUILD_TYPE=Release", f"-DPython_EXECUTABLE={sys.executable}"]
    if ninja := shutil.which("ninja", path=search):
        configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    configure += shlex.split(os.environ.get("CMAKE_ARGS", ""))
    targets = ["beaconkv-stock"]
    targets += [] if options.without_bench else ["llama-bench"]
    targets += ["llama-server"] if options.server else []
    build = [cmake, "--build", str(out), "--config", "Release", "--target", *targets]
    build += ["--parallel", str(os.cpu_count() or 1)]
    for command in (configure, build):
        if subprocess.run(command).returncode != 0:
            sys.exit("error: the stock build failed")
    print(f"BEACONKV_STOCK_LIB_DIR={out / 'bin'}")


if __name__ == "__main__":
    main()
