"""vLLM's wheel cut to what `serving.py` runs, for a GPU machine that only small files reach: 300 MB become 23, and
wheels that vLLM needs beside torch and transformers 27.

    python3 benchmarks/vllm_wheel.py OUTPUT [--python 3.12]     # fetches all of it
    python3 OUTPUT/install.py SITE                              # on the machine

Kept are Python, the operators and FlashAttention 3, of the latter the kernels for bfloat16, heads of 64 and 128
dimensions and no softcap; of all libraries the machine code of compute capability 9.0 alone. Left out are
FlashAttention 2, mixtures of experts, MLA, quantised products and what is written in Rust. What is kept is vLLM's, byte
for byte, so that a peer is as fast as its whole wheel; what was cut fails when it is called.
"""

from __future__ import annotations

import argparse
import io
import lzma
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

VLLM = "vllm==0.26.0"
NEEDS = (
    "annotated-doc annotated-types apache-tvm-ffi==0.1.15.post2 blake3 cachetools==8.0.1 cbor2==6.3.0 distro "
    "fastapi==0.136.3 gguf==0.19.0 httpcore2==2.16.2 httpx2==2.16.2 jiter==0.19.0 jsonschema==4.26.0 "
    "jsonschema-specifications llguidance loguru msgspec==0.22.0 openai==3.54.0 openai-harmony==0.0.8 "
    "partial-json-parser pybase64==1.5.1 pycountry pydantic==2.14.3 pydantic-core==2.50.4 pyzmq==27.3.0 referencing "
    "rpds-py==2026.9.1 setproctitle sniffio starlette==1.10.0 truststore typing-inspection xgrammar==0.2.8").split()
"""What an engine imports and a machine with torch, transformers, numba, Triton and what these need does not have."""
GLIBC = (5, 12, 17, 24, 26, 27, 28, 31, 34)
CAPABILITY = 90
PARTS = {
    "operators": {"vllm/_C_stable_libtorch.abi3.so": None},
    "attention": {"vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so":
                  rb"FlashAttnFwdCombine|prepare_scheduler|"
                  rb"EEELi(64|128)ENS_10bfloat16_tEfNS_4arch4Sm90ELb[01]ELb[01]ELb0"},
}
LEFT_OUT = re.compile(r"vllm/(third_party/(fmha_sm100|deep_gemm)/|benchmarks/|vllm-rs|_rust_|_moe_C|_flashmla|_qutlass"
                      r"|spinloop|vllm_flash_attn/_vllm_fa2|entrypoints/serve/instrumentator/static/"
                      r"|model_executor/layers/.*/configs/.*\.json$)")
INSTALL = '''"""install.py SITE: unpack the parts and wheels beside this file into SITE."""
import pathlib, sys, tarfile, zipfile
from concurrent.futures import ThreadPoolExecutor

here, site = pathlib.Path(__file__).parent, pathlib.Path(sys.argv[1])
site.mkdir(parents=True, exist_ok=True)


def unpack(part):
    with zipfile.ZipFile(part) if part.suffix == ".whl" else tarfile.open(part, "r:xz") as held:
        held.extractall(site)


with ThreadPoolExecutor(16) as pool:
    list(pool.map(unpack, [*here.glob("*.tar.xz"), *here.glob("*.whl")]))
own = site / "sparsekv-0.dist-info"  # vLLM finds the backend by its entry point
own.mkdir(exist_ok=True)
(own / "METADATA").write_text("Metadata-Version: 2.1\\nName: sparsekv\\nVersion: 0\\n")
(own / "entry_points.txt").write_text("[vllm.general_plugins]\\nsparsekv = sparsekv.serving.plugin:register\\n")
'''
FAT, HEADER = struct.pack("<I", 0xBA55ED50), struct.Struct("<IHHQ")
ENTRY, CUBIN, PTX, COMPRESSED = struct.Struct("<HHIQ"), 2, 1, 0x8000


def cut(library: bytes, keep: bytes | None) -> bytes:
    """A library of the same size whose device code of other capabilities is zero, so that it packs to little; keep: a
    pattern of kernels, those without it become a copy of the smallest that is kept (a module must load whole)."""
    data, at = bytearray(library), 0
    spare: list[tuple[int, int]] = []
    smallest: tuple[int, int] | None = None
    while (at := data.find(FAT, at)) >= 0:
        _, version, header, size = HEADER.unpack_from(data, at)
        if version != 1 or header != HEADER.size or at + header + size > len(data):
            at += len(FAT)
            continue
        place, end, entries = at + header, at + header + size, []
        while place < end:
            kind, _, before, length = ENTRY.unpack_from(data, place)
            capability, = struct.unpack_from("<I", data, place + 28)
            flags, = struct.unpack_from("<Q", data, place + 40)
            entries.append((place + before, length, kind, capability, flags))
            place += before + length
        native = any(kind == CUBIN and capability == CAPABILITY for _, _, kind, capability, _ in entries)
        for first, length, kind, capability, flags in entries:
            loaded = (kind == CUBIN and capability == CAPABILITY) or (
                kind == PTX and not native and capability <= CAPABILITY)
            body = slice(first, first + length)
            if not loaded:
                data[body] = bytes(length)
            elif keep is not None and not re.search(keep, data[body]):
                spare.append((first, length))
            elif kind == CUBIN and not flags & COMPRESSED and (smallest is None or length < smallest[1]):
                smallest = first, length
        at = end
    for first, length in spare:
        assert smallest is not None
        held = bytes(data[smallest[0]:sum(smallest)]) if smallest[1] <= length else b""
        data[first:first + length] = held + bytes(length - len(held))
    return bytes(data)


def fetch(requirement: str, folder: Path, python: str) -> None:
    """The wheel of a package for the machine, without what it needs."""
    platforms = [word for n in GLIBC for word in ("--platform", f"manylinux_2_{n}_x86_64")]
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                    "--only-binary=:all:", "--python-version", python, "--implementation", "cp", "--abi",
                    f"cp{python.replace('.', '')}", "--abi", "abi3", "--abi", "none", *platforms, "--platform",
                    "manylinux2014_x86_64", "--platform", "manylinux1_x86_64", "--dest", str(folder), requirement],
                   check=True)


def pack(files: dict[str, bytes], output: Path) -> Path:
    best = 9 | lzma.PRESET_EXTREME
    with lzma.open(output, "w", preset=best) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for name, data in files.items():
            about = tarfile.TarInfo(name)
            about.size, about.mode = len(data), 0o755 if name.endswith(".so") else 0o644
            tar.addfile(about, io.BytesIO(data))
    return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--python", default="3.12", help="the machine's")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    for needed in NEEDS:
        fetch(needed, options.output, options.python)
    (options.output / "install.py").write_text(INSTALL, encoding="utf-8")
    cut_apart = {name for libraries in PARTS.values() for name in libraries}
    with tempfile.TemporaryDirectory() as place:
        fetch(VLLM, Path(place), options.python)
        held = io.BytesIO(next(Path(place).glob("*.whl")).read_bytes())
    with zipfile.ZipFile(held) as wheel:
        parts = {part: {name: cut(wheel.read(name), keep) for name, keep in libraries.items()}
                 for part, libraries in PARTS.items()}
        parts["python"] = {name: wheel.read(name) for name in wheel.namelist()
                           if not name.endswith("/") and name not in cut_apart and not LEFT_OUT.match(name)}
    with ThreadPoolExecutor() as pool:
        for path in pool.map(lambda part: pack(parts[part], options.output / f"{part}.tar.xz"), parts):
            print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
