"""`environment.format: auto` is the format in which the chat template of the model writes calls."""

import pytest
from chat_templates import CHATML, LLAMA3, QWEN3

from fp8core.config.environment import EnvironmentConfig
from fp8core.environments.chat import tool_calls_of
from fp8core.environments.protocol import Tool
from fp8core.environments.tool_calls import TOOL_CALLS
from fp8core.errors import UserError
from fp8core.models.tokenizer import Tokenizer, character_tokenizer

AUTO = EnvironmentConfig(name="calculator")
CALL = {"name": "calculate", "arguments": {"expression": "3*4"}}
ASSISTANT = {"role": "assistant", "content": "", "tool_calls": [{"function": CALL}]}


@pytest.fixture
def with_template(bpe_tokenizer, tmp_path):
    """A tokenizer as a model's folder has it, with a chat template."""

    def load(template):
        bpe_tokenizer.save(tmp_path)
        (tmp_path / "chat_template.jinja").write_text(template)
        return Tokenizer.load(tmp_path)

    return load


@pytest.mark.parametrize(("template", "name"), [(QWEN3, "qwen"), (LLAMA3, "llama3")])
def test_a_call_of_the_template_is_read(with_template, template, name):
    tokenizer = with_template(template)
    assert AUTO.format == "auto"
    found = tool_calls_of(AUTO, tokenizer)
    assert found == name
    written = tokenizer.render([{"role": "user", "content": "What is 3*4?"}, ASSISTANT], add_generation_prompt=False)
    # The policy's turn, without what begins and ends it.
    turn = written.rpartition("assistant")[2].removeprefix("<|end_header_id|>").removesuffix("<|eom_id|>")
    ((call,), malformed) = TOOL_CALLS[found](turn, (Tool("calculate", "", {}),))
    assert (call._asdict(), malformed) == (CALL, "")


XML = """
{%- for call in messages[-1].tool_calls %}<tool_call>
<function={{ call.function.name }}>
{%- for name, value in call.function.arguments | items %}
<parameter={{ name }}>
{{ value }}
</parameter>
{%- endfor %}
</function>
</tool_call>{% endfor %}
"""


@pytest.mark.parametrize("more", ["", XML], ids=["none", "of XML"])
def test_a_template_without_calls_that_are_known_needs_a_setting(with_template, tmp_path, more):
    tokenizer = with_template(CHATML + more)
    with pytest.raises(UserError) as refused:
        tool_calls_of(AUTO, tokenizer)
    assert str(refused.value) == (
        f"environment.format=auto: {tmp_path}: the chat template writes no tool calls that are known; set it to "
        "qwen, llama3 or plain, and the first message says how to call"
    )


def test_without_a_template_calls_are_plain():
    assert tool_calls_of(AUTO, character_tokenizer("0123456789*=[]#$", 20, "$")) == "plain"
