"""SIGKILL while a judge answers: what it answered is not asked again."""

import os
import signal
from collections import Counter

from judge_server import TRIAL, judge_server, tenths


def test_after_a_kill_only_the_request_that_was_open_is_made_again(new_training, tmp_path):
    with judge_server() as server:
        options = {"url": server.url, "model": "m", "template": "{question}{completion}", "concurrency": 1}
        settings = {"reward": {"verifier": "judge", "options": options}, "steps": 3}
        whole, training = (new_training("judged", runs=tmp_path / name, **settings) for name in ("whole", "killed"))
        assert whole.live().finished
        expected = server.counts
        open_requests = []

        def reply(text, before):
            # In the first evaluation, and in the second half of the run's completions.
            count = server.counts.total() - expected.total()
            if text != TRIAL and count in (5, expected.total() * 3 // 4):
                open_requests.append(text)
                os.kill(training.pid, signal.SIGKILL)
            return tenths(text)

        server.reply = reply
        assert training.live().killed
        # The first of the five was about the reference of the first problem.
        assert (training.folder / "answers.jsonl").read_bytes().count(b"\n") == 3
        assert training.live().killed
        assert training.live().finished
    training.must_equal(whole)
    assert not (training.folder / "answers.jsonl").exists()
    assert server.counts - expected - expected == Counter(open_requests)
