"""Run llama-cpp-python's own tests with our class in place of theirs, the tests unchanged.

    python tests/upstream/run_llama_cpp_python.py [ARGUMENT OF PYTEST ...]

They come out of the pinned source distribution. llama_cpp_python_plugin.py puts beaconkv_gguf.Llama
where they look for llama_cpp.Llama, and models that are at hand where they would download some; it
lists those that cannot run here, with the reason. Needs beaconkv_gguf installed with its "test"
extra. Ends with pytest's status.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import upstream  # noqa: E402

VOCABULARY = "vendor/llama.cpp/models/ggml-vocab-llama-spm.gguf"  # a test opens it by this path


def unpack_tests(sdist: Path, folder: Path) -> None:
    with tarfile.open(sdist) as archive:
        for member in archive:
            path = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            is_test = path.parts[:1] == ("tests",) and ".." not in path.parts
            if not member.isfile() or not (is_test or str(path) == VOCABULARY):
                continue
            content = archive.extractfile(member)
            assert content is not None
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            with content:
                (folder / path).write_bytes(content.read())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve()
        unpack_tests(upstream.fetch(upstream.CACHE), folder)
        # An empty configuration, so that pytest takes this folder for the root and none of ours.
        (folder / "pytest.ini").write_text("[pytest]\n")
        search = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, search))}
        command = [sys.executable, "-m", "pytest", "-p", "llama_cpp_python_plugin", "-ra", "tests"]
        return subprocess.run([*command, *arguments], cwd=folder, env=environment).returncode


if __name__ == "__main__":
    try:
        sys.exit(main())
    except upstream.UpstreamError as error:
        sys.exit(f"error: {error}")
