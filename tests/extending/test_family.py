"""The family of docs/extending.md is computed and exported as transformers does it, and a path refuses it by name."""

import json

COMPARE = """
import json, sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, Exaone4Config, Exaone4ForCausalLM
from fp8core.models.checkpoint import find_checkpoint, save_checkpoint
from fp8core.models.decoder import Decoder, FullContext
from fp8core.models.weights import load_policy, reference_formats, stored_weights

torch.manual_seed(0)
torch.set_grad_enabled(False)
folder, exported = Path(sys.argv[1]), Path(sys.argv[1]) / "exported"
model = Exaone4ForCausalLM(Exaone4Config(**json.loads(sys.argv[2]))).eval()
for parameter in model.parameters():
    if parameter.dim() == 1:
        parameter.normal_(1.0, 0.2)
model.save_pretrained(folder)

checkpoint = find_checkpoint(folder)
arch, masters = checkpoint.architecture, dict(checkpoint.source())
decoder = Decoder(arch, reference_formats(arch.num_layers))
stored = stored_weights(masters, decoder.formats.stored_names(), decoder.formats.recipe.weights)
tokens = torch.arange(3, 20)[None]
everything = FullContext.of(torch.ones_like(tokens, dtype=torch.bool))
weights = load_policy(arch, stored)
hidden = decoder.hidden(weights, tokens, torch.arange(tokens.shape[1])[None], everything, ())
ours, theirs = decoder.formats.head.logits(hidden[0], weights.head), model(tokens).logits[0]
save_checkpoint(exported, arch, masters, checkpoint.tokenizer, torch.float32)
again = AutoModelForCausalLM.from_pretrained(exported)(tokens).logits[0]
print(json.dumps({
    "family": arch.family,
    "error": float((ours - theirs).abs().max() / theirs.abs().max()),
    "exported": torch.equal(again, theirs),
}))
"""
REFUSAL = """
from fp8core.config.load import load_config
from fp8core.models.families import family_of
from fp8core.models.hub import model_shape

print(*family_of(model_shape(load_config("exaone4.yaml", []))).refusals("vllm", "rollout.engine=vllm"))
"""
SHAPE = {
    **{"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 24},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2},
    **{"sliding_window": None, "layer_types": ["full_attention"] * 2, "eos_token_id": None, "bos_token_id": None},
}


def test_the_family_of_the_page_computes_what_transformers_computes(changed_package, bpe_tokenizer, tmp_path):
    run, folder = changed_package("A model family"), tmp_path / "model"
    bpe_tokenizer.save(folder)
    compared = json.loads(run("-c", COMPARE, str(folder), json.dumps(SHAPE)))
    assert compared["family"] == "exaone4"
    assert compared["error"] <= 1e-4
    assert compared["exported"], "transformers computes the same from what is exported"
    assert run("-c", REFUSAL) == "rollout.engine=vllm: it computes no Exaone4; set rollout.engine=embedded\n"
