"""Prepare the llama.cpp folder that CMake builds: find the sources, copy, patch.

    python tools/source_tree.py OUT [--source FOLDER] [--stock]

Nothing happens when OUT is up to date; otherwise only files whose content changes are written, so
that a rebuild compiles no more than a patch touched.
"""

from __future__ import annotations

import argparse
import filecmp
import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

import patches
import upstream

STAMP = "beaconkv-stamp"


def queue_key(stock: bool) -> str:
    """Hash what decides how the tree looks, the sources themselves left out."""
    digest = hashlib.sha256(b"stock" if stock else b"patched")
    digest.update(repr((upstream.KEPT, upstream.DROPPED, upstream.KEPT_ANYWAY)).encode())
    for patch in [] if stock else patches.read_series():
        digest.update(f"\0{patch.name}\0{patch.read_text(encoding='utf-8')}".encode())
    return digest.hexdigest()


def files_key(tree: Path) -> str:
    """Hash names, sizes and times of a source folder that somebody may be editing."""
    digest = hashlib.sha256(str(tree).encode())
    for file in upstream.kept_files(tree):
        stat = (tree / file).stat()
        digest.update(f"\0{file}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    return digest.hexdigest()


def read_stamp(tree: Path) -> str:
    stamp = tree / STAMP
    return stamp.read_text() if stamp.is_file() else ""


def vendored_tree(key: str) -> Path | None:
    """Return the patched tree of our own source distribution, if its patches are still these."""
    tree = upstream.ROOT / "vendor" / "llama.cpp"
    unpacked = (upstream.ROOT / "PKG-INFO").is_file()  # in a checkout, vendor/ is a by-product
    return tree if unpacked and read_stamp(tree).split()[:1] == [key] else None


def copy_tree(source: Path, target: Path) -> None:
    for file in upstream.kept_files(source):
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / file, target / file)


def update_tree(out: Path, new: Path) -> int:
    """Make `out` equal to `new`, leaving equal files alone; return how many files changed."""
    wanted = upstream.kept_files(new)
    changed = 0
    for file in wanted:
        if not (out / file).is_file() or not filecmp.cmp(out / file, new / file, shallow=False):
            (out / file).parent.mkdir(parents=True, exist_ok=True)
            os.replace(new / file, out / file)
            changed += 1
    for file in set(upstream.kept_files(out)) - set(wanted):
        (out / file).unlink()
        changed += 1
    return changed


def prepare(out: Path, source: str | None = None, stock: bool = False) -> str:
    """Bring `out` up to date and return a line that says from what."""
    source = source or os.environ.get(upstream.SOURCE_VARIABLE)
    key = queue_key(stock)
    origin = upstream.given_source(source) if source else vendored_tree(key)
    stamp = f"{key} {files_key(origin) if origin else ' '.join(upstream.pinned())}"
    if read_stamp(out) == stamp:
        return f"llama.cpp sources up to date: {out}"

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix="llama.cpp-") as scratch:
        new = Path(scratch)
        if origin:
            copy_tree(origin, new)
        else:
            origin = upstream.fetch(upstream.CACHE)
            upstream.unpack(origin, new)
        applied = [] if stock else patches.apply_queue(new, origin=origin)
        (out / STAMP).unlink(missing_ok=True)  # an interrupted update must not look complete
        changed = update_tree(out, new)
    (out / STAMP).write_text(stamp)
    return f"llama.cpp sources from {origin}: {len(applied)} patches applied, {changed} files new"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--source", help=f"instead of ${upstream.SOURCE_VARIABLE}")
    parser.add_argument("--stock", action="store_true", help="leave the patches out")
    options = parser.parse_args()
    print(prepare(options.out.resolve(), options.source, options.stock))


if __name__ == "__main__":
    try:
        main()
    except (patches.PatchError, upstream.UpstreamError) as error:
        sys.exit(f"error: {error}")
