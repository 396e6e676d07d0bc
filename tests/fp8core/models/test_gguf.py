"""GGUF files become folders that a training starts from; what is not in them is never drawn at random."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8core.errors import UserError
from fp8core.models.checkpoint import load_checkpoint
from fp8core.models.gguf import convert_gguf

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")

_VOCABULARY = [*(chr(33 + i) for i in range(62)), '!"']
_BLOCK = {
    **{"attn_q": (128, 128), "attn_k": (64, 128), "attn_v": (64, 128), "attn_output": (128, 128)},
    **{"attn_norm": (128,), "ffn_norm": (128,), "ffn_gate": (256, 128), "ffn_up": (256, 128), "ffn_down": (128, 256)},
}
_SHAPES = {"token_embd": (64, 128), "output_norm": (128,), "output": (64, 128)} | {
    f"blk.0.{name}": shape for name, shape in _BLOCK.items()
}

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A Llama of one layer as a GGUF file, with some of its tensors left out or added, and a kind of rotary scaling.

    Transformers adds `<|endoftext|>` to a vocabulary that ends with another text.
    """

    def call(without: str = "", more: str = "", scaling: str = "none", end: str | None = "<|endoftext|>") -> Path:
        path = tmp_path / "model.gguf"
        file = gguf.GGUFWriter(path, "llama")
        file.add_context_length(64)
        file.add_embedding_length(128)
        file.add_block_count(1)
        file.add_feed_forward_length(256)
        file.add_head_count(4)
        file.add_head_count_kv(2)
        file.add_layer_norm_rms_eps(1e-5)
        file.add_rope_freq_base(1e4)
        file.add_rope_scaling_type(gguf.RopeScalingType(scaling))
        file.add_vocab_size(64)
        file.add_tokenizer_model("gpt2")
        file.add_token_list([end or "<|endoftext|>", *_VOCABULARY])
        file.add_token_types([3, *[1] * 63])
        file.add_token_merges(['! "'])
        if end is not None:
            file.add_bos_token_id(0)
            file.add_eos_token_id(0)
            file.add_unk_token_id(0)
        shapes = {**_SHAPES, **({more: (16,)} if more else {})}
        random = np.random.default_rng(0)
        for name, shape in shapes.items():
            if name != without:
                file.add_tensor(f"{name}.weight", random.standard_normal(shape, dtype=np.float32))
        file.write_header_to_file()
        file.write_kv_data_to_file()
        file.write_tensors_to_file()
        file.close()
        return path

    return call


def test_the_folder_has_the_weights_of_the_file(write: Write, tmp_path: Path) -> None:
    convert_gguf(write(), tmp_path / "folder")
    read = load_checkpoint(tmp_path / "folder")
    embedding = np.random.default_rng(0).standard_normal((64, 128), dtype=np.float32)
    assert torch.equal(read.tensors["model.embed_tokens.weight"], torch.from_numpy(embedding).bfloat16())
    assert (read.architecture.family, read.architecture.rms_norm_eps) == ("llama", 1e-5)
    assert read.tokenizer.decode(read.tokenizer.encode('!"#')) == '!"#'


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"without": "blk.0.attn_k"}, "layers.0.self_attn.k_proj.weight"),
        ({"more": "rope_freqs"}, "rope_freqs.weight"),
        ({"scaling": "yarn"}, "llama.rope.scaling.type"),
        ({"end": "<|end|>"}, "vocab_size=64"),
        ({"end": None}, "no token ends"),
    ],
)
def test_what_cannot_be_kept_is_refused(write: Write, tmp_path: Path, changed: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        convert_gguf(write(**changed), tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("kept", [40, 3000])
def test_a_cut_file_is_one_line(write: Write, tmp_path: Path, kept: int) -> None:
    path = write()
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError) as refused:
        convert_gguf(path, tmp_path / "folder")
    assert str(refused.value).startswith(f"{path}: ")
    assert len(str(refused.value).splitlines()) == 1
