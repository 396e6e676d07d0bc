"""The examples of configs/cluster: Ray, a shell and fp8-grpo take them, and they ask for what the machines have."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from flows.cli.commands import build_parser
from fp8core.config.load import SHIPPED, load_config
from fp8core.config.run import RunConfig

EXAMPLES = SHIPPED / "cluster"
COMMAND = re.compile(r"fp8-grpo (\w+) ([^'\n&]*)")


def config_of(name: str) -> RunConfig:
    return load_config(str(EXAMPLES / name))


def machines(file: str) -> tuple[int, int]:
    """How many there are, and GPUs of all."""
    text = (EXAMPLES / file).read_text()
    if file == "slurm.sh":
        nodes, gpus = (int(re.findall(rf"^#SBATCH --{key}=(\d+)$", text, re.MULTILINE)[0]) for key in SLURM)
        assert text.count(f"--num-gpus={gpus} ") == 2
        return nodes, nodes * gpus
    found = yaml.safe_load(text)
    if file == "ray-up.yaml":
        nodes = 1 + len(found["provider"]["worker_ips"])
        return nodes, nodes * int(re.findall(r"--num-gpus=(\d+)", text)[0])
    head, (group,) = found["spec"]["headGroupSpec"], found["spec"]["workerGroupSpecs"]
    for each in (head, group):
        (container,) = each["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == each["rayStartParams"]["num-gpus"]
    return 1 + group["replicas"], (1 + group["replicas"]) * int(head["rayStartParams"]["num-gpus"])


SLURM = ("nodes", "gpus-per-node")


@pytest.mark.parametrize("file", ["ray-up.yaml", "kuberay.yaml", "slurm.sh"])
def test_an_example_has_the_gpus_that_its_configuration_asks_for(file):
    config = config_of("two-machines.yaml")
    nodes, gpus = machines(file)
    assert nodes == 2
    assert gpus == config.cluster.engines == config.cluster.ranks


@pytest.mark.parametrize("file", ["ray-up.yaml", "kuberay.yaml", "slurm.sh", "one-machine.yaml", "two-machines.yaml"])
def test_the_commands_of_an_example_are_commands_of_ours(file):
    found = [each for each in COMMAND.findall((EXAMPLES / file).read_text()) if each[0] in ("run", "doctor")]
    assert found
    for command, arguments in found:
        options = build_parser().parse_args([command, *arguments.split()])
        if command == "run":
            config_of(Path(options.config).name)


def test_one_machine_starts_its_own_cluster():
    cluster = config_of("one-machine.yaml").cluster
    assert (cluster.address, cluster.engines, cluster.ranks) == (None, 8, 8)


def test_ray_takes_the_example_for_ray_up():
    util = pytest.importorskip("ray.autoscaler._private.util", reason="needs the extra ray")
    prepared = util.prepare_config(yaml.safe_load((EXAMPLES / "ray-up.yaml").read_text()))
    util.validate_config(prepared)
    assert prepared["max_workers"] == 1


def test_a_shell_takes_the_script_for_slurm():
    assert subprocess.run(["bash", "-n", EXAMPLES / "slurm.sh"], capture_output=True).stderr == b""
