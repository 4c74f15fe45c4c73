# forkvm: 'make help' lists what there is.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# Our programs are static and carry no trace of where they were built.
export CGO_ENABLED := 0
GOBUILD := go build -trimpath -buildvcs=false -ldflags='-s -w'

# Programs of the project's own making that are not shipped.
TOOLS := .cache/bin
LAB := $(TOOLS)/lab
# Its last element is its name below /in.
GUEST := .cache/lab/guest

FUZZTIME ?= 5s
PKG ?= ./...

.PHONY: help build quickstart test test-host test-lab test-long test-task soak test-guest lab lab-tool bench bench-clones bench-compare bench-micro bench-go fuzz lint bpf generate fmt deps clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## build the programs into bin/
	@mkdir -p bin
	$(GOBUILD) -o bin/ ./cmd/...

test: lint test-host test-lab fuzz ## lint, all tests here and in the lab, and every fuzz target for FUZZTIME (5s)

test-host: ## the tests that run on this machine; PKG=./path/... for some
	go test $(PKG)

test-lab: build lab-tool test-guest ## the tests that need KVM, in the lab; PKG=./path/... RUN=regexp for some, V=1 to see all
	LAB_ICOUNT=1 REQUIRE=files LAB_IN=$(GUEST) $(LAB) test -short -timeout 25m $(if $(V),-v) $(if $(RUN),-run '$(RUN)') $(PKG)

test-long: build lab-tool test-guest ## the same with the tests that take minutes each; the whole of it takes hours
	LAB_ICOUNT=1 REQUIRE=files LAB_IN=$(GUEST) LAB_TIMEOUT=6h $(LAB) test -timeout 2h $(if $(V),-v) $(if $(RUN),-run '$(RUN)') $(PKG)

test-task: test-guest ## real software, Debian with PostgreSQL, git and pytest: judge rollouts of a task, use a network; builds the quickstart's environment
	environment=$$(scripts/environment) && mirror=$$(scripts/mirror) && \
	LAB_ICOUNT=1 REQUIRE=files,environment LAB_IN=$(GUEST),$$environment,$$mirror,quickstart/task LAB_TIMEOUT=3h \
		$(LAB) test -timeout 2h $(if $(V),-v) -run '$(or $(RUN),TestReal)' ./cmd/forkvm

soak: build lab-tool test-guest ## the long version of the snapshot tests: SOAK_ROUNDS=200 rounds, SOAK_SEED to repeat a run
	LAB_ICOUNT=1 SOAK_ROUNDS=$${SOAK_ROUNDS:-200} REQUIRE=files LAB_IN=$(GUEST) LAB_TIMEOUT=6h $(LAB) test -v -timeout 6h -run TestSoak .

test-guest: # what tests boot; see internal/testkit
	@go run ./internal/lab/cmd/testguest $(GUEST)

quickstart: ## the main job on a real environment: boot, snapshot, clone, fork, judge (here or in the lab)
	@scripts/quickstart

lab: build lab-tool ## run CMD='…' in the lab machine, which has a real /dev/kvm (docs/lab.md)
	@test -n "$$CMD" || { echo "usage: make lab CMD='…'" >&2; exit 2; }
	@$(LAB) run "$$CMD"
export CMD

lab-tool:
	@mkdir -p $(TOOLS)
	@$(GOBUILD) -o $(LAB) ./internal/lab/cmd/lab

bench: build lab-tool test-guest ## measure forkvm end to end, in the lab and in counted time; ONLY=regexp for some of it
	@scripts/bench

bench-clones: build lab-tool test-guest ## start CLONES=1000 clones of a small guest in the lab, or as many as fit
	@BENCHFLAGS='-clones $(or $(CLONES),1000)' scripts/bench

bench-compare: ## measure REF=git-ref and this tree, and print what differs; ONLY=regexp for some of it
	@scripts/bench-compare '$(REF)'

bench-micro: ## wall-clock benchmarks with a tiny guest, on this machine's /dev/kvm, whatever it is
	go test -run '^$$' -bench . -benchtime 1s ./bench/micro

bench-go: build lab-tool test-guest ## the Go benchmarks that need KVM, in counted time; PKG=./path/... for some
	LAB_ICOUNT=1 REQUIRE=files LAB_IN=$(GUEST) $(LAB) test -bench . -timeout 30m $(PKG)

fuzz: ## run every fuzz target for FUZZTIME; PKG=./path/... for some
	go run ./internal/testkit/cmd/fuzz -time $(FUZZTIME) $(PKG)

lint: ## gofmt, go vet, staticcheck
	@scripts/check-format
	go vet ./...
	go tool staticcheck ./...

fmt: ## format the sources
	gofmt -w $$(git ls-files --cached --others --exclude-standard '*.go')

bpf: ## compile the programs for the kernel anew (Debian: clang llvm libbpf-dev)
	go run ./internal/egress/cmd/compile internal/egress egress
	go run ./internal/egress/cmd/compile internal/tapnet tap

generate: ## make generated sources anew
	go generate ./...

deps: ## install the Debian packages that are missing, or print the command
	@scripts/deps

clean: ## remove what the other targets made, but not the cache of the lab
	rm -rf bin lab bench/out .cache
