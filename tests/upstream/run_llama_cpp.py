"""Build and run llama.cpp's own tests on the patched sources, then some of them in a KV budget.

    python tests/upstream/run_llama_cpp.py [--out FOLDER] [--only NAME] [--model FILE]

Without a budget all of them have to pass as they do upstream. In a budget (budget_from_env.cpp),
models that a budget can't serve must be declined by name, those and no others; all else has to
pass. CMAKE_ARGS passes through as in the package's build. Ends with 1 if anything failed; logs are
in FOLDER/logs. Budgets need an ELF system (Linux).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

TESTS = (
    "test-llama-archs",
    "test-save-load-state",
    "test-state-restore-fragmented",
    "test-thread-safety",
    "test-backend-ops",
)

# Cells. test-llama-archs reads all logits of a batch of 128 tokens, which has to fit, and goes on
# to 224; the others read or write at least 70 tokens per sequence.
ARCHS_BUDGET = 160
STATE_BUDGET = 64

# Which of test-llama-archs' models a budget declines, by the reason that the message ends with.
DECLINED: dict[str, set[str]] = {
    "its attention is ALiBi, which needs the true position of every cell": {
        "bloom",
        "jais",
        "mpt",
        "refact",
    },
    "its attention is MLA, which has no cache of values": {
        "bailingmoe3",
        "deepseek2",
        "deepseek32",
        "dots3note",
        "glm-dsa",
        "glm5-next",
        "hy_v4",
        "kimi-k3",
        "kimi-linear",
        "mistral4",
    },
    "its memory has caches that mirror each other's cells": {"minimax-m3", "qwen4exp"},
    "it is an encoder, which keeps no history": {"dream", "llada", "llada-moe", "rnd1", "t5"},
    "it is recurrent, its memory is bounded already": {"mamba", "mamba2"},
    "flash attention is off or not to be had for it": {"grok"},
    # lfm2 has a sliding window in this test
    "no layer of this model attends to everything": {"deepseek4", "lfm2"},
}


@dataclass
class Report:
    """Counts results and prints one line for each."""

    results: list[tuple[str, bool]] = field(default_factory=list)

    def add(self, name: str, passed: bool, note: str = "") -> None:
        self.results.append((name, passed))
        mark = "ok    " if passed else "FAILED"
        print(f"{mark} {name}{': ' if note else ''}{note}", flush=True)

    def count(self, passed: bool) -> int:
        return sum(p == passed for _, p in self.results)


@dataclass
class Runner:
    """Runs the built tests, each with a log of its own."""

    folder: Path
    timeout: int

    def __post_init__(self) -> None:
        for name in ("logs", "work"):
            (self.folder / name).mkdir(exist_ok=True)

    def __call__(
        self, log: str, test: str, *arguments: str | Path, budget: int = 0
    ) -> tuple[int, str]:
        """Exit status (negative for a crash, 124 for a time-out), and output."""
        # Threads that wait for each other would spin, and may outnumber the cores.
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
        environment.pop("BEACONKV_TEST_BUDGET", None)
        if budget:
            environment["BEACONKV_TEST_BUDGET"] = str(budget)
        command = [self.folder / "bin" / test, *arguments]
        # apart, for a message may come in the middle of a table's row
        outputs = [self.folder / "logs" / f"{log}.{kind}" for kind in ("out", "err")]
        with outputs[0].open("wb") as stdout, outputs[1].open("wb") as stderr:
            try:
                status = subprocess.run(
                    [str(c) for c in command],
                    cwd=self.folder / "work",
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    timeout=self.timeout,
                ).returncode
            except subprocess.TimeoutExpired:
                status = 124
        text = "\n".join(file.read_text("utf-8", "replace") for file in outputs)
        return status, re.sub(r"\x1b\[[0-9;]*m", "", text)


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def last_error(text: str) -> str:
    """What a crash was about: a failed assertion, or the last line."""
    assertion = re.search(r"\S+: GGML_ASSERT\(.*", text)
    return assertion[0] if assertion else last_line(text)


def build(out: Path, jobs: int) -> None:
    # cmake and ninja may be the ones of this interpreter's environment.
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    cmake = shutil.which("cmake", path=search)
    if cmake is None:
        sys.exit("error: cmake is needed, and was not found (pip install cmake ninja)")
    configure = [cmake, "-S", str(HERE), "-B", str(out), "-DCMAKE_BUILD_TYPE=Release"]
    configure.append(f"-DPython_EXECUTABLE={sys.executable}")
    if ninja := shutil.which("ninja", path=search):
        configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    configure += shlex.split(os.environ.get("CMAKE_ARGS", ""))
    targets = [cmake, "--build", str(out), "--parallel", str(jobs), "--target", *TESTS]
    for command in (configure, targets):
        if subprocess.run(command).returncode != 0:
            sys.exit("error: the build failed")


def default_model() -> Path:
    """The embedded default model; its module is read alone, the package may not be installed."""
    file = ROOT / "beaconkv_gguf" / "default_model.py"
    spec = importlib.util.spec_from_file_location("default_model", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path: Path = module.default_model_path()
    return path


def table_rows(text: str) -> Iterator[tuple[str, list[str]]]:
    """Architecture and other cells of each row of a table.

    Messages may come between the parts of a row, and the log may lose its last lines.
    """
    for name, rest in re.findall(r"^\| *([a-z][\w.-]*)\|(.*)$", text, re.M):
        yield name, [cell.strip() for cell in rest.split("|")]


def count_compactions(text: str) -> int:
    """Compactions of all contexts that were freed (budget_from_env.cpp)."""
    return sum(map(int, re.findall(r"^budget_from_env: compactions: (\d+)", text, re.M)))


#
# without a budget
#


def run_archs(run: Runner, report: Report, seed: str) -> list[str]:
    """test-llama-archs over all; returns the architectures that it tests."""
    status, text = run("archs", "test-llama-archs", "-s", seed)
    tested = [(arch, cells) for arch, cells in table_rows(text) if cells.count("SKIP") < 2]
    failed = dict.fromkeys(arch for arch, cells in tested if any("FAIL" in c for c in cells))
    archs = list(dict.fromkeys(arch for arch, _ in tested))
    note = f"{len(archs)} architectures"
    if failed or status != 0:
        note += f", ended with {status}; failed: {', '.join(failed) or last_line(text)}"
    report.add("test-llama-archs", status == 0 and not failed and bool(archs), note)
    return archs


def write_models(run: Runner, seed: str) -> Path:
    """Let test-llama-archs write its models, as upstream's ctest does for the next test."""
    models = run.folder / "models"
    if not any(models.glob("*.gguf")):
        models.mkdir(exist_ok=True)
        status, text = run("models", "test-llama-archs", "-s", seed, "-o", models)
        if status != 0:
            sys.exit(f"error: test-llama-archs could not write its models: {last_line(text)}")
    return models


