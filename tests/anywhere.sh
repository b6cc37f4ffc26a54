#!/usr/bin/env bash
# Run a share of the suite in clones of the last commit: in other folders, as other users, in other orders, in other
# Pythons. Nothing is written outside of a temporary folder.
#
#   tests/anywhere.sh                      every place of this machine
#   tests/anywhere.sh umlaut offline       some
#   tests/anywhere.sh python3.13           an environment of its own, which takes gigabytes while it runs
#
# TESTS: what runs, instead of the share. PYTHON: the environment, by default this checkout's.
set -uo pipefail

here=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$here/.venv/bin/python}
# files, folders, processes, builds, and what they compute
share=${TESTS:-"tests/test_package.py tests/test_directions.py tests/test_earlier_files.py
  tests/pt2mx/kernels/cpu/test_build.py tests/pt2mx/kernels/cpu/test_prebuilt.py tests/pt2e/files tests/pt2e/program
  tests/pt2e/cli/test_quantize.py tests/pt2e/checkpoints/test_save.py tests/fx/test_lower.py"}
places="pt2mx umlaut root-without-powers no-home one-core one-process shuffled twice offline"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# run in CLONE with HOME, the words before Python, then pytest's arguments
suite() {
  local clone=$1 home=$2
  shift 2
  # shellcheck disable=SC2086  # the share is words
  (cd "$clone" && env HOME="$home" OMP_NUM_THREADS=1 PYTHONPATH="$clone:$clone/tests/conformance" \
    $prefix "$python" -m pytest -q -p no:cacheprovider "$@" $share)
}

in_place() {
  local name=$1 clone=$work/$1/pt2mx home=$work/home  # one home: the C++ kernels are built once
  prefix=""
  [ "$name" != umlaut ] || clone="$work/$name/a folder für pt2mx"
  mkdir -p "$home"
  git clone --quiet "$here" "$clone" || return 1
  case $name in
    pt2mx | umlaut) suite "$clone" "$home" -n 2 ;;
    root-without-powers)  # files that this user may not write stay unwritten, for root too
      [ "$(id -u)" -ne 0 ] || prefix="setpriv --bounding-set=-all"
      suite "$clone" "$home" -n 2 ;;
    no-home) suite "$clone" /proc/nobody -n 2 ;;
    one-core)
      prefix="taskset -c 0"
      suite "$clone" "$home" -n 1 ;;
    one-process) suite "$clone" "$home" ;;
    shuffled)
      export SEED=${SEED:-$RANDOM}
      echo "SEED=$SEED"
      suite "$clone" "$home" -n 2 -p tests.shuffled_order ;;
    twice) suite "$clone" "$home" -n 2 && suite "$clone" "$home" -n 2 ;;
    offline)
      prefix="unshare --net"
      suite "$clone" "$home" -n 2 ;;
    python3*)
      "$name" -m venv "$work/$name/venv" && (cd "$clone" && make --silent VENV="$work/$name/venv" PYTHON="$name" \
        "$work/$name/venv/.installed") && python=$work/$name/venv/bin/python suite "$clone" "$home" -n 2 ;;
    *) echo "no place $name: there are $places, and python3.10 and the like" >&2 && return 1 ;;
  esac
}

failed=""
for name in ${*:-$places}; do
  start=$SECONDS
  if in_place "$name" >"$work/log" 2>&1; then
    echo "$name: $(tail -1 "$work/log") [$((SECONDS - start)) s]"
  else
    failed="$failed $name"
    tail -40 "$work/log"
    echo "$name: failed [$((SECONDS - start)) s]"
  fi
  rm -rf "${work:?}/$name"
done
[ -z "$failed" ] || { echo "failed:$failed"; exit 1; }
