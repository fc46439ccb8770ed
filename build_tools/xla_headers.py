"""Prints the folder of XLA's FFI headers that the extension has to be built with: those of the oldest supported jaxlib.

That release is rarely the installed one, so its wheel is downloaded once and its headers (260 KB of 85 MB) are kept in the given folder.
Where that release has no wheel for this Python, the installed jaxlib's headers are taken.

    python xla_headers.py FOLDER
"""

import importlib.metadata
import importlib.util
import pathlib
import subprocess
import sys
import tempfile
import zipfile

OLDEST_JAXLIB = "0.10.2"  # as in [build-system] of pyproject.toml
PREFIX = "jaxlib/include/"


def installed_headers() -> pathlib.Path:
    """The headers of the jaxlib of this interpreter."""
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or spec.origin is None:
        raise SystemExit("jaxlib is not installed")
    return pathlib.Path(spec.origin).parent / "include"


def download_headers(folder: pathlib.Path) -> bool:
    """Puts the headers of the oldest supported jaxlib into `folder`. False: it has no wheel for this Python."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", f"--dest={scratch}"]
        if subprocess.run([*command, f"jaxlib=={OLDEST_JAXLIB}"], stdout=sys.stderr, check=False).returncode != 0:
            return False
        [wheel] = pathlib.Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.startswith(PREFIX)])
    return True


def main() -> None:
    folder = pathlib.Path(sys.argv[1]).absolute()
    if importlib.metadata.version("jaxlib") == OLDEST_JAXLIB:
        print(installed_headers())
    elif (folder / PREFIX).is_dir() or download_headers(folder):
        print(folder / PREFIX)
    else:
        print(f"jaxlib {OLDEST_JAXLIB} has no wheel for this Python; building with the installed jaxlib's headers", file=sys.stderr)
        print(installed_headers())


if __name__ == "__main__":
    main()
