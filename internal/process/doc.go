// Package process is the border between a VM process and the programs that
// start and steer it. Each VM has a process of its own, so that a crash, an
// exhausted heap or a hostile guest ends one VM.
//
// A VM process begins with nothing but a packet socket. The first message on it,
// prepare, carries what every VM has: its sockets, its console log, and KVM, of
// which the process makes the virtual machine. The second, start, carries what
// this one is made of. Both bring descriptors, never paths, so that the process
// needs no access to any file system. It answers when the guest is ready, and from
// then on listens at its control socket.
//
// Whoever prepares processes ahead of time sends detach instead of start. Such a
// process waits at its control socket, and who connects there first sends start.
//
// Messages are JSON in packets of their own (SOCK_SEQPACKET); descriptors ride
// on them, and the JSON names each by its index.
package process
