// Package node keeps the VMs, snapshots and images of one machine. It has no
// process of its own: each VM is a process, its state is a directory, and
// whoever opens a Node sees the same VMs.
//
// # Directories
//
//	<data>/images/<name>/     what a cold boot needs
//	<data>/snapshots/<name>/  frozen VMs
//	<data>/tmp/               unnamed files: the top layers of running disks
//	<run>/vms/<id>/           one VM: vm.json, control socket, logs
//	<run>/vms/<id>/own/       all that the VM's process reaches: vsock socket, exit report
//	<run>/names/<name>        symbolic link to the VM of that name
//
// A VM is alive when the process on its record is: the same number with the same
// start time since the same boot of the host. A bare number could be anybody's.
package node