def add_compactions(wrong: list[str], text: str) -> str:
    """A note on compactions; none of them is one more thing that went wrong."""
    n = count_compactions(text)
    if n == 0:
        wrong.append("nothing was compacted")
    return f"compactions: {n}"


STATE_TESTS = ("baseline", "seq_rm", "state_load", "cp_h", "cp_d", "cp_h_s", "cp_d_s", "rt", "rf")


def check_save_load(
    run: Runner, report: Report, model: Path, *arguments: str, budget: int = 0
) -> None:
    """test-save-load-state on one model; it takes folders, and prints a table then."""
    suffix = f"-{budget}" if budget else ""
    folder = run.folder / "work" / "one-model"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / model.name).symlink_to(model)
    status, text = run(
        f"state{suffix}-{model.stem}",
        "test-save-load-state",
        "--models",
        folder,
        *arguments,
        budget=budget,
    )
    row = re.search(rf"^{re.escape(model.name)}(.*)", text, re.M)
    marks = re.findall(r"PASS|FAIL|SKIP", row[1]) if row else []
    wrong = [
        f"{name} {mark}" for name, mark in zip(STATE_TESTS, marks, strict=False) if mark != "PASS"
    ]
    if len(marks) < len(STATE_TESTS):
        wrong.append(f"ended with {status} in {STATE_TESTS[len(marks)]}")
    elif status != 0 and not wrong:
        wrong.append(f"ended with {status}")
    note = add_compactions(wrong, text) if budget else ""
    report.add(f"test-save-load-state {model.stem}", not wrong, ", ".join(wrong) or note)


def run_save_load(run: Runner, report: Report, dummies: Path, model: Path) -> None:
    status, text = run("state", "test-save-load-state", "--models", dummies)
    rows = re.findall(r"^(\S+)\.gguf(.*)$", text, re.M)
    failed = [name for name, marks in rows if marks.count("PASS") != len(STATE_TESTS)]
    note = f"{len(rows)} models" + (f", not all passed: {', '.join(failed)}" if failed else "")
    report.add("test-save-load-state", status == 0 and not failed and bool(rows), note)
    check_save_load(run, report, model)


def run_fragmented(run: Runner, report: Report, model: Path, budget: int = 0) -> None:
    log = f"fragmented-{budget}" if budget else "fragmented"
    status, text = run(log, "test-state-restore-fragmented", "-m", model, budget=budget)
    wrong = [] if status == 0 else [f"ended with {status}: {last_error(text)}"]
    if not re.search(r"saved seq 1 state, [1-9]\d* bytes", text):
        wrong.append("no state was saved")  # with which the test is content
    note = add_compactions(wrong, text) if budget else ""
    report.add("test-state-restore-fragmented", not wrong, ", ".join(wrong) or note)


