#!/bin/sh
# Finds the browser that tests the page: CHROMIUM, or one in PATH. Installs Debian's if there is none and we are root.
for name in "$CHROMIUM" chromium chromium-browser google-chrome google-chrome-stable chrome microsoft-edge; do
    command -v "$name" >/dev/null 2>&1 && exit 0
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    printf '\033[1m==> Installing chromium, which tests the page\033[0m\n'
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive exec apt-get install -y -qq --no-install-recommends chromium >/dev/null
fi
echo "make: the tests of the page need Chromium or Chrome: install it (Debian: apt-get install chromium; Ubuntu:" >&2
echo "snap install chromium; macOS: brew install --cask chromium), or say make CHROMIUM=/path/to/it" >&2
exit 1
