#!/usr/bin/env bash
# Builds the test plugins of languages that have tools of their own, JavaScript and Python, into a folder:
#
#     tests/guests/build.sh <folder>
#
# The tools are fetched from npm and PyPI once for each lock file, and kept in $PILOTHOUSE_CACHE, as is the component of each source.
# Where there is no npm or pip the plugin is left out with a note, and its test checks nothing. In CI, which sets $CI, that is a failure.
set -euo pipefail
output=$(realpath -m "$1")
cd "$(dirname "$0")"
contract=$(realpath ../../wit/0.1.0)
cache=${PILOTHOUSE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pilothouse}/guests
mkdir -p "$cache" "$output"
# What is made in here and then renamed is whole, whoever else is at it.
part=$(mktemp -d "$cache/part.XXXXXX")
trap 'rm -rf "$part"' EXIT

key() { cat "$@" | sha256sum | cut -c 1-16; }

# Puts a folder where it is kept, unless somebody else has been faster.
keep() { mv -T "$1" "$2" 2>/dev/null || [ -d "$2" ]; }

javascript() { # <component>
  local tools
  tools=$cache/javascript-tools-$(key javascript/package-lock.json)
  if [ ! -d "$tools" ]; then
    mkdir "$part/node"
    cp javascript/package.json javascript/package-lock.json "$part/node"
    npm ci --prefix "$part/node" --no-audit --no-fund --loglevel=error
    keep "$part/node" "$tools"
  fi
  # Node looks for packages beside the source.
  mkdir "$part/source"
  cp javascript/*.js javascript/*.mjs "$part/source"
  ln -s "$tools/node_modules" "$part/source/node_modules"
  node "$part/source/build.mjs" "$contract" "$1"
}

python() { # <component>
  local tools
  tools=$cache/python-tools-$(key python/requirements.txt)
  if [ ! -d "$tools" ]; then
    python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
      --target "$part/pip" --requirement python/requirements.txt
    keep "$part/pip" "$tools"
  fi
  mkdir "$part/module"
  cp python/*.py "$part/module"
  PYTHONPATH=$tools "$tools/bin/componentize-py" --quiet --wit-path "$contract" --world plugin \
    componentize --python-path "$part/module" --output "$1" widget
}

build() { # <language> <what tells whether its tools can be fetched>…
  local language=$1 component
  shift
  component=$cache/$language-$(key build.sh "$language"/* "$contract"/*).wasm
  if [ ! -e "$component" ]; then
    if ! "$@" >/dev/null 2>&1; then
      rm -f "$output/$language.wasm"
      echo "note: the plugin in $language is left out, and not tested: \`$*\` fails here" >&2
      [ -z "${CI:-}" ]
      return
    fi
    "$language" "$part/$language.wasm"
    mv "$part/$language.wasm" "$component"
  fi
  # Only what is new, so that nobody compiles it again.
  cmp --quiet "$component" "$output/$language.wasm" || cp "$component" "$output/$language.wasm"
}

# Fetching takes as long as building, so both at once.
build javascript npm --version &
javascript=$!
build python python3 -m pip --version &
python=$!
failed=0
wait "$javascript" || failed=1
wait "$python" || failed=1
exit "$failed"
