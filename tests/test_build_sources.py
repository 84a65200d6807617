"""The pinned sources: fetched by pip, checked by hash, unpacked with care, kept up to date."""

from __future__ import annotations

import io
import os
import tarfile
import time
from pathlib import Path

import pytest

import source_tree
import upstream

NAME = "llama_cpp_python-9.8.7"
LLAMA_CPP = f"{NAME}/vendor/llama.cpp"
METADATA = "Metadata-Version: 2.1\nName: llama-cpp-python\nVersion: 9.8.7\n"
BACKEND = f"""
import os
def prepare_metadata_for_build_wheel(folder, settings=None):
    os.mkdir(folder + "/llama_cpp_python-9.8.7.dist-info")
    open(folder + "/llama_cpp_python-9.8.7.dist-info/METADATA", "w").write({METADATA!r})
    return "llama_cpp_python-9.8.7.dist-info"
def build_wheel(*arguments):
    raise RuntimeError("nobody wants a wheel")
"""
FILES = {
    f"{NAME}/PKG-INFO": METADATA,
    f"{NAME}/pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\n'
    'backend-path = ["."]\n',
    f"{NAME}/backend.py": BACKEND,
    f"{LLAMA_CPP}/CMakeLists.txt": "top",
    f"{LLAMA_CPP}/LICENSE": "MIT",
    f"{LLAMA_CPP}/docs/long.md": "not needed",
    f"{LLAMA_CPP}/ggml/include/ggml.h": "ggml",
    f"{LLAMA_CPP}/include/llama.h": "llama",
    f"{LLAMA_CPP}/src/llama-kv-cache.cpp": "cache",
    f"{LLAMA_CPP}/tools/ui/CMakeLists.txt": "page",
    f"{LLAMA_CPP}/tools/ui/src/page.ts": "not needed",
}
KEPT = [
    "CMakeLists.txt",
    "LICENSE",
    "ggml/include/ggml.h",
    "include/llama.h",
    "src/llama-kv-cache.cpp",
    "tools/ui/CMakeLists.txt",
]


