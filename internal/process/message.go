package process

import (
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/internal/failure"
	"github.com/forkvm/forkvm/internal/journal"
	"github.com/forkvm/forkvm/internal/linux"
	"github.com/forkvm/forkvm/internal/machine"
	"github.com/forkvm/forkvm/snapshot"
	"github.com/forkvm/forkvm/snapshot/layer"
	"github.com/forkvm/forkvm/snapshot/store"
	"github.com/forkvm/forkvm/vmm"
)

// Operations of a VM process.
const (
	opPrepare    = "prepare"  // the first message of the launch socket
	opDetach     = "detach"   // the second, if the start is to come from somebody else
	opRehearse   = "rehearse" // detach, behind a life that is thrown away
	opStart      = "start"    // what a prepared process waits for
	opStatus     = "status"
	opPause      = "pause"
	opResume     = "resume"
	opCheckpoint = "checkpoint"
	opCompact    = "compact"
	opReset      = "reset"
	opNetwork    = "network"
	opRefusals   = "refusals"
	opNoteUse    = "note-use"
	opKill       = "kill"
)

type request struct {
	Op      string       `json:"op"`
	Prepare *prepareForm `json:"prepare,omitempty"`
	Start   *startForm   `json:"start,omitempty"`
	// Tops are the new top layers of a checkpoint or a reset, those behind a rehearsal, or
	// what disks are compacted into, by disk; -1 for a read-only one.
	Tops  []int      `json:"tops,omitempty"`
	Reset *resetForm `json:"reset,omitempty"`
	// Policy is the new one of the network, nil to hear what that has seen.
	Policy *policy.Policy `json:"policy,omitempty"`
}

// resetForm is machine.Target as it travels, without the tops.
type resetForm struct {
	Checkpoint   *checkpointForm  `json:"checkpoint,omitempty"`
	Identity     machine.Identity `json:"identity"`
	ReadyTimeout time.Duration    `json:"ready_timeout_ns"`
}

type response struct {
	Error      *failure.Error         `json:"error,omitempty"`
	Started    *Started               `json:"started,omitempty"`
	Status     *Status                `json:"status,omitempty"`
	Checkpoint *checkpointForm        `json:"checkpoint,omitempty"`
	Network    *machine.NetworkStatus `json:"network,omitempty"`
	Refused    *journal.Refused       `json:"refused,omitempty"`
	// Reset is how long a reset took, from the request to the guest agent's
	// confirmation.
	Reset time.Duration `json:"reset_ns,omitempty"`
}

// Started is the answer to a start.
type Started struct {
	// Ready is the time from the start message to the guest agent's answer, or
	// to the first instruction of a guest without one.
	Ready time.Duration `json:"ready_ns"`
	// Timeline is of the whole launch: the phases of the launcher and of the VM
	// process on one clock.
	Timeline machine.Timeline `json:"timeline"`

	launcher *conn // kept open by an attached launch
}

// Phases of a launch; those of package machine come between layers and answer.
const (
	phaseProcess = "process" // from the call of Launch to the first line of Serve
	phaseMessage = "message" // until the start message is read
	phaseLayers  = "layers"  // state and layers of the message opened and checked
	phaseAnswer  = "answer"  // until the launcher has the answer
)

// State is what a VM is doing.
type State string

const (
	Running State = "running"
	Paused  State = "paused"
	Ended   State = "ended"
)

// Status is what a VM process says of itself.
type Status struct {
	State State     `json:"state"`
	Exit  *vmm.Exit `json:"exit,omitempty"`
	// Generation is what the guest has confirmed last.
	Generation string `json:"generation,omitempty"`
	// DiskError is the last error of the host's storage that the guest ran into.
	DiskError *failure.Error `json:"disk_error,omitempty"`
}

// prepareForm is what a VM process gets ahead of its start. Files are indices into
// the descriptors of the message.
type prepareForm struct {
	Control   int `json:"control"`
	Vsock     int `json:"vsock"`
	Directory int `json:"directory"`
	Console   int `json:"console"`
	KVM       int `json:"kvm"`
	CPUs      int `json:"cpus"`
	// Tap is nil for a process without a TAP device.
	Tap *tapForm `json:"tap,omitempty"`
	// Confined: the process gives up what it does not need before its guest runs.
	Confined bool `json:"confined,omitempty"`
}

