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

import fp8core.kernels.attention as module
from fp8core.numerics.attention import HEAD_DIM, Queries, decode_attention_reference, token_queries

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
KV_HEADS, PAGE, PARTITION = 1, 16, 128
SOURCE = Path(module.__file__).with_name("decode_attention.cu")
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
def library(folder: Path, group: int, tokens: int) -> ctypes.CDLL:
    source, target = (folder / f"decode-{group}-{tokens}.{end}" for end in ("cpp", "so"))
    source.write_text(on_cpu(SOURCE.read_text()))
    row = 2 * HEAD_DIM * KV_HEADS
    macros = {"GROUP": group, "TOKENS": tokens, "PAGE": PAGE, "PARTITION": PARTITION, "STAGES": 2, "RESIDENT": 1}
    macros |= {"BLOCK_STRIDE": PAGE * row, "KEY_STRIDE": row, "HEAD_STRIDE": 2 * HEAD_DIM}
    options = [f"-D{name}={value}" for name, value in macros.items()]
    # No contraction: sums are those that are written.
    command = ["g++", "-std=c++17", "-O1", "-ffp-contract=off", "-w", "-shared", "-fPIC", *options]
    subprocess.run([*command, str(source), "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


class Case:
    """Sequences over a cache whose unused slots are NaN."""

    def __init__(self, folder: Path, lengths: list[int], group: int) -> None:
        generator = torch.Generator().manual_seed(0)
        counts = [-(-length // PAGE) for length in lengths]
        cache = torch.randn(sum(counts) + 1, PAGE, KV_HEADS, 2 * HEAD_DIM, generator=generator) * 30
        self.cache = cache.to(torch.float8_e4m3fn)
        order = torch.randperm(len(cache), generator=generator).int()
        self.table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        for i, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            self.table[i, :count], order = order[:count], order[count:]
            if length % PAGE:
                self.cache.view(torch.uint8)[int(self.table[i, count - 1]), length % PAGE :] = 0x7F
        self.lengths, self.group = torch.tensor(lengths, dtype=torch.int32), group
        self.scales = tuple(torch.tensor(scale) for scale in (0.004, 0.03125, 0.125))
        self.folder, self.generator = folder, generator

    def query(self, tokens: int) -> Tensor:
        heads = KV_HEADS * self.group
        return (torch.randn(tokens, heads, HEAD_DIM, generator=self.generator) * 40).to(torch.float8_e4m3fn)

    def attend(self, query: Tensor, queries: Queries, together: int = 1) -> Tensor:
        """What the kernel writes, so many tokens at a time; rows that it leaves are NaN."""
        keys, values = self.cache.split(HEAD_DIM, dim=-1)
        out = torch.full(query.shape, torch.nan, dtype=torch.bfloat16)
        count, parts = len(queries.owners), -(-int(queries.lengths.max()) // PARTITION)
        partial = torch.empty(count * KV_HEADS * parts * self.group * (HEAD_DIM + 2))
        arrived = torch.zeros(count * KV_HEADS, dtype=torch.int32)
        table, owners, starts, lengths = queries
        arguments = [query, query.stride(0), keys, values, count, table, table.stride(0), owners, starts, lengths]
        arguments += [*self.scales, HEAD_DIM**-0.5, out, out.stride(0), partial, arrived]
        grid = (ctypes.c_int(n) for n in (KV_HEADS, -(-count // together), parts))
        library(self.folder, self.group, together).run(*grid, *map(c_value, arguments))
        assert not arrived.any(), "counters are left as they were found"
        return out

    def expected(self, query: Tensor, queries: Queries) -> Tensor:
        return decode_attention_reference(query, *self.cache.split(HEAD_DIM, dim=-1), queries, self.scales)


def c_value(argument: Tensor | int | float) -> ctypes.c_void_p | ctypes.c_longlong | ctypes.c_float:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_longlong(argument)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cuda")


def numbers(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int32)


@pytest.mark.parametrize("group", [4, 8])
def test_equals_the_reference(folder: Path, group: int) -> None:
    lengths = [1, 15, 17, 33, 70, 128, 0, 129, 300]
    case = Case(folder, lengths, group)
    query = case.query(len(lengths))
    queries = Queries(case.table, numbers(9), numbers(10), case.lengths)
    found, expected = case.attend(query, queries).double(), case.expected(query, queries)
    # Scores are summed in FP32 here and in FP64 there, so a few P round the other way; then all of it to BF16.
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
    assert error.max() < 4e-3
    assert (found[lengths.index(0)] == 0).all()
    one = case.cache[case.table[0, 0].long(), 0, 0, HEAD_DIM:].double() * float(case.scales[2])
    assert torch.equal(found[0], one.bfloat16().double().expand(group, -1)), "the only weight is exact"


def test_a_prompts_token_attends_as_if_it_were_decoded(folder: Path) -> None:
    """Of two prompts, one cached in part; then a token of padding, and one that is left out."""
    case = Case(folder, [150, 40], group=4)
    query, starts = case.query(66), torch.tensor([0, 25, 65], dtype=torch.int32)
    queries = token_queries(case.table, starts, case.lengths, 66)
    found = case.attend(query, queries)
    for token, (owner, length) in {0: (0, 126), 24: (0, 150), 25: (1, 1), 57: (1, 33), 64: (1, 40)}.items():
        alone = Queries(case.table, numbers(2)[owner:][:1], numbers(2), torch.tensor([length], dtype=torch.int32))
        assert torch.equal(case.attend(query[token : token + 1], alone)[0], found[token]), token
    assert (found[65] == 0).all()
    skipping = Queries(case.table, numbers(2), torch.tensor([0, 1, 3], dtype=torch.int32), case.lengths)
    left = case.attend(query[:3], skipping)
    assert not left[0].isnan().any()
    assert left[1:].isnan().all()


@pytest.mark.parametrize(("group", "together"), [(4, 2), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_tokens_that_share_their_keys_do_not_change_one_another(folder: Path, group: int, together: int) -> None:
    """Of three prompts, with neighbours of other sequences, padding and one that is left out; some end with a tile or a
    partition, where their neighbour sees one more."""
    case = Case(folder, [150, 129, 40], group)
    starts = torch.tensor([0, 45, 54, 67], dtype=torch.int32)
    query, queries = case.query(70), token_queries(case.table, starts, case.lengths, 70)
    skipping = queries.starts.clone()
    skipping[61:] += 1
    queries = queries._replace(starts=skipping)
    query = torch.cat((query, query[:1]))
    alone = case.attend(query, queries)
    assert alone[60].isnan().all()
    assert not alone[queries.starts[:-1][queries.starts.diff() == 1].long()].isnan().any()
    assert torch.equal(case.attend(query, queries, together).nan_to_num(7.0), alone.nan_to_num(7.0))
