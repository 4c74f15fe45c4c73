// Package egress has the kernel enforce what a process may reach: it makes a control group for the process, with programs that
// allow the group's sockets what a policy allows and nothing else. The process can do nothing about it, and neither does the end
// of the program that made the group: the kernel keeps programs and policy as long as the group.
//
// # Inside
//
// The programs (egress.c, compiled by "make bpf" to egress.o) are loaded once on a host and pinned, for every group to be
// attached to. They find a group's policy in the map policies, by the group's identifier: a trie in which addresses lead to
// classes and classes to ports (package trie). To set a policy is to make a trie and to put it in the old one's place, so that
// each packet meets one or the other. Only who may use the pins, which are root's, can do that.
//
// A group whose policy is not there sends nothing. What it answers from its published ports (door.go) is apart from its policy, and does
// not change: segments of connections that others have opened, and datagrams to those who have sent some, whom a program for what
// comes in notes.
package egress
