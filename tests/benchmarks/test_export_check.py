import json

import pytest

from benchmarks.export_check import LOADERS, _finished, main, table
from fp8core.data.chain import ALPHABET, EOS, VOCABULARY
from fp8core.models.tokenizer import character_tokenizer


@pytest.fixture
def exported_tokenizer(tmp_path):
    transformers = pytest.importorskip("transformers")
    character_tokenizer(ALPHABET, VOCABULARY, EOS).save(tmp_path)
    return transformers.AutoTokenizer.from_pretrained(tmp_path)


def test_a_completion_ends_at_its_stop_token(exported_tokenizer):
    ids = exported_tokenizer("4,4#4$", add_special_tokens=False)["input_ids"]
    assert _finished(exported_tokenizer, [*ids, 0, 0]) == ("4,4#4", "stop")
    assert _finished(exported_tokenizer, ids[:4]) == ("4,4#", "length")


def test_the_table_says_why_there_is_no_accuracy():
    rows = [
        {"format": "in training", "loader": "vllm", "accuracy": None},
        {"format": "bf16", "loader": "vllm", "accuracy": None, "problem": "skipped: vllm is not installed"},
        {"format": "bf16", "loader": "transformers", "accuracy": 0.5, "linears": "Linear", "prompts": 8},
    ]
    lines = table(rows).splitlines()[2:]
    assert lines == [
        "| in training | vllm |  | not measured |  |",
        "| bf16 | vllm |  | skipped: vllm is not installed |  |",
        "| bf16 | transformers | Linear | 0.5000 | 8 |",
    ]


@pytest.mark.slow
def test_exports_of_a_run_answer_in_transformers(whole_run, tmp_path):
    pytest.importorskip("transformers")
    main([str(whole_run.folder), "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "export_check.json").read_text())
    pairs = [(format, loader) for format, loaders in LOADERS.items() for loader in loaders]
    assert [(row["format"], row["loader"]) for row in rows[1:]] == pairs
    assert {row["kind"] for row in rows} == {"export"}
    assert {row["step"] for row in rows} == {4}
    answered = {(row["format"], row["loader"]): row["accuracy"] for row in rows if row["accuracy"] is not None}
    assert ("bf16", "transformers") in answered
    assert answered[("fp8", "transformers_dequantised")] == answered[("fp8", "transformers")]
    for row in rows[1:]:
        assert (row["accuracy"] is None) == ("problem" in row)
