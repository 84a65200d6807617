"""Runs the kernels of CUDA and Metal on the CPU with sanitizers, over the whole matrix of shapes.

    python tests/kernels/sanitize.py address|thread [--counts 1 31 257]

address: AddressSanitizer and UndefinedBehaviorSanitizer; thread: ThreadSanitizer, where each thread
of each block is a thread of its own, ordered by barriers alone. Needs GCC or Clang with them, and
the installed package. Exits with 1 at the first report or wrong result.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import operators
import test_operators as matrix


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sanitizer", choices=("address", "thread"))
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 31, 257], help="cells")
    options = parser.parse_args()

    kind = "address,undefined" if options.sanitizer == "address" else "thread"
    parts = {"edges": matrix.edges(), "track": matrix.track_matrix()}
    for n in options.counts:
        parts[f"score {n}"] = matrix.score_matrix((n,))
        parts[f"move {n}"] = matrix.move_matrix((n,))
    with tempfile.TemporaryDirectory() as folder:
        program = operators.build_runner(Path(folder), ("-O1", f"-fsanitize={kind}"))
        for device in operators.EMULATED:
            for name, cases in parts.items():
                begin = time.monotonic()
                operators.check(program, device, cases)
                seconds = time.monotonic() - begin
                print(f"{device}, {name}: {len(cases)} cases, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    try:
        main()
    except (AssertionError, RuntimeError) as error:
        sys.exit(f"error: {error}")
