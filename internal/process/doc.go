// Package process is the border between a VM process and the programs that
// start and steer it. Each VM has a process of its own, so that a crash, an
// exhausted heap or a hostile guest ends one VM.
//
// A VM process begins with nothing but a packet socket. The first message on it,
// start, carries what the machine is made of: descriptors, never paths, so that
// the process needs no access to any file system. It answers when the guest is
// ready, and from then on listens at a control socket that it was handed. Who
// starts a process ahead of time just sends its start message later.
//
// Messages are JSON in packets of their own (SOCK_SEQPACKET); descriptors ride
// on them, and the JSON names each by its index.
package process
