#!/bin/sh
# Prints the path of a Python interpreter that works: the first of the given versions that is here, by default the reference (3.12), then
# whatever python3 is if it is at least 3.11, then 3.11. Exits with 1 when there is none.
#
# A name on PATH is no proof: version managers put launchers there for interpreters that are not active, and those fail when run. Each
# candidate is therefore run, and pyenv's own folder is looked into as well.
set -u

# works CANDIDATE VERSION: does it run, and is it of that version (empty: 3.11 or newer)?
works() {
  "$1" -c "
import sys
wanted = '$2'
sys.exit(not ('%d.%d' % sys.version_info[:2] == wanted if wanted else sys.version_info >= (3, 11)))" >/dev/null 2>&1
}

# try VERSION (empty: any python3)
try() {
  name=python${1:-3}
  for candidate in "$(command -v "$name")" "/usr/bin/$name" "/usr/local/bin/$name" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/"$name"; do
    if [ -x "$candidate" ] && works "$candidate" "$1"; then
      # A launcher stands for another file; name that one, so that what is used does not change with the folder.
      "$candidate" -c 'import sys; print(sys.executable)'
      exit 0
    fi
  done
}

if [ $# -gt 0 ]; then
  for version in "$@"; do try "$version"; done
else
  try 3.12
  try ""
  try 3.11
fi
exit 1
