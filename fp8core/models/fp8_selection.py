"""Which weights of a decoder are quantised, told by their names alone.

The linears of the decoder's layers are (`q_proj` to `down_proj`, those of experts too). Embeddings, head, norms,
biases and routers stay in BF16 (DeepSeek-V3, arXiv 2412.19437, section 3.3), and so does every name that is unknown.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from fp8core.errors import UserError
from fp8core.models.weights import is_linear

# The second and third are those of models that also see or hear: their other towers are not decoders.
_LAYER = re.compile(r"(?:model|model\.language_model|language_model\.model)\.layers\.(\d+)\..+\.weight")
_PLAIN = re.compile(r"(?:.*\.)?(?:embed_tokens|lm_head|gate|router|shared_expert_gate)\.weight")
_EXPERTS = re.compile(r"(.*\.experts)\..+")
_FUSED = re.compile(r"(.*)\.(?:(?P<qkv>[qkv])|(?P<gate_up>gate|up))_proj\.weight")


@dataclass(frozen=True)
class KeptInBf16:
    """What the user keeps in BF16 besides embeddings, head, norms, biases and routers.

    Attributes:
        first_layers: Decoder layers at the start.
        last_layers: Decoder layers at the end.
        names: Shell patterns of tensors or modules, such as `*.down_proj`.
    """

    first_layers: int = 0
    last_layers: int = 0
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Selection:
    """Names sorted by layer.

    Attributes:
        quantised: Tensors in block FP8; all others stay in BF16.
        kept_modules: Modules with a matrix in BF16, as `modules_to_not_convert` lists them.
        unrecognised: Matrices in BF16 whose names say nothing about what they are.
    """

    quantised: frozenset[str]
    kept_modules: tuple[str, ...]
    unrecognised: tuple[str, ...]


def select(shapes: Mapping[str, tuple[int, ...]], num_layers: int, kept: KeptInBf16) -> Selection:
    """Choose the weights to quantise.

    Args:
        shapes: Shape of every tensor of the checkpoint, by name.
        num_layers: Decoder layers; what lies beyond them (layers that predict further tokens) is neither first
            nor last.
        kept: What stays in BF16.

    Raises:
        UserError: nothing is left to quantise, a pattern matches nothing, or parts that inference engines fuse into
            one weight (q, k and v; gate and up; the experts of a layer) would get different formats.
    """
    _refuse_idle_patterns(shapes, kept.names)
    linears = {name for name, shape in shapes.items() if _LAYER.fullmatch(name) and _is_matrix(name, shape)}
    quantised = frozenset(name for name in linears if not _is_kept(name, num_layers, kept))
    if not quantised:
        raise UserError(
            f"nothing to quantise: {len(linears)} linear weights in {num_layers} decoder layers, all kept in BF16"
        )
    matrices = [name for name in in_layer_order(shapes) if len(shapes[name]) >= 2]
    _refuse_split_groups(matrices, quantised)
    plain = [name for name in matrices if name not in quantised]
    # A head that shares the embedding's weight has no tensor, and is a module nevertheless.
    modules = {"lm_head"} | {_module(name) for name in plain if _is_module_weight(name)}
    unrecognised = (name for name in plain if name not in linears and not _PLAIN.fullmatch(name))
    return Selection(quantised, tuple(in_layer_order(modules)), tuple(unrecognised))


def in_layer_order(names: Iterable[str]) -> list[str]:
    """Names sorted with their numbers as numbers: layer 2 before layer 10."""
    return sorted(names, key=lambda name: [int(p) if p.isdecimal() else p for p in re.split(r"(\d+)", name)])


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    return is_linear(name) and len(shape) == 2 and 0 not in shape


def _is_kept(name: str, num_layers: int, kept: KeptInBf16) -> bool:
    layer = _LAYER.fullmatch(name)
    assert layer is not None
    index = int(layer[1])
    at_an_end = index < kept.first_layers or num_layers - kept.last_layers <= index < num_layers
    return at_an_end or any(_matches(name, pattern) for pattern in kept.names)


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.removesuffix(".weight"), pattern)


def _is_module_weight(name: str) -> bool:
    """Whether a matrix may belong to a linear, not to an embedding or directly to a layer."""
    return not name.endswith("embed_tokens.weight") and (name.endswith(".weight") or bool(_EXPERTS.fullmatch(name)))


def _module(name: str) -> str:
    """The module of a weight; for experts that which holds them all, the only one that every reader knows."""
    experts = _EXPERTS.fullmatch(name)
    return experts[1] if experts else name.removesuffix(".weight")


def _group(name: str) -> str:
    """What inference engines fuse the weight into; its own name if nothing."""
    experts, fused = _EXPERTS.fullmatch(name), _FUSED.fullmatch(name)
    if experts:
        return experts[1]
    return f"{fused[1]}.{fused.lastgroup}" if fused else name


def _refuse_idle_patterns(names: Iterable[str], patterns: Iterable[str]) -> None:
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in names):
            raise UserError(f"{pattern!r} matches no tensor; names look like {next(iter(names), 'none')}")


def _refuse_split_groups(matrices: Iterable[str], quantised: frozenset[str]) -> None:
    groups: dict[str, list[str]] = defaultdict(list)
    for name in matrices:
        groups[_group(name)].append(name)
    for members in groups.values():
        plain = [name for name in members if name not in quantised]
        if 0 < len(plain) < len(members):
            other = next(name for name in members if name in quantised)
            raise UserError(
                f"{plain[0]} would stay in BF16 and {other} would not, but inference engines fuse them: "
                "keep all of their group or none"
            )
