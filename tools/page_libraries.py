"""Fetch the libraries of the chat page into beaconkv_gguf/page/vendor.

    python tools/page_libraries.py [--check]

They come through npm as it is configured, each as a package of the version and the hash below,
and land unchanged, each with its licence. ``--check`` writes nothing and fails where the folder
holds anything else. To take a new version, change it and its hash (``npm view NAME@VERSION
dist.integrity``) and run this once.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

VENDOR = Path(__file__).resolve().parent.parent / "beaconkv_gguf" / "page" / "vendor"


@dataclass(frozen=True)
class Library:
    folder: str  # under vendor/
    package: str
    version: str
    integrity: str
    root: str  # the folder of the package that `files` counts from
    files: tuple[str, ...]
    licence: str = "LICENSE"


LIBRARIES = (
    Library(
        "marked",
        "marked",
        "18.2.1",
        "sha512-ii4bxCTCqqwpT86XZWgJNs+ZnAIZksmLGYMViWA7PDIXYIeNo1x6cDdX3JOip9NM"
        "/cI6p8z57FxliACboTruMA==",
        "lib",
        ("marked.esm.js",),
    ),
    Library(
        "dompurify",
        "dompurify",
        "3.5.0",
        "sha512-LYC0ZkE8P1V42JsRYTwMdme/2ET8SpOc5AA2eOFjP/IadvRd2fwiT4TVz5vkfy0X"
        "Ux12aS2UaRkTnfVPNOv9vw==",
        "dist",
        ("purify.min.js",),
    ),
    Library(
        "highlight",
        "@highlightjs/cdn-assets",
        "11.12.0",
        "sha512-KvOKXODaiFmId9xaq3xc5xCL66wVLUuOngDbO9B/kewbFTqdGbn2nJxNhN3H5R1c"
        "gDTVj6R8vH0zgiNDEGjpDw==",
        "es",
        ("highlight.min.js",),
    ),
    Library(
        "katex",
        "katex",
        "0.19.1",
        "sha512-jG8uKntjSEcm2EpQOh0XturpPuuC9r3Sq5HLHdsFdWZT27E672SF19QEi+of0/Ye"
        "Oy15lDgRhKvr5614uRrEfA==",
        "dist",
        ("katex.min.js", "katex.min.css", "fonts/*.woff2"),
    ),
)


def fetch(library: Library) -> dict[PurePosixPath, bytes]:
    """The files of `library`, by their paths under vendor/."""
    npm = shutil.which("npm")
    if npm is None:
        sys.exit("error: npm is needed, and was not found")
    name = f"{library.package}@{library.version}"
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", "--silent", "--pack-destination", folder, name]
        if subprocess.run(command, stdout=subprocess.DEVNULL).returncode != 0:
            sys.exit(f"error: npm did not fetch {name}")
        archive = next(Path(folder).glob("*.tgz")).read_bytes()
    digest = "sha512-" + base64.b64encode(hashlib.sha512(archive).digest()).decode()
    if digest != library.integrity:
        sys.exit(f"error: {name} is not the pinned one: its hash is {digest}")
    files = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as package:
        for member in package.getmembers():
            path = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            if str(path) == library.licence:
                target = path
            elif any(fnmatch(str(path), f"{library.root}/{file}") for file in library.files):
                target = path.relative_to(library.root)
            else:
                continue
            content = package.extractfile(member)
            assert content is not None
            files[library.folder / target] = content.read()
    return files


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    options = parser.parse_args()
    pinned = {path: data for library in LIBRARIES for path, data in fetch(library).items()}
    if options.check:
        found = {
            PurePosixPath(file.relative_to(VENDOR).as_posix()): file.read_bytes()
            for file in VENDOR.rglob("*")
            if file.is_file()
        }
        wrong = sorted(p for p in pinned.keys() | found.keys() if pinned.get(p) != found.get(p))
        if wrong:
            sys.exit("error: not the pinned files: " + ", ".join(map(str, wrong)))
    else:
        shutil.rmtree(VENDOR, ignore_errors=True)
        for path, data in pinned.items():
            file = VENDOR / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
    print(f"{len(pinned)} files of {len(LIBRARIES)} libraries")


if __name__ == "__main__":
    main()
