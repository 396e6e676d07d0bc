"""Pack what TRL or verl needs beyond a GPU host's own packages into pieces that fit one transfer each.

    python -m benchmarks.peers.runtime verl --host-has FILE                      a runtime of its own
    python -m benchmarks.peers.runtime trl --host-has FILE --beside FOLDER       only what a vLLM runtime lacks

FILE has the names of the host's packages. The host has Python 3.12, torch 2.11 and CUDA 13.0; torch stays behind.
FlashAttention 2 is compiled here, for Hopper, heads of 128 and BF16 alone: with two processors some 25 minutes, once.
Device code of other GPUs is overwritten with zeros, which compress to nothing. On the host:
`cat runtime.tar.xz.* | xz -dc -T8 | tar xf - -C ~/NAME`, and ~/NAME first on PYTHONPATH.
"""

import argparse
import json
import mmap
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

_TORCH, _FLASH = "torch==2.11.0", "flash-attn==2.8.3.post2"
# verl's extra `vllm` pins these; Liger is of its extra `fsdp`, with heads and norms that TRL can use too.
_REQUIREMENTS = {
    "trl": (_TORCH, "trl==1.16.0", "vllm==0.26.0", "transformers==5.17.0", "liger-kernel==0.8.5"),
    "verl": (_TORCH, "verl[vllm]==0.9.1", "liger-kernel==0.8.5"),
}
# What the host has in another version.
_OWN = {"trl": set[str](), "verl": {"transformers", "tokenizers", "huggingface-hub"}}
# Never imported here, or far too large for what they give.
_NOT_NEEDED = re.compile(
    r"torch|torchcodec|triton|cuda-tile|humming-kernels|mbridge|megatron-.*|modelscope|nvidia-.*|pynvvideocodec"
    r"|quack-kernels|fastapi-cloud-cli|setuptools|pip|tilelang|tokenspeed-.*|z3-solver|pre-commit|flashinfer-python|flashinfer-cubin"
)
_SKIPPED = (
    "vllm/vllm-rs",
    "_vllm_fa2_C",
    "_qutlass_C",
    "third_party/fmha_sm100",
    "third_party/tml_fa4",
    "__pycache__/",
)
_SKIPPED += (*(f"_C.cpython-3{minor}" for minor in (10, 11, 13, 14)), "../", "/tests/", "pycountry/locales/")
_SKIPPED += ("ray/jars", "ray/cpp", "ray/rllib", "ray/dashboard/client", "pyarrow/include")
_NVCC = ("cuda-nvcc", "cuda-crt", "nvvm", "cuda-cccl", "cuda-runtime", "cublas", "cuda-nvrtc", "cuda-profiler-api")
_LIBRARIES = ("nvidia-cusparse<13", "nvidia-cusolver<13", "nvidia-curand", "nvidia-cufft")
_SWITCHES = """#include <stdexcept>
#define FP16_SWITCH(COND, ...) [&] { if (COND) throw std::runtime_error("compiled for BF16 alone"); \\
  using elem_type = cutlass::bfloat16_t; return __VA_ARGS__(); }()
#define HEADDIM_SWITCH(DIM, ...) [&] { if (DIM != 128) throw std::runtime_error("compiled for heads of 128 alone"); \\
  constexpr static int kHeadDim = 128; return __VA_ARGS__(); }()
"""
_COMPILE = """
import sys
from pathlib import Path
from torch.utils import cpp_extension
src, build = Path(sys.argv[1]) / "csrc", sys.argv[2]
files = [src / "flash_attn/flash_api.cpp", *sorted((src / "flash_attn/src").glob("*hdim128_bf16*"))]
parts = ("DROPOUT", "ALIBI", "SOFTCAP", "LOCAL")
flags = ["-O3", "-std=c++17", *(f"-DFLASHATTENTION_DISABLE_{part}" for part in parts)]
names = ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS")
cuda = [*(f"-U__CUDA_NO_{name}__" for name in names), "--expt-relaxed-constexpr", "--expt-extended-lambda"]
folders = [str(src / each) for each in ("flash_attn", "flash_attn/src", "cutlass/include")]
cpp_extension.load(
    "flash_attn_2_cuda", [*map(str, files)], extra_cflags=flags, extra_cuda_cflags=[*flags, *cuda, "--use_fast_math"],
    extra_include_paths=folders, build_directory=build, is_python_module=False,
)
"""
_HOPPER, _PIECE_MIB = 90, 50
_MAGIC = struct.pack("<I", 0xBA55ED50)
_CUBIN, _PTX = 2, 1


