#!/usr/bin/env bash
# Installs what is needed (see install.sh) and runs the tests: the quick part, or all of them with --all or CI=true.
# Other arguments go to pytest: bash scripts/test.sh tests/unit -k config
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/install.sh

all=${CI:-false}
arguments=()
for argument in "$@"; do
    if [ "$argument" = --all ]; then all=true; else arguments+=("$argument"); fi
done
install_titan_prores dev

if [ "$all" = true ]; then
    say "running every test"
    markers='slow or not slow'
else
    say "running the quick tests; bash scripts/test.sh --all runs the slow ones too"
    markers='not slow'
fi
# Two workers, as tests start up to four processes themselves; slow files come first, so that both end at about the same
# time. An -m or -n among the arguments comes later and wins. The odd expansion is for an empty array under bash 3.2.
exec "$python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "$markers" \
    ${arguments[@]+"${arguments[@]}"}
