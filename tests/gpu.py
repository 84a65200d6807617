"""Whether a GPU does what the reference and the CPU do: the steps of benchmarks/gpu.sh.

    python tests/gpu.py build FOLDER       libraries with CUDA for the card's architecture alone
    python tests/gpu.py programs FOLDER    compile the two programs that the other steps run
    python tests/gpu.py parity FOLDER      the operators against the NumPy reference
    python tests/gpu.py upstream FOLDER    the operators in llama.cpp's own test-backend-ops
    python tests/gpu.py model              a model that lives in a budget, against one on the CPU
    python tests/gpu.py memcheck|racecheck FOLDER      the operators under compute-sanitizer

BEACONKV_GPU_DEVICE is ggml's name of the device (CUDA0), BEACONKV_LIB_DIR the folder of the
libraries. Exits with 1 where something differs.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the package of these sources

DEVICE = os.environ.get("BEACONKV_GPU_DEVICE", "CUDA0")
OPERATORS = ("BEACON_TRACK", "BEACON_SCORE", "BEACON_MOVE")

N_TEXT, N_FORCED, N_FREE = 512, 160, 160  # tokens that are read, given one by one, and written

# Rounding chooses between cells that are nearly as good, and all that follows differs. Measured on
# the CPU between fused and composed compactions: median 0.002, highest 0.11; 0.964; 98 %; 0.57
MEDIAN_KL, MOST_KL = 0.01, 0.5
LEAST_SAME = 0.9  # share of the cells
LEAST_EQUAL = 0.95  # share of the first choices,
MOST_BEHIND = 1.5  # and logits that another one is behind


def output(*command: str | Path) -> str:
    return subprocess.check_output(command, text=True)


def build(folder: Path) -> None:
    """The project's own build. Needs a CUDA toolkit, a card, and ninja or make."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        sys.exit("error: nvcc is needed, and was not found")
    os.environ["PATH"] += os.pathsep + str(Path(nvcc).parent)
    toolkit = Path(nvcc).resolve().parents[1]
    query = output("nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader")
    name, capability = query.splitlines()[0].rsplit(",", 1)
    arch = capability.strip().replace(".", "")
    print(f"{name}, architecture {arch}; {nvcc}", flush=True)
    defined: dict[str, str | Path] = {
        "BEACONKV_SERVER": "OFF",
        "GGML_CUDA": "ON",
        "GGML_CUDA_NCCL": "OFF",
        "CMAKE_CUDA_COMPILER": nvcc,
        "CMAKE_CUDA_ARCHITECTURES": f"{arch}-real",
        "Python_EXECUTABLE": sys.executable,
    }
    if not list(toolkit.glob("**/cublas_v2.h")):
        from cuda_build import cublas

        blas = cublas(folder / "cublas")
        defined["CMAKE_CUDA_FLAGS"] = f"-isystem {blas / 'include'}"
        for library in ("cublas", "cublasLt"):
            found = next((blas / "lib").glob(f"lib{library}.so.*"))
            defined[f"CUDA_{library}_LIBRARY"] = found
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    flags = [f"-D{key}={value}" for key, value in defined.items()]
    subprocess.run(["cmake", "-S", ROOT, "-B", folder, *generator, *flags], check=True)
    jobs = str(os.cpu_count() or 1)
    command = ["cmake", "--build", folder, "--target", "beaconkv", "-j", jobs]
    subprocess.run(command, check=True)


def upstream_source(tree: Path) -> str:
    """test-backend-ops.cpp with our cases."""
    text = (tree / "tests" / "test-backend-ops.cpp").read_text(encoding="utf-8")
    head = "static std::vector<std::unique_ptr<test_case>> make_test_cases_eval() {\n"
    first = "    std::vector<std::unique_ptr<test_case>> test_cases;\n"
    if text.count(head + first) != 1:
        sys.exit("error: test-backend-ops.cpp has changed: where do its cases begin?")
    ours = '#include "backend_ops.h"\n' + head + first + "    add_beacon_cases(test_cases);\n"
    return text.replace(head + first, ours)


