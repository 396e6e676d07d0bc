import re
import subprocess
import sys

import chat_templates
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from fp8core.config.load import load_config
from fp8core.data.chain import ALPHABET, EOS
from fp8core.data.prompt import Message, check_prompt, encode_prompt, generator, is_heldout, problem
from fp8core.errors import UserError
from fp8core.models.tokenizer import Tokenizer, character_tokenizer
from fp8core.run.open import check_template_arguments


def test_another_process_draws_and_holds_out_the_same() -> None:
    code = (
        "from fp8core.data.prompt import generator, is_heldout; "
        "print(generator(3, 'p', 5).integers(0, 2**63), [is_heldout(str(i)) for i in range(64)])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert printed == f"{generator(3, 'p', 5).integers(0, 2**63)} {[is_heldout(str(index)) for index in range(64)]}"


TOM = problem("Tom has 17 apples and buys 2 more.", "19")


def gsm8k(**overrides):
    return load_config("gsm8k", {"model": "any", "data.template": "{question}", **overrides})


@pytest.fixture(scope="module")
def characters():
    return character_tokenizer(ALPHABET, 32, EOS)


@pytest.fixture(scope="module")
def with_bos():
    """A tokenizer in the manner of Llama: its post-processor puts a first token before a sequence."""
    backend = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "one": 2, "two": 3}, unk_token="</s>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])

    def tokenizer(template=None):
        ends = {"bos_token": "<s>", "eos_token": "</s>"}
        fast = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **ends)
        return Tokenizer(fast, frozenset(), "test")

    return tokenizer


def test_the_template_goes_around_the_question_and_the_chat_around_both(bpe_tokenizer):
    config = gsm8k(**{"data.template": "Q: {question}\nAnswer {question} with {braces}."})
    text, tokens = encode_prompt(TOM, config, bpe_tokenizer, 512)
    plain = f"Q: {TOM.question}\nAnswer {TOM.question} with {{braces}}."
    assert text == f"<|im_start|>user\n{plain}<|im_end|>\n<|im_start|>assistant\n"
    assert tokens == bpe_tokenizer.encode(text)


def test_a_system_prompt_is_the_first_message_of_rows_without_their_own(bpe_tokenizer):
    config = gsm8k(**{"data.system": "Be brief."})
    text, _ = encode_prompt(TOM, config, bpe_tokenizer, 512)
    asks = f"<|im_start|>user\n{TOM.question}<|im_end|>\n<|im_start|>assistant\n"
    assert text == f"<|im_start|>system\nBe brief.<|im_end|>\n{asks}"
    own = problem(TOM.question, "19", before=(Message("system", "Be exact."),))
    assert encode_prompt(own, config, bpe_tokenizer, 512)[0] == f"<|im_start|>system\nBe exact.<|im_end|>\n{asks}"


def test_a_system_prompt_needs_a_chat_template(with_bos):
    with pytest.raises(UserError, match=r"^data\.system: the model has no chat template"):
        encode_prompt(problem("one two", ""), gsm8k(**{"data.system": "one"}), with_bos(), 512)
    with pytest.raises(UserError, match=r"system needs the chat template; set chat to true"):
        gsm8k(**{"data.system": "one", "data.chat": False})


def test_a_plain_prompt_begins_with_the_tokenizers_first_token(with_bos):
    assert encode_prompt(problem("one two", ""), gsm8k(), with_bos(), 512) == ("one two", [0, 2, 3])


def test_a_chat_template_writes_its_own_first_token(with_bos):
    template = "{{ bos_token }} {{ messages[0].content }} one"
    text, tokens = encode_prompt(problem("two two", ""), gsm8k(), with_bos(template), 512)
    assert text == "<s> two two one"
    assert tokens == [0, 3, 3, 2]


@pytest.mark.parametrize(
    ("allowed", "positions", "fitting"), [(5, 256, "1 to 5 fit"), (512, 21, "1 to 5 fit"), (512, 6, "none fit")]
)
def test_a_prompt_that_does_not_fit_is_refused(characters, allowed, positions, fitting):
    """`2*7-0=` has 6 tokens, a completion at most 16."""
    config = load_config("tiny", {"data.max_prompt_tokens": allowed})
    asked = problem("2*7-0=", "4")
    expected = (
        f"prompt {asked.prompt_id} ('2*7-0=') has 6 tokens; {fitting} (data.max_prompt_tokens={allowed}, "
        f"{positions} positions of model and engine, rollout.max_new_tokens=16); change one of these"
    )
    with pytest.raises(UserError, match=f"^{re.escape(expected)}"):
        encode_prompt(asked, config, characters, positions)


def test_a_character_that_has_no_token_is_refused_with_its_place(characters):
    asked = problem("é*7-0=", "4", "rows.jsonl:2")
    with pytest.raises(UserError, match=r"^rows\.jsonl:2: the tokenizer has no token for 'é'"):
        check_prompt(asked, load_config("tiny"), characters, 256)


def test_template_arguments_reach_the_chat_template(bpe_tokenizer, tmp_path):
    bpe_tokenizer.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(chat_templates.PREFILLS["switched off"])
    tokenizer, off = Tokenizer.load(tmp_path), gsm8k(**{"data.template_arguments": {"enable_thinking": False}})
    on = encode_prompt(TOM, gsm8k(), tokenizer, 512)[0]
    assert encode_prompt(TOM, off, tokenizer, 512)[0] == f"{on}<think>\n\n</think>\n\n"
    check_template_arguments(off, tokenizer)
    with pytest.raises(UserError, match=r"^data\.template_arguments: enable_thinking: the chat template"):
        check_template_arguments(off, bpe_tokenizer)
