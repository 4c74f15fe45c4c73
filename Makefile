# forkvm: 'make help' lists what there is.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# Our programs are static and carry no trace of where they were built.
export CGO_ENABLED := 0
GOBUILD := go build -trimpath -buildvcs=false -ldflags='-s -w'

TOOLS := .cache/bin
LAB := $(TOOLS)/lab

.PHONY: help build test quickstart lab bench fuzz lint generate fmt clean deps lab-tool soak

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## build the programs into bin/
	@mkdir -p bin
	$(GOBUILD) -o bin/ ./cmd/...

lab-tool:
	@mkdir -p $(TOOLS)
	@$(GOBUILD) -o $(LAB) ./internal/lab/cmd/lab

lab: build lab-tool ## run CMD='…' in the lab machine, which has a real /dev/kvm (docs/lab.md)
	@$(LAB) run $(if $(CMD),"$$CMD",'echo "usage: make lab CMD=…"; exit 2')
export CMD