def run_threads(run: Runner, report: Report, model: Path, budget: int = 0) -> None:
    # the arguments of upstream's ctest
    arguments = ["-ngl", "99", "-p", "The meaning of life is", "-n", "128"]
    arguments += ["-c", "256", "-ub", "32", "-np", "4", "-t", "2"]
    log = f"threads-{budget}" if budget else "threads"
    status, text = run(log, "test-thread-safety", "-m", model, *arguments, budget=budget)
    wrong = [] if status == 0 else [f"ended with {status}: {last_error(text)}"]
    note = add_compactions(wrong, text) if budget else ""
    report.add("test-thread-safety", not wrong, ", ".join(wrong) or note)


def run_backend_ops(run: Runner, report: Report) -> None:
    status, text = run("backend-ops", "test-backend-ops")
    compared = len(re.findall(r"^ *\d+/\d+ tests passed", text, re.M))
    note = last_line(text) if compared else "nothing to compare with the CPU's backend here"
    report.add("test-backend-ops", status == 0, note)


#
# in a budget
#


def run_archs_bounded(run: Runner, report: Report, archs: list[str], seed: str) -> None:
    """test-llama-archs, one architecture at a time: it ends with the first declined one."""
    expected = {arch: reason for reason, names in DECLINED.items() for arch in names}
    for arch in archs:
        status, text = run(
            f"archs-{ARCHS_BUDGET}-{arch}",
            "test-llama-archs",
            *("-a", arch, "-s", seed),
            budget=ARCHS_BUDGET,
        )
        refusal = re.search(r"^budget_from_env: no context: (.*)", text, re.M)
        passed = False
        if refusal:
            passed = arch in expected and refusal[1].endswith(expected[arch])
            note = f"declined{'' if passed else ', unexpectedly'}: {refusal[1]}"
        elif status != 0:
            bad = [" ".join(c) for _, c in table_rows(text) if any("FAIL" in cell for cell in c)]
            note = f"ended with {status}: {'; '.join(bad) or last_error(text)}"
        elif arch in expected:
            note = f"served, but was to be declined: {expected[arch]}"
        else:
            n = count_compactions(text)
            passed, note = n > 0, f"compactions: {n}"
        report.add(f"test-llama-archs {arch}", passed, note)


def arch_of(model: Path) -> str:
    return re.sub(r"-(dense|moe)$", "", model.stem)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "upstream-tests")
    parser.add_argument("--no-build", action="store_true", help="run what was built before")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="of the build")
    parser.add_argument("--model", type=Path, help="GGUF file; default: the embedded default model")
    parser.add_argument("--only", action="append", choices=TESTS, help="may be given repeatedly")
    parser.add_argument("--arch", default="", help="regular expression: in a budget, only these")
    parser.add_argument("--seed", default="1", help="of test-llama-archs' weights and tokens")
    parser.add_argument("--timeout", type=int, default=1800, help="seconds for one program")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--without-budget", action="store_true", help="leave the second part out")
    which.add_argument("--budget-only", action="store_true", help="leave the first part out")
    options = parser.parse_args()

    out = options.out.resolve()
    only = options.only or TESTS
    if not options.no_build:
        build(out, options.jobs)
    model = (options.model or default_model()).resolve()
    run, report = Runner(out, options.timeout), Report()
    with_budget = sys.platform.startswith("linux") and not options.without_budget

    archs: list[str] = []
    if not options.budget_only:
        print("== without a budget", flush=True)
        if "test-llama-archs" in only:
            archs = run_archs(run, report, options.seed)
        if "test-save-load-state" in only:
            run_save_load(run, report, write_models(run, options.seed), model)
        if "test-state-restore-fragmented" in only:
            run_fragmented(run, report, model)
        if "test-thread-safety" in only:
            run_threads(run, report, model)
        if "test-backend-ops" in only:
            run_backend_ops(run, report)

    if with_budget:
        print(f"== budgets of {ARCHS_BUDGET} and {STATE_BUDGET} cells", flush=True)
        if "test-llama-archs" in only:
            archs = archs or run_archs(run, Report(), options.seed)
            archs = [arch for arch in archs if re.search(options.arch, arch)]
            run_archs_bounded(run, report, archs, options.seed)
        if "test-save-load-state" in only:
            declined = set().union(*DECLINED.values())
            dummies = sorted(write_models(run, options.seed).glob("*.gguf"))
            # further than the prompt, so that what was loaded is compacted
            arguments = ["-n", "64"]
            for dummy in dummies:
                if arch_of(dummy) not in declined and re.search(options.arch, arch_of(dummy)):
                    check_save_load(run, report, dummy, *arguments, budget=STATE_BUDGET)
            check_save_load(run, report, model, *arguments, budget=STATE_BUDGET)
        if "test-state-restore-fragmented" in only:
            run_fragmented(run, report, model, STATE_BUDGET)
        if "test-thread-safety" in only:
            run_threads(run, report, model, STATE_BUDGET)

    print(f"{report.count(True)} passed, {report.count(False)} failed")
    return int(report.count(False) > 0)


if __name__ == "__main__":
    sys.exit(main())
