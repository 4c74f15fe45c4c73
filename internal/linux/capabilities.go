package linux

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Capabilities are those of a thread that are in force, capabilities(7).
type Capabilities [2]unix.CapUserData

// OwnCapabilities returns those of the calling thread.
func OwnCapabilities() (c Capabilities, err error) {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	if err := unix.Capget(&header, &c[0]); err != nil {
		return c, fmt.Errorf("read capabilities: %w", err)
	}
	return c, nil
}

// Has tells whether one is in force, by its number (unix.CAP_…).
func (c *Capabilities) Has(capability uint) bool {
	return c[capability/32].Effective&(1<<(capability%32)) != 0
}

// FirstFreePort is the first port at which programs without privileges may listen, in the caller's network namespace.
func FirstFreePort() int {
	const usual = 1024
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_unprivileged_port_start")
	if err != nil {
		return usual
	}
	first, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return usual
	}
	return first
}