def programs(folder: Path) -> None:
    """Compile the runner and test-backend-ops, at the same time. Needs a C++17 compiler."""
    import operators

    from beaconkv_gguf import _library

    tree = operators.source_tree()
    source = folder / "test-backend-ops.cpp"
    source.write_text(upstream_source(tree), encoding="utf-8")
    includes = [operators.HERE / "kernels", operators.NATIVE, tree / "ggml" / "include"]
    libraries = [_library.library_path(name) for name in ("ggml", "ggml-base", "ggml-cpu")]
    command = ["c++", "-std=c++17", "-O1", *[f"-I{path}" for path in includes], source, *libraries]
    loose = "-Wl,--allow-shlib-undefined"  # what the libraries need in turn may be anywhere
    command += [f"-Wl,-rpath,{_library.library_dir()}", loose, "-pthread"]
    compiler = subprocess.Popen([*command, "-o", source.with_suffix("")])
    operators.build_runner(folder, ("-O2", loose))
    if compiler.wait() != 0:
        sys.exit("error: test-backend-ops.cpp could not be compiled")


def parity(folder: Path) -> None:
    import operators
    import test_operators as matrix

    for n in matrix.COUNTS:
        cases = [*matrix.score_matrix((n,)), *matrix.move_matrix((n,))]
        operators.check(folder / "run", DEVICE, cases)
        print(f"{n} cells: {len(cases)} cases", flush=True)
    cases = [*matrix.track_matrix(), *matrix.edges()]
    operators.check(folder / "run", DEVICE, cases)
    print(f"tracking, and edges: {len(cases)} cases")


