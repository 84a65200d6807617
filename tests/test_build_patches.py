"""The patch queue: applying, skipping, failing with the remedy, regenerating."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import patches
import upstream

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")

TEXT = "".join(f"line {i}\n" for i in range(30))


def write_tree(tree: Path) -> Path:
    """Write what passes for llama.cpp's sources."""
    for file in (
        "CMakeLists.txt",
        "include/llama.h",
        "src/llama-kv-cache.cpp",
        "src/llama-graph.cpp",
    ):
        (tree / file).parent.mkdir(parents=True, exist_ok=True)
        (tree / file).write_text(TEXT)
    return tree


def edit(tree: Path, file: str, line: int, text: str) -> None:
    lines = (tree / file).read_text().splitlines(keepends=True)
    lines[line] = text + "\n"
    (tree / file).write_text("".join(lines))


@pytest.fixture
def before(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "before")


@pytest.fixture
def after(tmp_path: Path) -> Path:
    """Return a tree with the edits of both patches of `queue`."""
    tree = write_tree(tmp_path / "after")
    edit(tree, "src/llama-kv-cache.cpp", 9, "cache hook")
    edit(tree, "src/llama-graph.cpp", 19, "graph hook")
    return tree


@pytest.fixture
def queue(tmp_path: Path, before: Path, after: Path) -> Path:
    folder = tmp_path / "patches"
    folder.mkdir()
    (folder / "series").write_text("# in order\n")
    assigned = {"src/llama-kv-cache.cpp": "cache.patch", "src/llama-graph.cpp": "graph.patch"}
    patches.regenerate(after, before, assigned, folder)
    for patch in folder.glob("*.patch"):
        patch.write_text(patch.read_text().replace("(say it here)", "the cache calls it"))
    return folder


def assert_same(one: Path, other: Path) -> None:
    files = sorted(p.relative_to(one) for p in one.rglob("*") if p.is_file())
    assert files == sorted(p.relative_to(other) for p in other.rglob("*") if p.is_file())
    for file in files:
        assert (one / file).read_bytes() == (other / file).read_bytes(), file


def test_apply_then_skip(before: Path, after: Path, queue: Path) -> None:
    assert patches.apply_queue(before, queue) == ["cache.patch", "graph.patch"]
    assert_same(before, after)
    assert patches.apply_queue(before, queue) == []
    assert_same(before, after)


def test_apply_to_half_patched_tree(before: Path, after: Path, queue: Path) -> None:
    shutil.copyfile(after / "src/llama-kv-cache.cpp", before / "src/llama-kv-cache.cpp")
    assert patches.apply_queue(before, queue) == ["graph.patch"]
    assert_same(before, after)


@pytest.mark.parametrize("where", ["around", "at"])
def test_apply_in_a_repository(
    where: str, tmp_path: Path, before: Path, after: Path, queue: Path
) -> None:
    """`git apply` skips in silence what lies outside its prefix in a repository around the tree."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    repository = tmp_path if where == "around" else before
    subprocess.run(["git", "init", "-q", str(repository)], check=True, env=environment)
    assert patches.apply_queue(before, queue) == ["cache.patch", "graph.patch"]
    shutil.rmtree(before / ".git", ignore_errors=True)
    assert_same(before, after)


def test_failure_names_the_remedy_and_changes_nothing(before: Path, queue: Path) -> None:
    edit(before, "src/llama-kv-cache.cpp", 9, "upstream moved on")
    with pytest.raises(patches.PatchError) as error:
        patches.apply_queue(before, queue)
    message = str(error.value)
    assert "cache.patch does not apply" in message
    assert f"python tools/patches.py regenerate COPY --source {before}" in message
    assert (before / "src/llama-graph.cpp").read_text() == TEXT


def test_regenerate_keeps_reason_and_grouping(before: Path, after: Path, queue: Path) -> None:
    old = (queue / "graph.patch").read_text()
    edit(after, "src/llama-kv-cache.cpp", 20, "second hook")
    done = patches.regenerate(after, before, {}, queue)
    assert done == {"cache.patch": "rewritten", "graph.patch": "unchanged"}
    assert (queue / "graph.patch").read_text() == old
    reason, diff = patches.split_patch(queue / "cache.patch")
    assert "the cache calls it" in reason
    assert patches.count_lines(diff) == (2, 2)
    patches.apply_queue(before, queue)
    assert_same(before, after)


def test_regenerate_asks_where_a_new_file_belongs(before: Path, after: Path, queue: Path) -> None:
    edit(after, "include/llama.h", 0, "declared")
    with pytest.raises(patches.PatchError, match=r"--add NAME\.patch=include/llama\.h"):
        patches.regenerate(after, before, {}, queue)
    patches.regenerate(after, before, {"include/llama.h": "graph.patch"}, queue)
    assert patches.touched_files(patches.split_patch(queue / "graph.patch")[1]) == [
        "include/llama.h",
        "src/llama-graph.cpp",
    ]


def test_check(queue: Path) -> None:
    assert patches.check(queue) == [
        "cache.patch: 1 files, 1 lines added, 1 removed",
        "graph.patch: 1 files, 1 lines added, 1 removed",
    ]
    diff = patches.split_patch(queue / "cache.patch")[1]
    (queue / "unlisted.patch").write_text(diff)
    with (queue / "series").open("a") as series:
        series.write("missing.patch\nunlisted-too.patch\n")
    (queue / "unlisted-too.patch").write_text(diff)
    with pytest.raises(patches.PatchError) as error:
        patches.check(queue)
    for problem in (
        "unlisted.patch is not in patches/series",
        "patches/series lists missing.patch, which is missing",
        "unlisted-too.patch does not say why",
        "src/llama-kv-cache.cpp is in cache.patch and in unlisted-too.patch",
    ):
        assert problem in str(error.value)


def test_the_queue_itself_is_sound() -> None:
    patches.check()


def test_the_pin_is_the_dependency() -> None:
    version, _ = upstream.pinned()
    assert f'"llama-cpp-python=={version}"' in (upstream.ROOT / "pyproject.toml").read_text()
