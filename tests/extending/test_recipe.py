"""Both sides of a training compute by the recipe of docs/extending.md."""

import json

TRAIN = """
import io, json, sys
from fp8core.config.load import load_config
from fp8core.report.console import Console
from fp8core.run.loop import train
from fp8core.run.open import open_directory, open_run
from fp8core.run.refusals import graph_of
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import LedgerView

config = load_config("fp16-attention.yaml", json.loads(sys.argv[1]))
with (
    open_directory(config, "run") as directory,
    open_run(config, graph_of(config), directory, Console(io.StringIO(), config.steps)) as run,
):
    train(run)
    step = LedgerView.read(directory.path / LEDGER).step(1)
    print(json.dumps(directory.store.get_json(step.manifest)["record"]["executed"]))
"""


def test_both_sides_compute_by_the_recipe_of_the_page(changed_package, small, tmp_path):
    run = changed_package("A recipe")
    settings = {**small, "steps": 1, "runs": str(tmp_path / "runs")}
    executed = json.loads(run("-c", TRAIN, json.dumps(settings)))
    for side in ("rollout", "training"):
        assert executed[side]["scale_rule"] == "pow2_fp16_attention"
        assert executed[side]["attention"] == "fp16_over_fp8_cache"
