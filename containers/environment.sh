# shellcheck shell=sh
# What every program in an Apptainer image finds, the entrypoint's and any other: /opt/reference-training's own
# packages and nothing of the host's, which Apptainer passes in. What is meant for the image goes in by
# `apptainer exec --env NAME=VALUE`, which comes after this.
export PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin
export PYTHONNOUSERSITE=1
# Apptainer takes what is unset here from the host again, but what is empty counts as unset with Python and ld.so.
export PYTHONPATH='' PYTHONHOME='' PYTHONSTARTUP='' LD_PRELOAD='' CONDA_PREFIX=''
# Apptainer itself adds the folder that --nv puts the driver's libraries into.
export LD_LIBRARY_PATH=''
# uv, where somebody brings it, installs into this environment and keeps torch as pip does (pip.conf).
export VIRTUAL_ENV=/opt/venv UV_CONSTRAINT=/opt/reference-training/constraints.txt
