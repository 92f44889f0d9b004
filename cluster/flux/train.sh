#!/usr/bin/env bash
# Trains on the nodes of a Flux job:  flux batch train.sh [the trainer's flags]
# Adapt these lines; for GPUs take the cuda image and as many ranks as a node has GPUs.
# flux: -N 2 --exclusive -t 60m --job-name=train --output=train-{{id}}.out
NODES=${NODES:-2} RANKS=${RANKS:-1} # RANKS on each node
COMMAND=(train) # or (run train.py --lr 0.1)
IMAGE=${IMAGE-$PWD/sif/cpu.sif}
MINUTES=${MINUTES:-55} # less than -t: the run saves and ends with 75
# For data: export TRAIN_DATASET=imagefolder TRAIN_DATA_DIR=/data/pets APPTAINER_BIND=/data
# ---- nothing to adapt from here on
set -u
export TRAIN_RUN_NAME=${TRAIN_RUN_NAME:-job-$(flux getattr jobid)} TRAIN_RESUME=${TRAIN_RESUME:-auto}
export TRAIN_MAX_MINUTES=${TRAIN_MAX_MINUTES:-$MINUTES}

# This script runs on the job's first node, as rank 0 does.
export MASTER_ADDR=${MASTER_ADDR:-$(hostname)} LOCAL_WORLD_SIZE=$RANKS

# Monitors without this key cannot take part in the job.
export ENTRYPOINT_JOB_KEY=${ENTRYPOINT_JOB_KEY:-$(head -c 32 /dev/urandom | base64)}

# Without an image: the entrypoint of an installation that all nodes share.
start=(entrypoint "${COMMAND[@]}")
if [[ -n $IMAGE ]]; then start=(apptainer run --nv "$IMAGE" "${COMMAND[@]}"); fi

# The entrypoint binds each rank itself, by NUMA node.
flux run --nodes="$NODES" --exclusive --tasks-per-node="$RANKS" -o cpu-affinity=off -o exit-timeout=60s "${start[@]}" "$@"
code=$?
if [[ $code == 75 ]]; then echo "preempted: submit it again with TRAIN_RUN_NAME=$TRAIN_RUN_NAME to go on"; fi
exit "$code"
