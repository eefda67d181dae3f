# SPDX-License-Identifier: Apache-2.0
"""Pack vLLM 0.23.0 for a GPU machine without a network: bundle.py FOLDER [ARCHITECTURE]

For a machine that has Python 3.12, torch 2.11, transformers 5 and what usually comes
with them. Fetches the wheels of vLLM and of requirements-gpu-bundle.lock with pip and
writes FOLDER/site.tar.xz, about 50 MB: vLLM without the FlashAttention 2 and 3
libraries and with the code for one GPU architecture (90 by default), and its smaller
requirements. vLLM is stock in it; scripts/enter-bundle unpacks and patches it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from fatbin import prune
from fetch import download

LOCK = Path(__file__).resolve().parents[1] / "requirements-gpu-bundle.lock"
# Tags that pip matches one by one; a wheel carries some of them.
PLATFORMS = [f"manylinux_2_{n}" for n in (35, 34, 31, 28, 27, 26, 24, 17)]
PLATFORMS += ["manylinux2014", "manylinux1"]

LEFT_OUT = re.compile(
    r"vllm/vllm_flash_attn/_vllm_fa[23]_C"  # 120 MB compressed; sparse MLA needs none
    r"|vllm/third_party/deep_gemm/_C\.cpython-3(?!12)"  # for other versions of Python
    r"|vllm/vllm-rs$"  # the server in Rust
    r"|mistral_common/data/|pycountry/locales/"  # of what vLLM only imports
)
# Any name of such a module is an empty class.
EMPTY_CLASSES = """\
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
"""
# Modules that vLLM imports for GLM-5 and never calls.
STANDING_IN = {
    "vllm/vllm_flash_attn/_vllm_fa2_C.py": "",
    "xgrammar/__init__.py": f'__version__ = "0.2.0"\n\n\n{EMPTY_CLASSES}',
    "xgrammar/structural_tag.py": EMPTY_CLASSES,
}


def fetch(folder: Path) -> list[Path]:
    """The wheels, for Python 3.12 on Linux."""
    download("0.23.0", folder)
    command = [sys.executable, "-m", "pip", "download", "--requirement", str(LOCK)]
    command += ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command += [f"--platform={name}_x86_64" for name in PLATFORMS]
    command += ["--python-version=3.12", "--implementation=cp"]
    subprocess.run(command, check=True)
    return sorted(folder.glob("*.whl"))


def unpack(wheel: Path, site: Path, architecture: int) -> None:
    """What pip would install of a wheel, without what no one needs there."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if LEFT_OUT.match(name) or ".data/" in name:  # the latter: commands
                continue
            path = Path(archive.extract(name, site))
            if path.suffix == ".so" and name.startswith("vllm/"):
                path.write_bytes(prune(path.read_bytes(), architecture))


def main(folder: Path, architecture: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        wheels, site = Path(scratch, "wheels"), Path(scratch, "site")
        for wheel in fetch(wheels):
            unpack(wheel, site, architecture)
        for name, text in STANDING_IN.items():
            path = site / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        packed = folder / "site.tar.xz"
        command = ["tar", "--sort=name", "--owner=0", "--group=0", "-C", str(site)]
        command += ["--use-compress-program=xz -T0", "-cf", str(packed), "."]
        subprocess.run(command, check=True)
    print(f"{packed}: {packed.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 90)
