import json
import re
import shutil
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fp8core.errors import UserError
from fp8core.models.architecture import parameter_shapes
from fp8core.models.checkpoint import load_checkpoint, save_checkpoint

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def broken(small_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the small checkpoint, to be spoilt."""
    return Path(shutil.copytree(small_checkpoint, tmp_path / "broken"))


def rewrite_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def rewrite_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as refused:
        load_checkpoint(folder)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_what_transformers_saved_is_read(transformers_checkpoint):
    checkpoint = load_checkpoint(transformers_checkpoint.folder)
    state = transformers_checkpoint.unfused(transformers_checkpoint.model.state_dict())
    assert (len(list(transformers_checkpoint.folder.glob("*.safetensors"))) > 1) == transformers_checkpoint.sharded
    assert list(checkpoint.tensors) == list(parameter_shapes(checkpoint.architecture))
    for name, tensor in checkpoint.tensors.items():
        assert torch.equal(tensor, state[name]), name
    assert set(state) - set(checkpoint.tensors) <= {"lm_head.weight"}


def test_transformers_computes_the_same_from_what_is_saved(transformers_checkpoint, tmp_path):
    checkpoint, folder = load_checkpoint(transformers_checkpoint.folder), tmp_path / "saved"
    save_checkpoint(folder, checkpoint.architecture, checkpoint.tensors, checkpoint.tokenizer, dtype=torch.float32)
    reloaded, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert reloaded.generation_config.eos_token_id == checkpoint.tokenizer.encode("<|im_end|>")[0]
    tokens = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        assert torch.equal(reloaded(tokens).logits, transformers_checkpoint.model(tokens).logits)


def test_bf16_is_the_default(transformers_checkpoint, tmp_path):
    checkpoint, folder = load_checkpoint(transformers_checkpoint.folder), tmp_path / "saved"
    save_checkpoint(folder, checkpoint.architecture, checkpoint.tensors, checkpoint.tokenizer)
    reloaded = AutoModelForCausalLM.from_pretrained(folder)
    assert reloaded.dtype == torch.bfloat16
    for name, tensor in reloaded.state_dict().items():
        assert torch.equal(tensor, transformers_checkpoint.model.state_dict()[name].bfloat16()), name


def test_saving_what_was_loaded_gives_equal_bytes(small_checkpoint, tmp_path):
    checkpoint = load_checkpoint(small_checkpoint)
    save_checkpoint(tmp_path / "again", checkpoint.architecture, checkpoint.tensors, checkpoint.tokenizer)
    first = {path.name: path.read_bytes() for path in small_checkpoint.iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == first
    assert sorted(first) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_views_of_one_flat_buffer_are_saved(small_checkpoint, tmp_path):
    checkpoint = load_checkpoint(small_checkpoint)
    flat = torch.cat([tensor.flatten() for tensor in checkpoint.tensors.values()])
    parts = flat.split([tensor.numel() for tensor in checkpoint.tensors.values()])
    views = {name: part.view_as(checkpoint.tensors[name]) for name, part in zip(checkpoint.tensors, parts, strict=True)}
    save_checkpoint(tmp_path / "views", checkpoint.architecture, views, checkpoint.tokenizer)
    saved = (tmp_path / "views" / "model.safetensors").read_bytes()
    assert saved == (small_checkpoint / "model.safetensors").read_bytes()


def test_all_files_are_equally_readable(small_checkpoint):
    assert len({stat.S_IMODE(path.stat().st_mode) for path in small_checkpoint.iterdir()}) == 1


def test_an_interrupted_save_leaves_nothing_and_is_repeated(small_checkpoint, tmp_path):
    checkpoint = load_checkpoint(small_checkpoint)
    leftover = tmp_path / ".saved.partial"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"torn")
    (leftover / "stray").write_bytes(b"")
    save_checkpoint(tmp_path / "saved", checkpoint.architecture, checkpoint.tensors, checkpoint.tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert load_checkpoint(tmp_path / "saved").architecture == checkpoint.architecture
    assert not (tmp_path / "saved" / "stray").exists()


def test_a_checkpoint_is_never_overwritten(small_checkpoint, broken):
    checkpoint = load_checkpoint(small_checkpoint)
    before = (broken / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(UserError, match="already exists"):
        save_checkpoint(broken, checkpoint.architecture, checkpoint.tensors, checkpoint.tokenizer)
    assert (broken / "model.safetensors").stat().st_mtime_ns == before


def test_a_place_that_cannot_be_written_is_named(small_checkpoint, tmp_path):
    checkpoint = load_checkpoint(small_checkpoint)
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / "checkpoint"
    with pytest.raises(UserError, match=re.escape(f"{target}: the checkpoint cannot be written")):
        save_checkpoint(target, checkpoint.architecture, checkpoint.tensors, checkpoint.tokenizer)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({UP: None}, f"tensor {UP}: expected shape [256, 128], found nothing"),
        ({UP: torch.zeros(256, 64)}, f"tensor {UP}: expected shape [256, 128], found [256, 64]"),
        ({UP: torch.zeros(256, 128).to(torch.float8_e4m3fn)}, f"tensor {UP}: expected dtype BF16, F16, F32, found F8"),
        ({"model.extra": torch.zeros(3)}, "tensor model.extra: expected nothing of this name, found shape [3]"),
        ({UP: None, "model.norm.weight": None}, "found nothing (and 1 more tensors differ)"),
    ],
    ids=["missing", "shape", "dtype", "unexpected", "several"],
)
def test_a_wrong_tensor_is_named(broken, changes, message):
    rewrite_weights(broken, **changes)
    found = refusal(broken)
    assert found.startswith(f"{broken / 'model.safetensors'}: ")
    assert message in found


def test_rotary_leftovers_are_ignored(broken):
    rewrite_weights(broken, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16)})
    assert UP in load_checkpoint(broken).tensors


def test_a_tied_head_is_accepted_when_it_equals_the_embedding(broken):
    rewrite_json(broken / "config.json", tie_word_embeddings=True)
    assert "tensor lm_head.weight: expected the values of model.embed_tokens.weight" in refusal(broken)
    embedding = load_file(broken / "model.safetensors")["model.embed_tokens.weight"]
    rewrite_weights(broken, **{"lm_head.weight": embedding.clone()})
    checkpoint = load_checkpoint(broken)
    assert "lm_head.weight" not in checkpoint.tensors
    assert checkpoint.architecture.tie_embeddings


@pytest.mark.parametrize("size", [0, 5, 1000, -1])
def test_a_torn_weights_file_is_named(broken, size):
    path = broken / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert refusal(broken).startswith(f"{path}: not a complete safetensors file: ")


def shard(folder: Path, *files: dict[str, torch.Tensor]) -> None:
    """Replace the one weights file by several with an index."""
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    for name, tensors in zip(names, files, strict=True):
        save_file(tensors, folder / name, metadata={"format": "pt"})
    weight_map = {key: name for name, tensors in zip(names, files, strict=True) for key in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "model.safetensors").unlink()


@pytest.fixture
def halves(broken: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    tensors = load_file(broken / "model.safetensors")
    names = sorted(tensors)
    return {name: tensors[name] for name in names[:10]}, {name: tensors[name] for name in names[10:]}


def test_a_missing_shard_is_named(broken, halves):
    shard(broken, *halves)
    assert UP in load_checkpoint(broken).tensors
    second = broken / "model-00002-of-00002.safetensors"
    second.unlink()
    assert refusal(broken) == f"{second}: no such file, but the index names it"


def test_a_tensor_in_no_shard_is_named_with_the_index(broken, halves):
    first, second = halves
    shard(broken, {name: first[name] for name in list(first)[1:]}, second)
    found = refusal(broken)
    assert found.startswith(f"{broken / 'model.safetensors.index.json'}: tensor {next(iter(first))}: expected shape")


def test_a_tensor_in_two_shards_is_named(broken, halves):
    first, second = halves
    name = next(iter(first))
    shard(broken, first, {**second, name: first[name]})
    assert f"tensor {name}: expected once, found in model-00001-of-00002.safetensors as well" in refusal(broken)


@pytest.mark.parametrize("weight_map", [None, {}, {"a": 3}, {"a": "../elsewhere.safetensors"}])
def test_a_malformed_index_is_named(broken, weight_map):
    (broken / "model.safetensors").unlink()
    (broken / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "model.safetensors.index.json: weight_map: expected" in refusal(broken)


def test_other_weight_formats_are_refused(broken):
    (broken / "model.safetensors").rename(broken / "pytorch_model.bin")
    assert "only safetensors weights are read" in refusal(broken)


def test_a_missing_folder_or_config_is_named(broken, tmp_path):
    assert refusal(tmp_path / "nowhere") == f"{tmp_path / 'nowhere'}: no such folder"
    (broken / "config.json").unlink()
    assert refusal(broken).startswith(f"{broken / 'config.json'}: cannot be read")


def test_a_tokenizer_beyond_the_vocabulary_is_refused(broken):
    rewrite_json(broken / "generation_config.json", eos_token_id=[2, 512])
    assert "token 512 is beyond vocab_size=512 of config.json" in refusal(broken)
