#!/bin/sh
[ "$1" = remove ] && [ -d /run/systemd/system ] && systemctl disable --now tidings.service || true
