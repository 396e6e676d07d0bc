"""Two questions of a recipe with FP32 scales for activations: the scales of gradients, and the rounding of weights.

    python -m benchmarks.real_checkpoint FOLDER
    python -m benchmarks.studies.recipe_errors gradients FOLDER
    python -m benchmarks.studies.recipe_errors weights FOLDER

SmolLM2-135M-Instruct in `transformers`, FP8 by fake quantisation: activations in 1x128 groups under FP32 scales,
weights in 128x128 tiles under powers of two, K and V with a scale a tensor.

`gradients`: GRPO's loss on 16 groups of 3 completions that BF16 samples, right and wrong ones in each. The FP8 products
dX = dY W and dW = dY^T X of every linear, from the exact dY and behind a backward whose every dX is FP8, against FP64
from the exact dY. `packing` is the difference of dW between one micro-batch of 48 rows and 48 of 1.

`weights`: KL from BF16 on a question and its right answer, and the shift of the answer's log-probability, in two tasks.
One checkpoint rounded once is one draw. Draw 0 is the checkpoint's; the others round the weights times a factor of the
tensor, random between 1 and 2, and divide by it.

Predicted before measuring. Gradients: FP32 rows of dY lower the error of dX from 2.6 to 2.2 %. FP32 columns lower that
of dW from 3.7 %, by less than a fifth for either operand. Packing moves dW by 2 to 3 % where either has FP32 scales,
below 1e-6 where none has. Weights: a scale of least error changes nothing (a power of two moves no mantissa). Constant
sums of rows lower KL by 5 % at most. Diffusion, whose error has twice the energy, raises it by half. None wins.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.harness import RESULTS, provenance, stored, table, write_rows
from benchmarks.quantisation_errors import quantise_tensor
from benchmarks.real_checkpoint import score
from fp8core.numerics.e4m3 import decode, quantise_columns, quantise_rows, round_to_e4m3, scale_from_amax
from fp8core.numerics.linear import dequantise_rows
from fp8core.numerics.recipe import GRADIENT_FLOOR, TILE, Grouping, ScaleRule

Row = dict[str, Any]
Problem, Sample, Seen = tuple[str, str], tuple[Tensor, int, float], tuple[list[Tensor], list[Tensor]]
RULES: tuple[ScaleRule, ...] = ("pow2", "fp32")
GROUPINGS = {rule: Grouping(1, TILE, rule, GRADIENT_FLOOR) for rule in RULES}
GROUPS, GROUP, TOKENS, TEXTS, BATCH, DRAWS = 16, 3, 8, 128, 32, 4
_FILE = "recipe_errors"


def main() -> None:
    """Measure one part, write its rows beside those of the other, and print them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=["gradients", "weights"])
    parser.add_argument("folder", type=Path, help="of benchmarks.real_checkpoint")
    given = parser.parse_args()
    torch.manual_seed(0)
    study, kind = Study(given.folder), f"recipe_{given.part}"
    measured = gradient_rows(study) if given.part == "gradients" else weight_rows(study)
    path = RESULTS / f"{_FILE}.json"
    others = [row for row in stored(_FILE) if row["kind"] != kind] if path.exists() else []
    write_rows(path, others + [{"kind": kind, **row, **provenance()} for row in measured])
    keys = list(dict.fromkeys(key for row in measured for key in row))
    cells = [[row.get(key, "") for key in keys] for row in measured]
    print(table(keys, [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in line] for line in cells]))