def upstream(folder: Path) -> None:
    command = [folder / "test-backend-ops", "test", "-b", DEVICE, "-o", ",".join(OPERATORS)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    text = re.sub(r"\x1b\[[0-9;]*m", "", run.stdout)  # colours
    print("\n".join(line for line in text.splitlines() if line and not line.endswith(": OK")))
    missing = [name for name in OPERATORS if not re.search(rf"^\s*{name}\(.*: OK$", text, re.M)]
    if missing or "not supported" in text:
        sys.exit(f"error: not tested: {', '.join(missing) or 'what is not supported'}")
    if run.returncode != 0:
        sys.exit("error: test-backend-ops failed")


def sanitizer(folder: Path, check: str) -> None:
    """Small shapes under a tool of compute-sanitizer, which slows kernels down a lot."""
    import operators
    import test_operators as matrix

    log = folder / f"{check}.log"
    program = folder / check
    tool = f"compute-sanitizer --tool {check} --error-exitcode 1 --log-file '{log}'"
    program.write_text(f"#!/bin/sh\nexec {tool} '{folder / 'run'}' \"$@\"\n")
    program.chmod(0o755)
    cases = matrix.score_matrix((31, 65))[::7] + matrix.track_matrix()[::7]
    cases += matrix.move_matrix((257,))[::11] + matrix.edges()
    log.unlink(missing_ok=True)
    try:
        operators.check(program, DEVICE, cases)
    finally:
        report = log.read_text() if log.exists() else "no report"
        print(report[-8000:], flush=True)
    if re.search(r"SUMMARY: 0 (errors|hazards)", report) is None:
        sys.exit(f"error: {check} found something")
    print(f"{len(cases)} cases")


class Life(NamedTuple):
    """What a context did in its budget."""

    logits: Any  # after each batch of the text, and after each token; the written ones left out
    kept: list[dict[tuple[int, int], list[int]]]  # positions by layer and KV head, after each batch
    tokens: list[int]  # one by one: given, or the first choice; then written
    stats: dict[str, int]


def live(path: Path, on_gpu: bool, given: list[int] | None = None) -> Life:
    """Read a text past the budget, go on with the given tokens, then write greedily."""
    import vulkan

    import native

    logits, kept, tokens = [], [], []
    start = time.monotonic()
    with native.log() as lines:
        model = vulkan.load(path, on_gpu)
        text = model.tokenize(native.prose(40))[:N_TEXT]
        with vulkan.open_context(model) as context:
            for i in range(0, N_TEXT, vulkan.BATCH):
                logits.append(context.decode(text[i : i + vulkan.BATCH]))
                kept.append(context.positions())
            row = logits[-1]
            for i in range(N_FORCED + N_FREE):
                token = given[i] if given and i < N_FORCED else int(row.argmax())
                tokens.append(token)
                row = context.decode([token])
                if i < N_FORCED:
                    logits.append(row)
            stats = context.stats()
        model.close()
    for line in re.findall(r"^.*(?:offloaded|beaconkv:).*$", "".join(lines), re.M):
        print(f"    {line.strip()}")
    print(f"    {stats['n_compact']} compactions, {time.monotonic() - start:.0f} s", flush=True)
    return Life(np.stack(logits), kept, tokens, stats)


def compare(gpu: Life, cpu: Life, n_fused: int) -> bool:
    """Whether a GPU did what the CPU does, up to rounding."""
    import vulkan

    kl = vulkan.divergence(gpu.logits, cpu.logits)
    same = [
        float(np.mean([len({*a[key]} & {*b[key]}) / len(a[key]) for key in a]))
        for a, b in zip(cpu.kept, gpu.kept)
    ]
    first = gpu.logits.argmax(-1)
    behind = cpu.logits.max(-1) - np.take_along_axis(cpu.logits, first[:, None], -1)[:, 0]
    n_equal = int((first == cpu.logits.argmax(-1)).sum())
    most = vulkan.repeats(gpu.tokens[N_FORCED:])
    print(f"    KL divergence: median {np.median(kl):.1e}, highest {kl.max():.1e}")
    print(f"    share of the same cells, lowest of {len(same)}: {min(same):.3f}")
    print(
        f"    first choices: {n_equal} of {len(first)} are equal, others behind by up to ", end=""
    )
    print(f"{behind.max():.2f} on the CPU; most repetitions {most}")
    checks = [
        (f"{n_fused} layers are fused", gpu.stats["n_fused"] == n_fused),
        ("as many compactions", gpu.stats["n_compact"] == cpu.stats["n_compact"] > 5),
        ("logits as near", bool(np.median(kl) < MEDIAN_KL and kl.max() < MOST_KL)),
        ("the same cells", min(same) > LEAST_SAME),
        ("the same first choices", n_equal >= LEAST_EQUAL * len(first)),
        ("others nearly as good", bool(behind.max() < MOST_BEHIND)),
        ("no loop", most <= max(3, vulkan.repeats(cpu.tokens[N_FORCED:]))),
    ]
    for what, holds in checks:
        print(f"    {'ok  ' if holds else 'FAIL'}  {what}", flush=True)
    return all(holds for _, holds in checks)


def model(path: Path | None) -> None:
    """SmolLM2 past its budget with all layers on the device, fused and composed."""
    from beaconkv_gguf import llama_cpp
    from beaconkv_gguf.default_model import default_model_path

    path = path or default_model_path()
    on_gpu = DEVICE != "CPU"
    whole = True
    print("the CPU:", flush=True)
    cpu = live(path, on_gpu=False)
    for value in ("require", "0"):
        print(f"{DEVICE}, BEACONKV_FUSED={value}:", flush=True)
        os.environ["BEACONKV_FUSED"] = value
        gpu = live(path, on_gpu, cpu.tokens)
        whole &= compare(gpu, cpu, gpu.stats["n_layer"] if value == "require" else 0)
    if DEVICE.startswith("CUDA"):
        graphs = "USE_GRAPHS = 1" in llama_cpp.llama_print_system_info().decode()
        print(f"    {'ok  ' if graphs else 'FAIL'}  CUDA graphs are compiled in")
        whole &= graphs
    if not whole:
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    steps = {"build": build, "programs": programs, "parity": parity, "upstream": upstream}
    checks = ("memcheck", "racecheck")
    parser.add_argument("step", choices=[*steps, "model", *checks])
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "build" / "gpu")
    parser.add_argument("--model", type=Path, help="GGUF file (default: the default model)")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if options.step == "model":
        model(options.model)
    elif options.step in checks:
        sanitizer(folder, options.step)
    else:
        steps[options.step](folder)


if __name__ == "__main__":
    main()
