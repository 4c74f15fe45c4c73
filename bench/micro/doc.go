// Package micro has benchmarks by the wall clock, with a guest of 40 bytes: what
// packages vmm and memory cost alone, without process, devices, guest agent or
// kernel. They run on any /dev/kvm, also on one that cannot run Linux:
//
//	make bench-micro
//
// Their figures belong to the machine that they were taken on, unlike those of
// package bench.
package micro
