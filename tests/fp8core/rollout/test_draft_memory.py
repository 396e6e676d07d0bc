"""Drafts that are found on the device follow the longest context that the prompt's texts have had."""

import random

import pytest
import torch

from fp8core.rollout.vllm.draft_memory import DraftMemory, Text

DRAFT, WIDTH = 5, 3


def following(texts, context):
    """What may come after a context in other places of these texts, the last token of each left out."""
    for length in (8, 4, 2):
        last = context[-length:]
        ends = [(text, i) for text in texts for i in range(length, len(text)) if text[i - length : i] == last]
        if len(last) == length and ends:
            return [text[i : i + DRAFT] for text, i in ends]
    return []


@pytest.mark.parametrize("seed", range(6))
def test_a_draft_goes_on_as_a_text_of_the_prompt_did(seed):
    """Two prompts of few tokens, three requests at a time, which write one to three tokens a step."""
    draw = random.Random(seed)
    memory = DraftMemory(3, 64, DRAFT, torch.device("cpu"))
    # Their texts are of other tokens, so that no context is found in both.
    prompts = [[10 * p + draw.randint(1, 3) for _ in range(12)] for p in range(2)]
    texts, found = {0: [], 1: []}, 0
    for _ in range(4):
        owners = [draw.randrange(2) for _ in range(3)]
        live = [[*prompts[p]] for p in owners]
        memory.begin([Text(slot, text, 0, 30) for slot, text in enumerate(live)])
        for p, text in zip(owners, live, strict=True):
            texts[p].append(text)
        for _ in range(8):
            counts = [draw.randint(1, WIDTH) for _ in live]
            new = [[10 * p + draw.randint(1, 3) for _ in range(WIDTH)] for p in owners]
            firsts = torch.tensor([len(text) for text in live])
            for text, tokens, count in zip(live, new, counts, strict=True):
                text += tokens[:count]
            drafts = memory.extend(torch.arange(3), firsts, torch.tensor(new), torch.tensor(counts)).tolist()
            for p, text, draft in zip(owners, live, drafts, strict=True):
                if known := following(texts[p], text):
                    found += 1
                    assert any(draft[: len(each)] == each for each in known), (text, draft, known)
    assert found > 20


def test_sources_are_counted():
    memory = DraftMemory(2, 32, 2, torch.device("cpu"))
    prompt, slots, one = [1, 2, 3, 4, 5, 6], torch.tensor([0]), torch.tensor([1])

    def write(place, token):
        draft = memory.extend(slots, torch.tensor([place]), torch.tensor([[token]]), one)
        memory.judged(slots, torch.tensor([2]), torch.tensor([1]))
        return draft[0].tolist()

    memory.begin([Text(0, prompt, 0, 20)])
    write(6, 9)
    assert memory.counts() == {"saved_forwards": 1}
    write(7, 2)
    assert write(8, 3) == [4, 5]
    assert memory.counts() == {"draft_tokens_prompt": 2, "accepted_tokens_prompt": 1, "saved_forwards": 3}
    memory.begin([Text(0, prompt, 0, 20)])
    # After 5, 6, 9 the first request wrote 2 and 3.
    assert write(6, 9) == [2, 3]
    assert memory.counts()["draft_tokens_group"] == 2
    memory.begin_session()
    memory.begin([Text(0, [*prompt, 9], 1, 20)])
    assert write(7, 2)[0] == 3
    assert memory.counts()["draft_tokens_earlier"] == 2


def test_texts_that_are_written_over_leave_tokens_behind():
    """The ring is small: what a draft has in it is some token, whatever lies there."""
    memory = DraftMemory(1, 8, 4, torch.device("cpu"))
    memory._size, memory._tokens = 64, torch.zeros(65, dtype=torch.int32)
    for number in range(40):
        memory.begin([Text(0, [1 + number % 7, 2, 3], 0, 5)])
        for place in range(3, 6):
            draft = memory.extend(torch.tensor([0]), torch.tensor([place]), torch.tensor([[place]]), torch.tensor([1]))
            assert 0 <= draft.min() <= draft.max() <= 7
