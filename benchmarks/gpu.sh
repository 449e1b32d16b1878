#!/usr/bin/env bash
# Exactness, peak, time and longest sequence on one GPU, in at most nine minutes, from a bare checkout.
#
#     benchmarks/gpu.sh OUT [--tiny] [--minutes N] [--layers N] [--memory SIZE] ...
#
# Needs python3 with PyTorch and transformers, and nothing installed: neither this package nor a network.
# OUT gets results.json and table.txt, also if time runs out. `--tiny` runs on a CPU, in toy sizes.
set -euo pipefail
if [ $# -lt 1 ] || [ "${1#-}" != "$1" ]; then
    echo "usage: benchmarks/gpu.sh OUT [--tiny] [--minutes N] ..." >&2
    exit 2
fi
out=$1
shift
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "$out"
out=$(cd "$out" && pwd)

# The compiler lies beside the package and is a part of it once installed: staged so, it needs no install.
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
cp -r "$root/streambp_fx" "$stage/streambp_fx"
rm -f "$stage/streambp_fx/passes" # in a checkout it is a link
cp -r "$root/passes" "$stage/streambp_fx/passes"
cp -r "$root/benchmarks" "$stage/benchmarks"

cd "$stage"
export PYTHONPATH="$stage" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
# What counts on a CPU is the resident memory, see streambp_fx/measure/step.py.
case " $* " in *" --tiny "*) export MALLOC_MMAP_THRESHOLD_=65536 ;; esac
"${PYTHON:-python3}" -m benchmarks.gpu --out "$out" "$@"
