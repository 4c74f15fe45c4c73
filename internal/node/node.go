package node

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"

	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/judge"
	"github.com/forkvm/forkvm/snapshot/store"
)

// Config says where a node keeps what. All fields but NetworkCommand are required.
type Config struct {
	// DataDir holds images and snapshots and the disks of running VMs.
	DataDir string
	// RunDir holds what belongs to running VMs and need not survive a reboot. It
	// is short: socket paths below it must fit into 107 bytes.
	RunDir string
	// Command starts a VM process: the program, and arguments that make it call
	// process.Serve.
	Command []string
	// NetworkCommand is Command for a VM with a network card: a program that makes networks. Without it there are none.
	NetworkCommand []string
	// Version is recorded in snapshots.
	Version string
}

// Node is the VMs, snapshots and images of one machine. Its methods may be
// called from any goroutine and any number of processes.
type Node struct {
	config  Config
	store   *store.Store
	program string // which build of the program Command is
	// answered is set once it is known that a guest has answered, see proven.
	answered atomic.Bool

	// baselines are of the snapshots that have been judged with.
	baselines judge.Baselines

	admission sync.Mutex
	admitted  uint64 // bytes that VMs which are being made are sure to take
}

// socketRoom is what a socket's path needs behind the run directory:
// "/vms/", the identifier, "/", and the longest name of a socket with a port.
const socketRoom = len("/vms/") + 2*idBytes + len("/vsock.sock_4294967295")

// maxSocketPath is the longest path of a Unix socket (sun_path without its end).
const maxSocketPath = 107

// Open makes the node's directories if needed.
func Open(c Config) (*Node, error) {
	if len(c.RunDir)+socketRoom > maxSocketPath {
		return nil, failure.New(failure.InvalidArgument, "run directory %s: its path is %d bytes too long for the sockets below it",
			c.RunDir, len(c.RunDir)+socketRoom-maxSocketPath)
	}
	n := &Node{config: c}
	n.baselines.Dir = filepath.Join(c.DataDir, "cache", "baselines")
	for _, dir := range []string{n.vmsDir(), n.waitingDir(), n.namesDir(), n.groupsDir(), n.tmpDir()} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, failure.As(failure.Internal, fmt.Errorf("open node: %w", err))
		}
	}
	st, err := store.Open(c.DataDir)
	if err != nil {
		return nil, failure.As(failure.Internal, fmt.Errorf("open node: %w", err))
	}
	n.store = st
	n.program = programID(c.Command[0])
	return n, nil
}

// Close gives the node's descriptors back. VMs go on.
func (n *Node) Close() error { return n.store.Close() }

func (n *Node) vmsDir() string     { return filepath.Join(n.config.RunDir, "vms") }
func (n *Node) waitingDir() string { return filepath.Join(n.config.RunDir, "waiting") }
func (n *Node) namesDir() string   { return filepath.Join(n.config.RunDir, "names") }
func (n *Node) tmpDir() string     { return filepath.Join(n.config.DataDir, "tmp") }
