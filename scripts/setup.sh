#!/usr/bin/env bash
# Make .venv with the exact packages of requirements/dev.lock and this checkout, editable. A second call does nothing.
# Usage: scripts/setup.sh
# PYTHON=/path/to/python3.12 chooses the interpreter; by default any Python >= 3.12 is found.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
lock=requirements/dev.lock
megatrons=requirements/megatrons.lock
stamp=$venv/mok-setup.stamp
log=$venv/mok-setup.log
needed_mb=9000

die() {
  printf 'setup: %s\n' "$@" >&2
  exit 1
}

# Interpreters to try, best first: 3.12 (where the lock is tested), newer ones, then what pyenv keeps off the PATH.
candidates() {
  local minor folder name
  if [[ -n ${PYTHON:-} ]]; then
    echo "$PYTHON"
    return
  fi
  for minor in 12 13 14 15; do
    for name in "python3.$minor" /usr/local/bin/"python3.$minor" /opt/python*/bin/"python3.$minor"; do
      command -v "$name" || true
    done
    for folder in "${PYENV_ROOT:-$HOME/.pyenv}" "$(command -v pyenv >/dev/null && pyenv root || true)"; do
      ls "$folder"/versions/3."$minor".*/bin/python3 2>/dev/null | sort -rV || true
    done
    ls "$HOME"/.local/share/uv/python/cpython-3."$minor".*/bin/python3 2>/dev/null || true
  done
  command -v python3 || true
  command -v python || true
}

# The first candidate that runs, is new enough and can make a venv, as its real path.
find_python() {
  local candidate
  while read -r candidate; do
    "$candidate" -c 'import ensurepip, sys, venv
if sys.version_info < (3, 12): sys.exit(1)
print(sys.executable)' 2>/dev/null && return
  done < <(candidates)
  return 1
}

# Run pip with its output in the log; show once in a while what it is at.
pip_quietly() {
  local what=$1 pid started=$SECONDS shown=$SECONDS
  shift
  "$venv/bin/python" -m pip --disable-pip-version-check --no-input --no-color "$@" >>"$log" 2>&1 &
  pid=$!
  trap 'kill "$pid" 2>/dev/null || true' INT TERM
  while kill -0 "$pid" 2>/dev/null; do
    sleep 0.5
    if ((SECONDS - shown >= 15)); then
      shown=$SECONDS
      echo "  ... $((SECONDS - started)) s: $(grep -E '^(Collecting|Installing|Building)' "$log" | tail -1 | cut -c1-80)"
    fi
  done
  trap - INT TERM
  if ! wait "$pid"; then
    tail -15 "$log" >&2
    die "$what failed; the whole output is in $log" \
      "check that pip reaches a package index (pip download --no-deps pyyaml), then run scripts/setup.sh again"
  fi
}

wanted=$(cat "$lock" "$megatrons" pyproject.toml setup.py scripts/setup.sh | sha256sum | cut -d' ' -f1)
is_current() {
  [[ -x $venv/bin/python && $(cat "$stamp" 2>/dev/null) == "$wanted $PWD" ]]
}

is_current && exit 0
if command -v flock >/dev/null; then
  exec 9<"$PWD"
  flock -n 9 || { echo "setup: waiting for another setup of this checkout" && flock 9; }
  is_current && exit 0
fi

# Make .venv, or use the one that is there if it fits.
make_venv() {
  local python free_mb
  python=$(find_python) || die "no Python >= 3.12 with the venv module was found${PYTHON:+ (PYTHON=$PYTHON)}" \
    "install one (apt install python3.12-venv, pyenv install 3.12, uv python install 3.12), or set PYTHON=/path/to/python3.12"
  free_mb=$(df -Pm . | awk 'NR == 2 { print $4 }')
  ((free_mb >= needed_mb)) || die "$free_mb MB are free here, the packages need about $needed_mb MB: free some space"
  echo "setup: environment in $venv with $("$python" --version 2>&1) ($python)"
  rm -rf "$venv"
  "$python" -m venv "$venv" || die "$python could not make a venv in $PWD/$venv"
}

base_of() {
  "$1" -c 'import sys; print(sys.base_prefix)'
}

if ! "$venv/bin/python" -c '' 2>/dev/null; then
  make_venv
elif ! "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then
  die "$PWD/$venv has $("$venv/bin/python" --version), 3.12 or newer is needed: remove that folder and run this again"
elif [[ -n ${PYTHON:-} && $(base_of "$PYTHON") != "$(base_of "$venv/bin/python")" ]]; then
  die "$PWD/$venv was made by another Python than PYTHON=$PYTHON: remove that folder and run this again"
elif ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
  "$venv/bin/python" -m ensurepip >/dev/null || die "$PWD/$venv has no pip: remove that folder and run this again"
fi

rm -f "$stamp"
: >"$log"
echo "setup: installing $(grep -c == "$lock") pinned packages (torch with CUDA: several GB, minutes)"
pip_quietly "installing the pinned packages" install --no-deps -r "$lock"
rm -rf "$venv/megatrons"
while read -r requirement; do
  echo "setup: $requirement for the tests, beside the main one"
  pip_quietly "installing $requirement" install --no-deps --target "$venv/megatrons/${requirement#*==}" "$requirement"
done < <(grep -v '^#' "$megatrons")
echo "setup: installing this checkout"
pip_quietly "installing this checkout" install --no-deps --no-build-isolation -e .
pip_quietly "the check that all packages fit together" check
echo "$wanted $PWD" >"$stamp"
echo "setup: done in $SECONDS s"
