#!/usr/bin/env bash
# Proves the operators on an NVIDIA card, and measures them there.
#
#     bash benchmarks/gpu.sh [FOLDER]     (default: build/gpu, kept for the next time)
#
# Builds the libraries with CUDA for the card alone, then: the operators against the reference and in
# llama.cpp's own test-backend-ops, the default model in a budget on the card and on the CPU,
# benchmarks/fused.py, and the operators under compute-sanitizer where it is installed. Each step
# tells how long it took; a failed one doesn't end the run, but the exit status is 1 then.
#
# Needs an NVIDIA card with its driver (nvidia-smi), a CUDA toolkit from 12 on (nvcc in PATH or
# /usr/local/cuda, with cuBLAS, or pip gets that), a C++17 compiler, cmake 3.21 and ninja or make, and
# Python 3.9 with the packages of the project's extras: pip install ".[test]" or what that names.
# Without a network, what is fetched else: BEACONKV_LLAMA_CPP_SOURCE (llama.cpp's sources as a folder)
# and BEACONKV_CACHE_DIR (a folder with the default model).
#
# PYTHON               interpreter (default: python3)
# BEACONKV_LIB_DIR     libraries to take as they are, instead of a build
# BEACONKV_GPU_DEVICE  ggml's name of the device (default: CUDA0); CPU, with BEACONKV_LIB_DIR, tries this script
# BEACONKV_GPU_SKIP    steps to leave out, such as "benchmark racecheck"

set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$(realpath -m "${1:-build/gpu}")
python=${PYTHON:-python3}

export BEACONKV_GPU_DEVICE=${BEACONKV_GPU_DEVICE:-CUDA0}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
unset BEACONKV_FUSED GGML_CUDA_DISABLE_GRAPHS
mkdir -p "$folder/logs"

failed=()

# step NAME SECONDS COMMAND...
step() {
    local name=$1 limit=$2 start=$SECONDS
    shift 2
    if [[ " ${BEACONKV_GPU_SKIP:-} " == *" $name "* ]]; then
        echo "skip $name"
        return
    fi
    echo "==== $name"
    if timeout "$limit" "$@" 2>&1 | tee "$folder/logs/$name.log"; then
        echo "ok   $name, $((SECONDS - start)) s"
    else
        echo "FAIL $name, $((SECONDS - start)) s"
        failed+=("$name")
    fi
}

if [[ -z ${BEACONKV_LIB_DIR:-} ]]; then
    step build 420 "$python" tests/gpu.py build "$folder"
    export BEACONKV_LIB_DIR=$folder/bin
fi
step programs 120 "$python" tests/gpu.py programs "$folder"
if ((${#failed[@]})); then
    echo "FAIL nothing to run without them: ${failed[*]}"
    exit 1
fi
step parity 180 "$python" tests/gpu.py parity "$folder"
step upstream 60 "$python" tests/gpu.py upstream "$folder"
step model 120 "$python" tests/gpu.py model
benchmark=(benchmarks/fused.py --device "$BEACONKV_GPU_DEVICE" --runner "$folder/run" --markdown)
if [[ $BEACONKV_GPU_DEVICE == CPU ]]; then
    benchmark+=(--cells 512 --rounds 1 --threads 1)
fi
step benchmark 180 "$python" "${benchmark[@]}"
for check in memcheck racecheck; do
    if [[ $BEACONKV_GPU_DEVICE == CUDA* ]] && command -v compute-sanitizer >/dev/null; then
        step "$check" 120 "$python" tests/gpu.py "$check" "$folder"
    else
        echo "skip $check: no compute-sanitizer, or no CUDA"
    fi
done

if ((${#failed[@]})); then
    echo "FAIL after $SECONDS s: ${failed[*]}"
    exit 1
fi
echo "ok   all, $SECONDS s"
