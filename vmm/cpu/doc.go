// Package cpu decides what a virtual processor looks like, how it starts, and
// in which order its state is saved and restored.
//
// A [Policy] belongs to one machine. It makes the CPUID of each vCPU from what
// the host supports, with a topology that fits the number of vCPUs and without
// features whose state a snapshot could not carry. [State] is a saved vCPU as
// plain data with a versioned binary form; it may come from anywhere and is
// checked before a vCPU gets it, in the end by KVM itself.
//
// Sections named in comments are those of the Intel SDM and the AMD APM.
package cpu
