"""Files that are truncated, bit-flipped, deleted or swapped before a resume: repaired, or refused by name.

Whatever happens, a run never ends with another result than one that was never touched, and never with a traceback.
"""

import shutil
import time

import pytest

from fp8core.store.layout import LEDGER
from fp8core.store.ledger import Ledger, StepEntry

DAMAGES = ["truncated", "bit-flipped", "deleted", "swapped"]

# Step 4 was cut after its calibration, checkpoint 2 is the last: steps 3 and 4 are redone from their stored batches.
REDONE = ["prompts", "rollouts", "rewards", "logprobs", "kv_statistics", "next_policy", "train_report", "next_scales"]
ARTIFACTS = [
    *((0, name) for name in ("policy", "weights", "scales", "evaluation")),
    *((3, name) for name in REDONE),
    *((4, name) for name in ("rollouts", "kv_statistics", "next_policy", "next_scales")),
    *((3, name) for name in ("sync_report", "evaluation", "metrics", "manifest")),
]
CHECKPOINT = ["masters.safetensors", "optimiser.safetensors", "trainer.json", "policy/model.safetensors"]


def one_damage_each(files):
    """Each file with one of the damages in turn; the first tier has a quarter of them."""
    return [
        pytest.param(file, DAMAGES[i % 4], marks=() if i % 4 == i // 4 % 4 else pytest.mark.slow)
        for i, file in enumerate(files)
    ]


def damage_file(path, damage, other):
    """`other` is a file of the same form, with other content."""
    content = bytearray(path.read_bytes())
    path.unlink()
    match damage:
        case "truncated":
            path.write_bytes(content[: len(content) // 2])
        case "bit-flipped":
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        case "swapped":
            assert other.read_bytes() != content
            path.write_bytes(other.read_bytes())


@pytest.fixture(scope="module")
def stopped(cut):
    """Runs that were killed, by what was durable last; not to be changed."""
    return {what: cut(what) for what in ("4 calibrate", "4 checkpoint", "4 group 1")}


@pytest.fixture
def a_copy(stopped, new_training, tmp_path):
    """A run that stands where one of these stands."""

    def of(what):
        shutil.copytree(stopped[what].folder, tmp_path / "run")
        return new_training("run", runs=tmp_path)

    return of


def must_be_repaired_or_refused(training, whole, path, damage, other):
    intact = path.read_bytes()
    damage_file(path, damage, other)
    training.begin()
    life = training.end()
    uri = path.relative_to(training.folder).as_posix()
    if not life.finished:
        assert uri in life.error
        path.write_bytes(intact)
        training.begin()
        assert training.end().finished, "with the file put back the run goes on"
    training.must_equal(whole, without=[uri])


@pytest.mark.parametrize(("artifact", "damage"), one_damage_each(ARTIFACTS))
def test_a_damaged_artifact(a_copy, whole, artifact, damage):
    step, name = artifact
    training = a_copy("4 calibrate")
    ledger = training.ledger
    stored = {index: ledger.artifacts(index) for index in range(5)}
    stored[2]["manifest"], stored[3]["manifest"] = ledger.steps()[2].manifest, ledger.steps()[3].manifest
    ref = stored[step][name]
    # The same artifact of an earlier step; where there is none, or it is equal, another one.
    candidates = (
        [stored[step - 1].get(name), stored[3]["next_scales"], stored[2]["next_scales"]]
        if step
        else [stored[3]["next_scales"]]
    )
    other = next(found for found in candidates if found is not None and found != ref)
    must_be_repaired_or_refused(training, whole, training.folder / ref.uri, damage, training.folder / other.uri)


@pytest.mark.parametrize("artifact", ["rollouts", "logprobs"])
def test_an_artifact_of_the_step_that_was_cut_is_made_again_without_generating(a_copy, whole, artifact):
    training = a_copy("4 calibrate")
    (training.folder / training.ledger.artifacts(4)[artifact].uri).unlink()
    life = training.live()
    assert {step for step, _ in life.asked} == {5}
    training.must_equal(whole)
    training.must_have_committed_once(whole)


@pytest.mark.parametrize(("checkpoint", "last"), [("00002", "4 calibrate"), ("00004", "4 checkpoint")])
@pytest.mark.parametrize(("file", "damage"), one_damage_each(CHECKPOINT))
def test_a_damaged_checkpoint(a_copy, whole, checkpoint, last, file, damage):
    """After the second one no stored update is redone, which would find the damage out."""
    training = a_copy(last)
    path = training.folder / "checkpoints" / checkpoint / file
    other = whole.folder / "checkpoints" / "00005" / file
    must_be_repaired_or_refused(training, whole, path, damage, other)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard(a_copy, whole, damage):
    training = a_copy("4 group 1")
    first, second = sorted((training.folder / "shards" / "00004").iterdir())
    must_be_repaired_or_refused(training, whole, first, damage, second)


@pytest.mark.parametrize("damage", ["bit-flipped", "deleted"])
def test_a_damaged_description(a_copy, new_training, whole, damage):
    """Nothing tells what the run was, so that one of another configuration would go on in its place."""
    training = a_copy("4 calibrate")
    path = training.folder / "run.json"
    intact = path.read_bytes()
    damage_file(path, damage, path)
    if damage == "bit-flipped":
        # Of the learning rate: what lies in the middle may be a setting that decides no number.
        place = intact.index(b":", intact.index(b'"learning_rate"')) + 2
        path.write_bytes(intact[:place] + bytes([intact[place] ^ 1]) + intact[place + 1 :])
    other = new_training("run", runs=training.folder.parent, **{"training.learning_rate": 1e-3})
    for each in (training, other):
        error = each.live().error
        assert str(path) in error or "run exists with another configuration: " in error.replace("run run", "run")
    path.write_bytes(intact)
    assert training.live().finished
    training.must_equal(whole)


DAY_MS = 86_400_000


def lines_before_the_last(content):
    *before, _ = content.splitlines(keepends=True)
    return b"".join(before)


def test_a_last_line_torn_at_any_byte_is_cut_off(cut, tmp_path):
    content = (cut("2 step").folder / LEDGER).read_bytes()
    before, torn = lines_before_the_last(content), tmp_path / LEDGER
    for length in range(len(before), len(content)):
        torn.write_bytes(content[:length])
        Ledger.open(torn).close()
        assert torn.read_bytes() == before


@pytest.mark.parametrize("line", ["segment", "3 train", "2 step", "4 checkpoint"])
def test_a_run_with_a_torn_last_line_goes_on(cut, whole, line):
    training = cut(line)
    ledger = training.folder / LEDGER
    content = ledger.read_bytes()
    ledger.write_bytes(content[: (len(lines_before_the_last(content)) + len(content)) // 2])
    training.live()
    training.must_equal(whole)
    training.must_have_committed_once(whole)


def test_a_clock_that_goes_back_between_two_lives(cut, whole):
    training = cut("3 step")
    path = training.folder / LEDGER
    ahead = int(time.time() * 1000) + DAY_MS
    lines = path.read_text().splitlines()
    last = StepEntry.model_validate_json(lines[-1]).model_copy(update={"committed_ms": ahead})
    path.write_text("\n".join([*lines[:-1], last.model_dump_json()]) + "\n")
    training.live()
    training.must_equal(whole)
    training.must_have_committed_once(whole)
    steps = training.ledger.steps()
    assert ahead < steps[4].committed_ms < steps[5].committed_ms < ahead + DAY_MS
    timings = [seconds for manifest in training.manifests() for seconds in manifest.observed.timings.values()]
    assert min(timings) >= 0
    assert max(timings) < 60
