// Package lab boots the lab machine: a stock Debian kernel under QEMU's software emulation of an AMD processor with
// nested paging, so that the kernel's own kvm-amd module gives a real /dev/kvm wherever QEMU runs, unprivileged.
//
//	host  →  QEMU, emulated  →  lab machine: Debian kernel, kvm-amd  →  guests of what is under test
//
// A Machine is started fresh for each use, runs commands one after the other or side by side, and leaves nothing behind.
// Standard output and error of a command arrive live and apart; its exit status is returned. When the machine itself
// fails, the error is a *DeathError with the reason and the console's last lines.
//
// What does not change between machines is kept in a cache directory: the kernel package as fetched and unpacked, the
// initramfs, and disk images of the files that are given to the machine, each under a key made of its contents.
//
// The first program of the machine is cmd/labinit; package wire is what the two sides say to each other.
package lab
