"""The environment of docs/guides/environments.md plays on the tokenizer of the run that the page starts."""

import re
import runpy
from pathlib import Path

from fp8core.data.chain import ALPHABET, EOS
from fp8core.environments.chat import Talk
from fp8core.environments.protocol import Action, Outcome, Task, Turn
from fp8core.models.tokenizer import character_tokenizer

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "environments.md").read_text()


def test_every_turn_of_the_example_has_tokens(tmp_path: Path) -> None:
    shown = re.search(r"```python\n# countdown.py\n(.*?)```", PAGE, re.DOTALL)
    assert shown is not None
    (tmp_path / "countdown.py").write_text(shown[1])
    environment = runpy.run_path(str(tmp_path / "countdown.py"))["Countdown"](turns=3)
    began = environment.start(Task("3*4=", "2", 0))
    conversation = Talk(character_tokenizer(ALPHABET, 64, EOS), "plain").open(began)
    answers = [environment.step(Action(text)) for text in ("3,2#2", "#3", "#2")]
    assert [type(answer) for answer in answers] == [Turn, Turn, Outcome]
    for answer in answers[:2]:
        assert conversation.observe(answer.messages, None)
    assert [answer.reward for answer in answers[:2]] == [0.1, 0.0], "the reward depends on the action"
