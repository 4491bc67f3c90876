#!/bin/bash
# Trains on 4 nodes of 8 GPUs, a process a node:  sbatch docs/jobs/slurm.sh
# Slurm sends SIGTERM two minutes before the end; the run then saves, and the job queues up again.
#SBATCH --job-name=pretrain
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue

. .venv/bin/activate
# --kill-on-bad-exit: when one process fails, Slurm ends the others at once.
srun --kill-on-bad-exit=1 python -m train --config-name=fineweb_edu_h100x8_1b \
  hardware=h100x8x4 checkpoint_interval=500 checkpoints.keep_last=3 \
  hang_timeout_seconds=600 paths.root_working_dir=/shared/runs paths.model_name=1b
code=$?
# 143: stopped by SIGTERM, after it had saved. 124: a step hung. Both go on from the last checkpoint.
if [ $code = 143 ] || [ $code = 124 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
