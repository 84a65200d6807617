"""llama.cpp as the pinned source distribution of llama-cpp-python carries it: find, fetch, unpack.

The pin is a requirements file for pip (patches/upstream.txt). Standard library only, for this runs
inside the build.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
PIN = ROOT / "patches" / "upstream.txt"
CACHE = ROOT / "build" / "upstream"
SOURCE_VARIABLE = "BEACONKV_LLAMA_CPP_SOURCE"

# What builds the libraries, the server, llama-bench and upstream's tests. The rest of the
# repository (models, docs, the web page's sources) is three quarters of its size.
KEPT = (
    "CMakeLists.txt",
    "LICENSE",
    "cmake",
    "common",
    "ggml",
    "include",
    "licenses",
    "scripts/ui-assets.cmake",
    "src",
    "tests",
    "tools",
    "vendor",
)
DROPPED = ("tools/ui", "tools/mtmd/legacy-models", "tools/mtmd/tests", "tools/server/tests")
KEPT_ANYWAY = ("tools/ui/CMakeLists.txt", "tools/ui/ui.cpp.in", "tools/ui/ui.h.in")


class UpstreamError(RuntimeError):
    """The upstream sources are missing or not the ones that are pinned."""


def pinned() -> tuple[str, str]:
    """Return the version and the SHA-256 of the pinned source distribution."""
    match = re.search(
        r"^llama-cpp-python==(\S+) --hash=sha256:([0-9a-f]{64})$", PIN.read_text(), re.M
    )
    if match is None:
        raise UpstreamError(f"{PIN} does not pin llama-cpp-python by version and hash")
    return match[1], match[2]


def is_kept(path: str) -> bool:
    """Tell whether the build has a use for this file (a path relative to llama.cpp)."""

    def below(roots: tuple[str, ...]) -> bool:
        return any(path == root or path.startswith(root + "/") for root in roots)

    return path in KEPT_ANYWAY or (below(KEPT) and not below(DROPPED))


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check_sdist(sdist: Path) -> None:
    """Refuse a source distribution that is not the pinned one."""
    _, want = pinned()
    if (got := sha256(sdist)) != want:
        raise UpstreamError(f"{sdist.name} has SHA-256 {got}, patches/upstream.txt pins {want}")


def fetch(cache: Path) -> Path:
    """Return the pinned source distribution in `cache`, downloaded by pip if it is not there.

    pip's own configuration decides where from: index, proxy, certificates, find-links, no-index.
    """
    version, _ = pinned()
    sdist = cache / f"llama_cpp_python-{version}.tar.gz"
    if sdist.is_file():
        check_sdist(sdist)
        return sdist
    cache.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--requirement", str(PIN)]
    command += ["--no-binary", "llama-cpp-python"]
    if importlib.util.find_spec("scikit_build_core"):
        # pip asks the package's backend for its metadata. In our own build the backend is here
        # already, and a second isolated environment would only need the index once more.
        command.append("--no-build-isolation")
    # An outer pip's bookkeeping of builds in progress is not for this one.
    environment = {k: v for k, v in os.environ.items() if k != "PIP_BUILD_TRACKER"}
    with tempfile.TemporaryDirectory(dir=cache) as scratch:  # so that what is in the cache is whole
        done = subprocess.run([*command, "--dest", scratch], env=environment).returncode == 0
        if done:
            os.replace(Path(scratch) / sdist.name, sdist)
    if not done:
        raise UpstreamError(
            f"pip could not download llama-cpp-python {version} (its messages are above).\n"
            "Index, proxy and wheelhouse come from pip's configuration or PIP_* variables "
            "(PIP_INDEX_URL, PIP_PROXY, PIP_NO_INDEX with PIP_FIND_LINKS); options on the command "
            "line of an outer pip do not reach the build.\n"
            f"Or set {SOURCE_VARIABLE} to a folder with llama.cpp's or llama-cpp-python's sources."
        )
    check_sdist(sdist)
    return sdist


def unpack(sdist: Path, target: Path) -> None:
    """Write what the build needs of llama.cpp from the source distribution into `target`."""
    with tarfile.open(sdist) as archive:
        for member in archive:
            parts = PurePosixPath(member.name).parts  # name-version/vendor/llama.cpp/...
            path = "/".join(parts[3:])
            if parts[1:3] != ("vendor", "llama.cpp") or not member.isfile() or not is_kept(path):
                continue
            if ".." in parts or ":" in path or "\\" in path:
                raise UpstreamError(f"{sdist.name} has a member outside its folder: {member.name}")
            content = archive.extractfile(member)
            assert content is not None
            file = target / path
            file.parent.mkdir(parents=True, exist_ok=True)
            with content, file.open("wb") as out:
                shutil.copyfileobj(content, out)
    check_tree(target, sdist.name)


def kept_files(tree: Path) -> list[str]:
    """List the files of a llama.cpp folder that the build needs, sorted."""
    files: list[str] = []
    for root in KEPT:
        top = tree / root
        found = [top] if top.is_file() else [p for p in top.rglob("*") if p.is_file()]
        files += (p.relative_to(tree).as_posix() for p in found)
    return sorted(filter(is_kept, files))


def check_tree(tree: Path, name: str) -> None:
    for file in (
        "CMakeLists.txt",
        "include/llama.h",
        "src/llama-kv-cache.cpp",
        "ggml/include/ggml.h",
    ):
        if not (tree / file).is_file():
            raise UpstreamError(f"{name} holds no llama.cpp: {file} is missing")


def given_source(path: str) -> Path:
    """Return the llama.cpp folder in a folder with its or llama-cpp-python's sources."""
    tree = Path(path).expanduser().resolve()
    if (tree / "vendor" / "llama.cpp" / "CMakeLists.txt").is_file():
        tree = tree / "vendor" / "llama.cpp"
    if not tree.is_dir():
        raise UpstreamError(f"{SOURCE_VARIABLE}: {path} is no folder")
    check_tree(tree, f"{SOURCE_VARIABLE}={path}")
    return tree
