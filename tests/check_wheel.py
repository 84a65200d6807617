"""Checks how the package is delivered, slowly: python tests/check_wheel.py

Source distribution -> fresh environment, no network, no index -> built, installed, imported; and
what the wheel holds. Needs the `build` package, and the index once, to fill a wheelhouse.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent

IMPORT = """
import beaconkv_gguf, beaconkv_gguf.cli, llama_cpp
print("imported beaconkv_gguf", beaconkv_gguf.__version__, "with llama_cpp", llama_cpp.__version__)
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> None:
    print("+", *command, flush=True)
    subprocess.run(
        [str(c) for c in command], cwd=cwd, check=True, env={**os.environ, **environment}
    )


def without_network() -> list[str]:
    """Return a command prefix that cuts the network off, where the system has one."""
    prefix = ["unshare", "--map-root-user", "--net"]
    if shutil.which(prefix[0]) and subprocess.run([*prefix, "true"]).returncode == 0:
        return prefix
    print("note: no network namespaces here; only the index is off")
    return []


def build_requirements() -> list[str]:
    """Return what building takes from the index: the backend, and tools that are missing here."""
    text = (ROOT / "pyproject.toml").read_text()
    match = re.search(r"^requires = \[(.*?)\]", text, re.M)
    assert match is not None
    tools = [tool for tool in ("cmake", "ninja") if shutil.which(tool) is None]
    return [*re.findall(r'"([^"]+)"', match[1]), *tools]


def check_contents(wheel: Path) -> None:
    """The wheel holds the Python files, the libraries once each, the server, its page, licences."""
    assert re.fullmatch(r"beaconkv_gguf-[^-]+-py3-none-\w+\.whl", wheel.name), wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        modes = {info.filename: info.external_attr >> 16 for info in archive.infolist()}
    extension = {"linux": ".so", "darwin": ".dylib", "win32": ".dll"}[sys.platform]
    prefix = "" if sys.platform == "win32" else "lib"
    folders: dict[str, list[str]] = {}
    for name in names:
        path = PurePosixPath(name)
        folders.setdefault(str(path.parent), []).append(path.name)
    assert all(name.startswith("beaconkv_gguf/") for name in names), names
    assert folders["beaconkv_gguf/include"] == ["beaconkv.h"]
    assert {"LICENSE-llama.cpp", "LICENSE-jsonhpp"} <= set(folders["beaconkv_gguf/licenses"])
    libraries = folders["beaconkv_gguf/lib"]
    for name in ("llama", "ggml", "ggml-base"):
        assert f"{prefix}{name}{extension}" in libraries, libraries
    server = "llama-server.exe" if sys.platform == "win32" else "llama-server"
    assert server in libraries, libraries
    assert sys.platform == "win32" or modes[f"beaconkv_gguf/lib/{server}"] & 0o111 == 0o111
    assert all(name.endswith(extension) for name in libraries if name != server), libraries
    assert "index.html" in folders["beaconkv_gguf/page"]
    vendored = [name for name in folders if name.startswith("beaconkv_gguf/page/vendor/")]
    for name in {"/".join(name.split("/")[:4]) for name in vendored}:
        assert any(file.startswith("LICENSE") for file in folders[name]), name
    print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB, {len(names)} files")


def check_run_paths(folder: Path) -> None:
    """Libraries and the server look for each other in their own folder, and call nobody."""
    if shutil.which("readelf") is None:
        return
    for library in folder.iterdir():
        command = ["readelf", "--dynamic", str(library)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert re.findall(r"(?:RUNPATH|RPATH).*\[(.*)\]", text) == ["$ORIGIN"], text
        assert not re.search(r"NEEDED.*(curl|ssl|crypto)", text), text


def main() -> None:
    # The Python of llama-cpp-python is all that is needed of it.
    arguments = f"{os.environ.get('CMAKE_ARGS', '')} -DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        house = folder / "wheelhouse"
        pip: tuple[str | Path, ...] = (sys.executable, "-m", "pip")

        # Without pip's cache, where a llama-cpp-python without libraries would stay for others.
        wheels = (*pip, "wheel", "--no-cache-dir", "--wheel-dir", house)
        run(*wheels, ROOT, cwd=folder, CMAKE_ARGS=arguments)
        run(*pip, "download", "--dest", house, *build_requirements(), cwd=folder)
        (built,) = house.glob("beaconkv_gguf-*.whl")
        check_contents(built)
        built.unlink()
        run(sys.executable, "-m", "build", "--sdist", "--outdir", folder, ROOT, cwd=folder)
        (sdist,) = folder.glob("beaconkv_gguf-*.tar.gz")

        venv.create(folder / "venv", with_pip=True)
        programs = folder / "venv" / ("Scripts" if sys.platform == "win32" else "bin")
        offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(house), "PIP_CONFIG_FILE": os.devnull}
        pip = (*without_network(), programs / "python", "-m", "pip")
        run(*pip, "install", "--no-cache-dir", sdist, cwd=folder, CMAKE_ARGS=arguments, **offline)
        run(programs / "python", "-c", IMPORT, cwd=folder)
        run(programs / "beaconkv-gguf", "serve", "--help", cwd=folder)
        for lib in (folder / "venv").rglob("beaconkv_gguf/lib"):
            check_run_paths(lib)
    print("check_wheel: passed")


if __name__ == "__main__":
    main()
