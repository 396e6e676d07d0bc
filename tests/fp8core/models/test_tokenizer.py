"""The tokenizer of a folder against transformers' own, its chat templates, and the one of single characters."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from fp8core.errors import UserError
from fp8core.models.tokenizer import Tokenizer, character_tokenizer

ALPHABET = "0123456789+-*=#,$é\n"
TEXTS = ["", "Tom has 17 apples.\n", "  naïve – 数学 🙂\t", "<|im_start|>user\nHi<|im_end|>", "x" * 300]
HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}

characters = character_tokenizer(ALPHABET, vocab_size=32, eos="$")


@pytest.fixture
def folder(bpe_tokenizer: Tokenizer, tmp_path: Path) -> Path:
    bpe_tokenizer.save(tmp_path)
    return tmp_path


def rewrite_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def render(folder: Path, template: str, *arguments) -> str:
    (folder / "chat_template.jinja").write_text(template)
    return Tokenizer.load(folder).render(*arguments)


@pytest.mark.parametrize("text", TEXTS)
def test_bpe_agrees_with_transformers(folder, text):
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    ids = ours.encode(text)
    assert ids == theirs(text, add_special_tokens=False).input_ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert (ours.eos_ids, ours.pad_id) == ({theirs.eos_token_id}, theirs.pad_token_id)


def test_decoding_leaves_out_special_tokens_and_ids_that_have_none(bpe_tokenizer):
    """A model's embeddings may be more than the tokens that there are."""
    ids = bpe_tokenizer.encode("Tom<|im_end|>")
    assert ids[-1] in bpe_tokenizer.eos_ids
    beyond = bpe_tokenizer.vocab_size + 7
    assert bpe_tokenizer.decode([*ids, bpe_tokenizer.pad_id, beyond, beyond, *ids]) == "TomTom"


def test_ends_are_those_of_the_tokenizer_and_the_generation_config(folder):
    (folder / "config.json").write_text('{"eos_token_id": 5}')
    assert Tokenizer.load(folder).eos_ids == {2, 5}
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 2], "top_p": 0.9}')
    assert (Tokenizer.load(folder).eos_ids, Tokenizer.load(folder).sampling) == ({0, 2}, {"top_p": 0.9})
    (folder / "tokenizer_config.json").unlink()
    (folder / "generation_config.json").write_text('{"eos_token_id": [9, 4]}')
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.eos_ids, tokenizer.pad_id, tokenizer.bos_id) == ({4, 9}, 4, None)


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("tokenizer.json", None, "no such file; if the folder has another tokenizer format"),
        ("tokenizer.json", '{"model": 1}', "not a tokenizer: "),
        ("tokenizer.json", "{", "not JSON"),
        ("tokenizer_config.json", "[]", "expected a JSON object"),
        ("tokenizer_config.json", "{}", "no token ends a sequence; set eos_token"),
        ("generation_config.json", '{"eos_token_id": "two"}', "eos_token_id: found "),
    ],
)
def test_broken_folders_are_one_line(folder, name, content, line):
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(UserError) as refused:
        Tokenizer.load(folder)
    message = str(refused.value)
    assert message.startswith(str(folder))
    assert line in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("template", "tools"),
    [
        (None, []),
        ("{% if tools is not none %}T{% endif %}{% if tools %}V{% endif %}", [TOOL]),
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}{% if tools != none %}U{% endif %}", []),
        ("{{ bos_token }}|{{ eos_token }}|{{ {'a': '<é>'} | tojson }}{{ messages[0].content | trim }}", []),
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}", []),
    ],
)
def test_templates_read_as_in_transformers(folder, template, tools):
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    asked = [{"role": "user", "content": ' How many "apples" <b>& pencils</b>? '}]
    text = theirs.apply_chat_template(asked, tools=tools or None, add_generation_prompt=True, tokenize=False)
    assert ours.render(asked, tools) == text
    assert ours.encode(text) == theirs(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ("{{ raise_exception('no users here') }}", "no users here"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "maximum recursion depth"),
        ("{% for %}", "Expected an expression"),
    ],
)
def test_failing_templates_are_one_clear_line(folder, template, line):
    """A template is a stranger's program: it runs in jinja's sandbox, and reaches nothing of this process."""
    with pytest.raises(UserError, match=f"the chat template failed: .*{line}") as refused:
        render(folder, template, HI)
    assert "\n" not in str(refused.value)


def test_a_folder_executes_no_code(folder):
    (folder / "tokenization_own.py").write_text("raise SystemExit('executed')")
    own = {"AutoTokenizer": ["tokenization_own.Own", "tokenization_own.Own"]}
    rewrite_json(folder / "tokenizer_config.json", auto_map=own, tokenizer_class="Own")
    assert Tokenizer.load(folder).encode("Tom")


@given(st.text(alphabet=ALPHABET.replace("$", "")))
def test_character_round_trip(text):
    ids = characters.encode(text)
    assert len(ids) == len(text)
    assert characters.decode(ids) == text
