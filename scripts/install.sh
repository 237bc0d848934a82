# shellcheck shell=bash
# Finds or makes the Python environment and installs the package into it; sourced by quickstart.sh and test.sh.
#
#   install_titan_prores [extra]    afterwards $python is the environment's interpreter and its bin folder leads PATH
#
# An active virtual or conda environment is used as it is; otherwise .venv in the checkout. PYTHON names the
# interpreter that .venv is made from. Written for bash 3.2 and later, which macOS still ships.

torch_range='torch>=2.11,<2.14'
torch_cpu='torch==2.13.0' # one known version where no GPU asks for another
torch_cpu_index='https://download.pytorch.org/whl/cpu'
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '%s\n' "$*" >&2; }
die() {
    say "error: $*"
    exit 1
}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

# Name of the first Python >= 3.10, in $python.
find_python() {
    local candidate found=''
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.10; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        if new_enough "$candidate"; then
            python=$candidate
            return
        fi
        # A shim of a version manager may be there without the Python behind it.
        found="$found$("$candidate" --version 2>/dev/null | sed "s/.*/ $candidate is &;/")"
    done
    die "Python 3.10 or newer is needed.${found:- None was found;} set PYTHON to one or activate an environment."
}

# Use the active environment, or .venv, made when it is not there or was left half made.
choose_environment() {
    environment=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
    if [ -n "$environment" ]; then
        python=$environment/bin/python
        [ -x "$python" ] || die "the active environment $environment has no bin/python"
        new_enough "$python" || die "Python 3.10 or newer is needed; $environment has $("$python" --version 2>&1)."
        owned=false
        return
    fi
    environment=$PWD/.venv
    owned=true
    if ! "$environment/bin/python" -m pip --version >/dev/null 2>&1; then
        find_python
        need_space "$PWD" 1
        say "making .venv with $("$python" --version 2>&1)"
        rm -rf "$environment"
        if ! "$python" -m venv "$environment" >&2; then
            rm -rf "$environment"
            die "$python cannot make a virtual environment (on Debian and Ubuntu: apt install python3-venv)."
        fi
    fi
    python=$environment/bin/python
    new_enough "$python" || die "Python 3.10 or newer is needed; remove .venv, which has an older one."
}

# need_space FOLDER GIGABYTES
need_space() {
    local free_kb
    free_kb=$(df -Pk "$1" | awk 'NR == 2 { print $4 }')
    if [ "$free_kb" -lt $(($2 * 1000 * 1000)) ]; then
        die "the disk is too full: about $2 GB are needed in $1, $((free_kb / 1000)) MB are free."
    fi
}

# pip with its output shown; a full disk is named.
run_pip() {
    local log status=0
    log=$(mktemp)
    "$python" -m pip "$@" 2>&1 | tee "$log" >&2 || status=$?
    if [ "$status" -ne 0 ] && grep -q 'No space left on device' "$log"; then
        rm -f "$log"
        die "the disk is full (pip: No space left on device)."
    fi
    rm -f "$log"
    return "$status"
}

# Prints torch's version and "yes" or "no" for whether it is in range; nothing when there is none. Imports no torch.
torch_state() {
    "$python" - <<'PYTHON'
from importlib import metadata
try:
    version = metadata.version("torch")
    parts = tuple(int(part) for part in version.split(".")[:2])
    print(version, "yes" if (2, 11) <= parts < (2, 14) else "no")
except metadata.PackageNotFoundError:
    pass
PYTHON
}

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1; }

# Would pip as it is configured bring CUDA libraries with this torch? Fails also when pip finds no such torch.
plain_torch_is_cpu() {
    local report status=0
    report=$(mktemp)
    "$python" -m pip install --dry-run --ignore-installed --quiet --report "$report" "$torch_cpu" 2>/dev/null &&
        "$python" - "$report" <<'PYTHON' || status=$?
import json, sys
names = [item["metadata"]["name"].lower() for item in json.load(open(sys.argv[1]))["install"]]
sys.exit(any(name.startswith(("nvidia", "cuda")) for name in names))
PYTHON
    rm -f "$report"
    return "$status"
}

install_torch() {
    # Older ones than pip 23.2 cannot resolve without downloading; Python 3.10 and 3.11 may have brought such.
    if ! "$python" -c 'import pip; raise SystemExit(tuple(map(int, pip.__version__.split(".")[:2])) < (23, 2))'; then
        run_pip install --quiet --upgrade pip || say "pip could not be upgraded: going on with the old one"
    fi
    if has_gpu; then
        say "NVIDIA GPU found: installing PyTorch with CUDA"
        need_space "$environment" 10
        run_pip install "$torch_range" || die "PyTorch could not be installed."
        return
    fi
    need_space "$environment" 3
    say "no NVIDIA GPU found: installing a CPU build of PyTorch"
    if plain_torch_is_cpu; then
        run_pip install "$torch_cpu" || die "PyTorch could not be installed."
    elif ! run_pip install --retries 1 --timeout 20 --index-url "$torch_cpu_index" "$torch_cpu"; then
        say "PyTorch's CPU index does not answer: taking the ordinary build, which is several GB larger"
        need_space "$environment" 10
        run_pip install "$torch_range" || die "PyTorch could not be installed."
    fi
}

install_titan_prores() {
    local extra=${1:-} torch version in_range constraint stamp content
    choose_environment
    torch=$(torch_state)
    version=${torch% *} in_range=${torch#* }
    if [ -n "$torch" ] && [ "$in_range" = no ] && [ "$owned" = false ]; then
        die "$environment has torch $version, but $torch_range is needed; use another environment or change it there."
    fi

    # A stamp says what was installed from where, so that a second run starts at once.
    stamp=$environment/.titan-prores-installed
    content="$PWD $(cksum <pyproject.toml)"
    if [ "$in_range" != yes ] || ! grep -qxF "$content [$extra]" "$stamp" 2>/dev/null; then
        [ "$in_range" = yes ] || install_torch
        need_space "$environment" 1
        torch=$(torch_state)
        constraint=$(mktemp)
        echo "torch==${torch% *}" >"$constraint" # whatever else comes, this torch stays
        say "installing titan-prores${extra:+[$extra]} and what it needs"
        run_pip install --quiet --constraint "$constraint" --editable ".${extra:+[$extra]}" || {
            rm -f "$constraint"
            die "titan-prores could not be installed; pip says above why."
        }
        rm -f "$constraint"
        # A larger extra covers the plain install too.
        printf '%s\n' "$content [$extra]" "$content []" >"$stamp"
    fi
    export PATH="$environment/bin:$PATH"
}
