# Every target sets itself up: what is missing on the machine is installed with apt-get (as root, or with sudo).

VERSION ?= $(shell cat VERSION)
COMMIT  ?= $(shell git rev-parse --short=12 HEAD 2>/dev/null)
LDFLAGS := -s -w -X main.version=$(VERSION) -X main.commit=$(COMMIT)
TOOL    := go tool -modfile=tools/go.mod
SUDO    := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
export PATH := $(PATH):/usr/sbin:/usr/local/go/bin

# Arguments of bench-peers, such as PEERS="-rounds 1 -payloads 200".
PEERS ?=

# The toolchain of what is shipped: it has the standard library's latest corrections. go.mod asks for no more than it needs. RELEASE=local
# takes the one on the machine.
RELEASE ?= go1.27.3

# Faults of make crash, how many (default: each once) and which; length of make soak.
ROUNDS ?=
FAULTS ?=
SOAK   ?= 1h

# Seconds that each fuzz target runs.
FUZZTIME ?= 10s

.PHONY: run build test lint fuzz crash soak vuln docs deb bench bench-peers setup-db setup-race setup-faketime setup-promtool setup-systemd setup-peers clean

## run: serve with a private database and files below ./data
run: build setup-db
	./bin/tidings serve

## build: one static binary, bin/tidings
build: setup-go
	GOTOOLCHAIN=$(RELEASE) CGO_ENABLED=0 go build -trimpath -ldflags '$(LDFLAGS)' -o bin/tidings .

## test: all tests, against a real database, with the race detector
test: setup-go setup-db setup-race setup-faketime setup-promtool setup-systemd
	go vet ./...
	go test -race -timeout 15m ./...

## lint: formatting, vet, staticcheck
lint: setup-go
	@out=$$($(TOOL) gofumpt -l .); [ -z "$$out" ] || { echo "not formatted with gofumpt:"; echo "$$out"; exit 1; }
	go vet ./...
	$(TOOL) staticcheck ./...

## fuzz: every fuzz target for FUZZTIME
fuzz: setup-go
	go test ./server -run '^$$' -fuzz FuzzDecode -fuzztime $(FUZZTIME)
	go test ./internal/render -run '^$$' -fuzz FuzzRender -fuzztime $(FUZZTIME)
	go test ./sender -run '^$$' -fuzz FuzzHeader -fuzztime $(FUZZTIME)

## crash: faults one after the other against two nodes and their database; ROUNDS and FAULTS as in crash/
crash: setup-go setup-db setup-faketime
	CRASH_ROUNDS=$(ROUNDS) CRASH_FAULTS=$(FAULTS) go test -tags crash -count 1 -timeout 0 -v -run 'TestCrash|TestDiskFull' ./crash

## soak: an hour at half speed (SOAK=10m for another time): nothing may grow
soak: setup-go setup-db setup-faketime
	SOAK=$(SOAK) go test -tags crash -count 1 -timeout 0 -v -run TestSoak ./crash

## vuln: known vulnerabilities in what is built and shipped, by a database that comes as a Go module
vuln: build
	cd tools/vuln && GOTOOLCHAIN=$(RELEASE) go build -o ../../bin/ golang.org/x/vuln/cmd/govulncheck golang.org/x/vulndb/cmd/indexdb
	bin/indexdb -vulns "$$(cd tools/vuln && go list -m -f '{{.Dir}}' golang.org/x/vulndb)/data/osv" -out bin/vulndb
	GOTOOLCHAIN=$(RELEASE) bin/govulncheck -db "file://$(CURDIR)/bin/vulndb" ./...
	GOTOOLCHAIN=$(RELEASE) CGO_ENABLED=0 go build -trimpath -o bin/tidings-symbols . # stripped, it could not be told what is in it
	bin/govulncheck -db "file://$(CURDIR)/bin/vulndb" -mode binary bin/tidings-symbols

## docs: docs/errors.md, from the code's own table
docs: setup-go setup-db
	UPDATE_DOCS=1 go test ./server -run TestErrorCodes

## deb: a package for Debian and Ubuntu, with unit, manual and completions: bin/tidings_<version>_<arch>.deb
deb: build
	rm -rf bin/package && mkdir -p bin/package/man
	./bin/tidings man --dir bin/package/man
	./bin/tidings completion bash > bin/package/tidings.bash
	./bin/tidings completion zsh > bin/package/_tidings
	./bin/tidings completion fish > bin/package/tidings.fish
	cd tools/nfpm && go build -o ../../bin/nfpm github.com/goreleaser/nfpm/v2/cmd/nfpm
	VERSION=$(VERSION) ARCH=$$(go env GOARCH) bin/nfpm package -f deploy/nfpm.yaml -p deb -t bin/

## bench: measure this machine; see docs/benchmarks.md
bench: build setup-db
	./bin/tidings bench

## bench-peers: the same work on river, asynq and beanstalkd, in one run with Tidings; see docs/benchmarks.md
bench-peers: build setup-db setup-peers
	cd bench/peers && go build -o ../../bin/peers .
	./bin/peers $(PEERS)

setup-peers:
	@command -v redis-server >/dev/null && command -v beanstalkd >/dev/null && ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || { \
		echo "installing postgresql, redis-server and beanstalkd"; \
		$(SUDO) apt-get update -qq && DEBIAN_FRONTEND=noninteractive $(SUDO) apt-get install -y -qq --no-install-recommends postgresql redis-server beanstalkd; }

.PHONY: setup-go
setup-go:
	@command -v go >/dev/null || { echo "Go is missing: install 1.26 or later from https://go.dev/dl/"; exit 1; }

setup-db:
	@command -v mariadbd >/dev/null || command -v mysqld >/dev/null || { \
		echo "installing mariadb-server-core and mariadb-client-core"; \
		$(SUDO) apt-get update -qq && DEBIAN_FRONTEND=noninteractive $(SUDO) apt-get install -y -qq --no-install-recommends mariadb-server-core mariadb-client-core; }

# The race detector needs a C compiler.
setup-race:
	@command -v gcc >/dev/null || { \
		echo "installing gcc"; \
		$(SUDO) apt-get update -qq && DEBIAN_FRONTEND=noninteractive $(SUDO) apt-get install -y -qq --no-install-recommends gcc libc6-dev; }

# A database whose clock is an hour off, or in another time zone, needs a library that tells it another time.
setup-faketime:
	@ls /usr/lib/*/faketime/libfaketimeMT.so.1 >/dev/null 2>&1 || { \
		echo "installing libfaketime"; \
		$(SUDO) apt-get update -qq && DEBIAN_FRONTEND=noninteractive $(SUDO) apt-get install -y -qq --no-install-recommends libfaketime; }

# promtool checks the alert rules. It comes with Debian's prometheus, which would also run a server: so it is taken out of the package.
setup-promtool:
	@[ -x bin/promtool ] || command -v promtool >/dev/null || { \
		echo "fetching promtool"; set -e; dir=$$(mktemp -d); chmod 755 $$dir; \
		(cd $$dir && { apt-get download -qq prometheus || { $(SUDO) apt-get update -qq && apt-get download -qq prometheus; }; } && dpkg-deb -x prometheus_*.deb .); \
		mkdir -p bin; mv $$dir/usr/bin/promtool bin/promtool; rm -rf $$dir; }

# systemd-analyze checks the unit.
setup-systemd:
	@command -v systemd-analyze >/dev/null || { \
		echo "installing systemd"; \
		$(SUDO) apt-get update -qq && DEBIAN_FRONTEND=noninteractive $(SUDO) apt-get install -y -qq --no-install-recommends systemd; }

clean:
	rm -rf bin bench/out
