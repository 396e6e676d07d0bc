"""The CUDA source of the decode kernel, compiled for a CPU with stand-ins for what it uses of CUDA (cuda_on_cpu.h)."""

import ctypes
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fp8core.kernels import cuda
from fp8core.numerics.attention import HEAD_DIMS, QUERY_TYPES, Queries, decode_attention_reference
from fp8core.numerics.recipe import AttentionProducts

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
KV_HEADS, PAGE, PARTITION, Q_SCALE = 1, 16, 128, 0.004
_FUNCTION = re.compile(
    r"(?:^template <[^\n]*>\n)?^__device__ __forceinline__ (?:[^\n]*\}\n|.*?^\}\n)", re.MULTILINE | re.DOTALL
)
_CALL = """
extern "C" void run(int x, int y, int z, {parameters}) {{
    launch({{x, y, z}}, [&] {{ decode_attention({names}); }});
}}
"""


def on_cpu(source: str) -> str:
    """C++ of the kernel, with a function that runs a grid of it."""
    # Functions that are PTX are among the stand-ins.
    text = re.sub(_FUNCTION, lambda found: "" if "asm" in found[0] else found[0], source)
    text = re.sub(r"typedef [^;]*;\n", "", text)
    text = text.replace("extern __shared__ uint4 queue[];", "uint4* const queue = dynamic_shared;")
    signature = re.search(r"decode_attention\(([^)]*)\)", text)
    assert signature is not None
    parameters = signature[1].replace("__restrict__", "")
    names = ", ".join(re.findall(r"(\w+)(?:,|$)", parameters))
    header = Path(__file__).with_name("cuda_on_cpu.h").read_text()
    return header + text + _CALL.format(parameters=parameters, names=names)


@cache
def library(folder: Path, group: int, head_dim: int, products: AttentionProducts) -> ctypes.CDLL:
    source, target = (folder / f"decode-{group}-{head_dim}-{products}.{end}" for end in ("cpp", "so"))
    source.write_text(on_cpu(cuda.source("decode_attention")))
    row = 2 * head_dim * KV_HEADS
    macros = {"HEAD_DIM": head_dim, "GROUP": group, "PAGE": PAGE, "PARTITION": PARTITION, "STAGES": 2, "RESIDENT": 1}
    macros |= {"BLOCK_STRIDE": PAGE * row, "KEY_STRIDE": row, "HEAD_STRIDE": 2 * head_dim}
    macros["PRODUCTS_16"] = int(products != "fp8")
    options = [f"-D{name}={value}" for name, value in macros.items()]
    # No contraction: sums are those that are written.
    command = ["g++", "-std=c++17", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC", *options]
    subprocess.run([*command, str(source), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


class Case:
    """Sequences over a cache whose unused slots are NaN."""

    def __init__(
        self, folder: Path, lengths: list[int], group: int, head_dim: int, products: AttentionProducts
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        counts = [-(-length // PAGE) for length in lengths]
        cache = torch.randn(sum(counts) + 1, PAGE, KV_HEADS, 2 * head_dim, generator=generator) * 30
        self.cache = cache.to(torch.float8_e4m3fn)
        order = torch.randperm(len(cache), generator=generator).int()
        self.table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        for i, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            self.table[i, :count], order = order[:count], order[count:]
            if length % PAGE:
                self.cache.view(torch.uint8)[int(self.table[i, count - 1]), length % PAGE :] = 0x7F
        self.lengths, self.group, self.head_dim = torch.tensor(lengths, dtype=torch.int32), group, head_dim
        # Q in FP16 has no scale.
        q_scale = Q_SCALE if products == "fp8" else torch.nan
        self.scales = tuple(torch.tensor(scale) for scale in (q_scale, 0.03125, 0.125))
        self.folder, self.generator, self.products = folder, generator, products

    def query(self, tokens: int) -> Tensor:
        """Codes, or the values that they would stand for as a part of a fused projection."""
        heads = KV_HEADS * self.group
        drawn = torch.randn(tokens, heads, self.head_dim, generator=self.generator) * 40
        if self.products == "fp8":
            return drawn.to(torch.float8_e4m3fn)
        return torch.cat((drawn, drawn), dim=1).mul(Q_SCALE).bfloat16()[:, :heads]

    def attend(self, query: Tensor, queries: Queries) -> Tensor:
        """What the kernel writes; rows that it leaves are NaN."""
        keys, values = self.cache.split(self.head_dim, dim=-1)
        out = torch.full(query.shape, torch.nan, dtype=torch.bfloat16)
        count, parts = len(queries.lengths), -(-int(queries.lengths.max()) // PARTITION)
        partial = torch.empty(count * KV_HEADS * parts * self.group * (self.head_dim + 2))
        arrived = torch.zeros(count * KV_HEADS, dtype=torch.int32)
        table, starts, lengths = queries
        arguments = [query, query.stride(0), keys, values, table, table.stride(0), starts, lengths]
        arguments += [*self.scales, self.head_dim**-0.5, out, out.stride(0), partial, arrived]
        grid = (ctypes.c_int(n) for n in (KV_HEADS, count, parts))
        library(self.folder, self.group, self.head_dim, self.products).run(*grid, *map(c_value, arguments))
        assert not arrived.any(), "counters are left as they were found"
        return out

    def expected(self, query: Tensor, queries: Queries) -> Tensor:
        return decode_attention_reference(query, *self.cache.split(self.head_dim, dim=-1), queries, self.scales)


def c_value(argument: Tensor | int | float) -> ctypes.c_void_p | ctypes.c_longlong | ctypes.c_float:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_longlong(argument)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cuda")


def numbers(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int32)


@pytest.mark.parametrize("products", QUERY_TYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", [3, 8])
def test_equals_the_reference(folder: Path, group: int, head_dim: int, products: AttentionProducts) -> None:
    lengths = [1, 15, 17, 33, 70, 128, 0, 129, 300]
    case = Case(folder, lengths, group, head_dim, products)
    query = case.query(len(lengths))
    queries = Queries(case.table, numbers(10), case.lengths)
    found, expected = case.attend(query, queries).double(), case.expected(query, queries)
    # Scores are summed in FP32 here and in FP64 there, so a few P round the other way; then all of it to BF16.
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
    assert error.max() < 4e-3
    assert (found[lengths.index(0)] == 0).all()
    one = case.cache[case.table[0, 0].long(), 0, 0, head_dim:].double() * float(case.scales[2])
    assert torch.equal(found[0], one.bfloat16().double().expand(group, -1)), "the only weight is exact"


@pytest.mark.parametrize("products", QUERY_TYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_token_attends_as_if_it_were_alone(folder: Path, head_dim: int, products: AttentionProducts) -> None:
    """Tokens of two sequences side by side, and two that a query of its own leaves out."""
    case = Case(folder, [150, 40], 4, head_dim, products)
    lengths = [126, 127, 150, 1, 33, 40]
    query, owners = case.query(6), torch.tensor([0, 0, 0, 1, 1, 1])
    queries = Queries(case.table[owners], numbers(7), torch.tensor(lengths, dtype=torch.int32))
    found = case.attend(query, queries)
    for token, length in enumerate(lengths):
        alone = Queries(queries.block_table[token : token + 1], numbers(2), torch.tensor([length], dtype=torch.int32))
        assert torch.equal(case.attend(query[token : token + 1], alone)[0], found[token]), token
    skipping = Queries(case.table, torch.tensor([0, 1, 3], dtype=torch.int32), case.lengths)
    left = case.attend(query[:3], skipping)
    assert not left[0].isnan().any()
    assert left[1:].isnan().all()