def main() -> None:
    parser = argparse.ArgumentParser(description="Pack what a peer needs on a GPU host.")
    parser.add_argument("peer", choices=_REQUIREMENTS)
    parser.add_argument("--host-has", type=Path, required=True, help="names of the host's packages")
    parser.add_argument("--beside", type=Path, help="an unpacked runtime whose packages come along anyway")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/fp8-grpo-peers")
    given = parser.parse_args()
    cache = (given.cache / given.peer).absolute()
    shutil.rmtree(tree := cache / "tree", ignore_errors=True)
    tree.mkdir(parents=True)
    present = {_normal(name) for name in given.host_has.read_text().split()} - _OWN[given.peer]
    if given.beside is not None:
        present |= {_normal(info.name.partition("-")[0]) for info in given.beside.glob("*.dist-info")}
    site = _installed(given.cache / "build", [_TORCH, "packaging", "psutil", "setuptools<81", "ninja", "uv"])
    uv = site.parents[2] / "bin/uv"
    wanted = [each for each in _resolved(uv, _REQUIREMENTS[given.peer]) if _taken(each, present)]
    platform = ["--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_35"]
    subprocess.run([uv, "pip", "install", "-q", "--no-deps", *platform, "--target", tree, *wanted], check=True)
    _add_flash_attention(given.cache, site, tree)
    for library in tree.rglob("*.so*"):
        if library.stat().st_size > 1 << 20:
            _blank_other_architectures(library)
    print(json.dumps(wanted), flush=True)
    _pack(cache, tree)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _taken(requirement: str, present: set[str]) -> bool:
    name = _normal(requirement.partition("==")[0])
    return name not in present and not _NOT_NEEDED.fullmatch(name)


def _installed(env: Path, packages: Sequence[str]) -> Path:
    """A Python 3.12 environment with these packages; returns its site-packages."""
    if not (env / "bin/python").exists():
        subprocess.run(["python3.12", "-m", "venv", env], check=True)
        subprocess.run([env / "bin/pip", "install", "-q", *packages], check=True)
    return env / "lib/python3.12/site-packages"


def _resolved(uv: Path, requirements: Sequence[str]) -> list[str]:
    """`name==version` of all that the requirements need."""
    command = [uv, "pip", "compile", "-q", "--no-annotate", "--no-header", "-", "--python-version", "3.12"]
    command += ["--python-platform", "x86_64-manylinux_2_35"]
    found = subprocess.run(command, input="\n".join(requirements), text=True, check=True, capture_output=True)
    return [line.partition(" ")[0] for line in found.stdout.splitlines()]


