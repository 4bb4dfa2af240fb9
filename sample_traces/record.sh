#!/usr/bin/env bash
# Records the sample traces again: `make samples`, or record.sh BIN with the folder of an environment's programs.
# Runs in a folder of its own, so that no path of this machine gets into a manifest.
set -euo pipefail
bin=$1
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

ln -s "$("$bin/python" "$here/../tests/support/smollm2.py" | tail -n 1)" SmolLM2-135M-Instruct
"$bin/lifetrace" run --prompt "The physical hardware limits" --max-new-tokens 32 --repeats 2 --logprobs 5 \
    --detail module --no-report --out demo
"$bin/lifetrace" run --model SmolLM2-135M-Instruct --prompt "The physical hardware limits" --no-report --out smollm2

for trace in demo smollm2; do
    rm -rf "${here:?}/$trace"
    mv "$trace" "$here/$trace"
done
