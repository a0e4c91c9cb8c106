#!/bin/sh
# The service is not started by itself: it needs to be told where its database is, or to be allowed one of its own.
[ -d /run/systemd/system ] && systemctl daemon-reload || true
[ "$2" ] && [ -d /run/systemd/system ] && systemctl try-restart tidings.service || true