class Linear(torch.nn.Module):
    """A linear of `weight`, any values, with activations under `rule` or in BF16; `on_gradient` sees input and dY."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.stored = self.weight = linear.weight.detach()
        self.rule: ScaleRule | None = None
        self.on_gradient: Callable[[Tensor, Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = through(x, x.bfloat16().float())
        y = (through(x, by_rows(x, self.rule)) if self.rule else x) @ self.weight.t()
        if self.on_gradient:
            y.register_hook(partial(self.on_gradient, x.detach()))
        return through(y, y.bfloat16().float())


def by_rows(x: Tensor, rule: ScaleRule) -> Tensor:
    grouping = GROUPINGS[rule]
    return dequantise_rows(*quantise_rows(x.detach().flatten(0, -2), grouping), grouping).float().view(x.shape)


def through(x: Tensor, other: Tensor) -> Tensor:
    """`other`, with the gradient of x."""
    return x + (other - x).detach()


def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> tuple[Tensor, None]:
    """Causal attention of 16 bits over K and V of the cache: FP8 where linears are."""
    if module.q_proj.rule:
        k, v = (through(x, torch.mul(*quantise_tensor(x.detach(), "pow2"))) for x in (k, v))
    q, k, v = (through(x, x.bfloat16().float()) for x in (q, k, v))
    causal = q.shape[2] > 1
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scaling, enable_gqa=True)
    return through(mixed, mixed.bfloat16().float()).transpose(1, 2).contiguous(), None


class Study:
    """The model with a `Linear` for each one of its layers, and problems: questions and right answers."""

    def __init__(self, folder: Path) -> None:
        ALL_ATTENTION_FUNCTIONS.register("fp8_cache", attention)
        self.model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).requires_grad_(False)
        self.model.config._attn_implementation = "fp8_cache"
        layers = self.model.model.layers
        plain = {name: each for name, each in layers.named_modules() if isinstance(each, torch.nn.Linear)}
        self.linears = {name: Linear(each) for name, each in plain.items()}
        for name, each in self.linears.items():
            layers.set_submodule(name, each)
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        lines = map(json.loads, (folder / "harder.jsonl").read_text().splitlines()[:TEXTS])
        self.sums = [(line["question"], line["answer"].removeprefix("#### ")) for line in lines]

    def ids(self, text: str) -> Tensor:
        found: Tensor = self.tokenizer(text, return_tensors="pt")["input_ids"]
        return found


# Gradients


def gradient_rows(study: Study) -> list[Row]:
    """A row for each product and its rules."""
    rows, found = list(rollouts(study)), {}
    for linear in study.linears.values():
        linear.rule, linear.weight = "fp32", nearest(linear.stored)
    exact = gradients(study, rows, None)
    for name, (_, grads) in exact.items():
        weight, grad = study.linears[name].weight.double(), torch.cat(grads)
        for rule in RULES:
            got = by_rows(grad, rule).double() @ weight
            found["dX", "exact", rule, name] = distance(got, grad.double() @ weight)
    summaries = summarised(found)
    for backward in (None, *RULES):
        seen, found = gradients(study, rows, backward) if backward else exact, {}
        for name, (x, grads) in exact.items():
            want = torch.cat(grads).t().double() @ torch.cat(x).double()
            for rules in product(RULES, RULES):
                got = weight_gradient(x, seen[name][1], rules, len(rows))
                row = found["dW", backward or "exact", " ".join(rules), name] = distance(got, want)
                if backward is None:
                    row["packing"] = distance(weight_gradient(x, grads, rules, 1), got.double())["error"]
        summaries += summarised(found)
    return summaries


def rollouts(study: Study) -> Iterator[Sample]:
    """Token ids [1, length], those of the prompt and the advantage, of the first groups that are not all alike."""
    groups = 0
    for question, answer in study.sums:
        prompt = study.ids(question)
        sampling = {"do_sample": True, "top_k": 0, "num_return_sequences": GROUP, "max_new_tokens": TOKENS}
        rows = study.model.generate(prompt, attention_mask=torch.ones_like(prompt), **sampling)
        texts = study.tokenizer.batch_decode(rows[:, prompt.shape[1] :], skip_special_tokens=True)
        rewards = torch.tensor([float(score(question, text, f"#### {answer}", "")) for text in texts])
        if rewards.std() > 0 and groups < GROUPS:
            groups += 1
            for row, advantage in zip(rows, (rewards - rewards.mean()) / rewards.std(), strict=True):
                yield row[None], prompt.shape[1], float(advantage)
        if groups == GROUPS:
            return


def gradients(study: Study, rows: list[Sample], rule: ScaleRule | None) -> dict[str, Seen]:
    """X and dY of every linear by row of the batch; `rule` is of the dY that dX is computed from, None is exact."""
    seen: dict[str, Seen] = {name: ([], []) for name in study.linears}

    def see(name: str, x: Tensor, grad: Tensor) -> Tensor:
        for part, value in zip(seen[name], (x, grad), strict=True):
            part.append(value.flatten(0, -2))
        return by_rows(grad, rule) if rule else grad

    for name, linear in study.linears.items():
        linear.on_gradient = partial(see, name)
    for ids, prompt, advantage in rows:
        inputs = study.model.get_input_embeddings()(ids).requires_grad_()
        logits = study.model(inputs_embeds=inputs).logits[0, prompt - 1 : -1]
        (-advantage * logits.log_softmax(-1).gather(1, ids[0, prompt:, None]).sum()).backward()
    return seen


def weight_gradient(x: list[Tensor], grads: list[Tensor], rules: tuple[ScaleRule, ...], micro_batch: int) -> Tensor:
    """dW over micro-batches of so many rows; `rules` are of the columns of X and of dY."""
    starts = range(0, len(x), micro_batch)
    left, right = (
        torch.cat([by_columns(rows[start : start + micro_batch], rule) for start in starts], 1)
        for rows, rule in zip((grads, x), reversed(rules), strict=True)
    )
    return left @ right.t()


def by_columns(rows: list[Tensor], rule: ScaleRule) -> Tensor:
    return dequantise_rows(*quantise_columns(torch.cat(rows), GROUPINGS[rule]), GROUPINGS[rule]).float()


def distance(got: Tensor, want: Tensor) -> dict[str, float]:
    return {
        "error": float((got - want).norm() / want.norm()),
        "cosine": float(functional.cosine_similarity(got.double().flatten(), want.flatten(), 0)),
    }


def summarised(found: dict[tuple[str, ...], dict[str, float]]) -> list[Row]:
    """By case, the median and the worst of each measure over linears."""
    rows: list[Row] = []
    for case in dict.fromkeys(key[:-1] for key in found):
        linears = {key[-1]: each for key, each in found.items() if key[:-1] == case}
        row: Row = dict(zip(("product", "backward", "rules"), case, strict=True))
        for measure in next(iter(linears.values())):
            values = [each[measure] for each in linears.values()]
            row |= {measure: median(values), f"{measure}_worst": (min if measure == "cosine" else max)(values)}
        row["worst_linear"] = max(linears, key=lambda name: linears[name]["error"])
        rows.append(row)
    return rows


# Weights


def nearest(weight: Tensor) -> Tensor:
    return by_tiles(weight, round_to_e4m3)


def least_error_scale(weight: Tensor) -> Tensor:
    """The least squared error of scales of half (which saturates), one and two times the usual one."""

    def choose(tiles: Tensor) -> Tensor:
        tried = torch.stack([round_to_e4m3(tiles / factor) * factor for factor in (1, 0.5, 2)])
        best = (tried - tiles).square().sum((2, 4), keepdim=True).argmin(0, keepdim=True)
        return tried.take_along_dim(best, 0)[0]

    return by_tiles(weight, choose)


def constant_row_sums(weight: Tensor) -> Tensor:
    """To nearest, then elements nearest to a tie go to their other neighbour while the error of a row's sum falls."""
    values = decode(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)).nan_to_num(0).unique()

    def flip(tiles: Tensor) -> Tensor:
        grid = round_to_e4m3(tiles)
        error = tiles - grid
        total = error.sum(-1, keepdim=True)
        other = values[(torch.searchsorted(values, grid) + error.sign().long()).clamp(0, len(values) - 1)]
        step = torch.where(error.sign() == total.sign(), other - grid, 0)
        order = torch.where(step != 0, error / step, 0).argsort(-1, descending=True)
        left = torch.cat([total, total - step.gather(-1, order).cumsum(-1)], -1).abs()
        return grid + torch.where(order.argsort(-1) < left.argmin(-1, keepdim=True), step, 0)

    return by_tiles(weight, flip)


