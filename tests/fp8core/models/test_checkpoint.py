import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8core.errors import UserError
from fp8core.models.checkpoint import InitialWeights, find_checkpoint, initial_weights, save_checkpoint
from fp8core.models.families import parameter_shapes
from fp8core.models.hub import ResolvedModel, resolve_model

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
        find_checkpoint(folder).source()
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_what_transformers_saved_is_read(transformers_checkpoint):
    checkpoint = find_checkpoint(transformers_checkpoint.folder)
    state = transformers_checkpoint.unfused(transformers_checkpoint.model.state_dict())
    assert (len(list(transformers_checkpoint.folder.glob("*.safetensors"))) > 1) == transformers_checkpoint.sharded
    assert list(checkpoint.source()) == list(parameter_shapes(checkpoint.architecture))
    for name, tensor in checkpoint.source().items():
        assert torch.equal(tensor, state[name]), name
    assert set(state) - set(checkpoint.source()) <= {"lm_head.weight"}


def test_saving_what_was_loaded_gives_equal_bytes(small_checkpoint, tmp_path):
    checkpoint = find_checkpoint(small_checkpoint)
    save_checkpoint(tmp_path / "again", checkpoint.architecture, checkpoint.source(), checkpoint.tokenizer)
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


def test_an_interrupted_save_leaves_nothing_and_is_repeated(small_checkpoint, tmp_path):
    checkpoint = find_checkpoint(small_checkpoint)
    leftover = tmp_path / ".saved.partial"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"torn")
    (leftover / "stray").write_bytes(b"")
    save_checkpoint(tmp_path / "saved", checkpoint.architecture, checkpoint.source(), checkpoint.tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert find_checkpoint(tmp_path / "saved").architecture == checkpoint.architecture
    assert not (tmp_path / "saved" / "stray").exists()


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


def test_a_tied_head_is_accepted_when_it_equals_the_embedding(broken):
    rewrite_json(broken / "config.json", tie_word_embeddings=True)
    assert "tensor lm_head.weight: expected the values of model.embed_tokens.weight" in refusal(broken)
    embedding = load_file(broken / "model.safetensors")["model.embed_tokens.weight"]
    rewrite_weights(broken, **{"lm_head.weight": embedding.clone()})
    checkpoint = find_checkpoint(broken)
    assert "lm_head.weight" not in checkpoint.source()
    assert checkpoint.architecture.tie_embeddings


def test_a_tokenizer_beyond_the_vocabulary_is_refused(broken):
    rewrite_json(broken / "generation_config.json", eos_token_id=[2, 512])
    assert "config.json: token 512 of the tokenizer is beyond vocab_size=512" in refusal(broken)


COMMIT = "0123456789abcdef0123456789abcdef01234567"
RESOLVE = """
import json, sys
from fp8core.errors import UserError
from fp8core.models.hub import resolve_model
for model, revision in json.loads(sys.argv[1]):
    try:
        found = resolve_model(model, revision)
        print(found.folder, found.revision)
    except UserError as error:
        print("UserError:", error)
"""


@pytest.fixture(params=["offline mode", "refused connection"])
def resolve(request: pytest.FixtureRequest, tmp_path: Path):
    """Resolve models in one process of their own, because huggingface_hub reads its settings when it is imported."""
    unreachable = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    settings = {"HF_HUB_OFFLINE": "1"} if request.param == "offline mode" else unreachable

    def run(*models: tuple[str, str | None]) -> list[str]:
        command = [sys.executable, "-c", RESOLVE, json.dumps(models)]
        environment = {**os.environ, **settings, "HF_HUB_CACHE": str(tmp_path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
        return done.stdout.splitlines()

    return run


@pytest.fixture
def cached(small_checkpoint: Path, tmp_path: Path) -> Path:
    """A cache as huggingface_hub lays it out, holding one snapshot."""
    repository = tmp_path / "models--someone--tiny"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for path in small_checkpoint.iterdir():
        (snapshot / path.name).symlink_to(path)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return snapshot


def test_a_folder_is_used_as_it_is(small_checkpoint):
    assert resolve_model(str(small_checkpoint), None) == ResolvedModel(small_checkpoint, None)
    with pytest.raises(UserError, match="revision=main applies to hub ids"):
        resolve_model(str(small_checkpoint), "main")
    near = small_checkpoint.with_name("checkpoints")
    for model, line in {
        "/no/such": "no such folder, and not a hub id",
        "a/b/c": "no such folder, and not a hub id",
        str(near): f"did you mean {small_checkpoint}",
        "some one/a--b..c": "neither a folder nor a model",
    }.items():
        with pytest.raises(UserError, match=line) as refused:
            resolve_model(model, None)
        assert str(refused.value).startswith(f"model={model}: ")


def test_without_network_the_cache_is_used_or_the_line_says_what_to_run(resolve, cached):
    found = resolve(*((f"someone/{name}", revision) for name in ("tiny", "absent") for revision in (None, COMMIT)))
    assert found[:2] == [f"{cached} {COMMIT}"] * 2
    assert find_checkpoint(cached).architecture.family == "qwen3"
    for line, at in zip(found[2:], ("", f" --revision {COMMIT}"), strict=True):
        assert line.startswith("UserError: model=someone/absent: not in the cache, and the hub did not answer (")
        assert f"run `hf download someone/absent{at} --local-dir FOLDER`, then pass `--set model=FOLDER`" in line


def test_weights_depend_on_the_seed_alone(architecture):
    arch = architecture()
    first, again, other = initial_weights(arch, 0), initial_weights(arch, 0), initial_weights(arch, 1)
    elsewhere = pickle.loads(pickle.dumps(InitialWeights(arch, 0)))
    assert all(torch.equal(elsewhere[name], first[name]) for name in reversed(first)), "in whatever order"
    assert {name: tuple(tensor.shape) for name, tensor in first.items()} == parameter_shapes(arch)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if first[name].dim() == 2)
    state = torch.random.get_rng_state()
    initial_weights(arch, 2)
    assert torch.equal(torch.random.get_rng_state(), state), "the global generator must not be drawn from"
