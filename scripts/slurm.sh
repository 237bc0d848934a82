#!/usr/bin/env bash
# Multi-node training under Slurm: one launcher a node, which starts one rank a GPU.
#
#   sbatch --nodes 4 --gpus-per-node 8 scripts/slurm.sh --config train_configs/quickstart.toml --training.steps=1000
#
# Everything after the script's name goes to scripts/train.py. Options of sbatch on the command line win over those
# below. Submit from the root of the checkout, with the environment that titan-prores is installed in active; checkout,
# environment, token cache and run folder must lie on a file system that all nodes see.
#
#SBATCH --job-name=titan-prores
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --output=slurm-%j.out
# A job that is preempted or loses a node is queued again under the same id. It then finds its run folder and goes on
# from the newest checkpoint (checkpoint.resume = "auto"); the log is continued instead of overwritten.
#SBATCH --requeue
#SBATCH --open-mode=append

set -euo pipefail
# Slurm runs a copy of this file from its spool folder, so its own place says nothing about the checkout.
cd "${SLURM_SUBMIT_DIR:?run this with sbatch}"

# The nodes meet at the first of them. The port depends on the job, so that two jobs on shared nodes do not collide.
# A pipe into head would now and then end before scontrol has written all, and the job with it.
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
head_node=${nodes%%$'\n'*}
port=$((20000 + SLURM_JOB_ID % 20000))

# SLURM_GPUS_ON_NODE is missing on a partition without GPUs: then one rank a node, on its CPUs.
ranks_per_node=${SLURM_GPUS_ON_NODE:-1}
threads=$((${SLURM_CPUS_PER_TASK:-1} / ranks_per_node))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}

# srun starts this script's command once a node. --kill-on-bad-exit ends all nodes when one fails, so that Slurm sees
# a failed job at once, with the exit status that the ranks had.
exec srun --ntasks-per-node=1 --kill-on-bad-exit=1 \
    python scripts/train.py launch \
    --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc "$ranks_per_node" \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-endpoint "$head_node:$port" \
    "$@"
