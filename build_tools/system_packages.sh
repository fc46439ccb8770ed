#!/bin/sh
# Installs the Debian or Ubuntu packages that are missing for a task, and only those; does nothing when all are here.
#
#   system_packages.sh build <python>   a C++ compiler, and what the interpreter needs to make an environment and to build extensions;
#                                       where that asks nobody for a password, libfabric too, without which there is no network between hosts
#   system_packages.sh test             GoogleTest, libfabric, ip (network namespaces), ccache, Bazel
set -eu

# apt serves one at a time.
if [ -z "${HOCCL_PACKAGES_LOCKED:-}" ] && command -v flock >/dev/null; then
  exec env HOCCL_PACKAGES_LOCKED=1 flock "$0" "$0" "$@"
fi

missing=""
wished=""
need() { missing="$missing $1"; }
wish() { wished="$wished $1"; }
has_header() { printf '#include <%s>\n' "$1" | c++ -E -x c++ - >/dev/null 2>&1; }

case "$1" in
  build)
    command -v c++ >/dev/null || need g++
    # Debian splits these two off the interpreter.
    version=$("$2" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
    "$2" -c 'import ensurepip, venv' 2>/dev/null || need "$version-venv"
    "$2" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
      need "$version-dev"
    { command -v c++ >/dev/null && has_header rdma/fabric.h; } || wish libfabric-dev
    command -v pkg-config >/dev/null || wish pkg-config
    ;;
  test)
    has_header gtest/gtest.h || need libgtest-dev
    has_header rdma/fabric.h || need libfabric-dev
    command -v pkg-config >/dev/null || need pkg-config
    command -v git >/dev/null || need git
    PATH="$PATH:/usr/sbin:/sbin" command -v ip >/dev/null || need iproute2
    command -v ccache >/dev/null || need ccache
    command -v bazel >/dev/null || need bazel-bootstrap
    ;;
  *)
    echo "usage: $0 build <python> | test" >&2
    exit 2
    ;;
esac

[ -n "$missing$wished" ] || exit 0
if ! command -v apt-get >/dev/null; then
  [ -n "$missing" ] || exit 0
  echo "These packages of Debian, or what corresponds to them here, are missing:$missing" >&2
  exit 1
fi
as_root=""
[ "$(id -u)" = 0 ] || as_root=sudo
install() {
  # shellcheck disable=SC2086  # lists of words
  { $as_root apt-get update -qq && $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $1 >/dev/null; }
}
if [ -n "$missing" ]; then
  echo "Installing system packages:$missing"
  install "$missing"
fi
if [ -n "$wished" ] && { [ -z "$as_root" ] || sudo -n true 2>/dev/null; }; then
  echo "Installing system packages:$wished"
  install "$wished" || echo "They can't be installed: hoccl_jax will work on one host only."
fi
