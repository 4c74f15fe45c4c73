package egress

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/cilium/ebpf"

	"github.com/forkvm/forkvm/devices/nic/policy"
	"github.com/forkvm/forkvm/internal/egress/trie"
	"github.com/forkvm/forkvm/internal/linux"
)

// prefix begins the name of each control group.
const prefix = "forkvm-"

// Group is a control group whose processes reach what a policy allows.
type Group struct {
	// Path is the group's directory, by which others find it.
	Path string
	dir  *os.File
	set  chan struct{} // closed when it is known what has become of the policy; nil for a group that has none yet
	err  error         // of that
}

// Create makes a group of this name below the calling process's own, which reaches nothing: see Admit. note is called with its path
// before, so that it is on record for whoever comes after a crash. Errors are *UnavailableError if this host, or this user, has no
// such groups.
func Create(name string, note func(path string) error) (*Group, error) {
	below, err := parent()
	if err != nil {
		return nil, err
	}
	path := filepath.Join(below, prefix+name)
	if err := note(path); err != nil {
		return nil, err
	}
	if err := os.Mkdir(path, 0o700); err != nil {
		if errors.Is(err, fs.ErrPermission) || errors.Is(err, syscall.EROFS) {
			return nil, unavailable(err, "let this process make control groups below its own")
		}
		return nil, fmt.Errorf("create control group (%s): %w", name, err)
	}
	g, err := openGroup(path)
	if err == nil {
		if err = g.attach(); err == nil {
			return g, nil
		}
		g.Close()
	}
	return nil, errors.Join(explain(fmt.Errorf("create control group (%s): %w", name, err)), os.Remove(path))
}

// Open finds a group of this name that was made ahead. path is as for Remove. It is ErrNotEnforced if there is none, or programs of
// another build look after it.
func Open(path, name string) (*Group, error) {
	if !isGroup(path, name) {
		return nil, fmt.Errorf("open control group (%s): %.200q is not it", name, path)
	}
	g, err := openGroup(path)
	if errors.Is(err, fs.ErrNotExist) {
		err = errors.Join(ErrNotEnforced, err)
	}
	if err == nil {
		if err = g.attached(); err == nil {
			return g, nil
		}
		g.Close()
	}
	return nil, fmt.Errorf("open control group (%s): %w", name, err)
}

func openGroup(path string) (*Group, error) {
	dir, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	return &Group{Path: path, dir: dir}, nil
}

// attach attaches the programs, with all that they need but a policy.
func (g *Group) attach() error {
	return g.inOwn(refusalsMap, func(refusals *ebpf.Map, id uint64) error {
		if err := refusals.Put(id, Refused{}); err != nil {
			return err
		}
		if err := attachAll(g.dir, hooks()); err != nil {
			return errors.Join(err, forget(id))
		}
		return nil
	})
}

// attached returns an error unless programs of this build look after the group.
func (g *Group) attached() error {
	return g.inOwn(refusalsMap, func(refusals *ebpf.Map, id uint64) error {
		var r Refused
		if err := refusals.Lookup(id, &r); err != nil {
			return errors.Join(ErrNotEnforced, err)
		}
		return nil
	})
}

// inOwn calls do with this build's map of a name, and the group's identifier in it.
func (g *Group) inOwn(name string, do func(*ebpf.Map, uint64) error) error {
	id, err := g.id()
	if err != nil {
		return err
	}
	m, err := pinned(name)
	if err != nil {
		return err
	}
	defer m.Close()
	return do(m, id)
}

// Admit begins to set the policy of a group that has none; see Wait. From ports, which stay what they are, its processes may answer
// whoever has come.
func (g *Group) Admit(regions []policy.Region, ports []policy.Port) error {
	if err := g.admit(regions, ports); err != nil {
		return explain(fmt.Errorf("set policy of control group (%s): %w", filepath.Base(g.Path), err))
	}
	return nil
}

func (g *Group) admit(regions []policy.Region, ports []policy.Port) error {
	id, err := g.id()
	if err != nil {
		return err
	}
	if len(ports) > 0 {
		if err := open(id, ports); err != nil {
			return err
		}
	}
	if forDatagrams(ports) {
		if err := attachAll(g.dir, []hook{ingressHook()}); err != nil {
			return err
		}
	}
	policies, err := pinned(policiesMap)
	if err != nil {
		return err
	}
	g.set = make(chan struct{})
	go func() {
		defer close(g.set)
		defer policies.Close()
		g.err = trie.Set(policies, id, regions, ebpf.UpdateAny)
	}()
	return nil
}

// Wait returns when the policy is in force, or why it will never be. It returns at once if there is none to be set.
func (g *Group) Wait() error {
	if g.set == nil {
		return nil
	}
	<-g.set
	return explain(g.err)
}

