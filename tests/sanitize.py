"""Runs the tests that drive native code on libraries with sanitizers, slowly.

    python tests/sanitize.py address|thread [--build FOLDER] [--only-build] [TEST ...]

address: AddressSanitizer and UndefinedBehaviorSanitizer; thread: ThreadSanitizer. The libraries are
built by the project's own CMake, with the invariants of BEACONKV_CHECK, outside of the repository.
Needs GCC on Linux. Exits with 1 where a test fails, or a report has a line of native/ in it; other
reports are counted.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLAGS = {"address": "address,undefined", "thread": "thread"}
RUNTIMES = {"address": ["libasan.so", "libubsan.so"], "thread": ["libtsan.so"]}
TESTS = {
    "address": [
        "test_semantics.py",
        "test_parity.py",
        "test_fused.py",
        "test_reuse.py",
        "test_state.py",
        "test_machine.py",
        "test_abort.py",
        "test_threads.py",
        "test_llama.py",
    ],
    "thread": ["test_threads.py", "test_abort.py"],
}
SUPPRESSIONS = {
    # Queries that are not kept go to one scrap row of the query rows, from all threads of ggml at
    # once; nobody reads it.
    "thread": ["race:ggml_compute_forward_set_rows_impl"],
}
OPTIONS = {
    "address": {
        # Python keeps what it allocated; a model that is too large is a test of ours
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    },
    # Python and libffi are not instrumented: the GIL, and what it orders, would not be seen
    "thread": {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1:halt_on_error=0:exitcode=0"},
}


def tool(name: str) -> str:
    """Path of a program, of this interpreter's environment first."""
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    path = shutil.which(name, path=search)
    if path is None:
        sys.exit(f"error: {name} is needed, and was not found")
    return path


def build(kind: str, folder: Path, jobs: int) -> None:
    """Build libllama and ggml with a sanitizer."""
    flags = f"-fsanitize={FLAGS[kind]} -fno-omit-frame-pointer -DBEACONKV_CHECK"
    # -O1 for stacks that can be read. Without C's assertions, as the release: tests load states
    # with wrong numbers, which llama.cpp asserts and we refuse
    defined = {
        "CMAKE_BUILD_TYPE": "RelWithDebInfo",
        "CMAKE_MAKE_PROGRAM": tool("ninja"),
        "Python_EXECUTABLE": sys.executable,
        "GGML_NATIVE": "OFF",
        "GGML_LLAMAFILE": "OFF",
        "GGML_OPENMP": "OFF",  # libgomp is not instrumented: each of its barriers would be a race
        **{f"CMAKE_{language}_FLAGS": flags for language in ("C", "CXX")},
        **{
            f"CMAKE_{language}_FLAGS_RELWITHDEBINFO": "-O1 -g1 -DNDEBUG"
            for language in ("C", "CXX")
        },
    }
    if ccache := shutil.which("ccache"):
        defined.update({f"CMAKE_{name}_COMPILER_LAUNCHER": ccache for name in ("C", "CXX")})
    configure = [tool("cmake"), "-S", str(ROOT), "-B", str(folder), "-G", "Ninja"]
    configure += [f"-D{name}={value}" for name, value in defined.items()]
    compile_ = [tool("cmake"), "--build", str(folder), "--target", "llama", "-j", str(jobs)]
    for command in (configure, compile_):
        if subprocess.run(command).returncode != 0:
            sys.exit(f"error: the build failed: {folder}")


def run(kind: str, folder: Path, tests: list[str]) -> bool:
    """Run the tests on a build; whether they pass, and no report is of our code."""
    reports = folder / "reports"
    shutil.rmtree(reports, ignore_errors=True)
    reports.mkdir()
    compiler = os.environ.get("CXX", "c++")
    preloaded = [
        subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip()
        for name in RUNTIMES[kind]
    ]
    environment = {
        **os.environ,
        "BEACONKV_LIB_DIR": str(folder / "bin"),
        "LD_PRELOAD": ":".join(preloaded),
        "PYTHONMALLOC": "malloc",  # an arena would hide what is read beyond a buffer
        "GGML_NO_BACKTRACE": "1",  # by a debugger, which waits for an instrumented program
    }
    environment.pop("BEACONKV_STOCK_LIB_DIR", None)  # compares bits with a build of other flags
    suppressions = folder / "suppressions"
    suppressions.write_text("\n".join(SUPPRESSIONS.get(kind, [])) + "\n")
    for name, value in OPTIONS[kind].items():
        environment[name] = f"{value}:log_path={reports}/report"
        if kind in SUPPRESSIONS:
            environment[name] += f":suppressions={suppressions}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    passed = subprocess.run(command, cwd=ROOT, env=environment).returncode == 0

    counts: collections.Counter[str] = collections.Counter()
    ours = False
    for path in sorted(reports.iterdir()):
        for report in split(path.read_text(errors="replace")):
            is_ours = f"{ROOT}/native/" in report
            ours |= is_ours
            counts[title(report, is_ours)] += 1
            if is_ours and counts[title(report, is_ours)] == 1:
                print(report)
    for what, n in counts.most_common():
        print(f"{n:6d}  {what}")
    print(
        "tests pass" if passed else "tests FAIL", "and native/ has", "reports" if ours else "none"
    )
    return passed and not ours


def split(text: str) -> list[str]:
    """Reports of one process."""
    begins = r"^(?===\d+==ERROR|WARNING: ThreadSanitizer|\S+:\d+:\d+: runtime error)"
    return [part for part in re.split(begins, text, flags=re.M) if re.match(begins, part)]


def title(report: str, is_ours: bool) -> str:
    """First line of a report, and of whose code it is."""
    line = report.strip().splitlines()[0]
    frame = re.search(r"^ +#\d+ .*?(/\S+\.(?:cpp|c|h)\b:\d+)", report, re.M)
    where = f" at {frame[1]}" if frame and "runtime error" not in line else ""
    return f"{'OURS ' if is_ours else ''}{re.sub(r'0x[0-9a-f]+|==[0-9]+==', '', line)}{where}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=sorted(FLAGS))
    parser.add_argument("--build", type=Path, help="folder, kept for the next time")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only-build", action="store_true")
    parser.add_argument("tests", nargs="*", metavar="TEST", help="files, or what else pytest takes")
    options = parser.parse_intermixed_args()
    default = Path(tempfile.gettempdir()) / f"beaconkv-sanitize-{options.kind}"
    folder = (options.build or default).resolve()
    build(options.kind, folder, options.jobs)
    tests = options.tests or [f"tests/{name}" for name in TESTS[options.kind]]
    if not options.only_build:
        sys.exit(not run(options.kind, folder, tests))


if __name__ == "__main__":
    main()