def diffusion(weight: Tensor) -> Tensor:
    """To nearest along `in`, where the error of an element goes to the next one of its tile."""

    def carry(tiles: Tensor) -> Tensor:
        done, error = [], torch.zeros_like(tiles[..., 0])
        for column in tiles.unbind(-1):
            done.append(round_to_e4m3(column + error))
            error = column + error - done[-1]
        return torch.stack(done, -1)

    return by_tiles(weight, carry)


def by_tiles(weight: Tensor, grid: Callable[[Tensor], Tensor]) -> Tensor:
    """Dequantised [out, in] under powers of two; `grid` maps scaled tiles [_, 128, _, 128] to E4M3 values."""
    (out, columns), side = weight.shape, TILE
    padded = functional.pad(weight, (0, -columns % side, 0, -out % side))
    tiles = padded.unflatten(1, (-1, side)).unflatten(0, (-1, side))
    scales = scale_from_amax(tiles.abs().amax((1, 3), keepdim=True), "pow2")
    return (grid(tiles / scales) * scales).reshape(padded.shape)[:out, :columns].contiguous()


ROUNDINGS = {
    "nearest": nearest,
    "least-error scale": least_error_scale,
    "constant row sums": constant_row_sums,
    "diffusion": diffusion,
}
Batch = tuple[Tensor, Tensor, Tensor]
"""Token ids [texts, length], and where questions and texts end [texts]."""


