"""A disk that is full, or read-only: one clear line, nothing broken, and the run goes on when there is space."""

import re
import resource
import subprocess
from pathlib import Path

import pytest


class SmallDisk:
    """A file system in memory. Mounting takes root, or what `unshare --map-root-user --mount` gives."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def mount(self, options: str) -> bool:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.folder)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    def change(self, options: str) -> None:
        assert self.mount(f"remount,{options}")


@pytest.fixture
def small_disk(tmp_path):
    disk = SmallDisk(tmp_path)
    if not disk.mount("size=1m"):
        pytest.skip("may not mount a file system; the tests of limits and mode bits stand in for this one")
    yield disk
    subprocess.run(["umount", str(tmp_path)], check=True)


def errors_until_it_fits(training, sizes, give):
    """The lines that lives end with, one for each size but the last; give(size) returns what a life calls first."""
    lives = []
    while not lives or not lives[-1].finished:
        lives.append(training.live(arrange=give(sizes[len(lives)])))
    return [life.error for life in lives[:-1]]


def test_a_full_disk_is_one_line_and_the_run_goes_on_with_more_space(new_training, whole, small_disk):
    training = new_training("run", runs=small_disk.folder)

    def give(size):
        small_disk.change(f"size={size}")
        return lambda: None

    errors = errors_until_it_fits(training, range(200_000, 30_000_000, 800_000), give)
    assert all(re.search(rf"{small_disk.folder}/\S+: .*No space left on device", error) for error in errors), errors
    assert len(errors) >= 8
    training.must_equal(whole)
    training.must_have_committed_once(whole)


def test_files_that_may_not_grow_are_one_line_and_the_run_goes_on_without_the_limit(new_training, whole, tmp_path):
    """The size of single files is limited: writes stop half way, wherever the tests run."""
    training = new_training("run", runs=tmp_path)

    def give(size):
        return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    errors = errors_until_it_fits(training, [1 << k for k in range(8, 30)], give)
    assert all(re.search(rf"{tmp_path}/\S+: .*File too large", error) for error in errors), errors
    assert len(errors) >= 8
    training.must_equal(whole)
    training.must_have_committed_once(whole)


def test_a_read_only_file_system_is_one_line(new_training, whole, small_disk):
    small_disk.change("size=64m")
    training = new_training("run", runs=small_disk.folder)
    assert training.live(after="2 rollout").killed
    small_disk.change("ro")
    for refused in (training, new_training("another", runs=small_disk.folder)):
        assert re.search(rf"{small_disk.folder}/\S+: Read-only file system$", refused.live().error)
    small_disk.change("rw")
    assert training.live().finished
    training.must_equal(whole)
    training.must_have_committed_once(whole)
