#!/usr/bin/env bash
# Trains on a list of machines without a scheduler, by Open MPI over ssh:  train.sh [the trainer's flags]
# Adapt these lines; the image lies under the same path on all machines, which reach each other by ssh without a word.
HOSTS=${HOSTS:-node1:1,node2:1} # name:ranks, the first one is where this is started
COMMAND=(train) # or (run train.py --lr 0.1)
IMAGE=${IMAGE-$PWD/sif/cpu.sif}
# For data: export TRAIN_DATASET=imagefolder TRAIN_DATA_DIR=/data/pets APPTAINER_BIND=/data
# ---- nothing to adapt from here on
set -u
export MASTER_ADDR=${MASTER_ADDR:-${HOSTS%%[:,]*}}
ranks=0
for host in ${HOSTS//,/ }; do
  count=${host#*:}
  if [[ $count == "$host" ]]; then count=1; fi
  ranks=$((ranks + count))
done

# Without an image: the entrypoint of an installation that all machines share.
start=(entrypoint "${COMMAND[@]}")
if [[ -n $IMAGE ]]; then start=(apptainer run --nv "$IMAGE" "${COMMAND[@]}"); fi

# Monitors without this key cannot take part in the job.
export ENTRYPOINT_JOB_KEY=${ENTRYPOINT_JOB_KEY:-$(head -c 32 /dev/urandom | base64)}

# Ranks on other machines see what is named here and nothing else of this environment.
passed=(-x ENTRYPOINT_JOB_KEY)
groups='TRAIN|LAUNCH|OMP|KMP|GOMP|MKL|GLOO|NCCL|CCL|FI|I_MPI|UCX|TORCH|ACCELERATE|APPTAINER'
for name in $(compgen -e | grep -E "^($groups)_|^(PATH|MASTER_ADDR|MASTER_PORT|CUDA_VISIBLE_DEVICES)\$"); do
  if [[ ${name^^} =~ (^|_)(TOKEN|SECRET|PASSWORD|PASSWD|KEY)$ ]]; then
    echo "$name: not passed to other nodes, because the name is that of a secret" >&2
    continue
  fi
  passed+=(-x "$name")
done

# A machine that has not answered for half a minute is lost, and the job ends.
alive=(--mca oob_tcp_keepalive_time 10 --mca oob_tcp_keepalive_intvl 5 --mca oob_tcp_keepalive_probes 4)
exec mpirun --bind-to none -np "$ranks" --host "$HOSTS" "${alive[@]}" "${passed[@]}" "${start[@]}" "$@"
