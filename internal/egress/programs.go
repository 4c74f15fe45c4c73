package egress

import (
	"bytes"
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/internal/linux"
)

// object is egress.c, compiled.
//
//go:embed egress.o
var object []byte

// Where the kernel keeps programs and maps by name (bpffs).
const pinRoot = "/sys/fs/bpf"

// pins begins the directories of all programs that use the maps as this package does; a change of struct key or of what it leads
// to is another number.
const pins = pinRoot + "/forkvm/egress-1-"

// pinDir is that of this build's programs: those of another one may have another source.
const pinDir = pins + sourceHash

// Names of the maps, of egress.c.
const (
	policiesMap = "policies"
	refusalsMap = "refusals"
	doorsMap    = "doors"
	peersMap    = "peers"
)

// allMaps has the policies last: see install.
func allMaps() []string { return []string{refusalsMap, doorsMap, peersMap, policiesMap} }

// hook is a program and where it is attached.
type hook struct {
	name  string
	where uint32
}

func hooks() []hook {
	return []hook{
		{"connect4", unix.BPF_CGROUP_INET4_CONNECT}, {"connect6", unix.BPF_CGROUP_INET6_CONNECT},
		{"sendmsg4", unix.BPF_CGROUP_UDP4_SENDMSG}, {"sendmsg6", unix.BPF_CGROUP_UDP6_SENDMSG},
		{"egress", unix.BPF_CGROUP_INET_EGRESS},
	}
}

// ingressHook is for groups with doors for datagrams.
func ingressHook() hook { return hook{"ingress", unix.BPF_CGROUP_INET_INGRESS} }

// pinned opens a map of this build's, for which the programs are loaded if they have not been on this host.
func pinned(name string) (*ebpf.Map, error) {
	m, err := ebpf.LoadPinnedMap(filepath.Join(pinDir, name), nil)
	if errors.Is(err, fs.ErrNotExist) {
		if err = install(); err == nil {
			m, err = ebpf.LoadPinnedMap(filepath.Join(pinDir, name), nil)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("open map (%s): %w", name, err)
	}
	return m, nil
}

// holders are the maps of a name, each of another build's and open until the next one's turn: this build's first, which as a rule
// has what is looked for. An error is the last.
func holders(name string) iter.Seq2[*ebpf.Map, error] {
	own := filepath.Join(pinDir, name)
	return func(yield func(*ebpf.Map, error) bool) {
		if !hold(own, name, yield) {
			return
		}
		paths, _ := filepath.Glob(pins + "*/" + name) // the pattern is good
		for _, path := range paths {
			if path != own && !hold(path, name, yield) {
				return
			}
		}
	}
}

// hold yields one holder, if it is there, and says whether to go on.
func hold(path, name string, yield func(*ebpf.Map, error) bool) bool {
	m, err := ebpf.LoadPinnedMap(path, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return true
	}
	if err != nil {
		yield(nil, fmt.Errorf("open map (%s): %w", name, err))
		return false
	}
	defer m.Close()
	return yield(m, nil)
}

// install loads the programs and pins them, one caller at a time. The policies come last: where they are, all is.
func install() error {
	root, err := os.Open(pinRoot)
	if err != nil {
		return err
	}
	defer root.Close()
	if err := linux.Flock(root, unix.LOCK_EX); err != nil {
		return err
	}
	if _, err := os.Stat(filepath.Join(pinDir, policiesMap)); err == nil {
		return nil // another one was faster
	}
	if err := os.RemoveAll(pinDir); err != nil { // of one that died here
		return err
	}
	if err := os.MkdirAll(pinDir, 0o700); err != nil {
		return err
	}
	if err := load(); err != nil {
		return errors.Join(fmt.Errorf("load programs: %w", err), os.RemoveAll(pinDir))
	}
	return nil
}

func load() error {
	spec, err := ebpf.LoadCollectionSpecFromReader(bytes.NewReader(object))
	if err != nil {
		return err
	}
	c, err := ebpf.NewCollection(spec)
	if err != nil {
		return err
	}
	defer c.Close()
	for _, h := range append(hooks(), ingressHook()) {
		if err := c.Programs[h.name].Pin(filepath.Join(pinDir, h.name)); err != nil {
			return err
		}
	}
	for _, name := range allMaps() {
		if err := c.Maps[name].Pin(filepath.Join(pinDir, name)); err != nil {
			return err
		}
	}
	return nil
}

// attachAll attaches programs to a control group.
func attachAll(group *os.File, list []hook) error {
	for _, h := range list {
		if err := attach(filepath.Join(pinDir, h.name), int(group.Fd()), h.where); err != nil {
			return fmt.Errorf("attach program (%s): %w", h.name, err)
		}
	}
	return nil
}
