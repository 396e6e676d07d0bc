import json
import shutil
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from fp8core.errors import UserError
from fp8core.models.tokenizer import Tokenizer, character_tokenizer

ALPHABET = "0123456789+-*=#,$é\n"
TEXTS = ["", "Tom has 17 apples.\n", "  naïve – 数学 🙂\t", "<|im_start|>user\nHi<|im_end|>", "x" * 300]

HI = [{"role": "user", "content": "Hi"}]

characters = character_tokenizer(ALPHABET, vocab_size=32, eos="$")


@pytest.fixture
def folder(bpe_tokenizer: Tokenizer, tmp_path: Path) -> Path:
    bpe_tokenizer.save(tmp_path)
    return tmp_path


def rewrite_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as refused:
        Tokenizer.load(folder)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("text", TEXTS)
def test_bpe_agrees_with_transformers(folder, text):
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    ids = ours.encode(text)
    assert ids == theirs(text, add_special_tokens=False).input_ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert (ours.eos_ids, ours.pad_id) == ({theirs.eos_token_id}, theirs.pad_token_id)


def test_decoding_leaves_out_special_tokens_and_shows_ids_that_have_none(bpe_tokenizer):
    """A model's embeddings may be more than the tokens that there are."""
    ids = bpe_tokenizer.encode("Tom<|im_end|>")
    assert ids[-1] in bpe_tokenizer.eos_ids
    beyond = bpe_tokenizer.vocab_size + 7
    assert bpe_tokenizer.decode([*ids, bpe_tokenizer.pad_id, beyond, beyond, *ids]) == f"Tom{f'<|id {beyond}|>' * 2}Tom"


def test_special_tokens_are_added_only_when_asked(folder):
    path = folder / "tokenizer.json"
    first = {"id": "<|endoftext|>", "type_id": 0}
    rewrite_json(
        path,
        post_processor={
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": first}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
        },
    )
    tokenizer = Tokenizer.load(folder)
    plain = tokenizer.encode("Tom")
    assert tokenizer.encode("Tom", add_special_tokens=True) == [0, *plain]
    assert 0 not in plain


def test_truncation_and_padding_of_the_file_are_switched_off(folder):
    rewrite_json(
        folder / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
    )
    assert len(Tokenizer.load(folder).encode("one two three four five six seven")) > 4


def test_ends_are_those_of_the_tokenizer_and_the_generation_config(folder):
    (folder / "config.json").write_text('{"eos_token_id": 5}')
    assert Tokenizer.load(folder).eos_ids == {2, 5}
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    assert Tokenizer.load(folder).eos_ids == {0, 2}


def test_special_tokens_of_the_map_alone_are_those_of_the_tokenizer(folder, tmp_path):
    """They are in prompts, end completions, stay in what is saved, and come before those of the configuration."""
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    end = config.pop("eos_token")
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": None}))
    mapped = {"eos_token": {"content": end, "lstrip": False}, "bos_token": "<|im_start|>", "pad_token": "<|im_start|>"}
    (folder / "special_tokens_map.json").write_text(json.dumps({**mapped, "additional_special_tokens": ["<|im_end|>"]}))
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.chat_prompt("Hi") == "<|im_start|>Hi" == theirs.apply_chat_template(HI, tokenize=False)
    assert ours.eos_ids == {theirs.eos_token_id}
    assert ours.decode([ours.pad_id], special=True) == theirs.pad_token != config["pad_token"]
    (tmp_path / "saved").mkdir()
    ours.save(tmp_path / "saved")
    saved = Tokenizer.load(tmp_path / "saved")
    assert (saved.eos_ids, saved.bos_id, saved.pad_id) == (ours.eos_ids, ours.bos_id, ours.pad_id)
    rewrite_json(folder / "tokenizer_config.json", added_tokens_decoder={}, eos_token=end)
    assert Tokenizer.load(folder).bos_id is AutoTokenizer.from_pretrained(folder).bos_token_id is None


def test_padding_falls_back_to_an_end(folder):
    (folder / "tokenizer_config.json").unlink()
    assert "no token ends a sequence" in refusal(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [9, 4]}')
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.eos_ids, tokenizer.pad_id, tokenizer.bos_id) == ({4, 9}, 4, None)


def test_broken_folders_are_refused(folder):
    rewrite_json(folder / "tokenizer_config.json", eos_token={"content": "<|end|>"})
    assert refusal(folder) == f"{folder}: eos_token '<|end|>' is not in the vocabulary"
    (folder / "generation_config.json").write_text('{"eos_token_id": "two"}')
    assert refusal(folder).startswith(f"{folder / 'generation_config.json'}: eos_token_id: found ")
    (folder / "tokenizer.json").write_text('{"model": 1}')
    assert refusal(folder).startswith(f"{folder / 'tokenizer.json'}: not a tokenizer: ")
    (folder / "tokenizer.json").unlink()
    assert refusal(folder).startswith(f"{folder / 'tokenizer.json'}: no such file")


