package cli

import (
	"context"
	"strconv"
	"time"

	"github.com/forkvm/forkvm/cmd/forkvm/internal/output"
	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/internal/node"
	"github.com/forkvm/forkvm/vmm"
)

// vmView is a VM as the command line shows it.
type vmView struct {
	Schema   string     `json:"schema"`
	ID       string     `json:"id"`
	Name     string     `json:"name"`
	State    node.State `json:"state"`
	Created  time.Time  `json:"created"`
	Image    string     `json:"image,omitempty"`
	Snapshot string     `json:"snapshot,omitempty"`
	Parent   string     `json:"parent,omitempty"`

	CPUs        int        `json:"cpus"`
	MemoryBytes uint64     `json:"memory_bytes"`
	Disks       []diskView `json:"disks"`

	// PrivateBytes is memory that the VM's process shares with nobody.
	PrivateBytes int64   `json:"private_bytes"`
	ReadyMS      float64 `json:"ready_ms"`

	// Ports are this host's behind which are the VM's.
	Ports []policy.Port `json:"ports,omitempty"`

	Time       machine.Time `json:"time"`
	Generation string       `json:"generation"`
	MachineID  string       `json:"machine_id"`

	PID         int    `json:"pid"`
	Directory   string `json:"directory"`
	ConsoleLog  string `json:"console_log"`
	VsockSocket string `json:"vsock_socket"`

	DiskError *failure.Error `json:"disk_error,omitempty"`
	Exit      *vmm.Exit      `json:"exit,omitempty"`
	Error     *failure.Error `json:"error,omitempty"`
}

type diskView struct {
	Name      string `json:"name"`
	SizeBytes int64  `json:"size_bytes"`
	ReadOnly  bool   `json:"read_only"`
}

const vmSchema = "forkvm/vm/v1"

// viewOf is a VM together with what it is doing.
func viewOf(vm VM, st *node.Status) vmView {
	r, p := vm.Record(), vm.Paths()
	v := vmView{
		Schema: vmSchema, ID: r.ID, Name: r.Name, State: st.State, Created: r.Created.UTC(),
		Image: r.Image, Snapshot: r.Snapshot, Parent: r.Parent,
		CPUs: r.Shape.CPUs, MemoryBytes: r.Shape.MemoryBytes, Disks: []diskView{},
		PrivateBytes: st.PrivateBytes, ReadyMS: r.ReadyMS,
		Time: r.Identity.Time, Generation: r.Identity.Generation, MachineID: r.Identity.MachineID,
		Ports: r.Ports, PID: r.PID, Directory: p.Directory, ConsoleLog: p.Console, VsockSocket: p.Vsock,
		DiskError: st.DiskError, Exit: st.Exit,
	}
	for _, d := range r.Shape.Disks {
		v.Disks = append(v.Disks, diskView{Name: d.Name, SizeBytes: d.Size, ReadOnly: d.ReadOnly})
	}
	return v
}

// look asks a VM what it is doing. One that does not answer is shown all the
// same, with the reason.
func look(ctx context.Context, vm VM) vmView {
	st, err := vm.Status(ctx)
	if err != nil {
		v := viewOf(vm, &node.Status{State: stateUnknown})
		v.Error = explain(err)
		return v
	}
	return viewOf(vm, st)
}

// stateUnknown is the state of a VM whose process does not answer.
const stateUnknown node.State = "unknown"

// origin names what a VM began from.
func (v vmView) origin() string {
	switch {
	case v.Parent != "":
		return "vm " + v.Parent
	case v.Snapshot != "":
		return "snapshot " + v.Snapshot
	case v.Image != "":
		return "image " + v.Image
	}
	return ""
}

// condition is the state, and for an ended VM why.
func (v vmView) condition() string {
	if v.Exit != nil {
		return string(v.State) + " (" + string(v.Exit.Reason) + ")"
	}
	return string(v.State)
}

// vmList is the table of ls.
func (a *app) vmList(views []vmView) output.List[vmView] {
	now := a.Now()
	return output.List[vmView]{
		Header: []string{"ID", "NAME", "STATE", "FROM", "CPUS", "MEMORY", "PRIVATE", "CREATED"},
		Row: func(v vmView) []string {
			private := ""
			if v.PrivateBytes > 0 {
				private = output.Size(v.PrivateBytes)
			}
			return []string{
				v.ID, v.Name, v.condition(), v.origin(), strconv.Itoa(v.CPUs),
				output.Size(int64(v.MemoryBytes)), private, output.Age(now.Sub(v.Created)),
			}
		},
		Name:  func(v vmView) string { return v.ID },
		Items: views,
	}
}
