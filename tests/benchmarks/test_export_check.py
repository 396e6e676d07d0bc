import json

import pytest

from benchmarks import export_check
from benchmarks.export_check import LOADERS, PAIRS, _finished, main
from fp8core.config.data import CHAIN_VOCABULARY
from fp8core.data.chain import ALPHABET, EOS
from fp8core.models.tokenizer import character_tokenizer


@pytest.fixture
def exported_tokenizer(tmp_path):
    transformers = pytest.importorskip("transformers")
    character_tokenizer(ALPHABET, CHAIN_VOCABULARY, EOS).save(tmp_path)
    return transformers.AutoTokenizer.from_pretrained(tmp_path)


def test_a_completion_ends_at_its_stop_token(exported_tokenizer):
    ids = exported_tokenizer("4,4#4$", add_special_tokens=False)["input_ids"]
    assert _finished(exported_tokenizer, [*ids, 0, 0]) == ("4,4#4", "stop")
    assert _finished(exported_tokenizer, ids[:4]) == ("4,4#", "length")


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


@pytest.fixture
def checked(whole_run, tmp_path, monkeypatch):
    """Checks the run: its exit code, what it exported and the rows of its file; loaders answer as told."""
    exported = []
    monkeypatch.setattr(export_check, "_export", lambda run, step, format, target: exported.append(format))

    def check(accuracies, *flags):
        def row(format, loader, *_):
            return {"format": format, "loader": loader, "accuracy": accuracies[f"{format}/{loader}"]}

        monkeypatch.setattr(export_check, "_row", row)
        exported.clear()
        code = main([str(whole_run.folder), "--out", str(tmp_path), *flags])
        rows = json.loads((tmp_path / export_check.RESULT).read_text())
        return code, [*exported], {f"{row['format']}/{row['loader']}": row["accuracy"] for row in rows[1:]}

    return check


WITHOUT_KERNELS = {"/".join(pair): 0.5 for pair in PAIRS} | {"fp8/transformers": None}


def test_only_what_is_named_is_asked_again_and_told_of(checked):
    everything = checked(WITHOUT_KERNELS)
    assert everything == (1, ["bf16", "fp8"], WITHOUT_KERNELS)
    assert checked({"fp8/vllm": 0.75}, "--only", "fp8/vllm") == (0, ["fp8"], WITHOUT_KERNELS | {"fp8/vllm": 0.75})
    code, exported, rows = checked({"fp8/transformers": None}, "--only=fp8/transformers")
    assert (code, exported, rows["fp8/vllm"]) == (1, ["fp8"], 0.75)


def test_loaders_are_named_together_or_one_by_one_and_keep_their_order(checked):
    flags = ("--only", "fp8/vllm,bf16/vllm", "--only", "bf16/transformers")
    code, exported, rows = checked(WITHOUT_KERNELS, *flags)
    assert (code, exported, [*rows]) == (0, ["bf16", "fp8"], ["bf16/transformers", "bf16/vllm", "fp8/vllm"])
    assert [*checked({"fp8/transformers": 0.5}, "--only=fp8/transformers")[2]] == [
        "bf16/transformers",
        "bf16/vllm",
        "fp8/transformers",
        "fp8/vllm",
    ]


def test_rows_of_another_run_stay_but_in_a_call_for_everything(checked, tmp_path):
    path = tmp_path / export_check.RESULT
    other = {"run": "other", "step": 4, "format": "bf16", "loader": "vllm", "accuracy": 0.25}
    path.write_text(json.dumps([other]))
    code, _, _ = checked({"bf16/vllm": None}, "--only=bf16/vllm")
    rows = json.loads(path.read_text())
    assert (code, [row["run"] for row in rows]) == (1, ["other", "whole", "whole"])
    assert rows[0] == other
    checked(WITHOUT_KERNELS)
    assert {row["run"] for row in json.loads(path.read_text())} == {"whole"}


def test_a_loader_that_does_not_exist_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["run", "--out", str(tmp_path), "--only", "fp8/vlm"])
    assert "fp8/vlm" in capsys.readouterr().err