def weight_rows(study: Study) -> list[Row]:
    """A row for each draw, rounding and task."""
    rows: list[Row] = []
    tasks = {task: encoded(study, texts) for task, texts in (("sums", study.sums), ("operations", operations()))}
    references = {task: [logprobs(study, batch) for batch in batches] for task, batches in tasks.items()}
    for draw, (rounding, quantise) in product(range(DRAWS), ROUNDINGS.items()):
        generator = torch.Generator().manual_seed(draw)
        for linear in study.linears.values():
            factor = 1 + float(torch.rand((), generator=generator)) if draw else 1.0
            linear.rule, linear.weight = "fp32", quantise(linear.stored * factor) / factor
        for task, batches in tasks.items():
            pairs = zip(batches, references[task], strict=True)
            found = [compared(want, logprobs(study, batch), batch) for batch, want in pairs]
            kl, shift = (torch.cat(part).tolist() for part in zip(*found, strict=True))
            row = {"task": task, "rounding": rounding, "draw": draw, "texts": len(kl), "kl": mean(kl)}
            row |= {"kl_median": median(kl), "kl_worst": max(kl)}
            rows.append(row | {"shift": mean(shift), "shift_size": mean(map(abs, shift))})
    return rows


def operations() -> list[Problem]:
    """Two operations in words, and the result."""
    draw, found = random.Random(0), []
    for _ in range(TEXTS):
        name, things = draw.choice(("Anna", "Ben", "Clara", "David")), draw.choice(("apples", "books", "coins", "pens"))
        a, b, c = draw.randint(10, 60), draw.randint(10, 60), draw.randint(2, 9)
        text = f"{name} has {a} {things}, gets {b} more and gives {c} away. {a} + {b} - {c} ="
        found.append((text, str(a + b - c)))
    return found


def encoded(study: Study, texts: list[Problem]) -> list[Batch]:
    batches = []
    for start in range(0, len(texts), BATCH):
        pairs = [[study.ids(part)[0] for part in (q, f"{q} {a}")] for q, a in texts[start : start + BATCH]]
        ends = [torch.tensor([len(each) for each in side]) for side in zip(*pairs, strict=True)]
        batches.append((torch.nn.utils.rnn.pad_sequence([whole for _, whole in pairs], batch_first=True), *ends))
    return batches


@torch.no_grad()
def logprobs(study: Study, batch: Batch) -> Tensor:
    found: Tensor = study.model(batch[0]).logits.log_softmax(-1)
    return found


def compared(want: Tensor, got: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """By text: KL, nats a token, and the shift of the log-probability of the answer."""
    (ids, asked, ends), place = batch, torch.arange(batch[0].shape[1])
    kl = ((want.exp() * (want - got)).sum(-1) * (place < ends[:, None])).sum(1) / ends
    moved = (got - want)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    return kl, (moved * ((place[1:] >= asked[:, None]) & (place[1:] < ends[:, None]))).sum(1)


if __name__ == "__main__":
    main()