def _add_flash_attention(cache: Path, site: Path, tree: Path) -> None:
    """The Python part of FlashAttention 2, and the library compiled from its source release."""
    python, source, build = site.parents[2] / "bin/python", cache / "flash", cache / "flash-build"
    without = {**os.environ, "FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
    pip = [python, "-m", "pip", "-q"]
    plain = ["--no-deps", "--no-build-isolation", "--no-binary", "flash-attn", _FLASH]
    subprocess.run([*pip, "install", "--target", tree, *plain], env=without, check=True)
    library = build / "flash_attn_2_cuda.so"
    if not library.exists():
        cuda = _compiler(cache / "cuda", site.parents[2] / "bin/uv")
        subprocess.run([*pip, "download", "-d", source, *plain], env=without, check=True)
        (archive,) = source.glob("*.tar.gz")
        subprocess.run(["tar", "xf", archive, "--strip-components", "1", "-C", source], check=True)
        switches = source / "csrc/flash_attn/src/static_switch.h"
        switches.write_text(switches.read_text().partition("#define FP16_SWITCH")[0] + _SWITCHES)
        build.mkdir(exist_ok=True)
        path = f"{python.parent}:{os.environ['PATH']}"
        settings = {**os.environ, "CUDA_HOME": str(cuda), "TORCH_CUDA_ARCH_LIST": "9.0", "MAX_JOBS": "2", "PATH": path}
        subprocess.run([python, "-c", _COMPILE, source, build], env=settings, check=True)
    shutil.copy(library, tree / "flash_attn_2_cuda.cpython-312-x86_64-linux-gnu.so")


def _compiler(folder: Path, uv: Path) -> Path:
    """nvcc 13.0 with its headers, from wheels; returns its CUDA_HOME."""
    wheels = [*(f"nvidia-{name}==13.0.*" for name in _NVCC), *_LIBRARIES]
    subprocess.run([uv, "pip", "install", "-q", "--python-version", "3.12", "--target", folder, *wheels], check=True)
    home = folder / "nvidia/cu13"
    (home / "lib64").mkdir(exist_ok=True)
    if not (link := home / "lib64/libcudart.so").is_symlink():
        link.symlink_to(home / "lib/libcudart.so.13")
    return home


def _blank_other_architectures(library: Path) -> None:
    """Zero device code of other GPUs; where there is none for Hopper, the newest PTX that it can run stays."""
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as image:
        for entries in _fat_binaries(image):
            own = [each for each in entries if each[0] == _CUBIN and each[1] == _HOPPER]
            older = [each for each in entries if each[0] == _PTX and each[1] <= _HOPPER]
            stays = own or sorted(older, key=lambda each: each[1])[-1:]
            for _, _, at, size in (each for each in entries if each not in stays):
                image[at : at + size] = b"\0" * size


def _fat_binaries(image: mmap.mmap) -> Iterator[list[tuple[int, int, int, int]]]:
    """The entries of each fat binary: kind, architecture, and place and size of their code."""
    at = 0
    while (at := image.find(_MAGIC, at)) >= 0:
        number, header, size = struct.unpack_from("<HHQ", image, at + 4)
        if (number, header) != (1, 16):
            at += 4
            continue
        end, entry, found = at + 16 + size, at + 16, []
        while entry + 64 <= end:
            kind, _, head, code = struct.unpack_from("<HHIQ", image, entry)
            (arch,) = struct.unpack_from("<I", image, entry + 28)
            if not 64 <= head <= 4096 or entry + head + code > end:
                break
            found.append((kind, arch, entry + head, code))
            entry += head + code
        yield found
        at = max(end, at + 4)


def _pack(cache: Path, tree: Path) -> None:
    """Pieces of one .tar.xz, and their sizes."""
    names = cache / "files"
    with names.open("w") as listing:
        for file in sorted(each for each in tree.rglob("*") if each.is_file()):
            name = str(file.relative_to(tree))
            if not any(part in name for part in _SKIPPED):
                listing.write(f"{name}\n")
    for piece in cache.glob("runtime.tar.xz.*"):
        piece.unlink()
    pack = f"tar cf - -C {tree} -T {names} | xz -6 -T0 | split -b {_PIECE_MIB}m -d - {cache}/runtime.tar.xz."
    subprocess.run(["bash", "-o", "pipefail", "-c", pack], check=True)
    for piece in sorted(cache.glob("runtime.tar.xz.*")):
        print(f"{piece.name}: {piece.stat().st_size / 2**20:.0f} MiB", flush=True)


if __name__ == "__main__":
    sys.exit(main())
