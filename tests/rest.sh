#!/usr/bin/env bash
# Run the tests that `make test` leaves out, in as many minutes as the argument says: the compiled ones first, then the
# slow ones of one group of folders after the other. PYTEST is the command of pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
end=$((SECONDS + 60 * $1))

# minutes that a group takes on two cores, marks, paths
run() {
    local needed=$1 marks=$2 status=0
    shift 2
    if ((SECONDS + 60 * needed > end)); then
        echo "rest.sh: $(((end - SECONDS) / 60)) minutes are left, not $needed: no tests \"$marks\" of $*"
        return
    fi
    env $PYTEST -m "$marks" "$@" || status=$?
    ((status == 0 || status == 5)) || exit "$status" # 5: the group has no such test
}

run 16 "compiled and not slow and not cuda" tests
slow="slow and not cuda"
run 4 "$slow" tests/pt2mx tests/conformance tests/engines
run 3 "$slow" tests/fx
run 18 "$slow" tests/pt2e --ignore=tests/pt2e/language --ignore=tests/pt2e/cli
run 9 "$slow" tests/pt2e/language
run 4 "$slow" tests/pt2e/cli
run 8 "$slow" tests/test_[!m]*.py
run 20 "$slow" tests/test_model_sweep.py