// startForm is the rest of machine.Config, and the identity, as they travel.
type startForm struct {
	Kernel int `json:"kernel"`
	Initrd int `json:"initrd"`
	// Checkpoint is nil for what the process has rehearsed.
	Checkpoint *checkpointForm `json:"checkpoint,omitempty"`
	// WorkingSet is what a process that has rehearsed makes ready beside that; nil if nothing.
	WorkingSet *workingSetForm  `json:"working_set,omitempty"`
	Tops       []int            `json:"tops"`
	Identity   machine.Identity `json:"identity"`
	// Network is nil for a machine without a card.
	Network *NetworkConfig `json:"network,omitempty"`
	// Tap is nil for a network that is this process's.
	Tap *TapConfig `json:"tap,omitempty"`
	// ReadyTimeout bounds the wait for the guest agent.
	ReadyTimeout time.Duration `json:"ready_timeout_ns"`
	// Attached: the VM ends when the launch socket is closed.
	Attached bool `json:"attached,omitempty"`
}

// NetworkConfig says what a guest's network is, beside what the card is.
type NetworkConfig struct {
	Policy policy.Policy `json:"policy"`
	// Resolvers are asked for the names that the guest asks for.
	Resolvers []netip.AddrPort `json:"resolvers,omitempty"`
	// Ports are the host's behind which are the guest's.
	Ports []policy.Port `json:"ports,omitempty"`
}

type layerForm struct {
	File int      `json:"file"`
	Raw  *rawForm `json:"raw,omitempty"`
}

// rawForm is what is known about a raw image. Without its checksum a snapshot
// would have to read all of it.
type rawForm struct {
	ID       string `json:"id"`
	Checksum string `json:"checksum,omitempty"`
}

// checkpointForm is machine.Checkpoint as it travels.
type checkpointForm struct {
	Shape  machine.Shape `json:"shape"`
	State  int           `json:"state"`
	Memory []layerForm   `json:"memory,omitempty"`
	Disks  [][]layerForm `json:"disks,omitempty"`
	// WorkingSet is nil if there is none.
	WorkingSet *workingSetForm `json:"working_set,omitempty"`
	// HugePages is nil if there are none.
	HugePages   *hugePagesForm `json:"huge_pages,omitempty"`
	Pause       time.Duration  `json:"pause_ns"`
	Compactable bool           `json:"compactable,omitempty"`
}

// hugePagesForm is machine.HugePages as it travels.
type hugePagesForm struct {
	File  int `json:"file"`
	Above int `json:"above"`
}

// workingSetForm is store.WorkingSet as it travels.
type workingSetForm struct {
	File     int    `json:"file"`
	Snapshot string `json:"snapshot"`
	Wanted   bool   `json:"wanted,omitempty"`
	Late     bool   `json:"late,omitempty"`
}

// table collects the files of a message that is sent.
type table struct{ files []*os.File }

// add returns the index of a file, -1 for none.
func (t *table) add(f *os.File) int {
	if f == nil {
		return -1
	}
	t.files = append(t.files, f)
	return len(t.files) - 1
}

func (t *table) addAll(files []*os.File) []int {
	indices := []int{}
	for _, f := range files {
		indices = append(indices, t.add(f))
	}
	return indices
}

func (t *table) addLayers(layers []*layer.Layer) []layerForm {
	forms := make([]layerForm, len(layers))
	for i, l := range layers {
		forms[i] = layerForm{File: t.add(l.File())}
		if l.Raw() {
			forms[i].Raw = &rawForm{ID: l.ID(), Checksum: l.KnownChecksum()}
		}
	}
	return forms
}

// addCheckpoint adds a checkpoint's files. The state travels in a memory file,
// which the caller closes after sending; nil if the checkpoint has no state,
// as for a cold boot.
func (t *table) addCheckpoint(c *machine.Checkpoint) (checkpointForm, *os.File, error) {
	form := checkpointForm{Shape: c.Shape, State: -1, Memory: t.addLayers(c.Memory), Pause: c.Pause, Compactable: c.Compactable}
	for _, stack := range c.Disks {
		form.Disks = append(form.Disks, t.addLayers(stack))
	}
	form.WorkingSet = t.addWorkingSet(c.WorkingSet)
	if h := c.HugePages; h != nil {
		form.HugePages = &hugePagesForm{File: t.add(h.File), Above: h.Above}
	}
	if c.State == nil {
		return form, nil, nil
	}
	data, err := c.State.Encode()
	if err != nil {
		return form, nil, err
	}
	f, err := linux.MemoryFile("state")
	if err != nil {
		return form, nil, err
	}
	if _, err := f.Write(data); err != nil {
		f.Close()
		return form, nil, fmt.Errorf("send state: %w", err)
	}
	form.State = t.add(f)
	return form, f, nil
}

