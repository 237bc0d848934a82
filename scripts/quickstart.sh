#!/usr/bin/env bash
# Installs what is needed (see install.sh) and trains a deep little Llama with ProRes on two ranks of this machine.
# Arguments go to the trainer: bash scripts/quickstart.sh --transforms.prores.enabled=false
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/install.sh
install_titan_prores

set -- "$python" scripts/train.py launch --nproc 2 --config train_configs/quickstart.toml "$@"
say "$*"
status=0
"$@" || status=$?
[ "$status" -eq 0 ] || exit "$status"

cat <<'NEXT'

what to try next
  look at the curves         tensorboard --logdir outputs
  the same without ProRes    bash scripts/quickstart.sh --transforms.prores.enabled=false \
                               --job.dump_folder=outputs/quickstart-baseline
  stop and go on             start a run, press Ctrl-C, start it again: it resumes at its newest checkpoint
  train it again from 0      bash scripts/quickstart.sh --job.dump_folder=outputs/quickstart-2
NEXT
