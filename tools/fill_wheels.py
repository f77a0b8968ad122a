"""Fills the folder of wheels that `tools/on_gpu.sh` installs from, where there is a network.

    python3 tools/fill_wheels.py --python 3.12

The wheels are those of a Linux machine with that Python, and in all less than 60 MiB, so that
they travel with the sources. For that, large ones are compressed by LZMA, which the format
allows and pip reads; it takes a minute or two. torch and Triton are expected on the machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tools" / "wheels"
MOST = 60 * 2**20  # bytes
LARGE = 2**20  # bytes from which a wheel is compressed anew
# what the package, the benchmark and its tests import; PyG names more, which it asks for late
NEEDED = """
numpy numba llvmlite torch_geometric tqdm filelock typing_extensions
fsspec jinja2 markupsafe psutil requests urllib3 idna certifi charset_normalizer xxhash
pytest pluggy iniconfig packaging pygments
""".split()
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (28, 27, 26, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]


def download(python: str, *what: str) -> None:
    """Downloads wheels for a version of Python on Linux into the folder."""
    asked = [*"--only-binary=:all: --implementation cp --quiet".split()]
    asked += ["--python-version", python, "--dest", str(FOLDER)]
    for platform in PLATFORMS:
        asked += ["--platform", platform]
    command = [sys.executable, "-m", "pip", "download", *asked, *what]
    subprocess.run(command, check=True)


def compress(path: Path) -> None:
    """Compresses a wheel by LZMA; its files, and their hashes, stay the same."""
    fresh = path.with_suffix(".new")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(fresh, "w") as new:
        for entry in old.infolist():
            made = zipfile.ZipInfo(entry.filename, entry.date_time)
            made.external_attr = entry.external_attr
            new.writestr(made, old.read(entry), zipfile.ZIP_LZMA)
    fresh.replace(path)


def main(arguments: list[str] | None = None) -> int:
    """Fills the folder; returns 1 if it is too large."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", default="3.12", help="of the machine (%(default)s)")
    args = parser.parse_args(arguments)
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.whl"):
        old.unlink()
    download(args.python, "--no-deps", *NEEDED)
    own = sorted(FOLDER.glob("*.whl"))
    for path in own:
        if path.stat().st_size > LARGE:
            compress(path)
    size = sum(path.stat().st_size for path in own)
    for path in sorted(own, key=lambda path: -path.stat().st_size)[:5]:
        print(f"{path.stat().st_size / 2**20:6.1f} MiB  {path.name}")
    print(f"{size / 2**20:6.1f} MiB in {len(own)} wheels, in {FOLDER}")
    if size > MOST:
        print(f"more than {MOST / 2**20:.0f} MiB: leave something out of NEEDED")
    return int(size > MOST)


if __name__ == "__main__":
    sys.exit(main())