func (t *table) addWorkingSet(w *store.WorkingSet) *workingSetForm {
	if w == nil {
		return nil
	}
	return &workingSetForm{File: t.add(w.File), Snapshot: w.Snapshot, Wanted: w.Wanted, Late: w.Late}
}

// claims hands out the files of a message that was received, each once, and
// closes the rest.
type claims struct {
	files []*os.File
	// trusted says that the sender has checked what it sends: a VM process
	// believes its launcher, but nobody believes a VM process.
	trusted bool
	err     error // of the first claim that failed
}

// take returns the file of an index, nil for -1.
func (c *claims) take(index int) *os.File {
	if index == -1 {
		return nil
	}
	if index < 0 || index >= len(c.files) || c.files[index] == nil {
		if c.err == nil {
			c.err = fmt.Errorf("message names descriptor %d, which it does not carry", index)
		}
		return nil
	}
	f := c.files[index]
	c.files[index] = nil
	return f
}

func (c *claims) takeAll(indices []int) []*os.File {
	var files []*os.File
	for _, index := range indices {
		files = append(files, c.take(index))
	}
	return files
}

// takeLayers opens the layers of a stack. A file that is none is an error like a
// descriptor that is missing.
func (c *claims) takeLayers(forms []layerForm) []*layer.Layer {
	layers := make([]*layer.Layer, 0, len(forms))
	for _, form := range forms {
		f := c.take(form.File)
		if f == nil {
			continue
		}
		l, err := c.openLayer(f, form)
		if err != nil {
			f.Close()
			if c.err == nil {
				c.err = err
			}
			continue
		}
		layers = append(layers, l)
	}
	return layers
}

func (c *claims) openLayer(f *os.File, form layerForm) (*layer.Layer, error) {
	if form.Raw == nil {
		return layer.Open(f)
	}
	return layer.OpenRawWith(f, layer.RawOptions{ID: form.Raw.ID, Checksum: form.Raw.Checksum, Checked: c.trusted})
}

// takeCheckpoint is the receiving end of addCheckpoint.
func (c *claims) takeCheckpoint(form checkpointForm) (*machine.Checkpoint, error) {
	cp := &machine.Checkpoint{Shape: form.Shape, Memory: c.takeLayers(form.Memory), Pause: form.Pause, Compactable: form.Compactable}
	for _, stack := range form.Disks {
		cp.Disks = append(cp.Disks, c.takeLayers(stack))
	}
	cp.WorkingSet = c.takeWorkingSet(form.WorkingSet)
	cp.HugePages = c.takeHugePages(form.HugePages)
	state := c.take(form.State)
	if c.err != nil || state == nil {
		return cp, c.err
	}
	defer state.Close()
	info, err := state.Stat()
	if err != nil {
		return cp, err
	}
	cp.State, err = snapshot.ReadState(state, info.Size())
	return cp, err
}

func (c *claims) takeWorkingSet(form *workingSetForm) *store.WorkingSet {
	if form == nil {
		return nil
	}
	f := c.take(form.File)
	if f == nil {
		return nil
	}
	return &store.WorkingSet{File: f, Snapshot: form.Snapshot, Wanted: form.Wanted, Late: form.Late}
}

// takeHugePages opens huge pages. A file that is none is an error like a descriptor
// that is missing.
func (c *claims) takeHugePages(form *hugePagesForm) *machine.HugePages {
	if form == nil {
		return nil
	}
	f := c.take(form.File)
	if f == nil {
		return nil
	}
	h, err := machine.OpenHugePages(f, form.Above)
	if err != nil {
		f.Close()
		if c.err == nil {
			c.err = err
		}
	}
	return h
}

// close closes what was not claimed.
func (c *claims) close() { linux.CloseFiles(c.files...) }
