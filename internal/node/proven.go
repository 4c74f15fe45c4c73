package node

import (
	"os"
	"path/filepath"
)

// Whether this host's KVM runs guests is proven when one has answered. The file that
// says so is for other processes; like all of the run directory it does not survive
// a reboot.

func (n *Node) provenPath() string { return filepath.Join(n.config.RunDir, "kvm-proven") }

// proven says whether a guest has ever answered on this host.
func (n *Node) proven() bool {
	if !n.answered.Load() {
		_, err := os.Stat(n.provenPath())
		n.answered.Store(err == nil)
	}
	return n.answered.Load()
}

// prove notes that a guest has answered. If the file cannot be made, a slow start
// costs a needless look at KVM.
func (n *Node) prove() {
	if !n.proven() {
		_ = os.WriteFile(n.provenPath(), nil, 0o600)
		n.answered.Store(true)
	}
}
