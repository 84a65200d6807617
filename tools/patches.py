"""The patch queue on llama.cpp.

    python tools/patches.py apply TREE       patch a llama.cpp folder, skip what is in
    python tools/patches.py regenerate TREE  rewrite the patches from an edited folder
    python tools/patches.py check            the queue is sound and applies to the pinned sources

Every patch starts with the reason why it cannot live outside of upstream, and no two patches touch
the same file, so that each can be told apart from an edited tree. They only change files that
upstream has: what is new lives in native/.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import upstream

PATCHES = upstream.ROOT / "patches"


class PatchError(RuntimeError):
    """A patch does not apply, or the queue is not sound."""


def read_series(patches: Path = PATCHES) -> list[Path]:
    """List the patch files in the order in which they apply."""
    lines = (line.split("#")[0].strip() for line in (patches / "series").read_text().splitlines())
    return [patches / name for name in lines if name]


def split_patch(patch: Path) -> tuple[str, str]:
    """Return the reason that a patch starts with, and its diff."""
    text = patch.read_text(encoding="utf-8") if patch.exists() else ""
    start = re.search(r"^diff --git ", text, re.M)
    return (text[: start.start()], text[start.start() :]) if start else (text, "")


def touched_files(diff: str) -> list[str]:
    return re.findall(r"^\+\+\+ b/(\S+)", diff, re.M)


def git(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # `git apply` below the top of a repository skips, in silence, what is outside of the folder's
    # prefix. A repository that does not exist keeps git from looking for one around the tree.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment["GIT_DIR"] = str(tree / ".no-repository")
    command = ["git", "-c", "core.autocrlf=false", *arguments]
    try:
        return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    except FileNotFoundError:
        raise PatchError("git is needed to patch llama.cpp, and was not found") from None


def apply_queue(tree: Path, patches: Path = PATCHES, origin: Path | None = None) -> list[str]:
    """Patch a llama.cpp folder and return the names of the patches that were not in it yet.

    `origin` is where the sources come from, for the message when a patch does not apply.
    """
    applied = []
    for patch in read_series(patches):
        arguments = ("apply", "--whitespace=nowarn", "-p1")
        file = str(patch.resolve())
        if git(tree, *arguments, "--reverse", "--check", file).returncode == 0:
            continue
        result = git(tree, *arguments, file)
        if result.returncode != 0:
            version, _ = upstream.pinned()
            raise PatchError(
                f"patches/{patch.name} does not apply to {origin or tree}:\n"
                f"{result.stderr.rstrip()}\n"
                f"It is made for llama.cpp as llama-cpp-python {version} carries it. For other "
                "sources, make its changes by hand in a copy of them, then run\n"
                f"    python tools/patches.py regenerate COPY --source {origin or tree}"
            )
        applied.append(patch.name)
    return applied


def pristine(source: str | None, scratch: Path) -> Path:
    """Return a llama.cpp folder without our patches: the given one, or the pinned sources."""
    given = source or os.environ.get(upstream.SOURCE_VARIABLE)
    if given:
        return upstream.given_source(given)
    upstream.unpack(upstream.fetch(upstream.CACHE), scratch)
    return scratch


def diff_files(before: Path, after: Path, files: list[str], scratch: Path) -> str:
    """Diff some files of two folders, with the paths that `git apply -p1` takes."""
    for side, tree in (("a", before), ("b", after)):
        shutil.rmtree(scratch / side, ignore_errors=True)
        (scratch / side).mkdir(parents=True)
        for file in files:
            (scratch / side / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(tree / file, scratch / side / file)
    options = ("--no-index", "--no-prefix", "--no-color", "--no-ext-diff", "--no-renames")
    result = git(scratch, "diff", *options, "--abbrev=10", "--unified=3", "a", "b")
    if result.returncode not in (0, 1):
        raise PatchError(result.stderr)
    return result.stdout


def regenerate(
    tree: Path, before: Path, assigned: dict[str, str], patches: Path = PATCHES
) -> dict[str, str]:
    """Rewrite the queue from an edited tree; `assigned` maps files new to the queue to patches.

    Returns what was done to each patch, by name.
    """
    names = [patch.name for patch in read_series(patches)]
    owner = {file: name for name in names for file in touched_files(split_patch(patches / name)[1])}
    owner.update(assigned)
    changed = [
        file
        for file in upstream.kept_files(before)
        if (tree / file).is_file() and (tree / file).read_bytes() != (before / file).read_bytes()
    ]
    homeless = [file for file in changed if file not in owner]
    if homeless:
        raise PatchError(
            "no patch has these changed files yet; say which one takes each:\n"
            + "\n".join(f"    --add NAME.patch={file}" for file in homeless)
        )
    done = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in dict.fromkeys([*names, *assigned.values()]):
            files = [file for file in changed if owner[file] == name]
            reason, old = split_patch(patches / name)
            new = diff_files(before, tree, files, Path(scratch)) if files else ""
            if not new:
                done[name] = "nothing left of it: take it out of patches/series"
            elif old == new:
                done[name] = "unchanged"
            else:
                reason = reason or "Why this cannot live outside: (say it here)\n\n"
                (patches / name).write_bytes((reason + new).encode())  # no CRLF on Windows
                done[name] = "rewritten"
            if name not in names:
                with (patches / "series").open("a") as series:
                    series.write(name + "\n")
    return done


def count_lines(diff: str) -> tuple[int, int]:
    """Count the lines that a diff adds and removes."""
    lines = re.findall(r"^([+-])(?!\+\+ |-- )", diff, re.M)
    return lines.count("+"), lines.count("-")


def check(patches: Path = PATCHES) -> list[str]:
    """Check the queue without any sources and return one line for each patch."""
    series = read_series(patches)
    listed, present = {patch.name for patch in series}, {p.name for p in patches.glob("*.patch")}
    problems = [f"{name} is not in patches/series" for name in sorted(present - listed)]
    problems += [f"patches/series lists {name}, which is missing" for name in listed - present]
    owner: dict[str, str] = {}
    summary = []
    for patch in series:
        reason, diff = split_patch(patch)
        if not reason.strip() or "(say it here)" in reason:
            problems.append(f"{patch.name} does not say why it cannot live outside")
        for file in touched_files(diff):
            if file in owner:
                problems.append(f"{file} is in {owner[file]} and in {patch.name}")
            owner[file] = patch.name
        added, removed = count_lines(diff)
        files = len(touched_files(diff))
        summary.append(f"{patch.name}: {files} files, {added} lines added, {removed} removed")
    if problems:
        raise PatchError("\n".join(problems))
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("apply", help="patch a llama.cpp folder in place")
    verb.add_argument("tree", type=Path)
    verb = verbs.add_parser("regenerate", help="rewrite the patches from an edited folder")
    verb.add_argument("tree", type=Path)
    verb.add_argument("--source", help="the sources before (default: the pinned ones)")
    verb.add_argument("--add", action="append", default=[], metavar="NAME.patch=FILE")
    verb = verbs.add_parser("check", help="check the queue, and that it applies")
    verb.add_argument("--source", help="the sources before (default: the pinned ones)")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as scratch:
        if options.verb == "apply":
            for name in apply_queue(options.tree.resolve()):
                print(f"applied {name}")
        elif options.verb == "regenerate":
            before = pristine(options.source, Path(scratch))
            added = (item.partition("=") for item in options.add)
            assigned = {file: name for name, _, file in added}
            for name, what in regenerate(options.tree.resolve(), before, assigned).items():
                print(f"{name}: {what}")
        else:
            print("\n".join(check()))
            before, copy = pristine(options.source, Path(scratch) / "a"), Path(scratch) / "b"
            shutil.copytree(before, copy)
            applied = apply_queue(copy)
            again = apply_queue(copy)
            if again or len(applied) != len(read_series()):
                raise PatchError("the unedited sources hold a part of the queue already")
            print(f"{len(applied)} patches apply")


if __name__ == "__main__":
    try:
        main()
    except (PatchError, upstream.UpstreamError) as error:
        sys.exit(f"error: {error}")
