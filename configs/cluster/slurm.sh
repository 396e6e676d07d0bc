#!/bin/bash
# Two machines with eight GPUs each, in one allocation. /shared is on both, with the environment of fp8-grpo, the
# model, the data, the runs, and a copy of two-machines.yaml:
#   sbatch slurm.sh
#SBATCH --job-name=fp8-grpo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
# The run has ten minutes to commit its step and to write a checkpoint; `sbatch` again continues it.
#SBATCH --signal=B:TERM@600
set -euo pipefail
source /shared/fp8-grpo/bin/activate

# All machines need the same token; its holder can run code on all. The home of the user is on both, too.
export RAY_AUTH_MODE=token
ray get-auth-token --generate > /dev/null

# The head finds a silent node within 40 seconds, not 65.
export RAY_health_check_failure_threshold=3

HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# A step of one task would have one processor.
srun --nodes=1 --ntasks=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" --nodelist="$HEAD" \
    ray start --head --port=6379 --num-gpus=8 --block &
sleep 20
srun --nodes="$((SLURM_JOB_NUM_NODES - 1))" --ntasks="$((SLURM_JOB_NUM_NODES - 1))" \
    --cpus-per-task="$SLURM_CPUS_ON_NODE" --exclude="$HEAD" \
    ray start --address="$HEAD:6379" --num-gpus=8 --block &
sleep 20

# This script runs on the first machine, which is the head: the address is auto in every allocation.
fp8-grpo doctor --address auto
fp8-grpo run /shared/two-machines.yaml --set run=slurm &
RUN=$!
trap 'kill -TERM "$RUN"' TERM
# The signal ends the first wait, and not the run.
wait "$RUN" || wait "$RUN"
