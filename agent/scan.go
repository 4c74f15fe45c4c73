package agent

import (
	"bufio"
	"encoding/json"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/forkvm/forkvm/agent/proto"
)

const (
	// tick is the unit of processes' start times (USER_HZ).
	tick = time.Second / userHZ
	// scanBatch is how many names of a directory are held at once.
	scanBatch = 256
	maxUnread = 100
)

// scan sends all files below a directory and all processes.
func (s *session) scan(r proto.ScanRequest) (proto.ScanResult, error) {
	path, err := s.enterAt(r.Path, directoryPath)
	if err != nil {
		return proto.ScanResult{}, err
	}
	out, err := s.outflow(proto.Started{})
	if err != nil {
		return proto.ScanResult{}, err
	}
	w := bufio.NewWriterSize(out, 32<<10)
	c := scanner{out: json.NewEncoder(w), stateDir: s.agent.cfg.StateDir, systems: map[uint64]bool{}}
	if c.machineID, err = filepath.EvalSymlinks(machineIDPath); err != nil {
		c.machineID = machineIDPath
	}
	s.agent.renewal.RLock()
	c.result.RenewedTicks = s.agent.renewedTicks
	s.agent.renewal.RUnlock()
	if info, err := os.Lstat(filepath.Join(c.stateDir, "generation")); c.stateDir != "" && err == nil {
		c.result.RenewedNS = scannedFile("", info).CtimeNS
	}
	err = c.directory(path)
	if err == nil {
		err = c.processes()
	}
	if err == nil {
		err = w.Flush()
	}
	if err != nil {
		return c.result, fileError(err)
	}
	return c.result, out.end()
}

// scanner goes through the guest.
type scanner struct {
	out                 *json.Encoder
	stateDir, machineID string // what a renewal changes
	systems             map[uint64]bool
	result              proto.ScanResult
}

// directory sends what is in a directory, and below it.
func (c *scanner) directory(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		c.unread(path)
		return nil
	}
	defer dir.Close()
	for {
		names, err := dir.Readdirnames(scanBatch)
		for _, name := range names {
			if err := c.file(filepath.Join(path, name)); err != nil {
				return err
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			c.unread(path)
			return nil
		}
	}
}

// unread notes a directory of which something is not seen.
func (c *scanner) unread(path string) {
	if len(c.result.Unread) < maxUnread {
		c.result.Unread = append(c.result.Unread, proto.Text(path))
	}
}

// file sends one file, and for a directory what is below it.
func (c *scanner) file(path string) error {
	if path == c.stateDir || path == c.machineID {
		return nil
	}
	info, err := os.Lstat(path)
	if err != nil {
		return nil // gone meanwhile
	}
	f := scannedFile(path, info)
	if !c.kept(path, f.Device) {
		return nil
	}
	if f.Kind == proto.KindLink {
		target, err := os.Readlink(path)
		if err != nil {
			return nil
		}
		f.Target = proto.Text(target)
	}
	c.result.Files++
	if err := c.out.Encode(proto.ScanEntry{File: &f}); err != nil {
		return err
	}
	if !info.IsDir() {
		return nil
	}
	return c.directory(path)
}

func scannedFile(path string, info fs.FileInfo) proto.ScannedFile {
	f := proto.ScannedFile{Path: proto.Text(path), FileInfo: describe(info)}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		f.CtimeNS = st.Ctim.Nano()
		f.Device, f.Inode, f.Special = st.Dev, st.Ino, st.Rdev
	}
	return f
}

// kept says whether what is on a device is kept there: the files of /proc, /sys and
// the like are made up by the kernel when somebody looks.
func (c *scanner) kept(path string, device uint64) bool {
	kept, known := c.systems[device]
	if !known {
		kept = !madeUp[fileSystem(path)]
		c.systems[device] = kept
	}
	return kept
}

// fileSystem is the magic number of the file system that a file is on, a symbolic
// link included; 0 if it cannot be told.
func fileSystem(path string) int64 {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0
	}
	defer unix.Close(fd)
	var st unix.Statfs_t
	if unix.Fstatfs(fd, &st) != nil {
		return 0
	}
	return st.Type
}

// madeUp are the file systems without contents of their own, by their magic numbers
// (linux/magic.h).
var madeUp = map[int64]bool{
	unix.PROC_SUPER_MAGIC: true, unix.SYSFS_MAGIC: true, unix.CGROUP2_SUPER_MAGIC: true, unix.CGROUP_SUPER_MAGIC: true,
	unix.DEVPTS_SUPER_MAGIC: true, unix.DEBUGFS_MAGIC: true, unix.TRACEFS_MAGIC: true, unix.SECURITYFS_MAGIC: true,
	unix.BPF_FS_MAGIC: true, unix.PSTOREFS_MAGIC: true, unix.EFIVARFS_MAGIC: true, unix.AUTOFS_SUPER_MAGIC: true,
	unix.BINFMTFS_MAGIC: true, unix.SELINUX_MAGIC: true, unix.HUGETLBFS_MAGIC: true, unix.NSFS_MAGIC: true,
	0x19800202: true, // mqueue
	0x62656570: true, // configfs
	0x65735543: true, // fusectl
}

// processes sends all processes but the kernel's threads.
func (c *scanner) processes() error {
	p, err := openProcfs()
	if err != nil {
		return err
	}
	defer p.close()
	all, err := p.all()
	if err != nil {
		return err
	}
	for i := range all {
		c.result.Processes++
		if err := c.out.Encode(proto.ScanEntry{Process: &all[i]}); err != nil {
			return err
		}
	}
	return nil
}
