#!/usr/bin/env bash
# Makes the image that tests/deploy/test_container.py builds on where no registry can be reached: Debian from its package
# archive. Needs root, debootstrap and buildah. Does nothing where the image is there already.
set -euo pipefail
IMAGE=localhost/pellucid-test-base:bookworm
if buildah inspect --type image "$IMAGE" >/dev/null 2>&1; then exit 0; fi
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
debootstrap --variant=minbase bookworm "$root" >"$root.log" 2>&1 || { tail -n 20 "$root.log" >&2; exit 1; }
rm -rf "$root.log" "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
container=$(buildah from scratch)
buildah add --quiet "$container" "$root" / >/dev/null
buildah config --cmd /bin/sh "$container"
buildah commit --quiet --rm "$container" "$IMAGE" >/dev/null
echo "made $IMAGE"
