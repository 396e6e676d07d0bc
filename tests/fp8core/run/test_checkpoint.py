"""The order in which a checkpoint comes to be: files, name, line in the ledger, each durable before the next."""

import shutil

from fp8core.durable import partial_folder
from fp8core.run.checkpoint import save_state
from fp8core.run.loop import begin
from fp8core.store.layout import LEDGER


def test_a_checkpoint_is_durable_before_its_name_and_named_before_the_ledger_has_it(run_copy, stored):
    folder, ledger = run_copy.folder / "checkpoints" / "00004", run_copy.folder / LEDGER
    with run_copy.opened() as run:
        begin(run)
        shutil.rmtree(folder)
        stored.clear()
        save_state(run, 4)
    named = stored.index(("name", folder))
    partial = partial_folder(folder)
    files = {partial / path.relative_to(folder) for path in folder.rglob("*")}
    assert len(files) > 3
    assert files <= {path for what, path in stored[:named] if what == "sync"}
    assert stored[named - 1 : named + 2] == [("sync", partial), ("name", folder), ("sync", folder.parent)]
    assert stored.index(("sync", ledger)) > named + 1