def test_chat_prompt_is_that_of_transformers(folder):
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    question = 'How many "apples" <b>& pencils</b>?'
    expected = theirs.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    assert ours.chat_prompt(question) == expected == f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


TEMPLATE_FEATURES = """\
{%- if strftime_now is defined %}{{ strftime_now('%Y') }}{%- else %}26 Jul 2024{%- endif %}
{{ bos_token }}|{{ eos_token }}|{{ {'a': '<é>'} | tojson }}
{%- for message in messages %}
    {%- generation %}{{ message['content'] | trim }}{%- endgeneration %}
    {%- break %}
{%- endfor %}"""


def test_template_features(folder):
    (folder / "chat_template.jinja").write_text(TEMPLATE_FEATURES)
    rewrite_json(folder / "tokenizer_config.json", bos_token={"content": "<|endoftext|>", "special": True})
    prompt = Tokenizer.load(folder).chat_prompt(" 1 + 1 ")
    assert prompt == '26 Jul 2024<|endoftext|>|<|im_end|>|{"a": "<é>"}1 + 1'


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
TOLD = "{% if tools is not none %}T{% endif %}{% if tools != none %}U{% endif %}{% if tools %}V{% endif %}"


@pytest.mark.parametrize(
    ("template", "tools"),
    [
        (TOLD, []),
        (TOLD, [TOOL]),
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}" + TOLD, []),
        ("{% if documents is not none %}D{% endif %}{% if other is none %}O{% endif %}", []),
        ("{% if documents is defined and documents %}D{% endif %}", []),
        ("{{ messages[0] | tojson(separators=(',', ':')) }}", []),
        ("{{ messages[0] | tojson(ensure_ascii=True, sort_keys=True) }}{{ '<é>' | tojson(true, 2) }}", []),
    ],
)
def test_templates_read_tools_documents_and_json_as_in_transformers(folder, template, tools):
    (folder / "chat_template.jinja").write_text(template + "{{ messages[0].content }}")
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    asked = [{"role": "user", "content": "naïve"}]
    assert ours.render(asked, tools) == theirs.apply_chat_template(
        asked, tools=tools or None, add_generation_prompt=True, tokenize=False
    )


def test_no_tools_are_not_defined_either(folder):
    (folder / "chat_template.jinja").write_text("{% if tools is defined %}+{% endif %}{{ messages[0].content }}")
    assert Tokenizer.load(folder).render(HI) == "Hi"
    assert Tokenizer.load(folder).render(HI, [TOOL]) == "+Hi"


@pytest.mark.parametrize(
    "embedded",
    ["{{ messages[0].content }}!", [{"name": "tool"}, {"name": "default", "template": "{{ messages[0].content }}!"}]],
)
def test_the_template_file_wins_over_the_embedded_template(folder, embedded):
    rewrite_json(folder / "tokenizer_config.json", chat_template=embedded)
    assert Tokenizer.load(folder).chat_prompt("Hi").startswith("<|im_start|>")
    (folder / "chat_template.jinja").unlink()
    assert Tokenizer.load(folder).chat_prompt("Hi") == "Hi!"


