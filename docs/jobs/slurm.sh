#!/bin/bash
# Trains on 4 nodes of 8 GPUs with one process per node:  sbatch docs/jobs/slurm.sh
# Slurm sends SIGTERM two minutes before the time limit; the run saves and the job is requeued.
#SBATCH --job-name=pretrain
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append

. .venv-gpu/bin/activate # has requirements-gpu.txt
# JAX takes three quarters of a GPU's memory by default; the rest is for NCCL and CUDA.
export XLA_CLIENT_MEM_FRACTION=.9
# --cpus-per-task: Slurm 22.05 to 23.02 don't take it from above.
# --kill-on-bad-exit: if one process fails, Slurm ends the others at once.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 python -m train --config-name=fineweb_edu_h100x8_1b \
  hardware=h100x8x4 checkpoint_interval=500 checkpoints.keep_last=3 \
  hang_timeout_seconds=600 paths.root_working_dir=/shared/runs paths.model_name=1b
code=$?
# 143: stopped by SIGTERM, after a save; the requeued job resumes from there. Other failures, such as
# a hung step or a mistake in the config, which both exit with 1, end the job.
if [ $code = 143 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