// id is what the programs know the group by: the number of its directory.
func (g *Group) id() (uint64, error) { return number(g.Path) }

func number(path string) (uint64, error) {
	info, err := os.Stat(path)
	if err != nil {
		return 0, err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, fmt.Errorf("stat %s: no number", path)
	}
	return st.Ino, nil
}

// File is the group's directory, to start a process in. It stays the group's.
func (g *Group) File() *os.File { return g.dir }

// Close gives the descriptor back; the group stays. It is idempotent.
func (g *Group) Close() error {
	if err := g.dir.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

// ErrNotEnforced: no programs look after a control group.
var ErrNotEnforced = errors.New("no programs enforce its policy")

// SetPolicy replaces the policy of the group in a directory: each packet from then on meets the new one. The programs may be
// those of another build.
func SetPolicy(path string, regions []policy.Region) error {
	err := ofGroup(path, policiesMap, func(m *ebpf.Map, id uint64) error { return trie.Set(m, id, regions, ebpf.UpdateExist) })
	if err != nil {
		return fmt.Errorf("set policy of control group (%s): %w", filepath.Base(path), err)
	}
	return nil
}

// ofGroup calls do with the group's identifier and each build's map of this name, until one has the group.
func ofGroup(path, name string, do func(*ebpf.Map, uint64) error) error {
	id, err := number(path)
	if err != nil {
		return err
	}
	for m, err := range holders(name) {
		if err == nil {
			err = do(m, id)
		}
		if !errors.Is(err, ebpf.ErrKeyNotExist) {
			return explain(err)
		}
	}
	return ErrNotEnforced
}

// Refused is what was refused to a group.
type Refused struct {
	// Calls are connections and datagrams that were refused when they were asked for, Packets those on their way out.
	Calls   uint64 `json:"calls"`
	Packets uint64 `json:"packets"`
}

// RefusedBy says what was refused to the group in a directory so far.
func RefusedBy(path string) (r Refused, err error) {
	err = ofGroup(path, refusalsMap, func(m *ebpf.Map, id uint64) error { return m.Lookup(id, &r) })
	if err != nil {
		return r, fmt.Errorf("read refusals of control group (%s): %w", filepath.Base(path), err)
	}
	return r, nil
}

// removal is how long a group's last processes may take to end.
const removal = 5 * time.Second

// isGroup says whether a path is that of a group of this name, wherever it was on record.
func isGroup(path, name string) bool {
	return filepath.Base(path) == prefix+name && linux.InControlGroups(path)
}

// Remove ends what is in the group of this name and removes it, with its policy. path is the group's directory as it is on
// record somewhere, which need not be trusted: it is refused unless its name is this one. A group that is not there is removed.
func Remove(path, name string) error {
	if !isGroup(path, name) {
		return fmt.Errorf("remove control group (%s): %.200q is not it", name, path)
	}
	id, err := number(path)
	if errors.Is(err, fs.ErrNotExist) {
		err = forgetStale()
	} else if err == nil {
		if err = empty(path); err == nil {
			err = forget(id)
		}
	}
	if err != nil {
		return fmt.Errorf("remove control group (%s): %w", name, err)
	}
	return nil
}

// empty kills what is in a group and removes it.
func empty(path string) error {
	// An empty group, and a kernel before 5.14, end nothing.
	_ = os.WriteFile(filepath.Join(path, "cgroup.kill"), []byte("1"), 0)
	for pause, deadline := time.Millisecond/4, time.Now().Add(removal); ; pause *= 2 {
		err := syscall.Rmdir(path)
		if !errors.Is(err, syscall.EBUSY) || time.Now().After(deadline) {
			return err
		}
		time.Sleep(min(pause, 100*time.Millisecond))
	}
}

// forgetStale drops the policies of all groups that are gone: others than Remove have removed them.
func forgetStale() error {
	var stale []uint64
	for m, err := range holders(policiesMap) {
		if err != nil {
			return err
		}
		var id uint64
		var policy ebpf.MapID
		for entries := m.Iterate(); entries.Next(&id, &policy); {
			if linux.ControlGroupGone(id) {
				stale = append(stale, id)
			}
		}
	}
	var errs []error
	for _, id := range stale {
		errs = append(errs, forget(id))
	}
	return errors.Join(errs...)
}

// forget drops the policy of a group that is gone, or never was one.
func forget(id uint64) error {
	for _, name := range allMaps() {
		for m, err := range holders(name) {
			if err != nil {
				return err
			}
			if err := m.Delete(id); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				return fmt.Errorf("forget policy: %w", err)
			}
		}
	}
	return nil
}
