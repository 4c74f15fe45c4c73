package tapnet

import (
	"bytes"
	_ "embed"
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/devices/nic"
	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/internal/egress/trie"
	"github.com/forkvm/forkvm/internal/linux"
)

// object is tap.c, compiled.
//
//go:embed tap.o
var object []byte

// Names of programs and maps, of tap.c.
const (
	fromGuest   = "from_guest"
	toGuest     = "to_guest"
	settingsMap = "settings"
	policiesMap = "policies"
	countsMap   = "counts"
	eventsMap   = "events"
)

// settings is struct settings of tap.c.
type settings struct {
	MAC        nic.MAC
	Open       uint8
	Names      uint8
	Generation uint32
	Resolver   uint32
	Space      uint64
	Rate       uint64
	Bytes      uint64
	Packets    uint64
}

// Names of the maps in the kernel begin with these, and end with the network's name.
const (
	settingsPrefix = "s"
	policiesPrefix = "p"
)

// load loads a network's own programs and maps, which the kernel keeps as long as they are attached.
func load(name string) (*ebpf.Collection, error) {
	spec, err := ebpf.LoadCollectionSpecFromReader(bytes.NewReader(object))
	if err != nil {
		return nil, err
	}
	spec.Maps[settingsMap].Name = settingsPrefix + name
	spec.Maps[policiesMap].Name = policiesPrefix + name
	c, err := ebpf.NewCollection(spec)
	if err != nil {
		return nil, explain(fmt.Errorf("load programs: %w", err))
	}
	return c, nil
}

// attachment is where a program is attached: by its number for tcx, by its parent for the classifier of older kernels.
type attachment struct {
	program string
	tcx     uint32
	clsact  uint32
}

func attachments() []attachment {
	return []attachment{
		{fromGuest, unix.BPF_TCX_INGRESS, netlink.HANDLE_MIN_INGRESS},
		{toGuest, unix.BPF_TCX_EGRESS, netlink.HANDLE_MIN_EGRESS},
	}
}

// attach attaches the programs to an interface of the calling thread's namespace, for as long as there is one.
func attach(nl *netlink.Handle, c *ebpf.Collection, index int, classifier bool) error {
	if !classifier {
		err := attachTCX(c, index)
		if !errors.Is(err, unix.EINVAL) {
			return err
		}
		// A kernel before 6.6 does not know it.
	}
	return attachClassifier(nl, c, index)
}

func attachTCX(c *ebpf.Collection, index int) error {
	for _, a := range attachments() {
		if err := linux.AttachProgram(index, c.Programs[a.program].FD(), a.tcx, 0); err != nil {
			return fmt.Errorf("attach program (%s): %w", a.program, err)
		}
	}
	return nil
}

// attachClassifier is attachTCX for kernels that have none.
func attachClassifier(nl *netlink.Handle, c *ebpf.Collection, index int) error {
	err := nl.QdiscAdd(&netlink.GenericQdisc{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT},
		QdiscType:  "clsact",
	})
	if err != nil {
		return unavailable(fmt.Errorf("add queueing discipline clsact: %w", err), "a kernel with tcx (Linux 6.6), or with CONFIG_NET_SCH_INGRESS and CONFIG_NET_CLS_BPF, is needed")
	}
	for _, a := range attachments() {
		err := nl.FilterAdd(&netlink.BpfFilter{
			FilterAttrs:  netlink.FilterAttrs{LinkIndex: index, Parent: a.clsact, Handle: 1, Priority: 1, Protocol: unix.ETH_P_ALL},
			Fd:           c.Programs[a.program].FD(),
			Name:         a.program,
			DirectAction: true,
		})
		if err != nil {
			return unavailable(fmt.Errorf("attach program (%s): %w", a.program, err), "a kernel with tcx (Linux 6.6), or with CONFIG_NET_SCH_INGRESS and CONFIG_NET_CLS_BPF, is needed")
		}
	}
	return nil
}

// maps are those of a network that are written.
type maps struct{ settings, policies *ebpf.Map }

// openMaps opens a network's maps. Where they are on record need not be trusted: they have the network's name.
func openMaps(name string, r Record) (m *maps, err error) {
	m = &maps{}
	if m.settings, err = openMap(r.Settings, settingsPrefix+name); err != nil {
		return nil, err
	}
	if m.policies, err = openMap(r.Policies, policiesPrefix+name); err != nil {
		m.close()
		return nil, err
	}
	return m, nil
}

func openMap(id uint32, name string) (*ebpf.Map, error) {
	m, err := ebpf.NewMapFromID(ebpf.MapID(id))
	if errors.Is(err, ebpf.ErrKeyNotExist) || errors.Is(err, unix.ENOENT) {
		return nil, ErrGone
	}
	if err != nil {
		return nil, explain(fmt.Errorf("open map (%s): %w", name, err))
	}
	info, err := m.Info()
	if err == nil && info.Name != name {
		err = ErrGone
	}
	if err != nil {
		m.Close()
		return nil, err
	}
	return m, nil
}

func (m *maps) close() {
	m.settings.Close()
	m.policies.Close()
}

func (m *maps) read() (s settings, err error) {
	if err := m.settings.Lookup(uint32(0), &s); err != nil {
		return s, fmt.Errorf("read settings: %w", err)
	}
	return s, nil
}

// change lets do change the settings.
func (m *maps) change(do func(*settings)) error {
	s, err := m.read()
	if err != nil {
		return err
	}
	do(&s)
	if err := m.settings.Put(uint32(0), s); err != nil {
		return fmt.Errorf("write settings: %w", err)
	}
	return nil
}

// Policy is what a guest may reach.
type Policy struct {
	Regions []policy.Region
	// Names: it may ask for every name, if there is somebody to ask.
	Names bool
	// Rate is how many bytes a second may pass each way, Bytes how many in all, both ways together, 0 for any; of frames.
	Rate, Bytes uint64
	// Packets is how many may pass in a second, each way, 0 for any.
	Packets uint64
}

// setPolicy replaces what the guest may reach: each packet meets the old policy or the new one. Fragments of packets that began
// under the old one end.
func (m *maps) setPolicy(p Policy) error {
	if err := trie.Set(m.policies, uint32(0), p.Regions, ebpf.UpdateAny); err != nil {
		return err
	}
	return m.change(func(s *settings) {
		s.Generation++
		s.Names, s.Rate, s.Bytes, s.Packets = 0, p.Rate, p.Bytes, p.Packets
		if p.Names {
			s.Names = uint8(s.Resolver)
		}
	})
}