def write_sdist(path: Path, files: dict[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


@pytest.fixture
def wheelhouse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a small sdist that is the pinned one now, and pip's only source."""
    folder = tmp_path / "wheelhouse"
    folder.mkdir()
    sdist = write_sdist(folder / f"{NAME}.tar.gz", FILES)
    pin = tmp_path / "upstream.txt"
    pin.write_text(f"llama-cpp-python==9.8.7 --hash=sha256:{upstream.sha256(sdist)}\n")
    monkeypatch.setattr(upstream, "PIN", pin)
    monkeypatch.setattr(upstream, "CACHE", tmp_path / "cache")
    monkeypatch.delenv(upstream.SOURCE_VARIABLE, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_fetch_through_pip_from_an_offline_wheelhouse(wheelhouse: Path) -> None:
    sdist = upstream.fetch(upstream.CACHE)
    assert sdist == upstream.CACHE / f"{NAME}.tar.gz"
    assert [p.name for p in upstream.CACHE.iterdir()] == [sdist.name]
    (wheelhouse / sdist.name).unlink()
    assert upstream.fetch(upstream.CACHE) == sdist  # no second download


def test_fetch_refuses_another_hash(
    wheelhouse: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_sdist(wheelhouse / f"{NAME}.tar.gz", {**FILES, f"{LLAMA_CPP}/LICENSE": "other"})
    with pytest.raises(upstream.UpstreamError, match="pip could not download"):
        upstream.fetch(upstream.CACHE)
    assert "HASHES" in capfd.readouterr().err
    upstream.CACHE.mkdir(exist_ok=True)
    (wheelhouse / f"{NAME}.tar.gz").rename(upstream.CACHE / f"{NAME}.tar.gz")
    with pytest.raises(upstream.UpstreamError, match="has SHA-256"):
        upstream.fetch(upstream.CACHE)


def test_fetch_failure_says_what_can_be_set(wheelhouse: Path) -> None:
    (wheelhouse / f"{NAME}.tar.gz").unlink()
    with pytest.raises(upstream.UpstreamError, match="BEACONKV_LLAMA_CPP_SOURCE"):
        upstream.fetch(upstream.CACHE)


def test_unpack_takes_what_the_build_needs(wheelhouse: Path, tmp_path: Path) -> None:
    upstream.unpack(wheelhouse / f"{NAME}.tar.gz", tmp_path / "tree")
    files = [p for p in (tmp_path / "tree").rglob("*") if p.is_file()]
    assert sorted(p.relative_to(tmp_path / "tree").as_posix() for p in files) == KEPT
    assert upstream.kept_files(tmp_path / "tree") == KEPT


@pytest.mark.parametrize("name", ["src/../../../../evil", "src/c:/evil", "src/..\\evil"])
def test_unpack_stays_in_its_folder(name: str, tmp_path: Path) -> None:
    sdist = write_sdist(tmp_path / "evil.tar.gz", {f"{LLAMA_CPP}/{name}": "evil"})
    with pytest.raises(upstream.UpstreamError, match="outside its folder"):
        upstream.unpack(sdist, tmp_path / "a" / "b" / "tree")
    assert not list(tmp_path.rglob("*evil"))


def test_unpack_refuses_an_archive_without_llama_cpp(tmp_path: Path) -> None:
    sdist = write_sdist(tmp_path / "other.tar.gz", {f"{NAME}/PKG-INFO": METADATA})
    with pytest.raises(upstream.UpstreamError, match=r"no llama\.cpp"):
        upstream.unpack(sdist, tmp_path / "tree")


@pytest.mark.parametrize("root", ["", "vendor/llama.cpp"])
def test_given_source(root: str, wheelhouse: Path, tmp_path: Path) -> None:
    tree = tmp_path / "given" / root
    upstream.unpack(wheelhouse / f"{NAME}.tar.gz", tree)
    assert upstream.given_source(str(tmp_path / "given")) == tree.resolve()


def test_given_source_has_to_hold_llama_cpp(tmp_path: Path) -> None:
    with pytest.raises(upstream.UpstreamError, match="is no folder"):
        upstream.given_source(str(tmp_path / "nowhere"))
    with pytest.raises(upstream.UpstreamError, match=r"no llama\.cpp"):
        upstream.given_source(str(tmp_path))


def test_prepare_writes_only_what_changed(wheelhouse: Path, tmp_path: Path) -> None:
    given, out = tmp_path / "given", tmp_path / "build" / "llama.cpp"
    upstream.unpack(wheelhouse / f"{NAME}.tar.gz", given)
    assert "6 files new" in source_tree.prepare(out, str(given), stock=True)
    assert "up to date" in source_tree.prepare(out, str(given), stock=True)

    past = time.time() - 1000
    for file in KEPT:
        os.utime(out / file, (past, past))
    (given / "src/llama-kv-cache.cpp").write_text("edited")
    (given / "LICENSE").unlink()
    assert "2 files new" in source_tree.prepare(out, str(given), stock=True)
    assert (out / "src/llama-kv-cache.cpp").read_text() == "edited"
    assert not (out / "LICENSE").exists()
    assert [f for f in KEPT if f != "LICENSE" and (out / f).stat().st_mtime > past + 1] == [
        "src/llama-kv-cache.cpp"
    ]
    assert (given / "src/llama-kv-cache.cpp").exists()  # copied, not moved
    assert [p.name for p in out.parent.iterdir()] == ["llama.cpp"]


def test_prepare_fetches_without_a_given_source(wheelhouse: Path, tmp_path: Path) -> None:
    out = tmp_path / "llama.cpp"
    assert "6 files new" in source_tree.prepare(out, stock=True)
    assert "up to date" in source_tree.prepare(out, stock=True)
    assert upstream.kept_files(out) == KEPT


def test_vendored_tree_is_for_our_source_distribution_only(
    wheelhouse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout has vendor/ left over from making one, perhaps of other patches."""
    key = source_tree.queue_key(stock=False)
    monkeypatch.setattr(upstream, "ROOT", tmp_path)
    tree = tmp_path / "vendor" / "llama.cpp"
    source_tree.prepare(tree, stock=True)
    (tree / source_tree.STAMP).write_text(key + " origin")
    assert source_tree.vendored_tree(key) is None
    (tmp_path / "PKG-INFO").touch()
    assert source_tree.vendored_tree(key) == tree
    assert source_tree.vendored_tree("other patches") is None
