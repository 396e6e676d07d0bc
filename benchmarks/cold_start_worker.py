"""One case of `cold_start`: a process that goes as far as the first token."""

import json
import os
import sys
import time
from pathlib import Path


def main(asked: Path) -> int:
    """In a new process: everything up to the first token, with a clock behind each part."""
    given = json.loads(asked.read_text())
    seconds, last = dict[str, float](), given["began"]

    def clock(part: str) -> None:
        nonlocal last
        seconds[part], last = time.time() - last, time.time()

    # Imported here: the processes that compile import this module again, and need none of it.
    from flows.environment import kernel_folders, set_engine_variables
    from fp8core.config.capability import this_platform
    from fp8core.config.load import load_config
    from fp8core.report.console import Console
    from fp8core.rollout.engine import PromptGroup, Sampling
    from fp8core.rollout.registry import engine_entry
    from fp8core.run.build import build_engine, build_trainer
    from fp8core.run.checks.settings import graph_of
    from fp8core.run.compilation import compile_kernels
    from fp8core.run.open import open_directory, open_run
    from fp8core.run.policy import push
    from fp8core.run.scales import read_scales
    from fp8core.run.start import first_scales, warm_start

    config, console = load_config(given["config"], given["settings"]), Console(sys.stdout, 1)
    graph = graph_of(config)
    set_engine_variables(config)
    folders = kernel_folders()
    clock("imports")
    with console.part("compiling kernels") as progress:
        compiled = compile_kernels(config, this_platform(), folders, progress, engine_entry(config).import_libraries)
    clock("compilation")
    assert config.run is not None
    with open_directory(config, config.run) as directory, open_run(config, graph, directory, console) as run:
        clock("weights")
        warm_start(run)
        clock("digest")
        run.engine = build_engine(run.config, run.arch, run.cluster)
        run.engine.sleep()
        clock("engine")
        run.trainer = build_trainer(run.config, run.arch, run.initial_policy(), run.cluster)
        clock("trainer")
        scales = read_scales(run, first_scales(run).entry.outputs["scales"])
        clock("calibration")
        push(run, scales)
        clock("sync")
        sampling = Sampling(1.0, 1, run.tokenizer.eos_ids)
        ((completion,),) = run.engine.generate([PromptGroup(0, "0", (1, 2, 3), (0,), (0,))], sampling)
        assert len(completion.tokens) == 1
        clock("token")
    found = {
        "first_token_seconds": sum(seconds.values()),
        "bytecode": _share_with_bytecode(given["began"]),
        "seconds": seconds,
        "jobs": compiled.jobs,
        "jobs_done": compiled.done,
        "kernels_before_engine": compiled.kernels,
        "kernels": folders.count(),
        "cores": len(os.sched_getaffinity(0)),
    }
    asked.with_suffix(".result.json").write_text(json.dumps(found))
    return 0


def _share_with_bytecode(began: float) -> float:
    """Of the modules that are imported here, those whose bytecode is older than this process."""
    found = [getattr(module, "__cached__", None) for module in [*sys.modules.values()]]
    kept = [Path(path) for path in found if isinstance(path, str)]
    return round(sum(path.exists() and path.stat().st_mtime < began for path in kept) / len(kept), 3)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