def test_failing_templates_are_one_clear_line(folder):
    def prompt(template: str) -> None:
        (folder / "chat_template.jinja").write_text(template)
        Tokenizer.load(folder).chat_prompt("Hi")

    with pytest.raises(UserError, match="the chat template failed: no users here"):
        prompt("{{ raise_exception('no users here') }}")
    with pytest.raises(UserError, match=r"the chat template failed: .*unsafe"):
        prompt("{{ messages.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(UserError, match="the chat template failed: maximum recursion depth"):
        prompt("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}")
    with pytest.raises(UserError, match="malformed chat template") as refused:
        prompt("{% for %}")
    assert "\n" not in str(refused.value)


def test_character_ids_are_fixed():
    assert characters.encode("0$9") == [3, 1, 12]
    assert (characters.pad_id, characters.eos_ids, characters.vocab_size) == (0, {1}, 32)
    assert characters.decode([3, 1, 0, 12]) == "09"
    assert characters.decode([2, 31]) == "<unk><unused10>"
    assert characters.chat_prompt("1+1=") is None


@given(st.text(alphabet=ALPHABET.replace("$", "")))
def test_character_round_trip(text):
    ids = characters.encode(text)
    assert len(ids) == len(text)
    assert characters.decode(ids) == text


@pytest.mark.parametrize("text", ["1 + 2", "1+2a", "<unk>"])
def test_a_character_outside_the_alphabet_is_refused(text):
    position = next(i for i, character in enumerate(text) if character not in ALPHABET)
    with pytest.raises(UserError, match=f"no token for '{text[position]}' \\(character {position}\\)"):
        characters.encode(text)


def test_a_vocabulary_that_is_too_small_is_refused():
    with pytest.raises(AssertionError, match="21 tokens do not fit"):
        character_tokenizer(ALPHABET, vocab_size=20, eos="$")


def test_characters_survive_saving_and_load_in_transformers(tmp_path):
    characters.save(tmp_path)
    loaded, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = "12+3*4=é\n#9$"
    ids = characters.encode(text)
    assert loaded.encode(text) == ids == theirs(text).input_ids
    assert loaded.decode(ids) == characters.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert (theirs.eos_token_id, theirs.pad_token_id, len(theirs)) == (1, 0, 32)
    assert (loaded.eos_ids, loaded.pad_id, loaded.vocab_size) == ({1}, 0, 32)
    with pytest.raises(UserError, match="no token for ' '"):
        loaded.encode("1 2")
    shutil.copytree(tmp_path, tmp_path / "again")
    loaded.save(tmp_path / "again")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()


def byte_level(normalizer=None, before=(), model=None, **flags):
    """Some merges of bytes, one of them of many, and an added token; `flags` are its own."""
    entries = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "aa", "aaaa", "\u0120\u0120"]
    merges = [("a", "a"), ("aa", "aa"), ("\u0120", "\u0120")]
    vocabulary = {text: i for i, text in enumerate(entries)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges) if model is None else model)
    steps = [*before, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_special_tokens([AddedToken("<|end of it|>", special=True, **flags)])
    return Tokenizer(backend, {"eos_token": "<|end of it|>"}, frozenset(), None, "a folder")


ISOLATED = pre_tokenizers.Split(Regex(r"\s+"), "isolated")
BOUNDED = {
    "bytes": byte_level(),
    "split": byte_level(before=[ISOLATED, pre_tokenizers.Digits(individual_digits=True)]),
    "nfc": byte_level(normalizers.NFC()),
    "characters": characters,
}
"""Tokenizers whose texts have a least number of tokens that is told."""


@pytest.mark.parametrize("name", BOUNDED)
@given(
    text=st.text()
    | st.text("aé \u0301\u212b\uac00\u1100\u1161\u11a8")
    | st.lists(st.sampled_from(["aaaa", "  ", "<|end of it|>", "<pad>", "12", "\n", "\ud800"])).map("".join)
)
def test_no_text_has_fewer_tokens_than_told(name, text):
    """However it is cut into pieces; where it cannot be put into tokens, nothing is told."""
    tokenizer = BOUNDED[name]
    try:
        pieces = tokenizer.plain_pieces(text)
        count = sum(len(tokenizer.encode(piece)) for piece in pieces)
    except (UserError, ValueError):
        count = 0
    assert tokenizer.least_tokens(text) <= count
    assert "".join(tokenizer.rough_pieces(text)) == text


@pytest.mark.parametrize("name", BOUNDED)
def test_a_long_text_has_many_tokens_as_told(name):
    assert BOUNDED[name].least_tokens("1" * 13_000) >= 1000


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        (byte_level(normalizers.NFKC()), "a" * 1000),
        (byte_level(normalizers.Strip()), " " * 1000),
        (byte_level(normalizers.NFC()), "\u212b" * 1000),
        (byte_level(before=[pre_tokenizers.Split(Regex(r"\s+"), "removed")]), " " * 1000),
        (byte_level(before=[pre_tokenizers.Whitespace()]), " " * 1000),
        (byte_level(lstrip=True), " " * 1000),
        (byte_level(rstrip=True), " " * 1000),
        (byte_level(model=models.BPE({"a": 0, "aa": 1}, [("a", "a")])), "b" * 1000),
        (characters, "?" * 1000),
        (characters, "1" * 1000 + "$"),
    ],
    ids=["nfkc", "strip", "not nfc", "removed", "whitespace", "lstrip", "rstrip", "dropped", "unknown", "control"],
)
def test_of_texts_that_may_shrink_or_be_refused_nothing_is_told(tokenizer, text):
    assert tokenizer.least_tokens(text) == 0


def test_rough_pieces_hold_no_control_token():
    assert byte_level().rough_pieces("1<|end of it|>2<|end") == ["1<", "|end of it|>2<|end"]
    assert characters.rough_pieces("1<pad>") == ["1<", "pad>"]
    assert characters.rough_pieces("") == [""]
